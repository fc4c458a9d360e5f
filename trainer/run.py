"""`build_run`: from a configuration and the user's inputs to a run that can train, evaluate and save."""

from __future__ import annotations

import torch

from zeromesh.kernels.cpu_matmul import take_product_buffers
from zeromesh.mesh.mesh_shape import AXES
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import reuse_freed_memory
from zeromesh.trainer.callbacks.dispatcher import CallbackDispatcher
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.feed import require_same_data
from zeromesh.trainer.data.sampler import BatchPlan
from zeromesh.trainer.loop.context import LogHistory, RunContext, RunProgress, UserInputs
from zeromesh.trainer.lr_schedule import LRSchedule
from zeromesh.trainer.models.build import check_model
from zeromesh.trainer.models.hub_download import pin_sources
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.monitoring.start_times import StartTimes
from zeromesh.trainer.monitoring.step_stats import StepStats
from zeromesh.trainer.setup import build
from zeromesh.trainer.setup.engine_options import engine_options
from zeromesh.trainer.setup.model import build_trained_model
from zeromesh.trainer.setup.rank_agreement import require_same_settings
from zeromesh.trainer.torch_lr_scheduler import TorchSchedule


def build_run(
    config: TrainerConfig, mesh: Mesh, inputs: UserInputs, events: CallbackDispatcher, start_times: StartTimes
) -> RunContext:
    """Make the parts of a run in their order; all ranks call it. What can be refused without data or a model is refused first.

    Raises:
        ConfigError, DataError, LayoutError, StorageError: for what cannot be trained, before anything large is allocated.
    """
    # What all ranks must have in common, and what the libraries are set to.
    require_same_settings(mesh, config, {**inputs.names(), "callbacks": "some" if events else "none"})
    config = pin_sources(config, mesh, model_given=inputs.model is not None)
    console = Console(shown=mesh.rank == 0)
    if mesh.device.type == "cpu":
        reuse_freed_memory()
        take_product_buffers()
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False

    # What the configuration alone decides.
    plan = build.batch_plan(config, mesh)
    options = engine_options(config, plan.accumulation)
    precision = options.precision.table(config.optimizer.name)
    for note in (*config.notes, *_layout_notes(config, mesh, plan), precision):
        console.note(note)
    if inputs.model is None:
        check_model(config.model)

    # The data, and what its length decides.
    console.status("reading the data")
    data = build.prepare_data(config, inputs, mesh, console)
    for note in data.notes:
        console.note(note)
    config, plan = build.over_data(config, plan, data.train)
    schedule: LRSchedule | TorchSchedule
    if inputs.lr_scheduler is not None:
        schedule = TorchSchedule(inputs.lr_scheduler, config.optimizer)
    else:
        schedule = LRSchedule(total_steps=config.run.max_steps, **config.schedule.model_dump(exclude={"warmup_ratio"}))
    data_description = data.description(shuffle=config.data.shuffle)
    mesh.meet("comparison of data")
    decided_by_data = {
        **{f"data.{name}": value for name, value in data_description.items()},
        "run.max_steps": config.run.max_steps,
        "schedule.warmup_steps": config.schedule.warmup_steps,
        "schedule": schedule.factor(0),
    }
    require_same_data(mesh, data.sets(), decided_by_data)
    start_times.end("data")

    # The model, and what is measured of it.
    history = LogHistory(kept=inputs.of_transformers or events.of_transformers is not None)
    progress = RunProgress(max_nonfinite=config.run.max_nonfinite, history=history)
    model = build_trained_model(
        config,
        mesh,
        options,
        inputs=inputs,
        data=data,
        plan=plan,
        progress=progress,
        console=console,
        start_times=start_times,
    )
    try:
        ledger = model.require_engine().ledger
        stats = StepStats(model.flops, mesh, options.precision.compute, config.batch.global_size, ledger)
        for note in stats.notes:
            console.note(note)
        start_times.end("figures")
    except BaseException:
        model.close()
        raise
    return RunContext(
        config=config,
        mesh=mesh,
        inputs=inputs,
        events=events,
        console=console,
        start_times=start_times,
        plan=plan,
        data=data,
        data_description=data_description,
        schedule=schedule,
        model=model,
        stats=stats,
        progress=progress,
    )


def _layout_notes(config: TrainerConfig, mesh: Mesh, plan: BatchPlan) -> list[str]:
    """What a person reads about the mesh and the batch, before anything is read."""
    shape, device = mesh.shape, mesh.device.type.upper()
    axes = [f"{axis} {size}" for axis, size in zip(AXES, shape.sizes, strict=True) if size > 1]
    ranks = f"{shape.world_size} {device} ranks: {' x '.join(axes)}" if axes else f"1 {device} rank"
    notes = [f"{config.run.name}: ZeRO stage {config.zero.stage} on {ranks}"]
    if shape.tensor > 1 or shape.pipeline > 1:
        notes.append(mesh.picture())
    return [*notes, f"batch: {plan.equation()}"]
