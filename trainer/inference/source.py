"""Resolves the model source of a generation, and loads the model on the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any

from zeromesh.checkpoint.format.manifest import NAME as MANIFEST
from zeromesh.errors import ConfigError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.options import Precision, ZeroOptions
from zeromesh.trainer.config.consent import Consent, foreign_code
from zeromesh.trainer.config.load import ConfigSource, load_config
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.config.yaml_reader import parse_yaml
from zeromesh.trainer.data.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from zeromesh.trainer.inference.settings import ModelSettings
from zeromesh.trainer.model_on_mesh import PlacedModel
from zeromesh.trainer.models.build import build_model, directory_of, pin_sources, read_configuration
from zeromesh.trainer.models.generation import check_arguments
from zeromesh.trainer.models.hub_form import HubForm
from zeromesh.trainer.models.prepare import prepare_model, use_attention
from zeromesh.trainer.models.save_pretrained import ADAPTER_CONFIG
from zeromesh.trainer.models.user_model import require_layout_fits
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.setup.build import require_same_settings, set_products
from zeromesh.trainer.setup.engine_options import engine_options, require_directories
from zeromesh.trainer.setup.model import begin_alike, divide_model, fill_engine
from zeromesh.trainer.tools.checkpoint.reading import checkpoint_at
from zeromesh.units.build import open_tiers

_RESOLVED = "config.resolved.yaml"
_FLOAT64_ROLES = ("precision.master=float64", "precision.reduce=float64")
"""Overrides of dtype roles that generation does not use; float64 agrees with every compute dtype."""
_FOR_TRAINING = {"model.lora": "adapters that are trained", "precision.linear": "products of training"}


def find_source(source: str | PathLike[str]) -> str:
    """Return the Hugging Face directory, or the name on the Hub, that `source` stands for.

    A run stands for its newest checkpoint, and every checkpoint is a Hugging Face directory.

    Raises:
        ConfigError: for a directory that is none of these, and for a run without a checkpoint.
    """
    path = Path(source).expanduser()
    # Errors about a directory of adapters are raised where models are read.
    if not path.is_dir() or any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        return str(path) if path.is_dir() else str(source)
    if (path / _RESOLVED).is_file() or (path / MANIFEST).is_file():
        return str(checkpoint_at(path))
    raise ConfigError(
        f"a directory without config.json or {_RESOLVED}; give a run, a checkpoint of a run, a model directory that "
        "save_pretrained wrote, or the name of a model on the Hub",
        where=str(source),
    )


def layout_of(
    source: str | PathLike[str],
    config: ConfigSource,
    sections: Mapping[str, Mapping[str, Any]],
    overrides: Sequence[str] = (),
) -> TrainerConfig:
    """Return the configuration of the model in `source` for generation, in the layout of the other arguments.

    `sections` and then `overrides` (`section.key=value`) override `config`.

    Raises:
        ConfigError: with all problems at once.
    """
    read = load_config(config, consent=Consent.GIVEN) if config is not None else None
    given = read.model_dump(mode="json", exclude_unset=True) if read is not None else {}
    merged: dict[str, Any] = {**given, "run": {"name": "generate", **given.get("run", {})}}
    for name, section in sections.items():
        merged[name] = {**merged.get(name, {}), **section}
    directory = find_source(source)
    model = merged.get("model", {})
    # Fields of the same kind of model are kept; a configuration of another model is dropped.
    fields = model.get("config") if "model_type" not in (model.get("config") or {}) else None
    merged["model"] = {**model, "source": directory, "config": fields}
    # Generation reads no data, only the tokenizer.
    merged["data"] = {name: value for name, value in merged.get("data", {}).items() if name == "tokenizer"}
    if not merged["data"]:
        merged["data"] = _tokenizer_of_run(Path(directory))
    by_file = isinstance(config, str | PathLike) and not any(foreign_code(sections))
    consent = Consent.COMMAND_LINE if by_file else Consent.GIVEN
    found = load_config(merged, [*overrides, *_FLOAT64_ROLES], consent=consent)
    problems = [
        f"{key} is for {what}, and nothing is trained here; leave it out"
        for key, what in _FOR_TRAINING.items()
        if attrgetter(key)(found) is not None
    ]
    if problems:
        raise ConfigError(problems)
    return found


def _tokenizer_of_run(directory: Path) -> dict[str, Any]:
    """Return the tokenizer setting of a checkpoint's run, where the checkpoint has no tokenizer itself."""
    resolved = directory.parent.parent / _RESOLVED
    if has_tokenizer(directory) or not (directory / MANIFEST).is_file() or not resolved.is_file():
        return {}
    values = parse_yaml(resolved.read_text(encoding="utf-8"), where=str(resolved))
    data = values.get("data") if isinstance(values, dict) else None
    return {"tokenizer": data["tokenizer"]} if isinstance(data, dict) and data.get("tokenizer") else {}


@dataclass(kw_only=True)
class ServedModel(PlacedModel):
    """This rank's part of a model for generation, which holds nothing but parameters in memory."""

    settings: ModelSettings
    tokenizer: Tokenizer | None


def place_model(config: TrainerConfig, mesh: Mesh, console: Console) -> ServedModel:
    """Build the model that a configuration names and read its weights into this rank's part; all ranks call it.

    Raises:
        ConfigError, DataError, LayoutError, StorageError: for a missing model or tokenizer, and for a model that cannot be
            divided or does not fit.
    """
    require_same_settings(mesh, config, {})
    config = pin_sources(config, mesh, model_given=False)
    directory = directory_of(config.model.source or "", config.model.revision)
    config = _with_model_defaults(config)
    set_products(config, mesh.device)
    named = config.data.tokenizer or (directory if has_tokenizer(directory) else None)
    tokenizer = load_tokenizer(named) if named is not None else None
    console.status("building the model")
    built = build_model(config.model, config.run.seed)
    model = built.model.requires_grad_(False)
    check_arguments(model, {}, None)
    options = _without_training(config)
    if config.model.attention is not None:
        use_attention(model, config.model.attention, options.precision.compute, mesh.device)
    require_layout_fits(model, mesh.shape, trains=False)
    notes = begin_alike(built, mesh, config.run.seed)
    tiers = open_tiers(mesh, options)
    try:
        settings, hub_form = ModelSettings(model, mesh), HubForm(model)
        divided = divide_model(model, mesh, config)
        _, prepared = prepare_model(model, config.model, options, tiers)
        console.note(*notes, *divided.notes, *prepared, *built.notes)
        engine = fill_engine(built, mesh, options, tiers, divided, console)
    except BaseException:
        tiers.close()
        raise
    return ServedModel(
        config=config,
        mesh=mesh,
        console=console,
        module=model.eval(),
        hub_form=hub_form,
        divided=divided,
        engine=engine,
        processing_class=getattr(tokenizer, "tokenizer", None),
        settings=settings,
        tokenizer=tokenizer,
    )


def _with_model_defaults(config: TrainerConfig) -> TrainerConfig:
    """Return the configuration with the task and the compute dtype of the model's directory, where they are not set."""
    section, precision = config.model, config.precision
    head_given = "head" in section.model_fields_set
    made, *_ = read_configuration(section if head_given else section.model_copy(update={"head": "base"}))
    if not head_given and made.is_encoder_decoder:
        section = section.model_copy(update={"head": "seq2seq_lm"})
    if "compute" not in precision.model_fields_set:
        stored = str(getattr(made, "dtype", None)).removeprefix("torch.")
        known = stored in ("bfloat16", "float16", "float32", "float64")
        precision = precision.model_copy(update={"compute": stored if known else "float32"})
    return config.model_copy(update={"model": section, "precision": precision})


def _without_training(config: TrainerConfig) -> ZeroOptions:
    """Return engine options that keep only parameters, in the compute dtype.

    Parameters on the file tier are read from the model's files, unless a directory or checksums are configured.
    """
    require_directories(config.offload)
    options = engine_options(config, 1)
    dtype, section = options.precision.compute, config.offload
    offload = replace(options.offload, in_place=section.directory is None and not section.checksums)
    precision = Precision(compute=dtype, master=dtype, reduce=dtype)
    return replace(options, precision=precision, offload=offload, average=None)
