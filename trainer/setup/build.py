"""`build_run`, which turns a configuration and the user's inputs into a run that can train, evaluate and save."""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

from zeromesh.environment import export, number_of_start, read_environment, set_default, setting
from zeromesh.errors import ConfigError, counted, some
from zeromesh.mesh.mesh_shape import AXES, SIZES, MeshShape
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import accelerator, reuse_freed_memory
from zeromesh.options import ZeroOptions
from zeromesh.telemetry.status_board import Activity
from zeromesh.trainer.callbacks.dispatcher import CallbackDispatcher
from zeromesh.trainer.config.sections.optimizer import make_optimizer
from zeromesh.trainer.config.sections.schedule import LRSchedule
from zeromesh.trainer.config.sections.training import AUTO_EVAL_SAMPLES, paths_of
from zeromesh.trainer.config.trainer_config import TrainerConfig, disagreements, schedule_of, with_length
from zeromesh.trainer.data.collate import check_dataset
from zeromesh.trainer.data.datasets import load_datasets, load_pictures
from zeromesh.trainer.data.feed import RunData, require_same_data
from zeromesh.trainer.data.loader import Workers
from zeromesh.trainer.data.sampler import BatchPlan, shares_by
from zeromesh.trainer.data.streaming import StreamedDataset, is_stream
from zeromesh.trainer.data.text_sources import HUB, find_text
from zeromesh.trainer.data.token_cache import TokenCache
from zeromesh.trainer.data.tokenizer import PretrainedTokenizer, Tokenizer
from zeromesh.trainer.formatting import Detail
from zeromesh.trainer.loop.context import RunContext, RunProgress, UserInputs
from zeromesh.trainer.loop.recovery import Recovery
from zeromesh.trainer.models.build import check_model, class_names, image_processor, pin_sources, while_posting
from zeromesh.trainer.models.user_model import source_of
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.monitoring.step_metrics import StartTimes, leaves
from zeromesh.trainer.setup.engine_options import engine_options, require_directories
from zeromesh.trainer.setup.model import build_trained_model
from zeromesh.trainer.torch_lr_scheduler import TorchSchedule


def connect(config: TrainerConfig) -> Mesh:
    """Join the other ranks of the launch in the configuration's mesh. Raises `ConfigError` or `LayoutError` if they do not fit."""
    environment = read_environment()
    parallel = config.parallel
    shape = MeshShape.resolve(environment.world_size, **{axis: getattr(parallel, axis) for axis in SIZES})
    set_default("PYTORCH_ALLOC_CONF", accelerator.allocator_settings(), "PYTORCH_CUDA_ALLOC_CONF")
    if config.run.deterministic:
        use_deterministic_kernels()
    device = accelerator.pick_device(environment.local_rank)
    if device.type == "cpu":
        reuse_freed_memory()
    seconds, traces = parallel.patience, config.run.directory
    mesh = Mesh(shape, environment, device=device, timeout_seconds=seconds, order=parallel.order, traces=traces)
    if config.profile.allocations:
        accelerator.record_allocations(device)
    mesh.recorder.enabled = config.profile.step_figures
    mesh.watch.disk_patience = config.checkpoint.timeout_seconds
    return mesh


def set_tf32(config: TrainerConfig, device: torch.device) -> None:
    """Allow or forbid TF32 in this process's float32 products, by `precision.tf32`. Raises `ConfigError` for TF32 on a CPU."""
    if accelerator.is_accelerator(device):
        accelerator.allow_tf32(config.precision.tf32)
    elif config.precision.tf32:
        raise ConfigError("TF32 is a format of GPUs, and this run computes on the CPU; leave it out", where="precision.tf32")


_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")  # by NVIDIA's manual: 8 of 4 MiB, which is fast, or of 16 KiB


def use_deterministic_kernels() -> None:
    """Restrict this process to deterministic kernels; torch raises an error for an operation without one. Raises `ConfigError` if
    cuBLAS has other workspaces, or was initialised without a setting."""
    given = setting(_WORKSPACE)
    if accelerator.has_cublas() and given not in _DETERMINISTIC_WORKSPACES:
        cure = f"set {_WORKSPACE}={_DETERMINISTIC_WORKSPACES[0]} before Python starts"
        if given is not None:
            raise ConfigError(f"{_WORKSPACE} is {given!r}; {cure}, or leave it out", where="run.deterministic")
        if accelerator.is_initialized():
            why = f"this process has used its GPU before the run began, and without {_WORKSPACE} products may differ"
            raise ConfigError(f"{why} from run to run; {cure}", where="run.deterministic")
        export({_WORKSPACE: _DETERMINISTIC_WORKSPACES[0]})
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def build_run(
    config: TrainerConfig,
    mesh: Mesh,
    inputs: UserInputs,
    events: CallbackDispatcher,
    console: Console,
    times: StartTimes,
    recovery: Recovery | None = None,
) -> RunContext:
    """Build the parts of a run; all ranks call it. `recovery` has memory for states that outlives this process. Checks that need
    neither data nor a model come first. Raises `ZeromeshError` for a run that cannot train, before it allocates anything large."""
    require_same_settings(mesh, config, {**inputs.names(), "callbacks": "some" if events else "none"})
    config, workers, plan, options = _plan_settings(config, mesh, inputs, console)

    # The data, and the settings that depend on its length.
    console.status("reading the data")
    data = _prepare_data(config, inputs, mesh, console)
    console.note(*data.notes, *map(Detail, workers.notes(data.train)), f"data     {data.row()}")
    config, plan = _sized(config, plan, data, console)
    plan = _with_shares(plan, config, data, mesh, console)
    made = inputs.lr_scheduler
    schedule: LRSchedule | TorchSchedule = TorchSchedule(made, config.optimizer, config.folders) if made else schedule_of(config)
    described = data.description(shuffle=config.data.shuffle)
    mesh.wait_for_all_ranks("comparison of data")
    decided_by_data = {f"data.{name}": value for name, value in described.items()}
    decided_by_data |= {"run.max_steps": config.run.max_steps, "schedule": schedule.factor(0)}
    decided_by_data |= {"schedule.warmup_steps": config.schedule.warmup_steps}
    require_same_data(mesh, data.datasets(), decided_by_data)
    times.end("data")

    # The model, and its measurements.
    window = config.recovery.spike_window if config.recovery.spike_factor else 0
    run = RunContext(
        config=config,
        mesh=mesh,
        inputs=inputs,
        events=events,
        console=console,
        start_times=times,
        plan=plan,
        data=data,
        data_description=described,
        schedule=schedule,
        progress=RunProgress(max_nonfinite=config.run.max_nonfinite, accepted=deque(maxlen=window)),
        workers=workers,
    )
    run.model = build_trained_model(run, options, recovery)
    return run


def _plan_settings(
    config: TrainerConfig, mesh: Mesh, inputs: UserInputs, console: Console
) -> tuple[TrainerConfig, Workers, BatchPlan, ZeroOptions]:
    """Return the configuration with pinned sources, and its data workers, batch plan and engine options; allows or forbids TF32."""
    config = pin_sources(
        config,
        mesh,
        model_given=inputs.model is not None,
        came_from=source_of(inputs.model),
        # The model that a callable builds is not known yet.
        reads_text=inputs.reads_text and isinstance(inputs.model, nn.Module | None),
    )
    set_tf32(config, mesh.device)
    workers = Workers.choose(config.data, mesh.device, mesh.environment.local_world_size)
    sizes = config.batch.model_dump(include={"global_size", "micro_size", "tokens", "average"})
    plan = BatchPlan(**sizes, data_ranks=mesh.data.size)
    require_directories(config.offload)
    make_optimizer(config.optimizer, None, folders=config.folders)  # Before data and model are read.
    options = engine_options(config, plan.accumulation)
    shape, device = mesh.shape, mesh.device.type.upper()
    axes = [f"{axis} {size}" for axis, size in zip(AXES, shape.sizes, strict=True) if size > 1]
    ranks = f"{shape.world_size} {device} ranks: {' x '.join(axes)}" if axes else f"1 {device} rank"
    layout = f"ZeRO stage {config.zero.stage} on {ranks}"
    factors = " x ".join(map(str, (plan.micro_size, plan.accumulation, plan.data_ranks)))
    batch = factors if plan.tokens is None else f"microbatches of {plan.tokens} tokens"
    console.note(
        *config.notes,
        Detail(f"{config.run.name}: {layout}"),
        *([Detail(mesh.picture())] if mesh.model_size > 1 else []),
        Detail(f"batch: {plan.equation()}"),
        f"layout   {layout}; batch {plan.global_size} = {batch}",
        Detail(options.precision.table(config.optimizer.name, config.optimizer.states)),
    )
    if inputs.model is None:
        check_model(config.model)
    return config, workers, plan, options


def require_same_settings(mesh: Mesh, config: TrainerConfig, inputs: Mapping[str, object]) -> None:
    """Raise `ConfigError` where the configurations or the user's inputs differ between ranks."""
    values = {".".join(keys): value for keys, value in leaves(config.shared_settings())} | dict(inputs)
    advice = "Give every rank the same configuration and arguments; what only one rank is to do belongs behind its rank's number"
    mesh.world.require_same(values, ConfigError, advice=advice)


def _sized(config: TrainerConfig, plan: BatchPlan, data: RunData, console: Console) -> tuple[TrainerConfig, BatchPlan]:
    """Return the configuration with the classes and steps of the data, and the plan with its epochs. Raises `ConfigError` for a
    warm-up that outlasts the run, and for epochs without a step."""
    train, given = data.train, config.model.config or {}
    if data.classes and given.get("num_labels") in (None, len(data.classes)):
        numbers = {name: number for number, name in enumerate(data.classes)}
        names = {"id2label": {str(number): name for name, number in numbers.items()}, "label2id": numbers}
        config = config.changed(model={"config": {**given, **names}})
    if train is None:
        return config, plan
    if not isinstance(train, StreamedDataset):
        plan = replace(plan, epoch_size=len(train), last=config.batch.last)
    run = config.run
    steps = run.max_steps if run.epochs is None else plan.steps_of(run.epochs)
    if run.epochs is not None and run.most_steps is not None:
        first = "run.max_steps ends" if run.most_steps < steps else "run.epochs end"
        given_steps = f"run.epochs {run.epochs:g} are {counted(steps, 'step')}, and run.max_steps is {run.most_steps}"
        console.note(f"{given_steps}: {first} the run")
        steps = min(steps, run.most_steps)
    warmup = config.schedule.warmup_of(steps)
    if warmup > steps:
        why = f"schedule.warmup_steps: {warmup} is more than the {steps} steps of {run.epochs} epochs"
        raise ConfigError(f"{why}, so optimizer.lr would never be reached; lower it, or set schedule.warmup_ratio")
    return with_length(config, steps), plan


def _with_shares(plan: BatchPlan, config: TrainerConfig, data: RunData, mesh: Mesh, console: Console) -> BatchPlan:
    """Return the plan with the shares of `batch.balance`. Raises `ConfigError` where these do not fit the run."""
    balance, ranks = config.batch.balance, plan.data_ranks
    if balance == "even" or data.train is None:
        return plan
    if balance == "speed":
        streams, on_device = isinstance(data.train, StreamedDataset), accelerator.is_accelerator(mesh.device)
        if streams or on_device:
            why = "train_dataset is a stream" if streams else "ranks with accelerators wait for each other unseen"
            raise ConfigError(f"speed cannot be taken, as {why}; give a list, or set it to even", where="batch.balance")
        return plan
    if len(balance) != ranks:
        numbers = f"{counted(len(balance), 'number')} for {counted(ranks, 'data rank')}"
        if not number_of_start():
            raise ConfigError(f"has {numbers}; give one for each, or set it to even", where="batch.balance")
        console.note(f"batch.balance has {numbers} that are left, so samples are shared out evenly")
        return plan
    shares = shares_by([1 / each for each in balance], plan.round_size, plan.round_size)
    console.note(f"batch    of each round of {plan.round_size} samples, data ranks take {some(shares, 16)}")
    return replace(plan, shares=shares)


def _prepare_data(config: TrainerConfig, inputs: UserInputs, mesh: Mesh, console: Console) -> RunData:
    """Return the user's datasets, or those of the configuration. One rank of each host tokenizes uncached text, and others wait."""
    train, evaluation, tokenizer = inputs.train_dataset, inputs.eval_dataset, inputs.processing_class
    if train is not None or evaluation is not None:
        streams = is_stream(train)
        whole = {} if train is None or streams else {"train_dataset": train}
        data = RunData(train=_make_streamed(train, config) if streams else train, eval=evaluation)
        for name, dataset in {**whole, **data.evaluation_sets()}.items():
            check_dataset(dataset, name=name)
        return _limit_eval_sets(data, None if config.data.eval_samples == "auto" else config.data.eval_samples)
    labelled = any(each.label or each.holds == "pictures" for each in config.data.formats)
    own = class_names(config.model, inputs.model) if labelled else ((), False)
    count = AUTO_EVAL_SAMPLES if config.data.eval_samples == "auto" else config.data.eval_samples
    if config.data.rows.holds == "pictures":
        made, mode = image_processor(config.model, inputs.model)
        console.status("looking at the pictures")
        pictures = while_posting(mesh, lambda: load_pictures(config.data, inputs.processing_class or made, mode, own))
        return _limit_eval_sets(pictures, count)
    if inputs.reads_text and config.data.tokenizer is None and isinstance(inputs.model, nn.Module | None):
        why = f"null means the tokenizer of the model, and {config.model.source or source_of(inputs.model)!r} has none"
        cure = "give the directory of its tokenizer, or bytes for a model whose tokens are the bytes of a text"
        raise ConfigError(f"{why}; {cure}", where="data.tokenizer")
    given: Tokenizer | None = PretrainedTokenizer(tokenizer=tokenizer) if tokenizer is not None else None
    cache_directory = config.data.cache or Path(setting("XDG_CACHE_HOME") or "~/.cache") / "zeromesh" / "tokens"
    cache = TokenCache(Path(cache_directory).expanduser(), console.note)

    def report(text: str) -> None:
        mesh.post(Activity.IDLE)
        console.status(text)

    trained = {name: part.train for name, part in config.data.parts().items()}
    if mesh.environment.local_rank:
        mesh.wait_for_all_ranks("tokens of the text")
    elif names := [path for path in paths_of({"": config.data.eval, **trained}) if path.startswith(HUB)]:
        while_posting(mesh, lambda: find_text(names, where="data.train"))
    loaded = load_datasets(config.data, tokenizer=given, cache=cache, tell=report, own=own)
    if not mesh.environment.local_rank:
        mesh.wait_for_all_ranks("tokens of the text")
    return _limit_eval_sets(loaded, count)


def _limit_eval_sets(data: RunData, count: int | None) -> RunData:
    if count is None or data.eval is None:
        return data
    sets: Mapping[str, Any] = data.eval if isinstance(data.eval, Mapping) else {"": data.eval}
    parts, notes = dict(sets), []
    for name, each in sets.items():
        if len(each) > count:
            parts[name] = Subset(each, [index * len(each) // count for index in range(count)])
            samples = f"{count:,} of {counted(len(each), 'sample', ',')} (data.eval_samples)"
            notes.append(Detail(f"evaluation{f' of {name}' if name else ''}: {samples}"))
    chosen = parts if isinstance(data.eval, Mapping) else parts[""]
    return replace(data, eval=chosen, notes=(*data.notes, *notes), limited=bool(notes))


def _make_streamed(source: Any, config: TrainerConfig) -> StreamedDataset:
    least = config.data.shuffle_window if config.data.shuffle else 1
    size = config.batch.global_size
    if problems := disagreements(config, under="a stream"):
        raise ConfigError(problems)
    seed = config.run.seed if config.data.seed is None else config.data.seed
    return StreamedDataset(source, block=-(-least // size) * size, seed=seed, resume=config.data.resume)
