"""The model of a run: looked at, divided and partitioned before the first step, whole again after the last.

A source of initial values that tells how far it is: reading a large model takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zeromesh.comm.select import choose_transport
from zeromesh.errors import ConfigError, PhaseError, StorageError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Tiers, available_bytes, settle_heap
from zeromesh.options import ZeroOptions
from zeromesh.rng import number_of, seed_all
from zeromesh.telemetry.watchdog import Activity
from zeromesh.trainer.data.feed import Feeds
from zeromesh.trainer.formatting import human_bytes, human_count
from zeromesh.trainer.loop.train_step import Stepper
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.models.flops import ModelFlops, parameters_of
from zeromesh.trainer.models.forward_inputs import ForwardInputs
from zeromesh.trainer.models.generation import check_arguments, generate
from zeromesh.trainer.models.prepare import KeptAttributes, prepare_model
from zeromesh.trainer.models.save_pretrained import save_model
from zeromesh.trainer.monitoring.console import RunConsole
from zeromesh.trainer.monitoring.user_scalars import require_free_names
from zeromesh.trainer.setup import build
from zeromesh.trainer.setup.engine_options import exempted
from zeromesh.trainer.setup.first_batch_checks import check_first_batches
from zeromesh.trainer.setup.memory_check import kept_input_bytes, require_memory
from zeromesh.trainer.setup.rank_agreement import share_weights
from zeromesh.units.build import open_tiers
from zeromesh.weight_init.meta_init import BuiltModel
from zeromesh.weight_init.weight_sources import ParameterSource
from zeromesh.zero.engine import ZeroEngine

if TYPE_CHECKING:
    from zeromesh.trainer.run import Run


class WatchedSource:
    """Hands on what the source of `built` gives, and tells the console, and the other ranks, that it goes on."""

    def __init__(self, built: BuiltModel, console: RunConsole, mesh: Mesh) -> None:
        self._source: ParameterSource = built.source
        self._console = console
        self._mesh = mesh
        self._total = sum(1 for _ in built.model.parameters())
        self._done = 0

    def read(self, fqn: str, start: int, end: int) -> torch.Tensor:
        """See `ParameterSource`."""
        return self._source.read(fqn, start, end)

    def buffer(self, name: str) -> torch.Tensor | None:
        """See `ParameterSource`."""
        return self._source.buffer(name)

    def release(self, fqn: str) -> None:
        """See `ParameterSource`; one parameter more is done."""
        self._source.release(fqn)
        self._done += 1
        self._console.status(f"setting the weights: {self._done} of {self._total} parameters")
        self._mesh.post(Activity.IDLE)

    def close(self) -> None:
        """See `ParameterSource`."""
        self._source.close()


_REDUCED = {"shared": "through host-shared memory", "gloo": "over gloo", "nccl": "over NCCL"}
"""How a transport reduces gradients, in the words of the start's line."""


class TrainedModel:
    """Of one run; this rank's part of it. `engine` is None once the model is whole.

    Raises:
        ConfigError, DataError, LayoutError, StorageError: at construction, before anything large is allocated, for a model that
            cannot be built, divided or trained so, for data that it cannot be trained on, and for too little memory.
    """

    def __init__(self, run: Run, options: ZeroOptions) -> None:
        self._run = run
        built = build.prepare_model(run.given.model, run.config, run.data.tokenizer)
        self.model = built.model
        options = exempted(options, run.config, self.model)
        self.optimizer = options.optimizer
        self._kept = KeptAttributes(self.model)
        self._gradients_ready = False
        self._generations = 0
        self._averages: dict[str, Tensor] = {}
        """Of the weights, by name, once the model is whole."""
        tiers = open_tiers(run.mesh, options)
        try:
            engine = self._build(built, options, tiers)
        except BaseException:
            tiers.close()
            self._kept.put_back()
            raise
        self.engine: ZeroEngine | None = engine
        if options.stage == 3 or run.mesh.tensor.size * run.mesh.pipeline.size > 1:
            self._save_whole()
        if run.mesh.device.type == "cpu":
            settle_heap()
        self.stepper = Stepper(
            self.model, self.loss, run.mesh, options.precision.compute, engine, self.divided.pipeline
        )
        run.tell(self._size(engine), engine.update_device.note())

    def _build(self, built: BuiltModel, options: ZeroOptions, tiers: Tiers) -> ZeroEngine:
        """Look at the model and the data, leave on this rank its part of the model, and give that its values."""
        run, model = self._run, self.model
        config, mesh, given = run.config, run.mesh, run.given
        build.require_layout_fits(model, mesh)
        build.place_buffers(built, mesh, config.run.seed)
        run.tell(*share_weights(model, mesh))
        # Of the whole model, so that all ranks take the same batches, count alike and refuse alike.
        forward = ForwardInputs.of(model, users_loss=given.compute_loss is not None)
        self.flops, self.parameters = ModelFlops.of(model), parameters_of(model)
        run.start_times.end("model")
        run.console.status("trying the loss on a small copy")
        self.loss = make_loss(
            model,
            mode=config.model.loss,
            compute_loss=given.compute_loss,
            divided=mesh.tensor.size > 1,
            smoothing=config.run.label_smoothing,
            check_scalars=partial(require_free_names, whose="compute_loss"),
        )
        run.start_times.end("loss")
        self.divided = build.divide_model(model, config, mesh)
        dressed = prepare_model(model, config.model, options, tiers, built.compile)
        run.tell(*self.divided.notes, *dressed.notes)
        self.feeds = Feeds(
            data=run.data,
            plan=run.plan,
            shuffle=config.data.shuffle,
            seed=config.run.seed if config.data.seed is None else config.data.seed,
            eval_micro_size=config.batch.eval_micro_size or config.batch.micro_size,
            collate=given.collate,
            vocab_size=forward.vocab_size,
            causal=self.loss.causal,
            fields=forward.fields,
            kept=forward.named if config.data.remove_unused else None,
        )
        run.tell(*built.notes, *build.notes_on_modules(model), *self.loss.notes)
        run.tell(*check_first_batches(self.feeds, config, forward, self.loss, given))
        transport = choose_transport(options.transport, mesh.shard, mesh.device)
        length = config.data.sequence_length if run.data.loaded is not None else 0
        inputs = kept_input_bytes(model, dressed.away, config.batch.micro_size, length, options.precision.compute)
        cuts = self.divided.cuts
        run.tell(*require_memory(model, options, mesh, transport=transport, inputs=inputs, cuts=cuts))
        mesh.meet("start of the run")
        source = WatchedSource(built, run.console, mesh)
        engine = ZeroEngine.build(model, mesh, options, source, tiers, cuts)
        source.close()
        return engine

    def _size(self, engine: ZeroEngine) -> str:
        here = " on this rank" if self.divided.pipeline is not None else ""
        units = f"{len(engine.units)} unit{'s' if len(engine.units) > 1 else ''}{here}"
        sums = f", gradients reduced {_REDUCED[engine.reduction_name]}" if self._run.mesh.shard.size > 1 else ""
        return f"{type(self.model).__name__}: {human_count(engine.state.numel)} parameters in {units}{sums}"

    def require_engine(self) -> ZeroEngine:
        """The engine. Raises `PhaseError` once the model is whole."""
        if self.engine is None:
            raise PhaseError("the model is whole again, and no longer trained")
        return self.engine

    def generate(self, arguments: Mapping[str, Any], seed: int | None) -> Any:
        """See `Trainer.generate`."""
        run, mesh, divided = self._run, self._run.mesh, self.engine is not None
        staged = divided and mesh.pipeline.size > 1
        shared = staged or (divided and mesh.tensor.size > 1)
        check_arguments(self.model, arguments, staged=staged, shared=shared)
        self._generations += 1
        number = number_of(f"{run.config.run.seed}/{run.step}/{self._generations}/generate")
        sow: Callable[[], object] = partial(seed_all, number)
        if seed is not None:
            sow = partial(torch.manual_seed, seed)
        with run.guarded("trainer.generate()" if divided else ""):
            return generate(self.model, mesh, arguments, seed=sow, engine=self.engine, pipeline=self.divided.pipeline)

    def state_dict(self, *, ema: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See `Trainer.state_dict`."""
        self._require_average(ema)
        if self.engine is None and ema:
            own = self.model.named_parameters()
            yield from ((name, self._averages.get(name, parameter.detach())) for name, parameter in own)
            return
        if self.engine is None:
            yield from ((name, parameter.detach()) for name, parameter in self.model.named_parameters())
            return
        with self._run.mesh.call("trainer.state_dict()"):
            yield from (self.engine.averaged_state if ema else self.engine.state).parameters()

    def _require_average(self, wanted: bool) -> None:
        if wanted and not self._run.config.ema.decay:
            raise ConfigError(
                "there are no averaged weights: set ema.decay, such as 0.999, for the run that makes them"
            )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the block the model has its averaged weights; all ranks enter it."""
        if self.engine is not None:
            with self.engine.averaged():
                yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        """Let a whole model's weights and their averages change places."""
        for name, average in self._averages.items():
            parameter = self.model.get_parameter(name)
            self._averages[name], parameter.data = parameter.data, average

    def save(self, path: Path, *, ema: bool = False) -> None:
        """See `Trainer.save`."""
        run = self._run
        self._require_average(ema)
        with run.guarded("trainer.save()"), self.averaged() if ema and self.engine is None else nullcontext():
            state = None
            if self.engine is not None:
                state = self.engine.averaged_state if ema else self.engine.state
            failure = save_model(self.model, state, path, run.mesh, processing_class=run.processing_class)
        if failure:
            raise StorageError(failure)

    def _save_whole(self) -> None:
        """Have the own `save_pretrained` of the model, which callbacks call, write all of it as `save` does, and not what this rank
        has of it; until it is whole again."""
        own = getattr(self.model, "save_pretrained", None)
        if own is None:
            return

        def save_pretrained(save_directory: Any, *arguments: Any, state_dict: Any = None, **named: Any) -> Any:
            if state_dict is not None:
                return own(save_directory, *arguments, state_dict=state_dict, **named)
            return self.save(Path(save_directory).expanduser())

        vars(self.model)["save_pretrained"] = save_pretrained

    @contextmanager
    def gradients_to_read(self) -> Iterator[None]:
        """Inside the block, between the last backward of a step and its update, `gradient` answers."""
        self._gradients_ready = True
        try:
            yield
        finally:
            self._gradients_ready = False

    def gradient(self, name: str) -> Tensor | None:
        """See `Trainer.gradient`."""
        if self.engine is None or not self._gradients_ready:
            raise PhaseError("gradients are there between backward and update: read them in on_pre_optimizer_step")
        self.engine.state.nbytes_of(
            [name]
        )  # A name that no parameter has is refused before ranks wait for one another.
        with self._run.mesh.call(f"trainer.gradient({name!r})"):
            gradient = self.engine.state.gradient(name)
        return None if gradient is None else gradient.mul_(self.stepper.gradient_factor)

    @contextmanager
    def gathered(self, names: list[str]) -> Iterator[None]:
        """See `Trainer.gathered`."""
        if self.engine is None:
            yield
            return
        needed = self.engine.state.nbytes_of(names)
        shown = ", ".join(map(repr, names))
        with self._run.mesh.call(f"trainer.gathered([{shown[:100] + ' ...' if len(shown) > 100 else shown}])"):
            free = self._least_available()
            if free is not None and needed > free:
                raise StorageError(
                    f"parameters {', '.join(names[:4])} need {human_bytes(needed)} on every rank, and a rank has "
                    f"{human_bytes(free)} free"
                )
            with self.engine.gathered(names):
                yield

    def _least_available(self) -> int | None:
        """Free bytes of the rank that has least, when all ranks of a host take as much as it does; None: not known."""
        mesh = self._run.mesh
        if mesh.device.type == "cuda":
            mine = torch.cuda.mem_get_info(mesh.device)[0]
        else:
            mine = available_bytes() // max(1, mesh.environment.local_world_size)
        return -int(mesh.world.max_(torch.tensor([-mine]), "free memory")[0]) or None

    def make_whole(self) -> None:
        """End the engine and leave the model whole, if every rank has memory for it; else it stays partitioned."""
        engine, run = self.engine, self._run
        if engine is None:
            return
        if engine.options.offload.parameters.leaves(run.mesh.device):
            run.tell("parameters rest on another tier, and the model stays partitioned; use save()")
            return
        master = engine.options.precision.master
        state = engine.state
        nbytes = state.numel * master.itemsize
        free = self._least_available()
        averaged = engine.keeps_averages
        if free is not None and (3 if averaged else 2) * nbytes > free:
            run.tell("the model does not fit in one rank's memory and stays partitioned; use save()")
            return
        if averaged:
            self._averages = {name: tensor.clone() for name, tensor in engine.averaged_state.parameters()}
        state.make_whole(self.divided.restore)
        engine.close()
        self.engine = None
        self._kept.put_back()
        self.stepper = Stepper(self.model, self.loss, run.mesh, master, None)

    def close(self) -> None:
        """See `Trainer.close`."""
        self._kept.put_back()
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        self.divided.close()
