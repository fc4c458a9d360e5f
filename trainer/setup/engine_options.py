"""The options of the engine that follow from a configuration, and the parameters that are trained or without weight decay."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from zeromesh.errors import ConfigError
from zeromesh.offload import FileSettings, TierChoice
from zeromesh.optim.fused_optimizer import OPTIMIZERS as FUSED
from zeromesh.optim.fused_optimizer import hyperparameters
from zeromesh.options import OffloadOptions, OptimizerSettings, Precision, ZeroOptions
from zeromesh.settings.keys import AverageSettings, OptimizerKeys, PrecisionKeys, StepKeys
from zeromesh.trainer.config.sections.model import ModelSection
from zeromesh.trainer.config.sections.optimizer import make_optimizer, parameter_groups, require_matches
from zeromesh.trainer.config.sections.parallelism import OffloadSection
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.models.adapters import adapter_names, encoded_weights, is_adapted
from zeromesh.trainer.models.quantized_layers import codec_of_layers
from zeromesh.units.plan import encoded_names
from zeromesh.zero.sharded_optimizer import settings_of


def choose_trained(model: nn.Module, patterns: Sequence[str] | None) -> None:
    """Train the parameters of `model` that a pattern matches and freeze all others, by their first names; a later pattern counts
    more than an earlier one, and one that begins with ! freezes. None changes nothing. Raises `ConfigError` for a pattern that
    matches none, and for weights beside adapters that no file of adapters would have."""
    if patterns is None:
        return
    where = "model.train"
    parameters, beside = dict(model.named_parameters()), adapter_names(model) if is_adapted(model) else None
    require_matches([each.removeprefix("!") for each in patterns], parameters, where)
    for name, parameter in parameters.items():
        matching = [each for each in patterns if fnmatchcase(name, each.removeprefix("!"))]
        trained = bool(matching) and not matching[-1].startswith("!")
        if trained and beside is not None and name not in beside:
            raise ConfigError(f"{name} is of the base, and saved adapters lack it; name its module in modules_to_save", where=where)
        if trained and not parameter.is_floating_point():
            raise ConfigError(f"{name} has {parameter.dtype} numbers, which have no gradients", where=where)
        parameter.requires_grad_(trained)


_ALL_TRAINED = (
    "{} is for frozen matrices of linear layers and experts, and this model has none; set model.lora or model.adapters, freeze "
    "what is not trained (model.train, or requires_grad_(False)), or set this to null"
)

# The patterns of `transformers.Trainer.get_decay_parameter_names` (a test compares them), for lower-case names of parameters.
_NO_DECAY_PATTERNS = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")


def biases_and_norms(model: nn.Module) -> list[str]:
    """Return the names of parameters without weight decay: biases, normalisations, and those with the mark `_no_weight_decay`."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], list(_NO_DECAY_PATTERNS)))
    return [name for name, each in model.named_parameters() if name not in decayed or getattr(each, "_no_weight_decay", False)]


def engine_options(config: TrainerConfig, accumulation: int) -> ZeroOptions:
    """Return the engine's options; `accumulation` is the number of microbatches of a step."""
    precision, optimizer, offload = config.precision, config.optimizer, config.offload
    # Without master weights (none, kahan), weights are in bfloat16.
    roles = {each.name: getattr(torch, getattr(precision, each.name), torch.bfloat16) for each in fields(PrecisionKeys)}
    states = {name: getattr(offload, name) for name in ("optimizer", "gradients", "parameters", "activations")}
    tiers: dict[str, Any] = {name: TierChoice(**dict(each)) for name, each in states.items() if each.tier != "auto"}
    run = config.run.directory.resolve()
    named = offload.directory or str(run / "offload")
    directories = [Path(each).expanduser().absolute() for each in ((named,) if isinstance(named, str) else named)]
    # In a directory of several runs, files that stay are told apart by the runs' own directories.
    digest = hashlib.blake2b(str(run).encode(), digest_size=4).hexdigest()
    label = config.run.name + (f"-{digest}" if offload.directory else "")
    files = FileSettings(directories=tuple(directories), label=label, checksums=offload.checksums)
    staging = None if offload.staging == "auto" else offload.staging
    scale = precision.loss_scale if precision.compute == "float16" else None
    given = optimizer.model_dump(include={each.name for each in fields(OptimizerKeys)}, exclude_none=True)
    return ZeroOptions(
        **dict(config.zero),
        transport=config.parallel.transport,
        wire=config.parallel.wire,
        precision=Precision(**roles, compensated=precision.master == "kahan", loss_scale=scale),
        optimizer=OptimizerSettings(**given),
        offload=OffloadOptions(**tiers, files=files, update=offload.update, durable=offload.durable, staging_bytes=staging),
        average=config.ema if config.ema.decay else None,
        outer=config.parallel.outer if config.parallel.sync_every > 1 else None,
        weights=encoded_weights(config.model.weights),
        accumulation=accumulation,
        optimizer_in_backward=optimizer.in_backward,
        **config.run.model_dump(include={each.name for each in fields(StepKeys)}),
    )


def adapters_spared(options: ZeroOptions, model: nn.Module) -> ZeroOptions:
    """Return the options by which no parameter of an adapter is encoded, also where it is frozen. Raises `ConfigError` for a
    pattern of `model.weights` that matches nothing, unless it has brackets (of files in 4 bits) or numbers (of layers)."""
    if options.weights is None:
        return options
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    require_matches([each for each in options.weights.skip if not re.search(r"\[|\b\d+\b", each)], names, "model.weights.skip")
    skip = (*options.weights.skip, *sorted(adapter_names(model) if is_adapted(model) else ()))
    return replace(options, weights=replace(options.weights, skip=skip))


def require_trained(section: ModelSection, *, given: bool) -> None:
    """Raise `ConfigError` if the section leaves nothing to train or, for a model that is not `given`, nothing to encode."""
    if section.trains_nothing:
        raise ConfigError(f"{list(section.train or ())} freezes all parameters; unfreeze some", where="model.train")
    freezes = any((given, section.named, section.trust_remote_code, section.train is not None, section.wanted_adapters))
    if section.weights is not None and not freezes:
        raise ConfigError(_ALL_TRAINED.format(section.weights.codec), where="model.weights")


def options_for_model(options: ZeroOptions, config: TrainerConfig, model: nn.Module) -> ZeroOptions:
    """Return the options with the codec of layers that bitsandbytes has quantized, unless `model.weights` names another, and with
    the groups of `optimizer.groups` and `optimizer.exempt`, or the class of `optimizer.name`. Raises `ConfigError` for patterns
    that match nothing, if `model.weights` encodes no parameter of the model, and for an optimizer that cannot be sharded."""
    options = adapters_spared(options, model)
    if options.weights is None:
        options = replace(options, weights=codec_of_layers(model))
    elif not encoded_names(model, options.weights):
        raise ConfigError(_ALL_TRAINED.format(options.weights.codec.name), where="model.weights")
    section, settings = config.optimizer, options.optimizer
    require_matches(section.no_decay, dict(model.named_parameters()), "optimizer.no_decay")
    exempt = tuple(biases_and_norms(model)) if section.exempt != "none" else ()
    if section.name in FUSED and not section.options:
        if not section.groups:
            return replace(options, optimizer=replace(settings, no_decay=section.no_decay + exempt))
        found = parameter_groups(section, dict(model.named_parameters()), exempt)
        common = hyperparameters(settings)[0]
        groups = tuple({**common, "lr": section.lr * factor, "weight_decay": decay} for factor, decay in found)
        return replace(options, optimizer=replace(settings, groups=groups, members=tuple(map(tuple, found.values()))))
    optimizer = make_optimizer(section, model, exempt, config.folders)
    try:
        settings = settings_of(optimizer, model.named_parameters(), takes_modes=True)
    except ConfigError as error:
        raise ConfigError(str(error), where="optimizer.name") from error
    options = replace(options, optimizer=replace(settings, no_decay=section.no_decay, states=section.states))
    return replace(options, average=AverageSettings()) if options.evaluates_average else options


def require_directories(section: OffloadSection) -> None:
    """Raise `ConfigError` if the parent of a directory for swap files is missing, as its disk may not be mounted."""
    tiers = (section.optimizer, section.gradients, section.parameters, section.activations)
    named = (section.directory,) if isinstance(section.directory, str) else section.directory or ()
    for path in [Path(each).expanduser().absolute() for each in named if any(tier.tier == "file" for tier in tiers)]:
        if not path.parent.is_dir():
            why = f"{str(path)!r} would be made in {str(path.parent)!r}, which is no directory"
            raise ConfigError(f"{why}; mount its disk, or make it first", where="offload.directory")
