"""From a configuration to the objects of a run: mesh, plan, schedule, data, model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from zeromesh.environment import read_environment, setting
from zeromesh.errors import ConfigError, DataError
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.mesh.process_mesh import Mesh, pick_device
from zeromesh.parallelize import Divided, ParallelOptions, divide
from zeromesh.telemetry.watchdog import Activity
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.collate import MapDataset, Spread, check_dataset
from zeromesh.trainer.data.datasets import load_datasets
from zeromesh.trainer.data.feed import RunData
from zeromesh.trainer.data.sampler import BatchPlan
from zeromesh.trainer.data.streaming import StreamedDataset, is_stream
from zeromesh.trainer.data.token_cache import TokenCache
from zeromesh.trainer.data.tokenizer import PretrainedTokenizer, Tokenizer
from zeromesh.trainer.lr_schedule import LRSchedule
from zeromesh.trainer.models.build import build_model
from zeromesh.trainer.models.lora import add_lora
from zeromesh.trainer.models.peft import description_of_adapters, is_adapted
from zeromesh.trainer.models.user_model import Compile, require_adapters_that_fit, require_no_layer_drop, unwrap
from zeromesh.trainer.monitoring.console import RunConsole
from zeromesh.trainer.torch_lr_scheduler import MakeScheduler, TorchSchedule
from zeromesh.weight_init.meta_init import BuiltModel, build_deferred, hooked_parameters, take_given
from zeromesh.weight_init.weight_sources import materialize_buffers


def connect(config: TrainerConfig) -> Mesh:
    """Join the other ranks of the launch in the mesh of the configuration.

    Raises:
        ConfigError, LayoutError: when the launch or the mesh does not fit.
    """
    environment = read_environment()
    parallel = config.parallel
    shape = MeshShape.resolve(
        environment.world_size,
        pipeline=parallel.pipeline,
        replicate=parallel.replicate,
        shard=parallel.shard,
        tensor=parallel.tensor,
    )
    device = pick_device(environment.local_rank)
    mesh = Mesh(shape, environment, device=device, timeout_seconds=parallel.timeout_seconds, order=parallel.order)
    mesh.recorder.enabled = config.profile.step_figures
    if mesh.watch is not None:
        mesh.watch.be_patient_with_disks(config.checkpoint.timeout_seconds)
    return mesh


def divide_model(model: nn.Module, config: TrainerConfig, mesh: Mesh) -> Divided:
    """Leave on this rank its part of the model.

    Raises:
        LayoutError: for a model that cannot be divided so.
    """
    parallel = config.parallel
    options = ParallelOptions(
        rules=parallel.plan or {},
        sequence=parallel.sequence,
        transport=parallel.transport,
        schedule=parallel.schedule,
        chunks=parallel.chunks,
        stages=parallel.stages or (),
        balance=parallel.balance,
    )
    return divide(model, mesh, options)


def batch_plan(config: TrainerConfig, mesh: Mesh) -> BatchPlan:
    """How global batches are cut, before the length of the data is known."""
    batch = config.batch
    return BatchPlan(
        global_size=batch.global_size, micro_size=batch.micro_size, data_ranks=mesh.data.size, average=batch.average
    )


def over_data(
    config: TrainerConfig, plan: BatchPlan, train: MapDataset | StreamedDataset | None
) -> tuple[TrainerConfig, BatchPlan]:
    """The configuration with its steps, and the plan with its epochs, now that the length of the data is known.

    Raises:
        ConfigError: for a warm-up that outlasts the run, or epochs without a step.
    """
    if train is None:
        return config, plan
    if not isinstance(train, StreamedDataset):
        plan = replace(plan, epoch_size=len(train), last=config.batch.last)
    run, schedule = config.run, config.schedule
    steps = run.max_steps if run.epochs is None else plan.steps_of(run.epochs)
    warmup = schedule.warmup_steps
    if schedule.warmup_ratio is not None:
        warmup = math.ceil(schedule.warmup_ratio * steps)
    elif run.epochs is not None and "warmup_steps" not in schedule.model_fields_set:
        warmup = min(warmup, steps // 10)
    if warmup > steps:
        raise ConfigError(
            f"schedule.warmup_steps: {warmup} is more than the {steps} steps of {run.epochs} epochs, so optimizer.lr would "
            "never be reached; lower it, or set schedule.warmup_ratio"
        )
    sections = {
        "run": run.model_copy(update={"max_steps": steps}),
        "schedule": schedule.model_copy(update={"warmup_steps": warmup}),
    }
    return config.model_copy(update=sections), plan


def set_determinism(wanted: bool) -> None:
    """Have torch take only kernels that give the same bits each time, or leave it as it is."""
    if wanted:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def learning_rate_schedule(config: TrainerConfig, make: MakeScheduler | None = None) -> LRSchedule | TorchSchedule:
    """The schedule of the configuration, over the steps of its run, or the one that `make` makes."""
    if make is not None:
        return TorchSchedule(make, config.optimizer)
    section = config.schedule
    return LRSchedule(
        name=section.name,
        warmup_steps=section.warmup_steps,
        total_steps=config.run.max_steps,
        min_ratio=section.min_ratio,
        num_cycles=section.num_cycles,
        power=section.power,
        decay_steps=section.decay_steps,
        decay_shape=section.decay_shape,
        timescale=section.timescale,
        warmup_shape=section.warmup_shape,
        start_ratio=section.start_ratio,
    )


def description_of(model: nn.Module) -> dict[str, Any]:
    """What a run that goes on must have for a model: its class and its configuration, without what says where it came from."""
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    described = {f"config.{name}": value for name, value in values.items() if name not in _NOT_OF_THE_MODEL}
    if is_adapted(model):
        described |= description_of_adapters(model)
    return {"class": type(model).__name__, **json.loads(json.dumps(described, default=str))}


_NOT_OF_THE_MODEL = frozenset(
    {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "use_cache"}
)


def prepare_data(
    config: TrainerConfig,
    train: MapDataset | None,
    evaluation: MapDataset | Mapping[str, MapDataset] | None,
    tokenizer: Any,
    mesh: Mesh,
    console: RunConsole,
) -> RunData:
    """Datasets as given, or made of the text that the configuration names, by `tokenizer` if that is not None; all ranks call it.

    One rank of each host tokenizes text that the cache does not have, while the others wait.

    Raises:
        DataError: for an empty or unusable dataset, file or tokenizer.
    """
    if train is not None or evaluation is not None:
        streams = train is not None and not isinstance(train, str | bytes | PathLike) and is_stream(train)
        data = RunData(train=_streamed(train, config) if streams else train, eval=evaluation, loaded=None)
        whole = {} if train is None or streams else {"train_dataset": train}
        for name, dataset in {**whole, **data.evaluated()}.items():
            check_dataset(dataset, name=name)
        return _limited(data, config.data.eval_samples)
    given: Tokenizer | None = PretrainedTokenizer(tokenizer=tokenizer) if tokenizer is not None else None
    cache = TokenCache(_cache_directory(config), console.note)

    def tell(text: str) -> None:
        mesh.post(Activity.IDLE)
        console.status(text)

    if mesh.environment.local_rank:
        mesh.meet("tokens of the text")
    loaded = load_datasets(config.data, tokenizer=given, cache=cache, tell=tell)
    if not mesh.environment.local_rank:
        mesh.meet("tokens of the text")
    return _limited(RunData(train=loaded.train, eval=loaded.eval, loaded=loaded), config.data.eval_samples)


def _cache_directory(config: TrainerConfig) -> Path:
    """Where tokens of texts are kept."""
    if config.data.cache is not None:
        return Path(config.data.cache).expanduser()
    return Path(setting("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zeromesh" / "tokens"


def _limited(data: RunData, count: int | None) -> RunData:
    """With at most `count` samples in each evaluation set, spread evenly over it."""
    if count is None or data.eval is None:
        return data
    sets = data.eval if isinstance(data.eval, Mapping) else {"": data.eval}
    parts = {name: each if len(each) <= count else Spread(each, count) for name, each in sets.items()}
    notes = tuple(
        f"evaluation{f' of {name}' if name else ''}: {count:,} of {len(each):,} samples (data.eval_samples)"
        for name, each in sets.items()
        if len(each) > count
    )
    return replace(data, eval=parts if isinstance(data.eval, Mapping) else parts[""], limited=notes)


def _streamed(source: Any, config: TrainerConfig) -> StreamedDataset:
    """A stream as a dataset; its blocks are whole global batches."""
    least = config.data.shuffle_window if config.data.shuffle else 1
    size = config.batch.global_size
    if config.run.epochs is not None:
        raise ConfigError("run.epochs: train_dataset is a stream, whose length is not known; set run.max_steps")
    if config.batch.last != "carry":
        raise ConfigError(
            f"batch.last: {config.batch.last} needs to know where an epoch ends, and train_dataset is a stream; set it to carry"
        )
    return StreamedDataset(source, block=-(-least // size) * size)


def prepare_model(model: Any, config: TrainerConfig, tokenizer: Tokenizer | None) -> BuiltModel:
    """The model of a run and where its weights come from: given built, built by a callable on meta, or named by the config.

    Raises:
        ConfigError: for a model that cannot be built.
        LostValuesError: for a model on the meta device whose weights nothing computes.
    """
    built = _built_model(model, config, tokenizer)
    lora = config.model.lora
    return built if lora is None else add_lora(built, lora, config.model.head, config.run.seed)


def _built_model(model: Any, config: TrainerConfig, tokenizer: Tokenizer | None) -> BuiltModel:
    seed = config.run.seed
    if model is None:
        section = config.model
        return build_model(
            source=section.source,
            config=section.config,
            head=section.head,
            seed=seed,
            revision=section.revision,
            trust_remote_code=section.trust_remote_code,
            vocab_size=tokenizer.vocab_size if tokenizer else None,
            end_of_text=tokenizer.end_of_text if tokenizer else None,
        )
    if isinstance(model, nn.Module):
        inside = unwrap(model)
        return replace(take_given(inside.model, seed), compile=inside.compile)
    if not callable(model):
        given = f"{model!r}" if isinstance(model, str | PathLike) else f"a {type(model).__name__}"
        raise ConfigError(
            f"model is {given}; give an nn.Module or a callable that builds one, or name a local Hugging Face directory "
            "in the configuration: model.source"
        )

    compile_: Compile | None = None

    def build() -> nn.Module:
        nonlocal compile_
        made = model()
        if not isinstance(made, nn.Module):
            raise ConfigError(
                f"the callable given as model returned a {type(made).__name__}; it should return an nn.Module"
            )
        inside = unwrap(made)
        compile_ = inside.compile
        return inside.model

    return replace(build_deferred(build, seed), compile=compile_)


def require_layout_fits(model: nn.Module, mesh: Mesh) -> None:
    """Raise `ConfigError` for a model that this layout cannot train."""
    require_adapters_that_fit(model, mesh)
    hooked = hooked_parameters(model) if mesh.tensor.size > 1 or mesh.pipeline.size > 1 else ()
    if hooked:
        raise ConfigError(
            f"{hooked[0]} has a hook on its gradient, and under parallel.tensor or parallel.pipeline a rank has but a part of "
            "parameters and gradients; set both to 1, or take the hook off"
        )
    require_no_layer_drop(model, mesh.data.size)


def place_buffers(built: BuiltModel, mesh: Mesh, seed: int) -> None:
    """Put the model's buffers on the device, in their own dtypes.

    Raises:
        ConfigError: when some on the meta device cannot be recomputed.
    """
    lost = materialize_buffers(built.model, mesh.device, seed, source=built.source)
    if lost:
        raise ConfigError(
            f"buffers {', '.join(lost[:8])} were lost by building on the meta device; pass the model built, or a callable"
        )


def no_training_data() -> DataError:
    """The error where only an evaluation dataset was given."""
    return DataError("there is no train_dataset; give one to Trainer, or name text in data.train")


def require_trained_parameters(model: nn.Module) -> None:
    """Raise `ConfigError` for a model in which nothing would change."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        some = any(True for _ in model.parameters())
        why = "has only frozen parameters (requires_grad is False)" if some else "has no parameters"
        raise ConfigError(f"{type(model).__name__} {why}; there is nothing to train")


def notes_on_modules(model: nn.Module) -> list[str]:
    """Modules in training mode whose result depends on how the global batch is cut, by what they are.

    SyncBatchNorm is none of them: its statistics are those of all ranks.
    """
    names = [
        name or type(model).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training
    ]
    if not names:
        return []
    some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return [
        f"BatchNorm ({some}): means and variances are those of each rank's own microbatch, not of the global batch; every "
        "rank keeps running statistics of its own, and rank 0's are saved"
    ]
