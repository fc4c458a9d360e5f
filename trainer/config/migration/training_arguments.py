"""transformers' `TrainingArguments` in place of a configuration: each field is mapped, has no effect here, or is refused.

What transformers' Trainer does with the arguments is what the configuration says: linear decay of the rate, no weight decay of
biases and normalisations, epochs whose last batch is smaller, float32 unless bf16 or fp16 is set.
"""

import dataclasses
import math
from collections.abc import Mapping
from inspect import get_annotations
from pathlib import Path
from typing import Any

import torch

from zeromesh.environment import setting
from zeromesh.trainer.config.messages import either
from zeromesh.trainer.config.migration.training_arguments_table import TABLE
from zeromesh.trainer.config.migration.translate import LaunchFacts, Pairs, Reading, Translation, translate
from zeromesh.trainer.config.sections.outputs import RUN_NAME

WORD = "TrainingArguments"
_KNOWN = frozenset(row.name for row in TABLE)
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_torch_npu_fused", "adamw_torch_xla")
_OPTIMIZERS = dict.fromkeys(_ADAMW, "adamw") | {"sgd": "sgd", "adagrad": "adagrad"}
_OTHERS = {"sgd": ("momentum", 0.0), "adagrad": ("eps", 1e-10)}
"""Other optimizers, with the option that each has and its default in torch."""
_TRACKERS = ("clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
_STAGES = {"true": 3, "full_shard": 3, "false": 2, "shard_grad_op": 2, "no_shard": 0}
_POLYNOMIAL_END = 1e-7
"""The lowest rate of transformers' polynomial curve where `lr_end` is not given."""
_AT_THE_END = 10**9
"""More steps than runs have: the only checkpoint is that of the last step, or of the one after which SIGTERM has ended the run."""
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


def read_training_arguments(arguments: Any, place: LaunchFacts) -> Translation:
    """The keys that a `TrainingArguments` asks for, in a world as `place` says.

    A field of a subclass that is not transformers' own is the user's business; one that transformers has and this version does not
    know is refused when it is set.
    """
    # Fields that older versions of transformers do not have.
    defaults: dict[str, Any] = {"activation_checkpointing": None, "data_seed": None, "warmup_steps": 0}
    fields = [field for field in dataclasses.fields(arguments) if field.init]
    for field in fields:
        factory: Any = field.default_factory
        defaults[field.name] = field.default if factory is dataclasses.MISSING else factory()
    settings = {field.name: _as_set(arguments, field.name) for field in fields}
    # Not a field: what accelerate's launcher says, where neither bf16 nor fp16 does.
    settings["mixed_precision"] = getattr(arguments, "mixed_precision", None)
    tensor = getattr(settings.get("parallelism_config"), "tp_size", None) or 1
    reading = Reading(settings, place, tensor=tensor, defaults=defaults)
    bases = [base for base in type(arguments).__mro__ if base.__module__.startswith("transformers.")]
    own = []
    for name in (field.name for field in fields if field.name not in _KNOWN):
        if not any(name in get_annotations(base) for base in bases):
            own.append(name)
        elif settings[name] != defaults[name]:
            reading.refuse(name, "this version of zeromesh does not know it; leave it out")
    if own:
        kind = type(arguments).__name__
        reading.notes.append(f"{', '.join(own)}: no effect: fields of {kind} that transformers does not have")
    joins = (
        *(_directory, _batch, _length, _curve, _optimizer, _precision, _memory),
        *(_intervals, _tracking, _ranks, _fsdp),
    )
    return translate(TABLE, joins, reading, source=WORD)


def _as_set(arguments: Any, name: str) -> Any:
    """The value of a field; its default where it is but what transformers makes of that."""
    value = getattr(arguments, name)
    value = getattr(value, "value", value)
    match name:
        case "report_to" if value == []:
            return "none"
        case "debug" if value == []:
            return ""
        case "disable_tqdm" | "activation_checkpointing" | "gradient_checkpointing" if value is False:
            return None
        case "do_eval" if getattr(arguments.eval_strategy, "value", arguments.eval_strategy) != "no":
            return False
        case "dataloader_pin_memory" if arguments.use_cpu:
            return True
        case "use_cpu" if not torch.cuda.is_available():
            return False
        case "accelerator_config" if value is not None and value == type(value)():
            return None
    return value


def _directory(read: Reading) -> Pairs:
    path = Path(str(read("output_dir") or "trainer_output")).expanduser()
    path = path.absolute().resolve() if path.name in ("", "..") else path
    if not RUN_NAME.fullmatch(path.name):
        read.refuse(
            "output_dir",
            f"the last part of {str(path)!r} names the run; allowed are letters, digits, '.', '_' and '-', beginning with a letter "
            "or digit",
        )
        return
    yield from (("run.output_dir", str(path.parent)), ("run.name", path.name))


def _global_size(read: Reading) -> int | None:
    """Samples of a step; None where what they follow from is wrong by itself."""
    micro, accumulation = read.count("per_device_train_batch_size"), read.count("gradient_accumulation_steps")
    return micro * accumulation * read.data_ranks if micro and accumulation else None


def _batch(read: Reading) -> Pairs:
    size = _global_size(read)
    if size is not None:
        yield from (("batch.micro_size", read("per_device_train_batch_size")), ("batch.global_size", size))
    exact = read("average_tokens_across_devices") or read.data_ranks == 1
    if not exact and read("gradient_accumulation_steps") != 1:
        read.refuse(
            "average_tokens_across_devices",
            "false makes the loss depend on which rank has which sample; set it to true, or gradient_accumulation_steps to 1",
        )
    yield "batch.average", "tokens" if exact else "samples"


def _total_steps(read: Reading) -> int | None:
    """Steps of the run, where they can be known before it."""
    limit, epochs, size = read.number("max_steps"), read.number("num_train_epochs"), _global_size(read)
    if limit is not None and limit > 0:
        return int(limit)
    if not size or not read.samples or epochs is None:
        return None
    per_epoch = read.samples // size if read("dataloader_drop_last") else math.ceil(read.samples / size)
    return max(1, math.ceil(epochs * max(1, per_epoch)))


def _length(read: Reading) -> Pairs:
    steps, warmup = read.number("max_steps") or 0, read.number("warmup_steps") or 0
    if steps > 0:
        yield "run.max_steps", read("max_steps")
    yield "run.epochs", None if steps > 0 else read("num_train_epochs")
    if 0 < warmup < 1 and steps <= 0 and read("lr_scheduler_type") != "constant":
        yield "schedule.warmup_ratio", warmup
    yield "schedule.warmup_steps", _warmup(read)


def _warmup(read: Reading) -> int:
    """Steps of the warm-up; 0 where it is a part of unknown steps."""
    warmup = 0 if read("lr_scheduler_type") == "constant" else read.number("warmup_steps") or 0
    return int(warmup) if warmup >= 1 else math.ceil(max(0, read.number("max_steps") or 0) * warmup)


def _curve(read: Reading) -> Pairs:
    name, options = read("lr_scheduler_type"), read("lr_scheduler_kwargs") or {}
    known = _CURVES.get(name)
    if known is None:
        read.refuse("lr_scheduler_type", f"{name} needs the metric of an evaluation; allowed is {either([*_CURVES])}")
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
    stable, decay = options.get("num_stable_steps"), options.get("num_decay_steps")
    if name == "warmup_stable_decay" and decay is None:
        read.refuse(
            "lr_scheduler_kwargs", "num_decay_steps is missing; warmup_stable_decay needs it in transformers too"
        )
    elif name == "warmup_stable_decay" and stable is not None and _total_steps(read) != _warmup(read) + stable + decay:
        read.refuse(
            "lr_scheduler_kwargs",
            f"num_stable_steps {stable}: the decay ends with the run; leave it out, or set max_steps to the sum of warm-up, stable "
            "and decay steps",
        )


def _optimizer(read: Reading) -> Pairs:
    kind = read.choice("optim", _OPTIMIZERS)
    option, default = _OTHERS.get(kind, ("eps", read("adam_epsilon")))
    options = {}
    if kind in _OTHERS:  # transformers does not read those of AdamW either
        parts = [part.partition("=") for part in (read("optim_args") or "").replace(" ", "").split(",") if part]
        options = {name: value for name, _, value in parts}
    if kind is not None:
        yield from (("optimizer.name", kind), (f"optimizer.{option}", options.get(option, default)))
    left = [name for name in options if name not in (option, "weight_decay")]
    if left:
        read.refuse("optim_args", f"{', '.join(left)} of {kind} cannot be set; allowed is {option}")
    yield "optimizer.betas", [read("adam_beta1"), read("adam_beta2")]
    yield "optimizer.weight_decay", read("weight_decay")
    yield "optimizer.exempt", "biases_and_norms" if read("weight_decay") else "none"


def _precision(read: Reading) -> Pairs:
    # As the arguments have read it from ACCELERATE_MIXED_PRECISION, which the launcher of accelerate sets.
    launched = {"bf16": "bfloat16", "fp16": "float16"}.get(read("mixed_precision", ""), "float32")
    compute = "float16" if read("fp16") else "bfloat16" if read("bf16") else launched
    yield "precision.compute", compute
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if read(f"{name}_full_eval") and compute != dtype:
            why = f"evaluation computes in the dtype of training, {compute}; leave it out, or set {name}"
            read.refuse(f"{name}_full_eval", why)


def _memory(read: Reading) -> Pairs:
    on = read("activation_checkpointing") or read("gradient_checkpointing")
    on = _true(on or _fsdp_options(read).get("activation_checkpointing"))
    yield "model.activation_checkpointing", "block" if on else "none"
    names = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    name = names[0] if read(names[0]) else names[1]
    options = dict(read(name) or {})
    every = options.pop("every_n_layers", 1)
    if every != 1:
        read.refuse(name, f"every_n_layers {every}: all blocks are recomputed, or none; leave it out")
    if options.pop("offload", False) and on:
        yield "offload.activations", "host"
    left = [option for option in options if option not in ("use_reentrant", "preserve_rng_state")]
    if left:
        read.refuse(name, f"{', '.join(left)} cannot be set; leave it out")
    backend = read.choice("torch_compile_backend", {"inductor": True})
    mode = read.choice("torch_compile_mode", {"default": True})
    yield "model.compile", bool(read("torch_compile") or backend or mode)


def _every(read: Reading, kind: str) -> int | str | None:
    """A number of steps, 0 or `epoch`; None for a part of a run whose steps are not known."""
    strategy = read(f"{kind}_strategy")
    if strategy != "steps":
        return "epoch" if strategy == "epoch" else 0
    steps = read.number(f"{kind}_steps")
    if steps is None or steps >= 1:
        return None if steps is None else int(steps)
    total = _total_steps(read)
    if total is not None:
        return max(1, math.ceil(total * steps))
    read.refuse(
        f"{kind}_steps",
        f"{steps} is a part of a run whose steps are not known yet; give a number of steps, or set max_steps",
    )
    return None


def _intervals(read: Reading) -> Pairs:
    every = {kind: _every(read, kind) for kind in ("logging", "eval", "save")}
    if read("save_strategy") == "best":
        if not every["eval"]:
            read.refuse("save_strategy", "best needs evaluations; set eval_strategy")
        every["save"] = every["eval"] or None
        yield from (("checkpoint.keep_best", 1), ("checkpoint.keep_last", 1))
    elif every["save"] == 0 and read("enable_jit_checkpoint"):
        every["save"] = _AT_THE_END
    keys = {"logging": "run.log_every", "eval": "run.eval_every", "save": "checkpoint.every_steps"}
    yield from ((keys[kind], steps) for kind, steps in every.items() if steps is not None)
    yield "run.eval_at_end", read("eval_strategy") != "no"


def _tracking(read: Reading) -> Pairs:
    """Translate the trackers, and what concerns the Hub."""
    asked = read("report_to") or []
    names = [name for name in ([asked] if isinstance(asked, str) else asked) if name not in (None, "none")]
    left = [name for name in names if name not in _TRACKERS]
    if left:
        read.refuse("report_to", f"{', '.join(left)} is not available; allowed is {either([*_TRACKERS, 'none'])}")
    mode = setting("WANDB_MODE") or "online"
    off = ("wandb",) if mode == "disabled" else ()
    yield "tracking.backends", [name for name in names if name in _TRACKERS and name not in off]
    yield "tracking.mode", "offline" if mode in ("offline", "dryrun") else "online"
    yield "tracking.project", setting("WANDB_PROJECT") or read("project")
    strategy = read("hub_strategy")
    if read("push_to_hub") and strategy == "every_save":
        read.notes.append(
            "hub_strategy: every_save: the model is uploaded when the training has ended, not at each save"
        )
    elif read("push_to_hub") and strategy != "end":
        read.refuse(
            "hub_strategy",
            f"{strategy}: checkpoints are not uploaded; set it to end, and for a checkpoint take `zeromesh checkpoint export` and "
            "`hf upload`",
        )


def _ranks(read: Reading) -> Pairs:
    shuffle = read.choice("train_sampling_strategy", {"random": True, "sequential": False})
    if shuffle is not None:
        yield "data.shuffle", shuffle
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
    backend = read.choice("ddp_backend", {"gloo": "gloo", "nccl": "nccl"})
    if backend is not None:
        yield "parallel.transport", backend
    if read("ddp_timeout") != read.defaults.get("ddp_timeout"):
        yield "parallel.timeout_seconds", read("ddp_timeout")
    accelerate = read("accelerator_config")
    for name in ("split_batches", "gradient_accumulation_kwargs"):
        if accelerate.get(name) if isinstance(accelerate, Mapping) else getattr(accelerate, name, None):
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
    if reshard not in _STAGES:
        why = f"reshard_after_forward {reshard}: set parallel.shard to the ranks that share one copy instead"
        read.refuse("fsdp_config", why)
    stage = _STAGES.get(reshard, 3)
    yield "zero.stage", stage
    if _true(options.get("cpu_offload")):
        yield from ((f"offload.{what}", "host") for what in ("optimizer", *(["parameters"] if stage == 3 else [])))
    if _true(options.get("xla")):
        read.refuse("fsdp_config", "xla: there is no XLA here; leave it out")
