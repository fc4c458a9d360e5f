"""The model of a run, from what the user names to its partitions: built, checked, divided, filled with its initial values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from zeromesh.comm.select import choose_transport
from zeromesh.errors import ConfigError, some
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import settle_heap
from zeromesh.options import ZeroOptions
from zeromesh.parallelize import Divided, ParallelOptions, divide
from zeromesh.telemetry.watchdog import Activity
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.collate import BatchRules
from zeromesh.trainer.data.feed import Feeds, RunData
from zeromesh.trainer.data.sampler import BatchPlan
from zeromesh.trainer.data.tokenizer import Tokenizer
from zeromesh.trainer.formatting import human_count
from zeromesh.trainer.loop.context import RunProgress, UserInputs
from zeromesh.trainer.loop.train_step import Stepper
from zeromesh.trainer.loop.trained_model import TrainedModel
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.models.adapters import add_lora
from zeromesh.trainer.models.build import build_model
from zeromesh.trainer.models.flops import ModelFlops, parameters_of
from zeromesh.trainer.models.forward_inputs import ForwardInputs
from zeromesh.trainer.models.prepare import KeptAttributes, prepare_model
from zeromesh.trainer.models.user_model import Compile, require_adapters_that_fit, require_no_layer_drop, unwrap
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.monitoring.start_times import StartTimes
from zeromesh.trainer.monitoring.step_stats import require_free_names
from zeromesh.trainer.setup.engine_options import exempted
from zeromesh.trainer.setup.first_batch_checks import check_first_batches
from zeromesh.trainer.setup.memory_check import kept_input_bytes, require_memory
from zeromesh.trainer.setup.rank_agreement import share_weights
from zeromesh.units.build import open_tiers
from zeromesh.weight_init.meta_init import BuiltModel, build_deferred, hooked_parameters, wrap_passed_model
from zeromesh.weight_init.weight_sources import ParameterSource, materialize_buffers
from zeromesh.zero.engine import ZeroEngine

_REDUCED = {"shared": "through host-shared memory", "gloo": "over gloo", "nccl": "over NCCL"}
"""How a transport reduces gradients, in the words of the line at the start of a run."""


def build_trained_model(
    config: TrainerConfig,
    mesh: Mesh,
    options: ZeroOptions,
    *,
    inputs: UserInputs,
    data: RunData,
    plan: BatchPlan,
    progress: RunProgress,
    console: Console,
    start_times: StartTimes,
) -> TrainedModel:
    """Build the model, check it and the data, leave on this rank its part of the model, and give that its values.

    Raises:
        ConfigError, DataError, LayoutError, StorageError: before anything large is allocated, for a model that cannot be built,
            divided or trained so, for data that it cannot be trained on, and for too little memory.
    """

    def show(notes: Iterable[str]) -> None:
        for note in notes:
            console.note(note)

    console.status("building the model")
    built = build_whole_model(inputs.model, config, data.tokenizer)
    model = built.model
    options = exempted(options, config, model)
    kept = KeptAttributes(model)
    tiers = open_tiers(mesh, options)
    try:
        _require_layout_fits(model, mesh)
        _place_buffers(built, mesh, config.run.seed)
        show(share_weights(model, mesh))
        # The inputs, the parameters and the loss are those of the whole model, so that all ranks take the same batches, count alike
        # and refuse alike.
        forward = ForwardInputs.of(model, users_loss=inputs.compute_loss is not None)
        flops, parameters = ModelFlops.of(model), parameters_of(model)
        start_times.end("model")
        console.status("trying the loss on a small copy")
        loss = make_loss(
            model,
            mode=config.model.loss,
            compute_loss=inputs.compute_loss,
            divided=mesh.tensor.size > 1,
            smoothing=config.run.label_smoothing,
            check_scalars=partial(require_free_names, whose="compute_loss"),
        )
        start_times.end("loss")
        divided = _divide_model(model, config, mesh)
        prepared = prepare_model(model, config.model, options, tiers, built.compile)
        feeds = Feeds(
            data=data,
            plan=plan,
            shuffle=config.data.shuffle,
            seed=config.run.seed if config.data.seed is None else config.data.seed,
            eval_micro_size=config.batch.eval_micro_size or config.batch.micro_size,
            rules=BatchRules(
                collate=inputs.collate,
                vocab_size=forward.vocab_size,
                causal=loss.causal,
                fields=forward.fields,
                sample_fields=forward.named if config.data.remove_unused else None,
            ),
        )
        show([*divided.notes, *prepared.notes, *built.notes, *_notes_on_modules(model), *loss.notes])
        show(check_first_batches(feeds, config, forward, loss, inputs))
        transport = choose_transport(options.transport, mesh.shard, mesh.device)
        length = config.data.sequence_length if data.loaded is not None else 0
        kept_inputs = kept_input_bytes(model, prepared.away, config.batch.micro_size, length, options.precision.compute)
        show(require_memory(model, options, mesh, transport=transport, inputs=kept_inputs, cuts=divided.cuts))
        mesh.meet("start of the run")
        source = WatchedSource(built, console, mesh)
        engine = ZeroEngine.build(model, mesh, options, source, tiers, divided.cuts)
        source.close()
    except BaseException:
        tiers.close()
        kept.put_back()
        raise
    trained = TrainedModel(
        config=config,
        mesh=mesh,
        console=console,
        steps_made=lambda: progress.step,
        processing_class=data.processing_class if inputs.processing_class is None else inputs.processing_class,
        module=model,
        loss=loss,
        divided=divided,
        kept=kept,
        feeds=feeds,
        flops=flops,
        parameters=parameters,
        optimizer=options.optimizer,
        engine=engine,
        stepper=Stepper(model, loss, mesh, options.precision.compute, engine, divided.pipeline),
    )
    if options.stage == 3 or mesh.tensor.size * mesh.pipeline.size > 1:
        trained.replace_save_pretrained()
    if mesh.device.type == "cpu":
        settle_heap()
    here = " on this rank" if divided.pipeline is not None else ""
    units = f"{len(engine.units)} unit{'s' if len(engine.units) > 1 else ''}{here}"
    reduced = f", gradients reduced {_REDUCED[engine.reduction_name]}" if mesh.shard.size > 1 else ""
    place = engine.update_device.note()
    show(
        [
            f"{type(model).__name__}: {human_count(engine.state.numel)} parameters in {units}{reduced}",
            *filter(None, [place]),
        ]
    )
    start_times.end("engine")
    return trained


def build_whole_model(model: Any, config: TrainerConfig, tokenizer: Tokenizer | None) -> BuiltModel:
    """Build the whole model, and say where its weights come from: it is passed built, built by a callable on meta, or named by the
    configuration.

    Raises:
        ConfigError: for a model that cannot be built.
        LostValuesError: for a model on the meta device whose weights nothing computes.
    """
    built = _build_without_lora(model, config, tokenizer)
    lora = config.model.lora
    return built if lora is None else add_lora(built, lora, config.model.head, config.run.seed)


def _build_without_lora(model: Any, config: TrainerConfig, tokenizer: Tokenizer | None) -> BuiltModel:
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
        return replace(wrap_passed_model(inside.model, seed), compile=inside.compile)
    if not callable(model):
        shown = f"{model!r}" if isinstance(model, str | PathLike) else f"a {type(model).__name__}"
        raise ConfigError(
            f"model is {shown}; give an nn.Module or a callable that builds one, or name a local Hugging Face directory "
            "in the configuration: model.source"
        )

    compile_: Compile | None = None

    def call() -> nn.Module:
        nonlocal compile_
        made = model()
        if not isinstance(made, nn.Module):
            raise ConfigError(
                f"the callable that is passed as model returned a {type(made).__name__}; it should return an nn.Module"
            )
        inside = unwrap(made)
        compile_ = inside.compile
        return inside.model

    return replace(build_deferred(call, seed), compile=compile_)


def _require_layout_fits(model: nn.Module, mesh: Mesh) -> None:
    """Raise `ConfigError` for a model that this layout cannot train."""
    require_adapters_that_fit(model, mesh)
    hooked = hooked_parameters(model) if mesh.tensor.size > 1 or mesh.pipeline.size > 1 else ()
    if hooked:
        raise ConfigError(
            f"{hooked[0]} has a hook on its gradient, and under parallel.tensor or parallel.pipeline a rank has but a part of "
            "parameters and gradients; set both to 1, or take the hook off"
        )
    require_no_layer_drop(model, mesh.data.size)


def _place_buffers(built: BuiltModel, mesh: Mesh, seed: int) -> None:
    """Put the model's buffers on the device, in their own dtypes.

    Raises:
        ConfigError: when some on the meta device cannot be recomputed.
    """
    lost = materialize_buffers(built.model, mesh.device, seed, source=built.source)
    if lost:
        raise ConfigError(
            f"buffers {', '.join(lost[:8])} were lost by building on the meta device; pass the model built, or a callable"
        )


def _divide_model(model: nn.Module, config: TrainerConfig, mesh: Mesh) -> Divided:
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


def _notes_on_modules(model: nn.Module) -> list[str]:
    """Notes on modules in training mode whose result depends on how the global batch is cut.

    SyncBatchNorm is not among them: its statistics are those of all ranks.
    """
    names = [
        name or type(model).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training
    ]
    if not names:
        return []
    return [
        f"BatchNorm ({some(names)}): means and variances are those of each rank's own microbatch, not of the global batch; every "
        "rank keeps running statistics of its own, and rank 0's are saved"
    ]


class WatchedSource:
    """Reads from the source of `built`, and shows the console and the other ranks that reading goes on."""

    def __init__(self, built: BuiltModel, console: Console, mesh: Mesh) -> None:
        self._source: ParameterSource = built.source
        self._console = console
        self._mesh = mesh
        self._total = sum(1 for _ in built.model.parameters())
        self._done = 0

    def read(self, fqn: str, start: int, end: int) -> torch.Tensor:
        """Read values of a parameter from the source."""
        return self._source.read(fqn, start, end)

    def buffer(self, name: str) -> torch.Tensor | None:
        """Read a buffer from the source; None where it has none."""
        return self._source.buffer(name)

    def release(self, fqn: str) -> None:
        """Release a parameter in the source, and show that one more is done."""
        self._source.release(fqn)
        self._done += 1
        self._console.status(f"setting the weights: {self._done} of {self._total} parameters")
        self._mesh.post(Activity.IDLE)

    def close(self) -> None:
        """Close the source."""
        self._source.close()
