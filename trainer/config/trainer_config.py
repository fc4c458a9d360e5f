"""The configuration of a run as a whole: its sections, and the rules that join several keys.

The keys are in `sections/`; `docs/configuration.md` is generated from these models by `scripts/config_reference.py`, and
`loading/load.py` reads files and reports all problems at once. A rule names the keys that it joins, so that it is left
out when one of them is wrong by itself, and all others are still reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import yaml
from pydantic import Field, PrivateAttr, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from zeromesh.errors import ConfigError
from zeromesh.trainer.config.sections.base import Section
from zeromesh.trainer.config.sections.data import BatchSection, DataSection
from zeromesh.trainer.config.sections.model import ModelSection
from zeromesh.trainer.config.sections.outputs import (
    CheckpointSection,
    HubSection,
    ProfileSection,
    RunSection,
    TrackingSection,
)
from zeromesh.trainer.config.sections.parallelism import OffloadSection, ParallelSection, PrecisionSection, ZeroSection
from zeromesh.trainer.config.sections.training import (
    DEFAULT_WARMUP_STEPS,
    EmaSection,
    OptimizerSection,
    ScheduleSection,
    default_warmup,
)
from zeromesh.trainer.config.yaml_reader import plain_scalar
from zeromesh.trainer.lr_schedule import LRSchedule


class TrainerConfig(Section):
    """The whole configuration. Every key has a default, so `TrainerConfig()` is the quick-start run."""

    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    zero: ZeroSection = Field(default_factory=ZeroSection)
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    offload: OffloadSection = Field(default_factory=OffloadSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    ema: EmaSection = Field(default_factory=EmaSection)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    batch: BatchSection = Field(default_factory=BatchSection)
    run: RunSection = Field(default_factory=RunSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    hub: HubSection = Field(default_factory=HubSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)
    profile: ProfileSection = Field(default_factory=ProfileSection)
    _notes: tuple[str, ...] = PrivateAttr(default=())

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that say what became of the settings of another trainer, where the configuration was made of such."""
        return self._notes

    def with_notes(self, notes: tuple[str, ...]) -> TrainerConfig:
        """The same configuration with other notes, which are no part of what it says."""
        config = self.model_copy()
        config._notes = notes
        return config

    @model_validator(mode="before")
    @classmethod
    def _default_warmup_fits_the_run(cls, data: Any) -> Any:
        """A warm-up that nobody asked for must not outlast a short run."""
        if not isinstance(data, dict):
            return data
        schedule, run = data.get("schedule", {}), data.get("run", {})
        steps = run.get("max_steps") if isinstance(run, dict) else getattr(run, "max_steps", None)
        if type(steps) is not int or not 1 <= steps < DEFAULT_WARMUP_STEPS:
            return data
        if not isinstance(schedule, dict) or "warmup_steps" in schedule:
            return data
        return {**data, "schedule": {**schedule, "warmup_steps": default_warmup(steps)}}

    @model_validator(mode="after")
    def _keys_agree(self, info: ValidationInfo) -> TrainerConfig:
        if (info.context or {}).get("rules", True):
            problems = disagreements(self)
            if problems:
                raise PydanticCustomError("keys_disagree", "{problems}", {"problems": "\n".join(problems)})
        return self

    def to_yaml(self, change: Callable[[dict[str, Any]], Any] = lambda values: values) -> str:
        """Every key with its value, as YAML that `load_config` reads back to an equal configuration, unless `change` says more."""
        return yaml.dump(change(self.model_dump(mode="json")), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that would be read as something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # PyYAML folds some line breaks (U+0085) unless they are escaped, which it does in double quotes only.
        style = None if text.isprintable() and plain_scalar(text) == text else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


Find = Callable[[TrainerConfig], Iterator[str]]
_RULES: list[tuple[frozenset[str], Find]] = []
"""The keys that a rule joins, and what yields the problems of a configuration whose keys are each valid."""


def disagreements(config: TrainerConfig, *, wrong: frozenset[str] = frozenset()) -> list[str]:
    """What does not agree in `config`, leaving out rules about keys that are `wrong` by themselves."""
    return [problem for keys, find in _RULES if not wrong & keys for problem in find(config)]


def _rule(*keys: str) -> Callable[[Find], Find]:
    def add(find: Find) -> Find:
        _RULES.append((frozenset(keys), find))
        return find

    return add


_LONG = 1 << 50
"""Steps of a run whose length is not known yet: more than any warm-up or decay."""
_CURVE_KEYS = tuple(key for key in ScheduleSection.model_fields if key != "warmup_ratio")


@_rule("model.source", "model.config", "model.revision", "model.trust_remote_code")
def _model(config: TrainerConfig) -> Iterator[str]:
    model = config.model
    if model.source is not None and model.config is not None and "model_type" in model.config:
        yield (
            f"model.config: given beside model.source {model.source!r}, which brings its own; name only the fields that are to "
            "differ from it (num_labels), or set it to null"
        )
    if model.source is None and model.config is not None and not isinstance(model.config.get("model_type"), str):
        yield "model.config.model_type: missing; give the name of a Hugging Face architecture, such as llama"
    for key, value in (("revision", model.revision), ("trust_remote_code", model.trust_remote_code)):
        if value and model.source is None:
            yield f"model.{key}: is about model.source, and that is null; set model.source, or leave model.{key} out"


@_rule("model.config", "data.sequence_length")
def _positions(config: TrainerConfig) -> Iterator[str]:
    for key in ("max_position_embeddings", "n_positions"):
        limit = (config.model.config or {}).get(key)
        if type(limit) is int and config.data.sequence_length > limit:
            yield (
                f"data.sequence_length: {config.data.sequence_length} is more than model.config.{key} "
                f"{limit}; lower the one or raise the other"
            )


@_rule("parallel.tensor", "parallel.pipeline", "parallel.schedule", "parallel.chunks")
def _mesh(config: TrainerConfig) -> Iterator[str]:
    parallel = config.parallel
    if parallel.tensor == 1:
        if parallel.sequence:
            yield "parallel.sequence: true shares sequences out to tensor ranks, and parallel.tensor is 1; set one of them"
        if parallel.plan:
            yield "parallel.plan says how layers are divided, and parallel.tensor is 1; set parallel.tensor, or no plan"
    interleaved = parallel.schedule == "interleaved"
    if interleaved != (parallel.chunks > 1):
        yield (
            f"parallel.chunks: {parallel.chunks} with parallel.schedule {parallel.schedule}; `interleaved`, and it alone, has "
            "2 or more stages on each rank"
        )
    if parallel.pipeline == 1 and (interleaved or parallel.stages):
        key = "schedule" if interleaved else "stages"
        yield f"parallel.{key} is about stages, and parallel.pipeline is 1; set parallel.pipeline, or leave it out"
    count = parallel.pipeline * parallel.chunks
    if parallel.stages and parallel.pipeline > 1 and len(parallel.stages) != count:
        yield f"parallel.stages has {len(parallel.stages)} numbers of blocks for {count} stages (pipeline x chunks)"
    if config.optimizer.in_backward and parallel.pipeline > 1 and parallel.schedule == "zero_bubble":
        yield (
            "optimizer.in_backward does not go with parallel.schedule zero_bubble, whose gradients of weights come after "
            "backward; set optimizer.in_backward: false, or another schedule"
        )


@_rule("precision.compute", "precision.master", "precision.reduce")
def _widths(config: TrainerConfig) -> Iterator[str]:
    """An update reads sums into master weights, so both are of one dtype, and no narrower than what was computed."""
    precision = config.precision
    roles = {"master": precision.master, "reduce": precision.reduce}
    narrow = [role for role, dtype in roles.items() if precision.compute == "float64" and dtype != "float64"]
    for role in narrow:
        yield (
            f"precision.{role}: {roles[role]} is less than precision.compute float64; set precision.{role} to float64"
        )
    if not narrow and precision.master != precision.reduce:
        yield (
            f"precision.reduce: {precision.reduce} differs from precision.master {precision.master}, and an update needs "
            "them equal; set both to float32, or both to float64"
        )


@_rule("precision.compute", "run.on_nonfinite")
def _float16(config: TrainerConfig) -> Iterator[str]:
    if config.precision.compute == "float16" and config.run.on_nonfinite == "stop":
        yield (
            "run.on_nonfinite: stop does not go with precision.compute float16, whose loss scale is found by "
            "skipping steps that overflow; set it to skip, or precision.compute to bfloat16"
        )


@_rule("optimizer.in_backward", "run.clip_norm", "run.on_nonfinite", "precision.compute")
def _in_backward(config: TrainerConfig) -> Iterator[str]:
    """Inside backward neither the norm nor the finiteness of all gradients is known yet."""
    if not config.optimizer.in_backward:
        return
    if config.run.clip_norm > 0:
        yield f"run.clip_norm: {config.run.clip_norm} does not go with optimizer.in_backward; set it to 0"
    if config.run.on_nonfinite != "stop":
        yield "run.on_nonfinite: skip does not go with optimizer.in_backward; set it to stop"
    if config.precision.compute == "float16":
        yield (
            "optimizer.in_backward: does not go with the loss scale of precision.compute float16; set it to "
            "false, or precision.compute to bfloat16"
        )


@_rule("offload.parameters", "zero.stage")
def _offload(config: TrainerConfig) -> Iterator[str]:
    """Only stage 3 gathers parameters around their use."""
    if config.offload.parameters.tier != "none" and config.zero.stage < 3:
        yield (
            f"offload.parameters: {config.offload.parameters.tier} does not go with zero.stage {config.zero.stage}, whose "
            "parameters are whole on every rank all the time; set zero.stage to 3, or offload.parameters to none"
        )


@_rule("offload.activations", "model.activation_checkpointing", "model.compile")
def _activations(config: TrainerConfig) -> Iterator[str]:
    """What rests elsewhere is the inputs of blocks that are recomputed."""
    if config.offload.activations.tier != "none" and config.model.activation_checkpointing == "none":
        yield (
            f"offload.activations: {config.offload.activations.tier} moves the inputs of recomputed blocks, and "
            "model.activation_checkpointing is none; set it to block, or offload.activations to none"
        )
    elif config.offload.activations.tier != "none" and config.model.compile:
        yield (
            f"offload.activations: {config.offload.activations.tier} does not go with model.compile, which stops at the hooks that "
            "keep the inputs and would compile nothing; set model.compile to false, or offload.activations to none"
        )


@_rule("batch.micro_size", "batch.global_size")
def _batch(config: TrainerConfig) -> Iterator[str]:
    batch = config.batch
    if batch.micro_size > batch.global_size:
        yield (
            f"batch.micro_size: {batch.micro_size} is more than batch.global_size {batch.global_size}; "
            "lower the one or raise the other"
        )


@_rule("schedule.warmup_steps", "schedule.warmup_ratio", "run.max_steps", "run.epochs")
def _warmup(config: TrainerConfig) -> Iterator[str]:
    warmup, steps = config.schedule.warmup_steps, config.run.max_steps
    if warmup > steps and config.run.epochs is None and config.schedule.warmup_ratio is None:
        yield (
            f"schedule.warmup_steps: {warmup} is more than run.max_steps {steps}, so optimizer.lr would "
            "never be reached; lower the one or raise the other"
        )


@_rule("run.load_best", "run.patience", "run.eval_every", "checkpoint.every_steps")
def _best(config: TrainerConfig) -> Iterator[str]:
    """What is judged by evaluations needs some on the way."""
    run = config.run
    for key, asked in (("load_best", run.load_best), ("patience", run.patience > 0)):
        if asked and not run.eval_every:
            yield f"run.{key} judges by evaluations, and run.eval_every is 0; set it to a number of steps, or to epoch"
    if run.load_best and not config.checkpoint.every_steps:
        yield "run.load_best keeps the best weights in a checkpoint, and checkpoint.every_steps is 0; set it, or load_best to false"


@_rule("ema.evaluate", "ema.decay")
def _ema(config: TrainerConfig) -> Iterator[str]:
    if config.ema.evaluate and not config.ema.decay:
        yield "ema.evaluate: true needs averaged weights; set ema.decay, such as 0.999"


@_rule("profile.steps")
def _profile(config: TrainerConfig) -> Iterator[str]:
    steps = config.profile.steps
    if steps is not None and steps[0] > steps[1]:
        yield f"profile.steps: {list(steps)} ends before it begins; give the first and the last step that are recorded"


@_rule(*(f"schedule.{key}" for key in _CURVE_KEYS), "run.max_steps")
def _curve(config: TrainerConfig) -> Iterator[str]:
    """The schedule knows its own options, and says what is wrong with them."""
    try:
        schedule_of(config)
    except ConfigError as error:
        yield from error.problems


def schedule_of(config: TrainerConfig) -> LRSchedule:
    """The learning-rate schedule that `config` names, of a long run where its steps follow from epochs. Raises `ConfigError`."""
    schedule = config.schedule
    steps = config.run.max_steps if config.run.epochs is None else _LONG
    curve: dict[str, Any] = {key: getattr(schedule, key) for key in _CURVE_KEYS}
    return LRSchedule(**(curve | {"warmup_steps": min(schedule.warmup_steps, steps), "total_steps": steps}))
