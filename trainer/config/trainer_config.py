"""The configuration of a run as a whole: its sections, which have the keys, and the rules between keys."""

import re
from collections.abc import Callable
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
from zeromesh.trainer.config.yaml_reader import plain_scalar


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
_MASTERLESS = ("none", "kahan")  # of precision.master
_POLYNOMIAL_END = 1e-7  # the final learning rate of transformers' polynomial schedule
_KEY = re.compile(rf"\b(?:{'|'.join(TrainerConfig.model_fields)})\.\w+")


def disagreements(config: TrainerConfig, *, wrong: frozenset[str] = frozenset()) -> list[str]:
    """List the keys of `config` that contradict each other. Rules about `wrong` keys are skipped."""
    problems = []
    for text, broken in _RULES.items():
        if found := not wrong.intersection(_KEY.findall(text)) and broken(config):
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


_RULES: dict[str, Callable[[TrainerConfig], object]] = {
    "model.config: given beside model.source {c.model.source!r}, which brings its own; name only the fields that "
    "are to differ from it (num_labels), or set it to null": lambda c: (
        c.model.source is not None and "model_type" in (c.model.config or {})
    ),
    "model.config.model_type: missing; give the name of a Hugging Face architecture, such as llama, or a "
    "model.source": lambda c: (
        c.model.source is c.model.python is None
        and c.model.config is not None
        and type(c.model.config.get("model_type")) is not str
    ),
    "model.revision: is about model.source, and that is null; set model.source, or leave model.revision out": lambda c: (
        c.model.revision and c.model.source is None
    ),
    "model.trust_remote_code: is about model.source, and that is null; set model.source, or leave "
    "model.trust_remote_code out": lambda c: c.model.trust_remote_code and c.model.source is None,
    "model.lora.options: {0} are keys of model.lora: rank, alpha, dropout and targets; give them there": lambda c: (
        c.model.lora and sorted({"r", "lora_alpha", "lora_dropout", "target_modules"} & c.model.lora.options.keys())
    ),
    "model.lora and model.adapters are both given; name all adapters in model.adapters, or leave it out": lambda c: (
        c.model.lora is not None and c.model.adapters is not None
    ),
    "model.adapters: {0} are no names; give letters, digits, _ and -": lambda c: (
        [name for name in c.model.adapters or {} if not re.fullmatch(r"[\w-]+", name)]
    ),
    "model.adapters.default is not the adapter that is trained, whose place in a directory it would have; rename it": lambda c: (
        "default" in c.model.wanted_adapters
        and (c.model.trained_adapter or next(iter(c.model.wanted_adapters))) != "default"
    ),
    "model.trained_adapter is {c.model.trained_adapter!r}, and the adapters are {0}": lambda c: (
        c.model.trained_adapter not in (None, *c.model.wanted_adapters) and [*c.model.wanted_adapters]
    ),
    "data.sequence_length: {c.data.sequence_length} is more than model.config.{0[0]} {0[1]}; lower the one or "
    "raise the other": _positions,
    "parallel.sequence: true shares sequences out to tensor ranks, and parallel.tensor is 1; set one of them": lambda c: (
        c.parallel.tensor == 1 and c.parallel.sequence
    ),
    "parallel.plan says how layers are divided, and parallel.tensor is 1; set parallel.tensor, or no plan": lambda c: (
        c.parallel.tensor == 1 and c.parallel.plan
    ),
    "parallel.chunks: {c.parallel.chunks} with parallel.schedule {c.parallel.schedule}; `interleaved`, and it "
    "alone, has 2 or more stages on each rank": lambda c: (
        (c.parallel.schedule == "interleaved") != (c.parallel.chunks > 1)
    ),
    "parallel.schedule is about stages, and parallel.pipeline is 1; set parallel.pipeline, or leave it out": lambda c: (
        c.parallel.pipeline == 1 and c.parallel.schedule == "interleaved"
    ),
    "parallel.stages is about stages, and parallel.pipeline is 1; set parallel.pipeline, or leave it out": lambda c: (
        c.parallel.pipeline == 1 and c.parallel.stages
    ),
    "parallel.stages has {0[0]} numbers of blocks for {0[1]} stages (parallel.pipeline x parallel.chunks)": lambda c: (
        c.parallel.stages
        and c.parallel.pipeline > 1
        and len(c.parallel.stages) != c.parallel.pipeline * c.parallel.chunks
        and (len(c.parallel.stages), c.parallel.pipeline * c.parallel.chunks)
    ),
    # zero_bubble computes weight gradients after backward.
    "optimizer.in_backward does not go with parallel.schedule zero_bubble, whose gradients of weights come after "
    "backward; set optimizer.in_backward: false, or another schedule": lambda c: (
        c.optimizer.in_backward and c.parallel.pipeline > 1 and c.parallel.schedule == "zero_bubble"
    ),
    # An update adds gradient sums to master weights, so both have one dtype, no narrower than the compute dtype.
    "precision.master {c.precision.master}, precision.reduce {c.precision.reduce}: the two have to be equal, and float64 where "
    "precision.compute is; set both to float32, or both to float64": lambda c: (
        c.precision.reduce != "bfloat16"
        and c.precision.master not in _MASTERLESS
        and (c.precision.master != c.precision.reduce or c.precision.compute == "float64" != c.precision.master)
    ),
    "precision.reduce: bfloat16 goes with precision.master float32 and precision.compute bfloat16 or float32, and not with "
    "{c.precision.master} and {c.precision.compute}; set precision.reduce to {c.precision.master}": lambda c: (
        c.precision.reduce == "bfloat16"
        and c.precision.master not in _MASTERLESS
        and (c.precision.master != "float32" or c.precision.compute not in ("bfloat16", "float32"))
    ),
    "precision.master: {c.precision.master} goes with precision.compute bfloat16 and precision.reduce float32, and not with "
    "{c.precision.compute} and {c.precision.reduce}; set these, or precision.master to float32": lambda c: (
        c.precision.master in _MASTERLESS and (c.precision.compute, c.precision.reduce) != ("bfloat16", "float32")
    ),
    "precision.master: {c.precision.master} does not go with ema.decay {c.ema.decay}, whose averages bfloat16 would round; leave "
    "one of them out": lambda c: c.precision.master in _MASTERLESS and c.ema.decay,
    "precision.linear: float8 is for precision.compute bfloat16, not {c.precision.compute}; set one of them": lambda c: (
        c.precision.linear is not None and c.precision.compute != "bfloat16"
    ),
    "precision.linear: float8 is for whole layers, and parallel.tensor {c.parallel.tensor} divides them; set it to 1, or leave "
    "precision.linear out": lambda c: c.precision.linear is not None and c.parallel.tensor > 1,
    "precision.linear: float8 does not go with parallel.schedule zero_bubble, which computes gradients of linear layers itself; "
    "take another schedule": lambda c: (
        c.precision.linear is not None and c.parallel.pipeline > 1 and c.parallel.schedule == "zero_bubble"
    ),
    "run.on_nonfinite: stop does not go with precision.compute float16, whose loss scale is found by skipping "
    "steps that overflow; set it to skip, or precision.compute to bfloat16": lambda c: (
        c.precision.compute == "float16" and c.run.on_nonfinite == "stop"
    ),
    # Inside backward, neither the norm nor the finiteness of all gradients is known yet.
    "run.clip_norm: {c.run.clip_norm} does not go with optimizer.in_backward; set it to 0": lambda c: (
        c.optimizer.in_backward and c.run.clip_norm > 0
    ),
    "run.on_nonfinite: skip does not go with optimizer.in_backward; set it to stop": lambda c: (
        c.optimizer.in_backward and c.run.on_nonfinite != "stop"
    ),
    "optimizer.in_backward: does not go with the loss scale of precision.compute float16; set it to false, or "
    "precision.compute to bfloat16": lambda c: c.optimizer.in_backward and c.precision.compute == "float16",
    "offload.parameters: {c.offload.parameters.tier} does not go with zero.stage {c.zero.stage}, whose parameters "
    "are whole on every rank all the time; set zero.stage to 3, or offload.parameters to none": lambda c: (
        c.offload.parameters.tier != "none" and c.zero.stage < 3
    ),
    # Activation offload moves the inputs of recomputed blocks only.
    "offload.activations: {c.offload.activations.tier} moves the inputs of recomputed blocks, and "
    "model.activation_checkpointing is none; set it to block, or offload.activations to none": lambda c: (
        c.offload.activations.tier != "none" and c.model.activation_checkpointing == "none"
    ),
    "offload.activations: {c.offload.activations.tier} does not go with model.compile, which stops at the hooks "
    "that keep the inputs and would compile nothing; set model.compile to false, or offload.activations to none": lambda c: (
        c.offload.activations.tier != "none" and c.model.activation_checkpointing != "none" and c.model.compile
    ),
    "data.train: {c.data.train!r} is given beside data.mixture, whose parts have their own; name it in one of them, or leave it "
    "out": lambda c: c.data.mixture is not None and c.data.train != "stdlib",
    "data.packing: true puts several conversations into a sequence, and with data.separate_documents: false each sees those before "
    "it; leave the one out, or set the other to false": lambda c: (
        c.data.separate_documents is False and c.data.packing and any(each.has_answers for each in c.data.formats)
    ),
    "data.format: pictures is for all data, and no part of data.mixture": lambda c: (
        c.data.mixture is not None and any(each.holds == "pictures" for each in c.data.formats)
    ),
    "model.python returns the model, and model.source {c.model.source} is one too; leave one of them out": lambda c: (
        c.model.python is not None and c.model.source is not None
    ),
    "data.train and data.eval: one is Python code and the other text of files; give both as code, or both as files": lambda c: (
        any(
            isinstance(each, NamedFunction) != isinstance(c.data.train, NamedFunction)
            for each in c.data.eval_sets().values()
        )
    ),
    "batch.micro_size: {c.batch.micro_size} is more than batch.global_size {c.batch.global_size}; lower the one or "
    "raise the other": lambda c: c.batch.micro_size > c.batch.global_size,
    "schedule.warmup_steps: {c.schedule.warmup_steps} is more than run.max_steps {c.run.max_steps}, so "
    "optimizer.lr would never be reached; lower the one, raise the other, or set schedule.warmup_ratio or "
    "run.epochs": lambda c: c.run.most_steps is not None and c.schedule.warmup_of(c.run.most_steps) > c.run.most_steps,
    "run.load_best judges by evaluations, and run.eval_every is 0; set it to a number of steps, or to epoch": lambda c: (
        c.run.load_best and not c.run.eval_every
    ),
    "run.patience judges by evaluations, and run.eval_every is 0; set it to a number of steps, or to epoch": lambda c: (
        c.run.patience and not c.run.eval_every
    ),
    "run.load_best keeps the best weights in a checkpoint, and checkpoint.every_steps is 0; set it, or load_best "
    "to false": lambda c: c.run.load_best and not c.checkpoint.every_steps,
    "ema.evaluate: true needs averaged weights; set ema.decay, such as 0.999": lambda c: (
        c.ema.evaluate and not c.ema.decay
    ),
    "profile.steps: {0} ends before it begins; give the first and the last step that are recorded": lambda c: (
        c.profile.steps is not None and c.profile.steps[0] > c.profile.steps[1] and list(c.profile.steps)
    ),
}
"""Conditions of conflicts between the valid keys of a configuration `c`, by message. A rule is skipped if a key in its text is
invalid, so the text names all keys whose defaults would break it."""


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
    run = config.run.model_copy(update={"max_steps": steps})
    schedule = config.schedule.model_copy(update={"warmup_steps": config.schedule.warmup_of(steps)})
    return config.model_copy(update={"run": run, "schedule": schedule})
