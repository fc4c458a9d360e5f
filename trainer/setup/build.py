"""From a configuration to the objects of a run: mesh, plan, schedule, data, model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

from zeromesh.environment import read_environment, setting
from zeromesh.errors import ConfigError
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.mesh.process_mesh import Mesh, pick_device
from zeromesh.telemetry.watchdog import Activity
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.collate import MapDataset, check_dataset
from zeromesh.trainer.data.datasets import load_datasets
from zeromesh.trainer.data.feed import RunData
from zeromesh.trainer.data.sampler import BatchPlan
from zeromesh.trainer.data.streaming import StreamedDataset, is_stream
from zeromesh.trainer.data.token_cache import TokenCache
from zeromesh.trainer.data.tokenizer import PretrainedTokenizer, Tokenizer
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.monitoring.console import Console


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


def prepare_data(config: TrainerConfig, inputs: UserInputs, mesh: Mesh, console: Console) -> RunData:
    """The user's datasets, or datasets of the text that the configuration names, in tokens of the user's tokenizer if there is one;
    all ranks call it.

    One rank of each host tokenizes text that the cache does not have, while the others wait.

    Raises:
        DataError: for an empty or unusable dataset, file or tokenizer.
    """
    train, evaluation, tokenizer = inputs.train_dataset, inputs.eval_dataset, inputs.processing_class
    if train is not None or evaluation is not None:
        streams = train is not None and not isinstance(train, str | bytes | PathLike) and is_stream(train)
        data = RunData(train=_streamed(train, config) if streams else train, eval=evaluation, loaded=None)
        whole = {} if train is None or streams else {"train_dataset": train}
        for name, dataset in {**whole, **data.evaluated()}.items():
            check_dataset(dataset, name=name)
        return _limited(data, config.data.eval_samples)
    own: Tokenizer | None = PretrainedTokenizer(tokenizer=tokenizer) if tokenizer is not None else None
    cache = TokenCache(_cache_directory(config), console.note)

    def report(text: str) -> None:
        mesh.post(Activity.IDLE)
        console.status(text)

    if mesh.environment.local_rank:
        mesh.meet("tokens of the text")
    loaded = load_datasets(config.data, tokenizer=own, cache=cache, tell=report)
    if not mesh.environment.local_rank:
        mesh.meet("tokens of the text")
    return _limited(RunData(train=loaded.train, eval=loaded.eval, loaded=loaded), config.data.eval_samples)


def _cache_directory(config: TrainerConfig) -> Path:
    """The directory in which tokens of texts are kept."""
    if config.data.cache is not None:
        return Path(config.data.cache).expanduser()
    return Path(setting("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zeromesh" / "tokens"


def _limited(data: RunData, count: int | None) -> RunData:
    """With at most `count` samples in each evaluation set, spread evenly over it."""
    if count is None or data.eval is None:
        return data
    sets: Mapping[str, Any] = data.eval if isinstance(data.eval, Mapping) else {"": data.eval}
    parts: dict[str, Any] = {
        name: each if len(each) <= count else Subset(each, [index * len(each) // count for index in range(count)])
        for name, each in sets.items()
    }
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
