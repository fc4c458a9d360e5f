"""Records a run in the user's layout, and compares it with the plain process. Each rank compares local values: outputs of its
modules, whole or its share of them, gradients and parameters, so that a difference on some ranks is attributed to these ranks."""

import copy
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zeromesh.errors import PhaseError, ZeromeshError, summary
from zeromesh.flat.layout import part_of
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import tensor_bytes
from zeromesh.parallelize import Divided
from zeromesh.pipeline.stages.build import Stub
from zeromesh.trainer.callbacks.callback import Callback
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.models.small_copy import changed_dims, deviation, whole_passes_in_float64
from zeromesh.trainer.verification.certificate import Difference, PassRecord
from zeromesh.trainer.verification.reference import PlainRun, tensors_of
from zeromesh.trainer.verification.shrink import SmallRun, exact
from zeromesh.units.unit import all_buckets
from zeromesh.zero.hooks import watch_outputs

_ROUNDING = 4.0
"""The allowed error of the user's layout, as a multiple of the error of a plain process in the same precision."""
_EPSILONS = 8.0  # The tolerance in units of the compute dtype's epsilon.
EXACT = 1e-9  # The relative tolerance in float64, where another order of summation changes values by about 1e-14.


class Recorder(Callback):
    """A callback that records the losses, gradient norms and last parameters of a run, and sets no hooks on modules."""

    def __init__(self, *, stop_after: int = 0, saves: bool = False) -> None:
        """`stop_after` is the step after which the run ends, after a checkpoint if `saves`; 0: the last step."""
        self._last, self._saves = stop_after, saves
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.parameters: dict[str, Tensor] = {}
        self.average: dict[str, Tensor] = {}
        self.began = False
        """True once training has begun; an earlier error is a refusal of the configuration, and no finding."""
        self.cleanup = ExitStack()  # Removes the patches of this process and the hooks of the model.

    def on_train_begin(self, trainer: Any) -> None:
        self.began = True
        if trainer.config.precision.compute == "float64":
            self.cleanup.enter_context(whole_passes_in_float64())

    def on_step_end(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        self.losses.append(float(metrics["loss"]))
        norm = metrics.get("grad_norm")
        self.norms.append(float("nan") if norm is None else float(norm))
        if step == self._last:
            trainer.request(save=self._saves, stop=True)

    def on_train_end(self, trainer: Any) -> None:
        self.cleanup.close()
        self.parameters = {name: each.cpu().clone() for name, each in trainer.state_dict()}
        if trainer.config.ema.decay:
            self.average = {name: each.cpu().clone() for name, each in trainer.state_dict(ema=True)}


class Observer(Recorder):
    """A callback that compares every step with the plain process, by hooks on modules. `differences` are of this rank alone."""

    def __init__(self, plain: PlainRun) -> None:
        super().__init__()
        self.plain = plain
        self.differences: list[Difference] = []
        self.sizes: dict[str, dict[str, float]] = {}  # The largest difference of any step, by kind and name.
        self.compared = 0
        self.step = 1
        self._outputs: dict[str, list[list[Tensor]]] = {}
        self._sums: list[tuple[float, int]] = []

    def on_train_begin(self, trainer: Any) -> None:
        super().on_train_begin(trainer)
        self._compare_masters(trainer, self.plain.initial, "initial", 0)
        # Modules that this rank computes with all their submodules, of which none is in another pipeline stage.
        named = [(name, module) for name, module in trainer.model.named_modules() if name]
        whole = [pair for pair in named if not any(isinstance(each, Stub) for each in pair[1].modules())]
        self.cleanup.callback(watch_outputs(whole, self._keep_outputs))
        loss = trainer.run.model.stepper.loss
        compute_loss = loss.compute

        def compute(*arguments: Any) -> Any:
            computed = compute_loss(*arguments)
            self._sums.append((float(computed[0].detach()), int(computed[2])))
            return computed

        loss.compute = compute

    def on_step_begin(self, trainer: Any, step: int) -> None:
        self.step = step
        self._outputs, self._sums = {}, []

    def on_pre_optimizer_step(self, trainer: Any, step: int) -> None:
        gradients = self.plain.steps[step - 1].gradients
        norm = float(torch.stack([each.norm() for each in gradients.values()]).norm()) if gradients else 0.0
        for name, plain in gradients.items():
            try:
                gradient = trainer.gradient(name)
            except PhaseError:
                return  # The gradient was consumed inside backward.
            self._note("gradient", name, float("inf") if gradient is None else deviation(gradient.cpu(), plain, norm))

    def on_optimizer_step(self, trainer: Any, step: int) -> None:
        self._compare_microbatches(trainer)
        self._compare_masters(trainer, self.plain.steps[step - 1].parameters, "parameter", step)

    def on_step_end(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        super().on_step_end(trainer, step, metrics)
        plain, norm = self.plain.steps[step - 1], self.norms[-1]
        self._note("loss", "", relative(self.losses[-1], plain.loss))
        if norm == norm:
            self._note("norm", "", relative(norm, plain.norm))

    def on_train_end(self, trainer: Any) -> None:
        super().on_train_end(trainer)
        for name, average in self.plain.average.items():
            self._note("average", name, deviation(self.average[name], average, 1e-12))

    def _note(self, kind: str, name: str, size: float, microbatch: int = -1) -> None:
        sizes = self.sizes.setdefault("parameter" if kind == "initial" else kind, {})
        sizes[name] = max(sizes.get(name, 0.0), size)
        if not size <= EXACT:
            step, plain = 0 if kind == "initial" else self.step, self.plain
            place = (plain.forward_order if kind == "output" else plain.backward_order).get(name, 0)
            values: dict[str, Any] = {"step": step, "size": size, "place": place, "microbatch": microbatch}
            self.differences.append(Difference(kind=kind, name=name, **values))

    def _keep_outputs(self, name: str, output: Any) -> None:
        # Modules that backward recomputes are not recorded again.
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._outputs.setdefault(name, []).append(tensors_of(output))

    def _compare_masters(self, trainer: Any, plain: Mapping[str, Tensor], kind: str, step: int) -> None:
        """Compare the master weights that this rank updates: its shards and its copies of replicated ones."""
        rate = trainer.config.optimizer.lr * step
        for bucket in all_buckets(trainer.engine.units):
            master = bucket.master.load(torch.device("cpu"))
            for piece in bucket.layout.pieces(bucket.interval):
                name, part = piece.spec.name, piece.in_parameter
                shard = master[piece.in_shard.start : piece.in_shard.end]
                plain_shard = part_of(plain[name], piece.spec.region).reshape(-1)[part.start : part.end]
                self._note(kind, name, deviation(shard, plain_shard, rate * part.length**0.5))

    def _compare_microbatches(self, trainer: Any) -> None:
        """Compare the sums of losses and the outputs of modules of this rank's microbatches."""
        indices, plain = rank_microbatches(trainer.config, trainer.mesh), self.plain.steps[self.step - 1]
        # A wrong loss is attributed to the last module, since it may have correct outputs of all modules.
        head = next(reversed(self.plain.forward_order), "")
        totals = torch.tensor([total for total, _ in self._sums], dtype=torch.float64)
        trainer.mesh.context.all_reduce(totals, "sums of shares of sequences")
        for total, (_, count), index in zip(totals.tolist(), self._sums, indices, strict=False):
            plain_total, plain_count = plain.sums[index]
            self._note("loss", head, float("inf") if count != plain_count else relative(total, plain_total), index)
        for name, calls in self._outputs.items():
            expected = len(plain.outputs[indices[0]].get(name, ())) if indices else 0
            if not expected or len(calls) != expected * trainer.run.plan.accumulation:
                continue
            for call, outputs in enumerate(calls[: expected * len(indices)]):
                index = indices[call // expected]
                wholes = plain.outputs[index][name][call % expected]
                for output, whole in zip(outputs, wholes, strict=True) if len(outputs) == len(wholes) else ():
                    if (plain_output := _local_part(trainer, name, whole, output)) is not None:
                        self.compared += 1
                        size = deviation(output.cpu(), plain_output, 1e-9 * plain_output.numel() ** 0.5)
                        self._note("output", name, size, index)


@dataclass(kw_only=True)
class Verification:
    make: Callable[..., Any]  # Creates a trainer from the arguments of `zeromesh.Trainer`.
    mesh: Mesh
    config: TrainerConfig
    inputs: UserInputs
    subject: SmallRun
    differences: list[Difference] = field(default_factory=list)
    passes: dict[str, PassRecord] = field(default_factory=dict)
    checks: dict[str, str] = field(default_factory=dict)
    plain: PlainRun = field(init=False)  # The plain process's run in float64.
    recorder: Recorder = field(init=False)  # The records of the run in the user's precision.
    failed: Exception | None = None  # The exception that ended a run in the user's layout.

    def run(self, config: TrainerConfig, recorder: Recorder, subject: SmallRun | None = None) -> None:
        """Train a copy of the subject's model, by default the small run's, by `config`, without output."""
        subject = subject or self.subject
        given = {name: getattr(self.inputs, name) for name in ("compute_loss", "lr_scheduler")}
        given |= {"data_collator": subject.collate, "callbacks": [recorder]}
        with recorder.cleanup, redirect_stdout(io.StringIO()):
            trainer = self.make(copy.deepcopy(subject.model), config, subject.samples, **given)
            try:
                with trainer:
                    trainer.fit()
            except Exception as error:  # Any error that ends the run is a finding, except refusals.
                if recorder.began or not (isinstance(error, ZeromeshError) and isinstance(error, ValueError)):
                    self.failed = error
                    step = len(recorder.losses) + 1
                    what = f"the run ends in step {step}, and rank {self.mesh.rank} says: {summary(error)}"
                    self.differences += getattr(recorder, "differences", [])
                    self.differences.append(Difference(kind="error", step=step, name="", size=0.0, detail=what))
                raise

    def exact_pass(self) -> None:
        """Train in float64, once with every output and gradient recorded, and once as the user trains, without hooks."""
        config = exact(self.subject.config)
        plain = self.plain = PlainRun(self.subject, config, self.inputs).train(rank_microbatches(config, self.mesh))
        observer, recorder = Observer(plain), Recorder()
        self.run(config, observer)
        self.run(config, recorder)
        self.differences += observer.differences
        self.differences += differences_of(recorder, plain, run="while nobody watched")
        sizes = {f"{kind}s": observer.sizes.get(kind, {}) for kind in ("gradient", "parameter")}
        self.passes["exact"] = _record(observer, plain, EXACT, **sizes, outputs=observer.compared)

    def user_precision_pass(self) -> None:
        """Train in the user's precision. The error against float64 may be 4 times that of a plain process in this precision."""
        config = self.subject.config
        wide = exact(config).model_copy(update={"optimizer": config.optimizer})
        true, plain = (PlainRun(self.subject, each, self.inputs).train() for each in (wide, config))
        recorder = self.recorder = Recorder()
        self.run(config, recorder)
        compute = config.precision.compute
        least = _EPSILONS * torch.finfo(getattr(torch, compute)).eps
        bounds = dict.fromkeys(("loss", "norm", "parameter"), max(EXACT, least))
        for kind, _, _, size in relative_errors(plain, true):
            bounds[kind] = max(bounds[kind], _ROUNDING * size + least)
        parameters = {}
        for kind, step, name, size in relative_errors(recorder, true):
            if kind == "parameter":
                parameters[name] = size
            if not size <= bounds[kind]:
                what = f"the {kind}{f' of {name}' if name else ''} in {compute} (bound {bounds[kind]:.2g})"
                found = Difference(kind="rounding", step=step, name=name, size=size, run="own precision", detail=what)
                self.differences.append(found)
        self.passes[compute] = _record(recorder, plain, max(bounds.values()), parameters=parameters)


def _record(run: Recorder, plain: PlainRun, bound: float, **compared: Any) -> PassRecord:
    compared |= {"norms": run.norms, "plain_norms": plain.norms, "bound": bound}
    return PassRecord(losses=run.losses, plain_losses=plain.losses, **compared)


def relative_errors(run: Recorder | PlainRun, plain: PlainRun, first: int = 0) -> Iterator[tuple[str, int, str, float]]:
    """Yield kind, step, name and relative difference of losses, norms and last parameters of a run from step `first` + 1 on."""
    last, rate = len(plain.steps), plain.config.optimizer.lr
    for kind, values, plain_values in (("loss", run.losses, plain.losses), ("norm", run.norms, plain.norms)):
        for step, (value, plain_value) in enumerate(zip(values, plain_values[first:], strict=True), start=first + 1):
            if kind == "loss" or value == value:
                yield kind, step, "", relative(value, plain_value)
    for name, tensor in plain.parameters.items():
        yield "parameter", last, name, deviation(run.parameters[name], tensor, rate * last * tensor.numel() ** 0.5)


def differences_of(recorder: Recorder, plain: PlainRun, *, run: str, first: int = 0) -> Iterator[Difference]:
    """Yield the differences between the plain process and a run without hooks, as `relative_errors` does."""
    for kind, step, name, size in relative_errors(recorder, plain, first):
        if not size <= EXACT:
            yield Difference(kind=kind, step=step, name=name, size=size, run=run, detail=run)


def rank_microbatches(config: TrainerConfig, mesh: Mesh) -> range:
    """Return the indices of this rank's microbatches in a global batch, without padding ones."""
    return range(mesh.data_index, -(-config.batch.global_size // config.batch.micro_size), mesh.data.size)


def bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor_bytes(tensor).numpy())


def relative(value: float, plain_value: float) -> float:
    """Return the relative difference of two numbers; infinite where one is not finite."""
    size = 0.0 if value == plain_value else abs(value - plain_value) / max(abs(plain_value), 1e-300)
    return size if size == size else float("inf")


def _local_part(trainer: Any, name: str, whole: Tensor, local: Tensor) -> Tensor | None:
    """Return the part of the output `whole` that this rank's output `local` must equal: all of it, a part of the sequence, or of
    the features of a divided layer; None if unknown, and for a module of another stage, whose output is NaN."""
    divided: Divided = trainer.run.model.divided
    if divided.pipeline is not None and bool(local.isnan().all()):
        return None
    if (context := divided.context) is not None and whole.dim() > 2 and whole.shape[1] % context.multiple == 0:
        whole = context.share(whole, 1)
    if local.shape == whole.shape:
        return whole
    dims = changed_dims(whole, local)
    if local.dim() != whole.dim() or len(dims) != 1 or divided.tensor is None:
        return None
    dim = dims[0]
    shares, parts = divided.tensor.shares, divided.cuts.parts
    if shares is not None and dim == 1 and whole.shape[1] == shares.exchange.size * local.shape[1]:
        return whole.chunk(shares.exchange.size, dim=1)[shares.exchange.index]
    for leaf in ("weight", "bias", "base_layer.weight"):
        part = parts.get(f"{name}.{leaf}")
        if part is None or dim != whole.dim() - 1:
            continue
        for size, here, intervals in zip(part.region.shape, part.region.local_shape, part.region.dims, strict=True):
            if (size, here) == (whole.shape[-1], local.shape[-1]) and size != here:
                return whole.index_select(dim, torch.cat([torch.arange(each.start, each.end) for each in intervals]))
    return None
