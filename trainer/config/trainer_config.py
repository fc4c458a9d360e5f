"""The configuration of a run as a whole: its sections, which have the keys, and the rules between keys."""

import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, PrivateAttr, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from zeromesh.errors import ConfigError
from zeromesh.settings.keys import int_if_whole
from zeromesh.trainer.config.sections import outputs, parallelism, training
from zeromesh.trainer.config.sections.base import NamedFunction, Section
from zeromesh.trainer.config.sections.model import ModelSection
from zeromesh.trainer.config.sections.optimizer import OptimizerSection
from zeromesh.trainer.config.sections.schedule import LRSchedule, ScheduleSection
from zeromesh.trainer.config.yaml_reader import plain_scalar, read_texts

_RANK_SPECIFIC: dict[str, Any] = {"data": {"chat_template", "eval", "mixture", "tokenizer", "train"}, "tracking": True}
_RANK_SPECIFIC |= {"model": {"source"}, "offload": {"directory"}, "run": {"output_dir"}}
"""Keys that may differ between ranks: paths on a host (contents are compared) and settings of rank 0 alone."""


class TrainerConfig(Section):
    """The whole configuration. Every key has a default, so `TrainerConfig()` is the quick-start run."""

    model: ModelSection = Field(default_factory=ModelSection)
    data: training.DataSection = Field(default_factory=training.DataSection)
    parallel: parallelism.ParallelSection = Field(default_factory=parallelism.ParallelSection)
    zero: parallelism.ZeroSection = Field(default_factory=parallelism.ZeroSection)
    precision: parallelism.PrecisionSection = Field(default_factory=parallelism.PrecisionSection)
    offload: parallelism.OffloadSection = Field(default_factory=parallelism.OffloadSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    ema: training.EmaSection = Field(default_factory=training.EmaSection)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    batch: training.BatchSection = Field(default_factory=training.BatchSection)
    train: training.TrainSection = Field(default_factory=training.TrainSection)
    run: outputs.RunSection = Field(default_factory=outputs.RunSection)
    checkpoint: outputs.CheckpointSection = Field(default_factory=outputs.CheckpointSection)
    recovery: outputs.RecoverySection = Field(default_factory=outputs.RecoverySection)
    hub: outputs.HubSection = Field(default_factory=outputs.HubSection)
    tracking: outputs.TrackingSection = Field(default_factory=outputs.TrackingSection)
    profile: outputs.ProfileSection = Field(default_factory=outputs.ProfileSection)
    _notes: tuple[str, ...] = PrivateAttr(default=())
    _folders: tuple[str, ...] = PrivateAttr(default=())

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about the translation of another trainer's settings, if any."""
        return self._notes

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the configuration files, in which named Python code is searched for."""
        return self._folders

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainerConfig) and vars(self) == vars(other)

    def changed(self, **sections: Mapping[str, Any]) -> "TrainerConfig":
        """Return a copy with these values in its sections, which are not checked."""
        parts = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=parts)

    def shared_settings(self) -> dict[str, Any]:
        """Return the values that have to be the same on all ranks, by `SECTION.KEY`."""
        sections = self.model_dump(mode="json", exclude=_RANK_SPECIFIC).items()
        found = {f"{section}.{key}": value for section, keys in sections for key, value in keys.items()}
        return found | ({} if self.checkpoint.resume in ("auto", "never") else {"checkpoint.resume": "a path"})

    def with_notes(self, notes: tuple[str, ...], folders: tuple[str, ...]) -> "TrainerConfig":
        """Return a copy with other notes and folders, which do not affect equality."""
        config = self.model_copy()
        config._notes, config._folders = notes, folders
        return config

    @model_validator(mode="before")
    @classmethod
    def _collect_auto_keys(cls, data: Any) -> Any:
        """Move keys with the value auto into the list `parallel.auto`, for which `KEY: auto` is short."""
        if not isinstance(data, dict):
            return data
        parallel = data.get("parallel", {})
        parallel = {"auto": ["parallel"]} if parallel == "auto" else parallel
        listed = (parallel.get("auto") or ()) if isinstance(parallel, dict) else None
        if not isinstance(listed, list | tuple):
            return data
        found, changed = list(listed), dict(data)
        for path in parallelism.AUTOMATIC[1:]:
            section, _, key = path.partition(".")
            values = data.get(section)
            if isinstance(values, dict) and values.get(key) == "auto":
                changed[section] = {name: value for name, value in values.items() if name != key}
                found.append(path)
        return {**changed, "parallel": {**parallel, "auto": found}} if found else data

    @model_validator(mode="after")
    def _check_conflicts(self, info: ValidationInfo) -> "TrainerConfig":
        problems = disagreements(self) if (info.context or {}).get("rules", True) else []
        if problems:
            raise PydanticCustomError("keys_disagree", "{problems}", {"problems": "\n".join(problems)})
        return self

    def to_yaml(self, change: Callable[[dict[str, Any]], Any] = lambda values: values) -> str:
        """Return every key with its value as YAML that `load_config` reads back to an equal configuration, after `change`."""
        return yaml.dump(change(self.model_dump(mode="json")), Dumper=CoreDumper, sort_keys=False, allow_unicode=True)


class CoreDumper(yaml.SafeDumper):
    """A YAML dumper that quotes every text that would be parsed as another type."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # PyYAML folds some line breaks (U+0085) unless they are escaped, which it does in double quotes only.
        style = None if text.isprintable() and plain_scalar(text) == text else '"'
        text = text.replace("${", "$${")  # Escaped, as `${` begins a variable.
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


CoreDumper.add_representer(str, CoreDumper.represent_text)

_UNKNOWN_LENGTH = 1 << 50  # steps, more than any warm-up or decay
_POLYNOMIAL_END = 1e-7  # the final learning rate of transformers' polynomial schedule
_KEY = re.compile(rf"\b(?:{'|'.join(TrainerConfig.model_fields)})\.\w+")


def disagreements(config: TrainerConfig, *, wrong: frozenset[str] = frozenset(), under: str | None = None) -> list[str]:
    """List the keys of `config` that contradict each other, or what is `under` it. Rules about `wrong` keys are skipped."""
    problems = []
    for text, where, broken in _RULES:
        if found := where == under and not wrong.intersection(_KEY.findall(text)) and broken(config):
            problems.append(text.format(found, c=config))
    if not wrong.intersection(["run.max_steps", *(f"schedule.{key}" for key in ScheduleSection.model_fields)]):
        try:
            schedule_of(config)  # The schedule checks its options.
        except ConfigError as error:
            problems += error.problems
    return problems


def _positions(config: TrainerConfig) -> tuple[str, int] | None:
    for key in ("max_position_embeddings", "n_positions"):
        limit = int_if_whole((config.model.config or {}).get(key))
        if type(limit) is int and config.data.sequence_length > limit:
            return key, limit
    return None


_CLAUSE = re.compile(r"(not )?([\w.]+)(?: (is not|is|<|>|has) (\S+))?")
_SIGNS: dict[str, Callable[[Any, Any], bool]] = {"is": operator.eq, "is not": operator.ne}
_SIGNS |= {"<": operator.lt, ">": operator.gt, "has": lambda values, name: name in (values or ())}


def _holds(clause: str, config: TrainerConfig) -> bool:
    negated, key, sign, given = _CLAUSE.fullmatch(clause).groups()  # type: ignore[union-attr]
    found = operator.attrgetter(key)(config)
    if sign is None:
        return bool(found) != bool(negated)
    other: Any = operator.attrgetter(given)(config) if "." in given else plain_scalar(given)
    return bool(_SIGNS[sign](found, other))


_FINDINGS: dict[str, Callable[[TrainerConfig], object]] = {
    "no_model_type": lambda c: (
        c.model.source is c.model.python is None
        and c.model.config is not None
        and type(c.model.config.get("model_type")) is not str
    ),
    "keys_of_lora": lambda c: (
        c.model.lora and sorted({"r", "lora_alpha", "lora_dropout", "target_modules"} & c.model.lora.options.keys())
    ),
    "unfit_adapter_names": lambda c: ([name for name in c.model.adapters or {} if not re.fullmatch(r"(?!__base__$)[\w-]+", name)]),
    "misplaced_default": lambda c: (
        "default" in c.model.wanted_adapters and (c.model.trained_adapter or next(iter(c.model.wanted_adapters))) != "default"
    ),
    "other_adapters": lambda c: c.model.trained_adapter not in (None, *c.model.wanted_adapters) and [*c.model.wanted_adapters],
    "positions": _positions,
    "stages_given_and_wanted": lambda c: (
        c.parallel.stages
        and c.parallel.pipeline > 1
        and len(c.parallel.stages) != c.parallel.pipeline * c.parallel.chunks
        and (len(c.parallel.stages), c.parallel.pipeline * c.parallel.chunks)
    ),
    "shared_sequences": lambda c: (
        c.data.separate_documents is False and c.data.packing and any(each.has_answers for each in c.data.formats)
    ),
    "micro_size_beside_tokens": lambda c: (
        c.batch.tokens is not None
        and ("auto" if "batch.micro_size" in c.parallel.auto else c.batch.micro_size > 1 and c.batch.micro_size)
    ),
    "pictures_in_a_mixture": lambda c: c.data.mixture and any(each.holds == "pictures" for each in c.data.formats),
    "code_beside_files": lambda c: (
        {isinstance(each, NamedFunction) for each in c.data.eval_sets().values()} - {isinstance(c.data.train, NamedFunction)}
    ),
    "endless_warmup": lambda c: c.run.most_steps and c.schedule.warmup_of(c.run.most_steps) > c.run.most_steps,
    "reversed_steps": lambda c: c.profile.steps and c.profile.steps[0] > c.profile.steps[1] and list(c.profile.steps),
}
"""The breach of a rule in a configuration `c`, by the rule's name in `rules.yaml`; false if there is none."""


def _rule(row: Mapping[str, Any]) -> Callable[[TrainerConfig], object]:
    if "by" in row:
        return _FINDINGS[row["by"]]
    either = [row[key] for key in ("when", "or") if key in row]
    return lambda config: any(all(_holds(clause, config) for clause in clauses) for clauses in either)


_RULES = [(row["says"], row.get("under"), _rule(row)) for row in read_texts(Path(__file__).with_name("rules.yaml"))]


def schedule_of(config: TrainerConfig) -> LRSchedule:
    """Return the learning-rate schedule of `config`, for a long run if its steps depend on epochs. Raises `ConfigError`."""
    section, lr = config.schedule, config.optimizer.lr
    steps = config.run.most_steps or _UNKNOWN_LENGTH
    curve: dict[str, Any] = section.model_dump(exclude={"warmup_ratio"})
    if section.name == "polynomial" and section.min_ratio is None and lr > _POLYNOMIAL_END:
        curve["min_ratio"] = _POLYNOMIAL_END / lr
    return LRSchedule(**(curve | {"warmup_steps": min(section.warmup_of(steps), steps), "total_steps": steps}))


def with_length(config: TrainerConfig, steps: int) -> TrainerConfig:
    """Return the configuration with `steps` steps and a resolved warm-up."""
    return config.changed(run={"max_steps": steps}, schedule={"warmup_steps": config.schedule.warmup_of(steps)})
