"""Keys of the configuration that several fields of `TrainingArguments` decide together, as transformers' Trainer reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeromesh.environment import setting
from zeromesh.trainer.config.migration.translate import Join, Pairs, Reading
from zeromesh.trainer.config.sections.outputs import RUN_NAME

_ADAMW = frozenset({"adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused"})
_TRACKERS = frozenset({"wandb", "tensorboard", "trackio", "comet_ml", "mlflow", "clearml", "dvclive", "swanlab"})
_OTHERS = {"sgd": ("momentum", 0.0), "adagrad": ("eps", 1e-10)}
"""Other optimizers, with the option that each has and its default in torch."""
_POLYNOMIAL_END = 1e-7
"""The lowest rate of transformers' polynomial curve where `lr_end` is not given."""
_MIN_LR = {"num_cycles": "num_cycles", "min_lr": "", "min_lr_rate": "min_ratio"}
_CURVES: dict[str, dict[str, str]] = {
    "constant": {},
    "constant_with_warmup": {},
    "linear": {},
    "cosine": {"num_cycles": "num_cycles"},
    "cosine_with_restarts": {"num_cycles": "num_cycles"},
    "cosine_with_min_lr": _MIN_LR,
    "cosine_warmup_with_min_lr": _MIN_LR | {"warmup_lr_rate": "start_ratio"},
    "polynomial": {"power": "power", "lr_end": ""},
    "inverse_sqrt": {"timescale": "timescale"},
    "warmup_stable_decay": {
        "num_decay_steps": "decay_steps",
        "num_stable_steps": "",
        "min_lr_ratio": "min_ratio",
        "decay_type": "decay_shape",
        "warmup_type": "warmup_shape",
        "num_cycles": "num_cycles",
    },
}
"""Options of transformers' curves, and the keys of `schedule` that they are; "" for those that need a closer look."""


def _directory(read: Reading) -> Pairs:
    path = Path(str(read("output_dir") or "trainer_output")).expanduser()
    if path.name in ("", ".."):
        path = path.absolute().resolve()
    if not RUN_NAME.fullmatch(path.name):
        read.refuse(
            "output_dir",
            f"the last part of {str(path)!r} names the run; allowed are letters, digits, '.', '_' and '-', beginning with a letter "
            "or digit",
        )
        return
    yield "run.output_dir", str(path.parent)
    yield "run.name", path.name


def _tensor(read: Reading) -> int:
    return getattr(read("parallelism_config"), "tp_size", None) or 1


def _global_size(read: Reading) -> int | None:
    """Samples of a step; None where what they follow from is wrong by itself."""
    micro, accumulation = read("per_device_train_batch_size"), read("gradient_accumulation_steps")
    if type(accumulation) is not int or accumulation < 1:
        read.refuse("gradient_accumulation_steps", f"got {accumulation!r}; allowed is an integer >= 1")
        return None
    return micro * accumulation * read.place.data_ranks(_tensor(read)) if type(micro) is int and micro > 0 else None


def _batch(read: Reading) -> Pairs:
    yield "batch.micro_size", read("per_device_train_batch_size")
    size = _global_size(read)
    if size is not None:
        yield "batch.global_size", size
    yield "batch.last", "drop" if read("dataloader_drop_last") else "partial"
    exact = read("average_tokens_across_devices") or read.place.data_ranks(_tensor(read)) == 1
    if not exact and read("gradient_accumulation_steps") != 1:
        read.refuse(
            "average_tokens_across_devices",
            "false makes the loss depend on which rank has which sample; set it to true, or gradient_accumulation_steps to 1",
        )
    yield "batch.average", "tokens" if exact else "samples"


def _steps_per_epoch(read: Reading) -> int | None:
    size, samples = _global_size(read), read.place.samples
    if not size or not samples:
        return None
    return max(1, samples // size if read("dataloader_drop_last") else math.ceil(samples / size))


def _total_steps(read: Reading) -> int | None:
    """Steps of the run, where they can be known before it."""
    limit, epochs, steps = read.number("max_steps"), read.number("num_train_epochs"), _steps_per_epoch(read)
    if limit is not None and limit > 0:
        return int(limit)
    return None if steps is None or epochs is None else max(1, math.ceil(epochs * steps))


def _length(read: Reading) -> Pairs:
    limited = (read.number("max_steps") or 0) > 0
    if limited:
        yield "run.max_steps", read("max_steps")
    yield "run.epochs", None if limited else read("num_train_epochs")


def _warmup(read: Reading) -> Pairs:
    warmup, total = read.number("warmup_steps") or 0, read.number("max_steps") or 0
    if read("lr_scheduler_type") == "constant":
        warmup = 0
    if warmup >= 1 or not warmup or total > 0:
        yield "schedule.warmup_steps", int(warmup) if warmup >= 1 else math.ceil(total * warmup)
        return
    yield "schedule.warmup_steps", 0
    yield "schedule.warmup_ratio", warmup


def _curve(read: Reading) -> Pairs:
    name, options = read("lr_scheduler_type"), read("lr_scheduler_kwargs") or {}
    known = _CURVES.get(name)
    if known is None:
        read.refuse(
            "lr_scheduler_type", f"{name} needs the metric of an evaluation; choose one of {', '.join(_CURVES)}"
        )
        return
    unknown = [option for option in options if option not in known]
    if unknown:
        allowed = ", ".join(known) or "none"
        read.refuse("lr_scheduler_kwargs", f"{name} has no option {', '.join(unknown)}; allowed are {allowed}")
    yield "schedule.name", name
    for option, key in known.items():
        if key and options.get(option) is not None:
            yield f"schedule.{key}", options[option]
    lowest = options.get("lr_end", _POLYNOMIAL_END) if name == "polynomial" else options.get("min_lr")
    highest = read.number("learning_rate")
    if isinstance(lowest, int | float) and highest:
        yield "schedule.min_ratio", lowest / highest
    if name == "warmup_stable_decay":
        _check_stable_steps(read, options)


def _check_stable_steps(read: Reading, options: Mapping[str, Any]) -> None:
    stable, decay, total = options.get("num_stable_steps"), options.get("num_decay_steps"), _total_steps(read)
    if decay is None:
        read.refuse(
            "lr_scheduler_kwargs", "num_decay_steps is missing; warmup_stable_decay needs it in transformers too"
        )
    elif stable is not None and (
        total is None or total != dict(_warmup(read))["schedule.warmup_steps"] + stable + decay
    ):
        read.refuse(
            "lr_scheduler_kwargs",
            f"num_stable_steps {stable}: the decay ends with the run; leave it out, or set max_steps to the sum of warm-up, stable "
            "and decay steps",
        )


def _optimizer(read: Reading) -> Pairs:
    name, options = read("optim"), _options(read)
    known = tuple(options)  # transformers does not read those of AdamW either
    if name in _ADAMW:
        yield "optimizer.name", "adamw"
        yield "optimizer.eps", read("adam_epsilon")
    elif name in _OTHERS:
        option, default = _OTHERS[name]
        yield "optimizer.name", name
        yield f"optimizer.{option}", options.get(option, default)
        known = (option, "weight_decay")
    else:
        read.refuse("optim", f"{name} is not available; allowed are {', '.join(sorted(_ADAMW))}, sgd and adagrad")
    left = [option for option in options if option not in known]
    if left:
        read.refuse("optim_args", f"{', '.join(left)} of {name} cannot be set; allowed is {known[0]}")
    yield "optimizer.betas", [read("adam_beta1"), read("adam_beta2")]
    yield "optimizer.weight_decay", read("weight_decay")
    yield "optimizer.exempt", "biases_and_norms" if read("weight_decay") else "none"


def _options(read: Reading) -> dict[str, Any]:
    """`momentum=0.9,nesterov=true` by name; numbers as such. Text that is none is left for the optimizer's key to refuse."""
    text = (read("optim_args") or "").replace(" ", "")
    parts = [part.partition("=") for part in text.split(",") if part]
    return {name: value for name, _, value in parts}


def _precision(read: Reading) -> Pairs:
    # As the arguments have read it from ACCELERATE_MIXED_PRECISION, which the launcher of accelerate sets.
    launched = {"bf16": "bfloat16", "fp16": "float16"}.get(read("mixed_precision", ""), "float32")
    compute = "float16" if read("fp16") else "bfloat16" if read("bf16") else launched
    yield "precision.compute", compute
    for name, dtype in (("bf16_full_eval", "bfloat16"), ("fp16_full_eval", "float16")):
        if read(name) and compute != dtype:
            read.refuse(
                name, f"evaluation computes in the dtype of training, {compute}; leave it out, or set {name[:4]}"
            )


def _memory(read: Reading) -> Pairs:
    fsdp = _fsdp_options(read)
    on = read("activation_checkpointing") or read("gradient_checkpointing") or fsdp.get("activation_checkpointing")
    yield "model.activation_checkpointing", "block" if _true(on) else "none"
    name = (
        "activation_checkpointing_kwargs"
        if read("activation_checkpointing_kwargs")
        else "gradient_checkpointing_kwargs"
    )
    options = dict(read(name) or {})
    every = options.pop("every_n_layers", 1)
    if every != 1:
        read.refuse(name, f"every_n_layers {every}: all blocks are recomputed, or none; leave it out")
    if options.pop("offload", False) and on:
        yield "offload.activations", "host"
    left = [option for option in options if option not in ("use_reentrant", "preserve_rng_state")]
    if left:
        read.refuse(name, f"{', '.join(left)} cannot be set; leave it out")
    backend, mode = read("torch_compile_backend"), read("torch_compile_mode")
    yield "model.compile", bool(read("torch_compile") or backend or mode)
    if backend not in (None, "inductor"):
        read.refuse("torch_compile_backend", f"got {backend!r}; allowed is inductor")
    if mode not in (None, "default"):
        read.refuse("torch_compile_mode", f"got {mode!r}; allowed is default")


_AT_THE_END = 10**9
"""More steps than runs have: the only checkpoint is that of the last step, or of the one after which SIGTERM has ended the run."""


def _every(read: Reading, kind: str, strategy: str) -> int | str | None:
    """A number of steps, 0 or `epoch`; None for a part of a run whose steps are not known."""
    if strategy != "steps":
        return "epoch" if strategy == "epoch" else 0
    steps = read.number(f"{kind}_steps")
    if steps is None or steps >= 1:
        return None if steps is None else int(steps)
    total = _total_steps(read)
    if total is None:
        read.refuse(
            f"{kind}_steps",
            f"{steps} is a part of a run whose steps are not known yet; give a number of steps, or set max_steps",
        )
        return None
    return max(1, math.ceil(total * steps))


def _intervals(read: Reading) -> Pairs:
    log = _every(read, "logging", read("logging_strategy"))
    if log is not None:
        yield "run.log_every", log
    evaluate = _every(read, "eval", read("eval_strategy"))
    if evaluate is not None:
        yield "run.eval_every", evaluate
    yield "run.eval_at_end", read("eval_strategy") != "no"
    if read("save_strategy") == "best":
        if evaluate:
            yield "checkpoint.every_steps", evaluate
        else:
            read.refuse("save_strategy", "best needs evaluations; set eval_strategy")
        yield "checkpoint.keep_best", 1
        yield "checkpoint.keep_last", 1
        return
    save = _every(read, "save", read("save_strategy"))
    if save == 0 and read("enable_jit_checkpoint"):
        save = _AT_THE_END
    if save is not None:
        yield "checkpoint.every_steps", save


def _tracking(read: Reading) -> Pairs:
    asked = read("report_to") or []
    names = [name for name in ([asked] if isinstance(asked, str) else asked) if name not in (None, "none")]
    left = [name for name in names if name not in _TRACKERS]
    if left:
        read.refuse(
            "report_to", f"{', '.join(left)} is not available; allowed are {', '.join(sorted(_TRACKERS))} and none"
        )
    mode = setting("WANDB_MODE") or "online"
    if mode == "disabled":
        names = [name for name in names if name != "wandb"]
    yield "tracking.backends", [name for name in names if name in _TRACKERS]
    yield "tracking.mode", "offline" if mode in ("offline", "dryrun") else "online"
    yield "tracking.project", setting("WANDB_PROJECT") or read("project")


def _order(read: Reading) -> Pairs:
    strategy = read("train_sampling_strategy")
    if strategy not in ("random", "sequential"):
        read.refuse("train_sampling_strategy", f"got {strategy!r}; allowed are random and sequential")
    yield "data.shuffle", strategy != "sequential"


def _ranks(read: Reading) -> Pairs:
    sizes = read("parallelism_config")
    for name, key in (("tp_size", "tensor"), ("dp_shard_size", "shard"), ("dp_replicate_size", "replicate")):
        size = getattr(sizes, name, None)
        if size is not None and (size > 1 or key == "shard"):
            yield f"parallel.{key}", size
    for name in ("cp_size", "sp_size"):
        if (getattr(sizes, name, None) or 1) > 1:
            read.refuse(
                "parallelism_config", f"{name}: sequences are not shared out so; set it to 1, and see parallel.sequence"
            )
    backend = read("ddp_backend")
    if backend in ("gloo", "nccl"):
        yield "parallel.transport", backend
    elif backend is not None:
        read.refuse("ddp_backend", f"got {backend!r}; allowed are gloo and nccl")
    if read("ddp_timeout") != read.defaults.get("ddp_timeout"):
        yield "parallel.timeout_seconds", read("ddp_timeout")
    accelerate = read("accelerator_config")
    for name in ("split_batches", "gradient_accumulation_kwargs"):
        value = accelerate.get(name) if isinstance(accelerate, Mapping) else getattr(accelerate, name, None)
        if value:
            read.refuse(
                "accelerator_config", f"{name}: set per_device_train_batch_size and gradient_accumulation_steps instead"
            )


def _true(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "1", "yes")


def _fsdp_options(read: Reading) -> dict[str, Any]:
    """The options of fsdp_config without the prefix that keys may have; empty where fsdp is off."""
    options = read("fsdp_config") if read("fsdp") else None
    return {key.removeprefix("fsdp_"): value for key, value in options.items()} if isinstance(options, Mapping) else {}


def _fsdp(read: Reading) -> Pairs:
    if not read("fsdp"):
        return
    options = _fsdp_options(read)
    reshard = str(options.get("reshard_after_forward", True)).lower()
    stages = {"true": 3, "full_shard": 3, "false": 2, "shard_grad_op": 2, "no_shard": 0}
    if reshard not in stages:
        read.refuse(
            "fsdp_config",
            f"reshard_after_forward {reshard}: set parallel.shard to the ranks that share one copy instead",
        )
    yield "zero.stage", stages.get(reshard, 3)
    if _true(options.get("cpu_offload")):
        yield "offload.optimizer", "host"
        if stages.get(reshard, 3) == 3:
            yield "offload.parameters", "host"
    if _true(options.get("xla")):
        read.refuse("fsdp_config", "xla: there is no XLA here; leave it out")


def _pushes(read: Reading) -> Pairs:
    strategy = read("hub_strategy")
    if read("push_to_hub") and strategy == "every_save":
        read.note("hub_strategy: every_save: the model is uploaded when the training has ended, not at each save")
    elif read("push_to_hub") and strategy != "end":
        read.refuse(
            "hub_strategy",
            f"{strategy}: checkpoints are not uploaded; set it to end, and for a checkpoint take `zeromesh checkpoint export` and "
            "`hf upload`",
        )
    yield "hub.push", read("push_to_hub")


JOINS: tuple[Join, ...] = (
    *(_directory, _batch, _length, _curve, _warmup, _optimizer, _precision, _memory),
    *(_intervals, _tracking, _order, _ranks, _fsdp, _pushes),
)
