"""Translation of DeepSpeed configurations, of which keys that interact are read as DeepSpeed 0.19 does. `auto` leaves zeromesh's
default. The learning rate follows DeepSpeed's curve without its first step, which DeepSpeed repeats."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any

from zeromesh.mesh.mesh_shape import MODEL_AXES
from zeromesh.settings.keys import int_if_whole
from zeromesh.trainer.config.foreign_names import TABLE, WORDS, Fate, SettingRow
from zeromesh.trainer.config.messages import join_choices, nearest_path, quote, unknown_key
from zeromesh.trainer.config.sections.optimizer import OptimizerSection
from zeromesh.trainer.config.sections.schedule import ScheduleSection
from zeromesh.trainer.config.sections.training import BatchSection
from zeromesh.trainer.config.trainer_config import TrainerConfig


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, key = path.split(".")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[key] = value
    return tree


_TREE = nested({row.name: row for row in TABLE})
_PATHS = dict.fromkeys(part for row in TABLE for part in accumulate(row.name.split("."), "{}.{}".format))
_SHARED_SECTIONS = frozenset(_TREE) & frozenset(TrainerConfig.model_fields)
_DEFAULTS = WORDS["defaults"]
_OPTIMIZERS, _CURVES, _TIERS, _DTYPES = (WORDS[kind] for kind in ("optimizers", "curves", "tiers", "dtypes"))
_SHAPE_KEYS = ScheduleSection.model_fields.keys() - {"name", "warmup_steps", "warmup_ratio"}
_BATCH_NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_TENSOR_NAMES = ("autotp_size", "tp.tp_size", "tensor_parallel.tp_size")
_LARGEST_COUNT = 1 << 53
_AUTO = "auto"
Pairs = Iterator[tuple[str, Any]]


class Translation:
    """The translation of DeepSpeed settings into keys; a call returns a setting's value."""

    def __init__(self, settings: Mapping[str, Any], ranks: int = 1, parallel: Any = None) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        sizes = [settings.get(f"tensor_parallel.{name}") for name in _TENSOR_NAMES]
        self.tensor = max([1, *(size for size in sizes if type(size) is int)])
        self.settings = {name: value for name, value in settings.items() if value != _AUTO}
        self.automatic = tuple(name for name, value in settings.items() if value == _AUTO)
        axes = dict.fromkeys(MODEL_AXES, 1) | {"tensor": self.tensor}
        given = {name: int_if_whole(size) for name, size in parallel.items()} if isinstance(parallel, Mapping) else {}
        axes |= {name: size for name in axes if type(size := given.get(name)) is int and size > 0}
        self.data_ranks = max(1, ranks // math.prod(axes.values()))
        self.problems: list[str] = []
        self.notes: list[str] = []

    def __call__(self, name: str, default: Any = None) -> Any:
        return self.settings.get(name, default)

    def has(self, beginning: str) -> bool:
        """Return True if a setting, automatic ones included, has a name that begins with `beginning`."""
        return any(name.startswith(beginning) for name in (*self.settings, *self.automatic))

    def number(self, name: str, takes: str = "a number", ok: Callable[[float], bool] = lambda _: True) -> float | None:
        """Return a numeric setting; None if it is absent or, after a refusal, not `takes`."""
        value = self(name)
        with suppress(TypeError, ValueError):
            if not isinstance(value, bool) and math.isfinite(number := float(value)) and ok(number):
                return number
        if value is not None:
            self.refuse(name, f"got {quote('', value)}; allowed is {takes}")
        return None

    def count(self, name: str, least: int = 1, most: int = _LARGEST_COUNT) -> Any:
        """Return an integer setting, also one written 1e3; DeepSpeed's default, or None, if absent or, after a refusal, invalid."""
        allowed = f"an integer >= {least}" + ("" if most == _LARGEST_COUNT else f" and <= {most}")
        whole = not isinstance(self(name), str)
        number = self.number(name, allowed, lambda number: whole and number.is_integer() and least <= number <= most)
        return _DEFAULTS.get(name.rpartition(".")[2]) if number is None else int(number)

    def choice(self, name: str, choices: Mapping[str, Any], *, required: bool = False) -> Any:
        """Look up a setting's value in `choices`, ignoring case; None if it is absent or, after a refusal, unknown."""
        value = self(name)
        for word, choice in choices.items():
            if value is not None and str(value).lower() == word.lower():
                return choice
        if value is not None or required:
            self.refuse(name, f"got {quote('', value)}; allowed is {join_choices(list(choices))}")
        return None

    def refuse(self, name: str, why: str) -> None:
        problem = f"{name}: {why}"
        if problem not in self.problems:
            self.problems.append(problem)


def is_deepspeed(data: Mapping[str, Any]) -> bool:
    """Return True if a mapping is a DeepSpeed configuration, with keys of DeepSpeed's alone and no section of zeromesh's alone."""
    if any(key in TrainerConfig.model_fields and key not in _SHARED_SECTIONS for key in data):
        return False
    optimizer = data.get("optimizer")
    typed = isinstance(optimizer, Mapping) and "type" in optimizer
    return typed or any(key in _TREE and key not in _SHARED_SECTIONS for key in data)


def read_deepspeed(data: Mapping[str, Any], ranks: int, parallel: Any = None) -> Translation:
    """Translate a DeepSpeed configuration for a launch of `ranks` ranks, beside a section `parallel` of zeromesh."""
    settings: dict[str, Any] = {}
    problems = list(_flatten(data, _TREE, "", settings))
    read = Translation(settings, ranks, parallel)
    read.problems += problems
    present = [row for row in TABLE if row.name in read.settings]
    for row in present:
        value = read(row.name)
        if row.fate is Fate.REFUSED and value not in row.neutral:
            read.refuse(row.name, f"{quote(row.name, value)} is not available: {row.text}")
        if row.is_copied:
            read.values[row.keys[0]] = value
    for decide in (_batch, _optimizer, _schedule, _precision_and_zero, _offload, _other_settings):
        read.values.update(decide(read))
    read.origins |= {key: f"DeepSpeed {row.name}" for row in present for key in row.keys if key in read.values}
    # A line for each mapped setting that was given, and one for each reason why settings have no effect.
    lines: list[str] = []
    why: dict[str, list[str]] = {}
    for row in TABLE:
        automatic, asked = row.name in read.automatic, row.name in read.settings
        if row.fate is Fate.IDLE and (asked or automatic):
            why.setdefault(f"no effect: {row.text}", []).append(row.name)
        elif row.fate is Fate.REFUSED and asked:
            why.setdefault("what is done here anyway", []).append(row.name)
        elif row.fate is Fate.MAPPED and (asked or automatic):
            found = ", ".join(f"{key}: {quote(key, read.values[key])}" for key in row.keys if key in read.values)
            default = "zeromesh's default" if automatic else "nothing, by what else is set" if row.keys else row.text
            lines.append(f"{row.name}: {_AUTO if automatic else quote(row.name, read(row.name))} -> {found or default}")
    lines += [f"{', '.join(names)}: {text}" for text, names in why.items()]
    read.notes[:] = [f"DeepSpeed: {line}" for line in (*lines, *read.notes)]
    return read


def _flatten(data: Mapping[str, Any], tree: Mapping[str, Any], prefix: str, found: dict[str, Any]) -> Iterator[str]:
    """Put values into `found` by dotted name; yields problems of unknown keys, and of values that should be sections."""
    for key, value in data.items():
        path, node = f"{prefix}{key}", tree.get(key)
        if node is None:
            hint = "" if nearest_path(path, _PATHS) else "docs/coming-from.md lists all that are known"
            yield unknown_key(path, value, _PATHS, hint)
        elif isinstance(node, SettingRow):
            found[path] = value
        elif isinstance(value, Mapping):
            yield from _flatten(value, node, f"{path}.", found)
        elif path == "zero_optimization" and value is True:
            found[f"{path}.stage"] = 1  # as in DeepSpeed's first versions
        elif value not in (None, False, "none"):
            yield f"{path}: got {quote('', value)}; allowed is a mapping of {', '.join(node)}"


def _batch(read: Translation) -> Pairs:
    if not read.has("gradient_clipping"):
        yield "run.clip_norm", _DEFAULTS["gradient_clipping"]
    if read("dataloader_drop_last") is not None:
        yield "batch.last", "drop" if read("dataloader_drop_last") else "carry"
    known = len(read.problems)
    train, micro, accumulation = map(read.count, _BATCH_NAMES)
    if len(read.problems) > known:
        return
    ranks, automatic = read.data_ranks, [name for name in _BATCH_NAMES if name in read.automatic]
    default = BatchSection()
    if train is None and micro is None:
        if not automatic:
            read.notes.append("without train_batch_size and train_micro_batch_size_per_gpu, zeromesh's defaults apply")
        automatic = list(_BATCH_NAMES)
    if micro is None:
        # Each rank's share of the global batch; if the micro batch is automatic, a divisor of it, such as zeromesh's default.
        free = "train_micro_batch_size_per_gpu" in automatic
        rest = max(1, (train or 0) // ranks // (accumulation or 1))
        alone = default.micro_size if free else 1
        micro = alone if train is None else math.gcd(rest, alone) if free and accumulation is None else rest
    if train is None:
        train = micro * (accumulation or 1) * ranks
        if accumulation is None and "train_batch_size" in automatic:
            train *= max(1, default.global_size // train)
    accumulation = accumulation or max(1, train // micro // ranks)
    if train != micro * accumulation * ranks:
        read.refuse(
            "train_batch_size",
            "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size "
            f"{train} != {micro} * {accumulation} * {ranks}; change one, set it to 'auto', or start other ranks",
        )
    yield "batch.micro_size", micro
    yield "batch.global_size", train


def _optimizer(read: Translation) -> Pairs:
    if not read.has("optimizer."):
        read.notes.append("no optimizer is given: zeromesh's default replaces it")
        return
    if (options := read.choice("optimizer.type", _OPTIMIZERS, required=True)) is None:
        return
    if options["name"] == "adamw":
        if read("optimizer.params.torch_adam"):
            options = options | {"weight_decay": _DEFAULTS["weight_decay"]}
        if str(read("optimizer.type")).lower() == "adam" and read("optimizer.params.adam_w_mode") is False:
            options = options | {"name": "adam", "weight_decay": 0.0}
    yield "optimizer.name", options["name"]
    for name, default in options.items():
        if name != "name" and f"optimizer.params.{name}" not in read.automatic:
            yield f"optimizer.{name}", read(f"optimizer.params.{name}", default)
    yield "optimizer.exempt", "none"


def _schedule(read: Translation) -> Pairs:
    prefix, steps = "scheduler.params.", None
    if not read.has("scheduler."):
        read.notes.append("no scheduler is given: the learning rate is constant")
        yield from (("schedule.name", "constant"), ("schedule.warmup_steps", 0))
        return
    if (name := read.choice("scheduler.type", _CURVES, required=True)) is None:
        return
    yield from ((f"schedule.{key}", None) for key in _SHAPE_KEYS)
    yield "schedule.name", name
    if name == "polynomial":
        lowest, highest = read.number(f"{prefix}cycle_min_lr"), read.number(f"{prefix}cycle_max_lr")
        if read(f"{prefix}cycle_momentum") is not False:
            read.refuse(f"{prefix}cycle_momentum", "momentum does not cycle; set it to false")
        first = read.count(f"{prefix}cycle_first_step_size")
        steps = first + (read.count(f"{prefix}cycle_second_step_size") or first)
        if lowest is None or not highest or lowest > highest:
            read.refuse(f"{prefix}cycle_max_lr", "OneCycle needs cycle_min_lr and cycle_max_lr, of which it is the higher")
            return
        yield from (("schedule.warmup_steps", first), ("schedule.warmup_ratio", None), ("optimizer.lr", highest))
        yield from ((f"schedule.{key}", lowest / highest) for key in ("min_ratio", "start_ratio"))
    else:
        if f"{prefix}warmup_num_steps" not in read.automatic:
            yield "schedule.warmup_steps", max(2, read.count(f"{prefix}warmup_num_steps"))
            yield "schedule.warmup_ratio", None
        yield "schedule.warmup_shape", read(f"{prefix}warmup_type", "log")
    if name == "cosine_warmup_with_min_lr":
        yield "schedule.min_ratio", read(f"{prefix}cos_min_ratio", _DEFAULTS["cos_min_ratio"])
        yield "schedule.start_ratio", read(f"{prefix}warmup_min_ratio")
    elif name != "polynomial":
        highest, lowest = read.number(f"{prefix}warmup_max_lr"), read.number(f"{prefix}warmup_min_lr")
        if highest is None and name == "linear" and f"{prefix}warmup_max_lr" not in read.automatic:
            highest = _DEFAULTS["warmup_max_lr"]
        if highest is not None:
            yield "optimizer.lr", highest
        lr = read.number("optimizer.params.lr") or read.values.get("optimizer.lr") or OptimizerSection().lr
        if lowest and not read.problems:
            yield "schedule.start_ratio", lowest / (highest or lr)
            if name == "linear":  # It falls to where it began.
                yield from (("schedule.name", "polynomial"), ("schedule.min_ratio", lowest / (highest or lr)))
    steps = read.count(f"{prefix}total_num_steps") if name in ("linear", "cosine_warmup_with_min_lr") else steps
    if steps is not None:
        yield from (("run.max_steps", steps), ("run.epochs", None))


def _precision_and_zero(read: Translation) -> Pairs:
    sections = ("bf16", "bfloat16", "fp16", "torch_autocast")
    on = [name for name in sections if read(f"{name}.enabled") is True]
    compute = None
    if "fp16" in on and len(on) > 1:
        read.refuse("fp16.enabled", "bfloat16 and fp16 modes cannot be simultaneously enabled")
    elif on:
        dtype = read("torch_autocast.dtype", "bfloat16") if on == ["torch_autocast"] else on[0]
        if (compute := _DTYPES.get(str(dtype).removeprefix("torch."))) is None:
            read.refuse("torch_autocast.dtype", f"got {dtype!r}; allowed is bfloat16 or float16")
        else:
            yield "precision.compute", compute
    elif not any(f"{name}.enabled" in read.automatic for name in sections):
        yield "precision.compute", "float32"
    if compute == "float16":
        yield "precision.loss_scale.initial_scale", 2.0 ** read.count("fp16.initial_scale_power", 0, 126)
        yield "precision.loss_scale.growth_interval", read.count("fp16.loss_scale_window")

    stage = read.count("zero_optimization.stage", 0)
    if "zero_optimization.stage" not in read.automatic:
        yield "zero.stage", stage or 0
    if read("zero_optimization.overlap_comm") is not None:  # DeepSpeed's default is null.
        yield "zero.overlap", read("zero_optimization.overlap_comm")
    for name, least in (("zero_optimization.zero_hpz_partition_size", 2), ("zero_optimization.mics_shard_size", 1)):
        size = read(name)
        if type(size) is not int or size < least:
            continue
        if read.data_ranks % size:
            read.refuse(name, f"{size} does not divide the {read.data_ranks} data ranks; give one that does")
        yield "parallel.shard", size
        yield "parallel.replicate", max(1, read.data_ranks // size)
    if read.tensor > 1:
        yield "parallel.tensor", read.tensor


def _offload(read: Translation) -> Pairs:
    directories = []
    for name, key, old in (
        ("zero_optimization.offload_optimizer", "offload.optimizer", "zero_optimization.cpu_offload"),
        ("zero_optimization.offload_param", "offload.parameters", "zero_optimization.cpu_offload_param"),
    ):
        tier = read.choice(f"{name}.device", _TIERS) or ("host" if read(old) and read(f"{name}.device") is None else "none")
        ratio, path = read(f"{name}.ratio", 1.0), read(f"{name}.nvme_path")
        tier = tier if ratio else "none"
        yield key, tier if ratio in (0, 1) or tier == "none" else {"tier": tier, "fraction": ratio}
        if tier == "file" and path is not None and path not in directories:
            directories.append(path)
    if directories:
        yield "offload.directory", directories if len(directories) > 1 else directories[0]


def _other_settings(read: Translation) -> Pairs:
    names = ("partition_activations", "cpu_checkpointing", "number_checkpoints")
    if any(read(f"activation_checkpointing.{name}") for name in names):
        yield "model.activation_checkpointing", "block"
    if read("activation_checkpointing.cpu_checkpointing"):
        yield "offload.activations", "host"
    if read("steps_per_print") is not None:
        steps = 0 if read("steps_per_print") == math.inf else read.count("steps_per_print")
        if steps is not None:
            yield "run.log_every", steps
    if read("flops_profiler.enabled"):
        step = read.count("flops_profiler.profile_step") or 1
        yield "profile.steps", [step, step]
    backends = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
    if asked := [name for name in backends if read(f"{name}.enabled") is True]:
        yield "tracking.backends", [backends[name] for name in asked]
    if "wandb" in asked:
        yield "tracking.mode", "online"
    for project in filter(None, (read(f"{name}.project") for name in sorted(asked))):
        yield "tracking.project", project
