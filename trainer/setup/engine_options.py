"""The options of the engine that follow from a configuration, and the parameters that weight decay leaves out."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from zeromesh.errors import ConfigError, ZeromeshError
from zeromesh.offload import FileSettings, TierChoice
from zeromesh.options import AverageSettings, OffloadOptions, OptimizerSettings, Precision, ScalerSettings, ZeroOptions
from zeromesh.trainer.config.sections.parallelism import OffloadSection
from zeromesh.trainer.config.trainer_config import TrainerConfig

# As in `transformers.Trainer.get_decay_parameter_names`, which a test compares: searched for in names in lower case.
_LEFT_OUT = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")

_USER_KEYS = {
    r"on_nonfinite": "run.on_nonfinite",
    r"clip_norm": "run.clip_norm",
    r"optimizer_in_backward": "optimizer.in_backward",
    r"prefetch(?= is)": "zero.prefetch",
    r"stage(?= is \d|(?<=set stage) to)": "zero.stage",
    r"give a directory(?= that can be written)": "set offload.directory to one",
}
"""Words of the engine's messages, as patterns, and what a configuration calls them."""


@contextmanager
def errors_with_user_keys() -> Iterator[None]:
    """Let errors that leave the block name keys of a configuration where the engine has named its own options."""
    try:
        yield
    except ZeromeshError as error:
        error.args = tuple(_with_user_keys(each) if isinstance(each, str) else each for each in error.args)
        if isinstance(error, ConfigError):
            error.problems = tuple(map(_with_user_keys, error.problems))
        raise


def _with_user_keys(text: str) -> str:
    for pattern, key in _USER_KEYS.items():
        text = re.sub(rf"(?<![\w./-]){pattern}(?![\w/])", key, text)
    return text


def biases_and_norms(model: nn.Module) -> list[str]:
    """The names of `model`'s parameters that are biases, or belong to a normalisation by its name or as an `nn.LayerNorm`, or that
    carry the mark `_no_weight_decay`, as those of state space models do."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], list(_LEFT_OUT)))
    named = model.named_parameters()
    return [name for name, each in named if name not in decayed or getattr(each, "_no_weight_decay", False)]


def engine_options(config: TrainerConfig, accumulation: int) -> ZeroOptions:
    """The options of the engine; `accumulation` is the number of microbatches of a step."""
    precision, optimizer, ema = config.precision, config.optimizer, config.ema
    return ZeroOptions(
        stage=config.zero.stage,
        prefetch=config.zero.prefetch,
        gathered_budget=None if config.zero.gathered_budget == "auto" else config.zero.gathered_budget,
        reduce_once=config.zero.reduce_once,
        overlap=config.zero.overlap,
        transport=config.parallel.transport,
        precision=Precision(
            **{role: getattr(torch, getattr(precision, role)) for role in ("compute", "master", "reduce")},
            loss_scale=ScalerSettings(**precision.loss_scale.model_dump()) if precision.compute == "float16" else None,
        ),
        optimizer=OptimizerSettings(**optimizer.model_dump(include={each.name for each in fields(OptimizerSettings)})),
        offload=_offload(config),
        average=AverageSettings(decay=ema.decay, every=ema.every_steps, start=ema.start_step) if ema.decay else None,
        accumulation=accumulation,
        clip_norm=config.run.clip_norm,
        on_nonfinite=config.run.on_nonfinite,
        optimizer_in_backward=optimizer.in_backward,
        seed=config.run.seed,
    )


def exempted(options: ZeroOptions, config: TrainerConfig, model: nn.Module) -> ZeroOptions:
    """The same options, with the names of parameters that are not decayed because of what they are (`optimizer.exempt`)."""
    if config.optimizer.exempt == "none":
        return options
    names = tuple(biases_and_norms(model))
    return replace(options, optimizer=replace(options.optimizer, no_decay=options.optimizer.no_decay + names))


def require_directories(section: OffloadSection) -> None:
    """Raise `ConfigError` where a directory of swap files is named and what it would lie in is not there: its disk may not be."""
    tiers = (section.optimizer, section.gradients, section.parameters, section.activations)
    named = (section.directory,) if isinstance(section.directory, str) else section.directory or ()
    for path in [Path(each).expanduser().absolute() for each in named if any(tier.tier == "file" for tier in tiers)]:
        if not path.parent.is_dir():
            raise ConfigError(
                f"{str(path)!r} would be made in {str(path.parent)!r}, which is no directory; mount its disk, or make it first",
                where="offload.directory",
            )


def _offload(config: TrainerConfig) -> OffloadOptions:
    """The tiers on which states rest, and the directories of their files."""
    section, gradients = config.offload, config.offload.gradients
    named = section.directory or str(Path(config.run.output_dir, config.run.name, "offload"))
    directories = (named,) if isinstance(named, str) else named
    return OffloadOptions(
        optimizer=TierChoice(tier=section.optimizer.tier, fraction=section.optimizer.fraction),
        gradients=None if gradients.tier == "auto" else TierChoice(tier=gradients.tier, fraction=gradients.fraction),
        parameters=TierChoice(tier=section.parameters.tier, fraction=section.parameters.fraction),
        activations=TierChoice(tier=section.activations.tier, fraction=section.activations.fraction),
        files=FileSettings(
            directories=tuple(Path(directory).expanduser().absolute() for directory in directories),
            label=config.run.name,
            checksums=section.checksums,
        ),
        update=section.update,
        staging_bytes=None if section.staging == "auto" else section.staging,
    )
