"""`trainer_state.json`: the counters from which a run resumes, the settings that it depends on, and the best evaluation. Batches,
learning rates and random numbers of forward are functions of step and seed, so no generator state is saved."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from torch import nn

from zeromesh.checkpoint.io.format import check_plain
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.errors import CheckpointError, ConfigError, StorageError
from zeromesh.trainer.config.sections.schedule import default_warmup
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.models.adapters import description_of_adapters, is_adapted

NAME = "trainer_state.json"
EVALUATED = "trainer_state_evaluated.json"  # supersedes the first, after an evaluation of a written checkpoint
LENGTH = "run.max_steps"
_KEYS = ("batch.global_size", "batch.last", "batch.average", "run.label_smoothing", LENGTH, "run.seed", "run.clip_norm")
_WARMUP = "schedule.warmup_steps"
_SCHEMA = 1
_ABSENT = "(absent)"
_Count = Annotated[int, Field(ge=0, lt=1 << 53)]  # floats are exact up to 2^53
_Number = Annotated[float, Field(allow_inf_nan=False)]

_NOT_COMPARED = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "use_cache"}
"""Keys of a model's configuration that do not affect its computation."""
Goal = Literal["lowest", "highest"]

_PAIRS = TypeAdapter(list[tuple[str | int | float | None, Any]])
_MADE: dict[str, Callable[[Any], Any]] = {  # what JSON does not have, by its only key; the first as in transformers' configurations
    "__float__": lambda text: float(str(text)),
    "__dict__": lambda pairs: dict(_PAIRS.validate_python(pairs)),
    "__Counter__": lambda pairs: Counter(dict(_PAIRS.validate_python(pairs))),
}


def is_storable(value: Any) -> bool:
    """Return True if a checkpoint can hold a value."""
    try:
        _to_strict_json(value, "")
    except StorageError:
        return False
    return True


def _to_strict_json(value: Any, place: str) -> Any:
    """Convert `value` to types of strict JSON; NumPy's and PyTorch's numbers become lists and numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {"__float__": str(float(value))}
    if isinstance(value, int | str | None):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str | int | float | None) for key in value):
        found = {key: _to_strict_json(each, f"{place}.{key}" if place else str(key)) for key, each in value.items()}
        counts = isinstance(value, Counter)
        if not counts and all(isinstance(key, str) and key not in _MADE for key in value):
            return found
        # Keys of JSON are text, and torch's schedulers keep milestones in a Counter by step.
        return {f"__{'Counter' if counts else 'dict'}__": [[_to_strict_json(k, place), each] for k, each in found.items()]}
    if isinstance(value, list | tuple):
        return [_to_strict_json(each, place) for each in value]
    if callable(getattr(value, "tolist", None)):
        return _to_strict_json(value.tolist(), place)
    raise StorageError(f"{place}: a {type(value).__name__}, which a checkpoint cannot hold; give numbers, text, lists and mappings")


def _from_strict_json(value: Any) -> Any:
    if isinstance(value, dict):
        found = {key: _from_strict_json(each) for key, each in value.items()}
        make = _MADE.get(next(iter(found))) if len(found) == 1 else None
        return found if make is None else make(*found.values())
    return [_from_strict_json(each) for each in value] if isinstance(value, list) else value


_Value = Annotated[Any, AfterValidator(_from_strict_json)]
_Float = Annotated[float, BeforeValidator(_from_strict_json)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best evaluation's `value`, None before the first, and `step`; `waited` counts evaluations since one was better."""

    __pydantic_config__: ClassVar = ConfigDict(strict=True, extra="forbid")

    value: Annotated[_Float, Field(ge=-math.inf)] | None = None  # NaN is none
    step: _Count = 0
    waited: _Count = 0

    def after(self, value: float, step: int, goal: Goal, min_improvement: float) -> "Best":
        """Return the best value after one more evaluation; NaN is never better."""
        gain = math.inf if self.value is None else (value - self.value) * (1 if goal == "highest" else -1)
        better = gain > 0 and not math.isnan(value)
        enough = better and gain >= min_improvement
        kept = replace(self, value=value, step=step) if better else self
        return replace(kept, waited=0 if enough else self.waited + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """The state of a run after `step` steps, of which `updates` were not skipped. `samples` and `tokens` count from the start,
    losses are the latest ones, `checkpoint.keep_best` compares `metric`, and a resumed run must match `settings`."""

    __pydantic_config__: ClassVar = ConfigDict(strict=True, extra="forbid")

    step: _Count
    samples: _Count
    tokens: _Count
    updates: _Count
    skipped: _Count
    loss: _Number | None = None
    eval_loss: _Number | None = None
    metric: _Number | None = None
    loss_scale: Annotated[_Number, Field(gt=0)] = 1.0
    good_steps: _Count = 0
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    max_steps: _Count = 0
    patience: _Count = 0  # `run.patience` of the process that has written the state
    start: str = ""  # the name of the launcher's start of the ranks that have written the state
    ended: str = ""  # why the run has ended before its last step; empty if it has not
    learning_rate: _Number = 0.0
    owes: Sequence[str] = ()  # of `evaluate` and `sample`: what was due after the step, and is left to be done
    passed_over: _Count = 0  # steps of the data that were no steps, as where a callback ended an epoch early
    skipped_in_a_row: _Count = 0  # of the latest steps
    rewinds: _Count = 0  # how often the run has gone back after a spike that lasted
    origin: str = ""  # the checkpoint of another run with which this one has begun
    averages: _Count = 0  # the number of updates in the moving average of the weights (`ema`)
    trained: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Parameters with a changed `requires_grad`, or that missed updates: their present flag and number of updates."""
    best: Best = Best()
    callbacks: Mapping[str, _Value] = field(default_factory=dict)
    unlogged: Sequence[_Float] = field(default_factory=list)  # the losses since the last line of the log
    accepted: Sequence[Sequence[_Number]] = field(default_factory=list)  # losses and norms that spikes are judged by
    stream: Mapping[str, _Value] = field(default_factory=dict)
    """The position in a training stream, as `StreamedDataset` saves it; empty for a dataset with a length."""
    paces: Sequence[_Number] = ()  # seconds a sample of each data rank (`batch.balance`)
    tracker: Mapping[str, str] = field(default_factory=dict)
    log_history: Sequence[Mapping[str, _Value]] = ()  # in transformers' form; empty if a run uses nothing of transformers
    settings: Mapping[str, _Value] = field(default_factory=dict)
    written: Mapping[str, _Value] = field(default_factory=dict)  # the later values of settings that the model changed

    def to_json(self) -> bytes:
        """Serialise to strict JSON, with null for losses that are not finite. Raises `StorageError` by path for other types."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values |= {name: None for name in ("loss", "eval_loss", "metric") if not math.isfinite(values[name] or 0.0)}
        values["best"] = {} if self.best.value is None else asdict(self.best)
        return json.dumps(_to_strict_json({"schema": _SCHEMA, **values}, ""), indent=1, allow_nan=False).encode()

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> "TrainerState":
        """Parse a state. Raises `CheckpointError` for other objects, and for newer versions."""
        values = dict(content)
        schema = values.pop("schema", None)
        if type(schema) is not int or schema > _SCHEMA:
            raise CheckpointError(f"{where}: {NAME} has schema {schema!r:.50}; this version reads {_SCHEMA}")
        check_plain(where, NAME, values)
        problem = f"{where}: {NAME} has other fields, or fields of other types than this version writes"
        try:
            return TypeAdapter(cls).validate_json(json.dumps(values))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise CheckpointError(f"{problem} ({place:.50}: {first['msg']:.100})") from None


def state_file_of(files: Container[str]) -> str:
    """Return the name of the file that holds the latest state, given the names of a checkpoint's files."""
    return EVALUATED if EVALUATED in files else NAME


def state_of(reader: CheckpointReader) -> TrainerState | None:
    """Return a checkpoint's state, or None. Raises `CheckpointError` for a state that no trainer has written."""
    name, where = state_file_of(reader.manifest.files), str(reader.directory)
    return TrainerState.from_json(reader.document(name), where) if name in reader.manifest.files else None


def evaluates_average(reader: CheckpointReader) -> bool:
    """True if the checkpoint's optimizer evaluates other weights than it trains: averages without a decay are the optimizer's."""
    name = state_file_of(reader.manifest.files)
    state = reader.document(name) if name in reader.manifest.files else {}
    return bool(state.get("averages")) and "ema.decay" not in state.get("settings", {})


def description_of(model: nn.Module) -> dict[str, Any]:
    """Describe the model's class and configuration, paths aside, which a resumed run must match."""
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    described = {f"config.{name}": value for name, value in values.items() if name not in _NOT_COMPARED}
    if is_adapted(model):
        described |= description_of_adapters(model)
    # The text of a user's object may contain its address, which differs between processes.
    shorten = json.dumps(described, default=lambda value: re.sub(r" at 0x[0-9a-f]+", "", str(value)))
    return {"class": type(model).__name__, **json.loads(shorten)}


def settings_of(config: TrainerConfig, *, model: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that determine a step's weights, by configuration key. `model` and `data` are described without paths."""
    local = {"sync_every", "outer"} if config.parallel.sync_every > 1 else set[str]()
    sections = {
        "model": model,
        "data": data,
        "optimizer": config.optimizer.model_dump(mode="json", exclude={"in_backward"}),
        "schedule": config.schedule.model_dump(mode="json"),
        "ema": config.ema.model_dump(mode="json", exclude={"evaluate"}) if config.ema.decay else {},
        "parallel": config.parallel.model_dump(mode="json", include=local),
    }
    flat = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
    flat |= {key: attrgetter(key)(config) for key in _KEYS}
    return flat if config.data.seed is None else {**flat, "data.seed": config.data.seed}


def differences(then: Mapping[str, Any], now: Mapping[str, Any], written: Mapping[str, Any] | None = None) -> list[str]:
    """Return a line for each setting that differs, but the length, default warm-ups, and what the model has `written` itself."""
    steps = [(each.get(LENGTH), each.get(_WARMUP)) for each in (then, now)]
    default = all(isinstance(length, int) and warmup == default_warmup(length) for length, warmup in steps)

    def shorten(value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return text if len(text) <= 80 else f"{text[:77]}..."

    lines = []
    for name in {**then, **now}:
        before, after = then.get(name, _ABSENT), now.get(name, _ABSENT)
        known = [before, written[name]] if written and name in written else [before]
        # NaN is not equal to itself, but its text is.
        if not (after in known or repr(after) in map(repr, known) or name == LENGTH or (default and name == _WARMUP)):
            lines.append(f"{name}: {shorten(before)} then, {shorten(after)} now")
    return lines


def goal_of(metric: str, goal: Literal["auto", "lowest", "highest"]) -> Goal:
    """Return `goal`, or for auto the lowest for names of losses, errors and perplexities, and else the highest."""
    if goal != "auto":
        return goal
    return "lowest" if any(word in metric.lower() for word in ("loss", "error", "perplexity")) else "highest"


def value_of(metric: str, values: Mapping[str, float]) -> float:
    """Return the evaluation value named `metric`, with or without the prefix `eval_`. Raises `ConfigError` without such a value."""
    for name in (metric, f"eval_{metric}"):
        if name in values:
            return float(values[name])
    cure = f"it has {', '.join(values)}. Set run.metric to one of them, or return it from compute_metrics"
    raise ConfigError(f"run.metric: {metric!r} is no value of an evaluation; {cure}")
