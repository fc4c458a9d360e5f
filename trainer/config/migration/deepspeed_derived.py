"""Keys of the configuration that several keys of a DeepSpeed configuration decide together, as DeepSpeed 0.19 reads them."""

from __future__ import annotations

import math
from typing import Any

from zeromesh.trainer.config.messages import shown
from zeromesh.trainer.config.migration.translate import Join, Pairs, Reading
from zeromesh.trainer.config.sections.data import BatchSection
from zeromesh.trainer.config.sections.training import OptimizerSection

_GRADIENT_CLIPPING = 1.0
_WARMUP_STEPS = 1000
_WARMUP_DECAY_LR = 1e-3
_COSINE_END = 1e-4
_CYCLE_STEPS = 2000
_SCALE_POWER, _SCALE_WINDOW = 16, 1000
_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
_TORCH_ADAMW_DECAY = 0.01
_PARAMETERS: dict[str, dict[str, Any]] = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
    "adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0},
}
"""What DeepSpeed's optimizers take where a configuration says nothing."""
_SHAPE_KEYS = (
    *("min_ratio", "num_cycles", "power", "decay_steps"),
    *("decay_shape", "timescale", "warmup_shape", "start_ratio"),
)
_TIERS = {"none": "none", "cpu": "host", "nvme": "file"}
_DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16", "half": "float16"}
_BATCH_NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def data_ranks(read: Reading) -> int:
    """Ranks that train on samples of their own."""
    return read.place.data_ranks(_tensor(read))


def _tensor(read: Reading) -> int:
    sizes = [
        *(read("tensor_parallel.autotp_size"), read("tensor_parallel.tp.tp_size")),
        read("tensor_parallel.tensor_parallel.tp_size"),
    ]
    return max([1, *(size for size in sizes if type(size) is int)])


def _count(read: Reading, name: str, least: int = 1, most: int = 1 << 53) -> int | None:
    """A whole number, as 1e3 is too; None where it is not there or wrong."""
    value = read(name)
    if value is None:
        return None
    whole = (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value == int(value)
    )
    if not whole or not least <= value <= most:
        limit = "" if most == 1 << 53 else f" and <= {most}"
        read.refuse(name, f"got {shown('', value)}; allowed is an integer >= {least}{limit}")
        return None
    return int(value)


def _batch(read: Reading) -> Pairs:
    if read("dataloader_drop_last") is not None:
        yield "batch.last", "drop" if read("dataloader_drop_last") else read.below.get("batch.last", "carry")
    known = len(read.problems)
    train, micro, accumulation = (_count(read, name) for name in _BATCH_NAMES)
    if len(read.problems) > known:
        return
    ranks, automatic = data_ranks(read), [name for name in _BATCH_NAMES if name in read.automatic]
    if read.below:
        # What TrainingArguments say otherwise is refused: it takes all of these together.
        yield from (pair for pair in (("batch.micro_size", micro), ("batch.global_size", train)) if pair[1] is not None)
        return
    default = BatchSection()
    if train is None and micro is None:
        if not automatic:
            read.note(
                "neither train_batch_size nor train_micro_batch_size_per_gpu is given: zeromesh's defaults stand in"
            )
        automatic = list(_BATCH_NAMES)
    if micro is None:
        most = default.micro_size if "train_micro_batch_size_per_gpu" in automatic else None
        micro = _micro_size(train, accumulation, ranks, most)
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


def _micro_size(train: int | None, accumulation: int | None, ranks: int, most: int | None) -> int:
    """What the global batch leaves for a microbatch; a divisor of that which is no more than `most`."""
    if train is None:
        return most or 1
    whole = max(1, train // ranks // (accumulation or 1))
    if most is None or accumulation is not None:
        return whole
    return max(size for size in range(1, most + 1) if whole % size == 0)


def _clipping(read: Reading) -> Pairs:
    if "gradient_clipping" not in read.settings and "gradient_clipping" not in read.automatic and not read.below:
        yield "run.clip_norm", _GRADIENT_CLIPPING


def _optimizer(read: Reading) -> Pairs:
    if not read.names("optimizer."):
        if not read.below:
            read.note("no optimizer is given: zeromesh's default replaces it")
        return
    kind = str(read("optimizer.type", "")).lower()
    if kind not in _PARAMETERS:
        value = read("optimizer.type") or "no type"
        read.refuse("optimizer.type", f"{value} is not available; allowed are AdamW, Adam, SGD and Adagrad")
        return
    if kind == "adam":
        kind = "adam" if read("optimizer.params.adam_w_mode") is False else "adamw"
    yield "optimizer.name", kind
    decay = _TORCH_ADAMW_DECAY if kind == "adamw" and read("optimizer.params.torch_adam") else 0.0
    for name, value in (_PARAMETERS[kind] | {"weight_decay": decay}).items():
        full = f"optimizer.params.{name}"
        if full in read.automatic:
            continue
        yield f"optimizer.{name}", read(full, value)
    if not read.below:
        yield "optimizer.exempt", "none"


def _schedule(read: Reading) -> Pairs:
    if not read.names("scheduler."):
        if not read.below:
            read.note("no scheduler is given: the learning rate is constant")
            yield "schedule.name", "constant"
            yield "schedule.warmup_steps", 0
        return
    kind = str(read("scheduler.type", ""))
    curves = {"WarmupLR": _constant, "WarmupDecayLR": _linear, "WarmupCosineLR": _cosine, "OneCycle": _one_cycle}
    if kind not in curves:
        read.refuse("scheduler.type", f"{kind or 'no type'} is not available; allowed are {', '.join(curves)}")
        return
    yield from ((f"schedule.{key}", None) for key in _SHAPE_KEYS)
    yield from curves[kind](read)


def _constant(read: Reading) -> Pairs:
    yield "schedule.name", "constant"
    yield from _warmup(read)
    yield from _highest(read, None)


def _linear(read: Reading) -> Pairs:
    yield "schedule.name", "linear"
    yield from _warmup(read)
    yield from _highest(read, _WARMUP_DECAY_LR)
    yield from _length(read, _count(read, "scheduler.params.total_num_steps"))


def _cosine(read: Reading) -> Pairs:
    yield "schedule.name", "cosine_warmup_with_min_lr"
    yield from _warmup(read)
    yield "schedule.min_ratio", read("scheduler.params.cos_min_ratio", _COSINE_END)
    yield "schedule.start_ratio", read("scheduler.params.warmup_min_ratio")
    yield from _length(read, _count(read, "scheduler.params.total_num_steps"))


def _one_cycle(read: Reading) -> Pairs:
    prefix = "scheduler.params."
    lowest, highest = read.number(f"{prefix}cycle_min_lr"), read.number(f"{prefix}cycle_max_lr")
    if read(f"{prefix}cycle_momentum") is not False:
        read.refuse(f"{prefix}cycle_momentum", "momentum does not cycle; set it to false")
    first = _count(read, f"{prefix}cycle_first_step_size") or _CYCLE_STEPS
    second = _count(read, f"{prefix}cycle_second_step_size") or first
    if lowest is None or not highest or lowest > highest:
        read.refuse(f"{prefix}cycle_max_lr", "OneCycle needs cycle_min_lr and cycle_max_lr, of which it is the higher")
        return
    yield "schedule.name", "polynomial"
    yield "schedule.warmup_steps", first
    yield "schedule.warmup_ratio", None
    yield "schedule.min_ratio", lowest / highest
    yield "schedule.start_ratio", lowest / highest
    yield "optimizer.lr", highest
    yield from _length(read, first + second)


def _warmup(read: Reading) -> Pairs:
    """Steps and shape, whose defaults are DeepSpeed's."""
    name = "scheduler.params.warmup_num_steps"
    if name not in read.automatic:
        yield "schedule.warmup_steps", max(2, _count(read, name) or _WARMUP_STEPS)
        yield "schedule.warmup_ratio", None
    yield "schedule.warmup_shape", read("scheduler.params.warmup_type", "log")


def _highest(read: Reading, default: float | None) -> Pairs:
    """The rate after the warm-up, and the one that it starts at as a part of that."""
    name = "scheduler.params.warmup_max_lr"
    value = read.number(name)
    if value is None and name not in read.automatic:
        value = default
    if value is not None:
        yield "optimizer.lr", value
    lowest = read.number("scheduler.params.warmup_min_lr")
    highest = value or read.number("optimizer.params.lr") or read.below.get("optimizer.lr", OptimizerSection().lr)
    if lowest and highest:
        yield "schedule.start_ratio", lowest / highest


def _length(read: Reading, steps: int | None) -> Pairs:
    if steps is None:
        return
    if read.below and read.below.get("run.max_steps") != steps:
        asked = read.below.get("run.max_steps", "not set")
        read.refuse(
            "scheduler.params", f"its steps are {steps}, and max_steps of TrainingArguments is {asked}; make them agree"
        )
        return
    yield "run.max_steps", steps
    yield "run.epochs", None


def _precision(read: Reading) -> Pairs:
    sections = ("bf16", "bfloat16", "fp16", "torch_autocast")
    on = [name for name in sections if read(f"{name}.enabled") is True]
    automatic = [name for name in sections if f"{name}.enabled" in read.automatic]
    compute = read.below.get("precision.compute")
    if "fp16" in on and len(on) > 1:
        read.refuse("fp16.enabled", "bfloat16 and fp16 modes cannot be simultaneously enabled")
    elif on:
        dtype = read("torch_autocast.dtype", "bfloat16") if on == ["torch_autocast"] else on[0]
        compute = _DTYPES.get(str(dtype).removeprefix("torch."))
        if compute is None:
            read.refuse("torch_autocast.dtype", f"got {dtype!r}; allowed are bfloat16 and float16")
            return
        yield "precision.compute", compute
    elif not automatic and not read.below:
        compute = "float32"
        yield "precision.compute", compute
    if compute == "float16":
        yield (
            "precision.loss_scale.initial_scale",
            2.0 ** (_count(read, "fp16.initial_scale_power", 0, 126) or _SCALE_POWER),
        )
        yield "precision.loss_scale.growth_interval", _count(read, "fp16.loss_scale_window") or _SCALE_WINDOW


def _zero(read: Reading) -> Pairs:
    stage = _count(read, "zero_optimization.stage", 0)
    if "zero_optimization.stage" not in read.automatic:
        yield "zero.stage", stage or 0
    if isinstance(read("zero_optimization.overlap_comm"), bool):
        yield "zero.overlap", read("zero_optimization.overlap_comm")
    ranks = data_ranks(read)
    for name, least in (("zero_hpz_partition_size", 2), ("mics_shard_size", 1)):
        size = read(f"zero_optimization.{name}")
        if type(size) is not int or size < least:
            continue
        if ranks % size:
            read.refuse(
                f"zero_optimization.{name}", f"{size} does not divide the {ranks} data ranks; give one that does"
            )
        yield "parallel.shard", size
        yield "parallel.replicate", max(1, ranks // size)
    if _tensor(read) > 1:
        yield "parallel.tensor", _tensor(read)


def _offload(read: Reading) -> Pairs:
    directories = []
    for name, key, old in (
        ("offload_optimizer", "offload.optimizer", "cpu_offload"),
        ("offload_param", "offload.parameters", "cpu_offload_param"),
    ):
        device = read(f"zero_optimization.{name}.device")
        device = ("cpu" if read(f"zero_optimization.{old}") else "none") if device is None else device
        if not isinstance(device, str) or device not in _TIERS:
            read.refuse(f"zero_optimization.{name}.device", f"got {shown('', device)}; allowed are {', '.join(_TIERS)}")
            continue
        ratio = read(f"zero_optimization.{name}.ratio", 1.0)
        tier = _TIERS[device] if ratio else "none"
        yield key, tier if ratio in (0, 1) or tier == "none" else {"tier": tier, "fraction": ratio}
        path = read(f"zero_optimization.{name}.nvme_path")
        if tier == "file" and path is not None and path not in directories:
            directories.append(path)
    if directories:
        yield "offload.directory", directories if len(directories) > 1 else directories[0]


def _activations(read: Reading) -> Pairs:
    names = [
        f"activation_checkpointing.{name}"
        for name in ("partition_activations", "cpu_checkpointing", "number_checkpoints")
    ]
    on = any(read(name) for name in names)
    if read.below:
        on = read.below.get("model.activation_checkpointing") != "none"
    elif on:
        yield "model.activation_checkpointing", "block"
    if on and read("activation_checkpointing.cpu_checkpointing"):
        yield "offload.activations", "host"


def _figures(read: Reading) -> Pairs:
    if not read.below and read("steps_per_print") is not None:
        steps = 0 if read("steps_per_print") == math.inf else _count(read, "steps_per_print")
        if steps is not None:
            yield "run.log_every", steps
    if read("flops_profiler.enabled"):
        step = _count(read, "flops_profiler.profile_step") or 1
        yield "profile.steps", [step, step]
    trackers = (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml"))
    asked = [backend for name, backend in trackers if read(f"{name}.enabled") is True]
    if not asked:
        return
    before = list(read.below.get("tracking.backends", ()))
    yield "tracking.backends", [*before, *(name for name in asked if name not in before)]
    if "wandb" in asked and not before:
        yield "tracking.mode", "online"
    for name in ("comet", "wandb"):
        if read(f"{name}.enabled") is True and read(f"{name}.project"):
            yield "tracking.project", read(f"{name}.project")


JOINS: tuple[Join, ...] = (
    *(_batch, _clipping, _optimizer, _schedule, _precision),
    *(_zero, _offload, _activations, _figures),
)
