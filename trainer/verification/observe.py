"""Watches a run of the engine and compares it, tensor by tensor, with what the plain process gave."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.flat.layout import ParameterSpec
from zeromesh.overrides import override
from zeromesh.pipeline.stages.stubs import Stub
from zeromesh.trainer.callbacks.callback import Callback
from zeromesh.trainer.losses.trial import InFloat64
from zeromesh.trainer.verification.compare import Bounds, Difference, Kind, differing_elements, norm_of
from zeromesh.trainer.verification.reference import PlainRun, first_tensor
from zeromesh.trainer.verification.shrink import SmallRun
from zeromesh.units.unit import AtRest, all_buckets
from zeromesh.zero.gather_order import PassMode
from zeromesh.zero.hooks import after_every_module

_MOST = 200
"""Differences of a kind that a rank keeps."""


class ModelsInFloat64(InFloat64):
    """Casts to fp32 become casts to float64 in the code of models, and stay what they are in zeromesh's own, whose mistakes they
    would hide.

    It is in force in backward too, where models compute again: `torch.autograd.backward` would suspend it, if it knew of it.
    """

    def __enter__(self) -> Any:
        self._undo = override(torch.autograd, "has_torch_function", lambda _: False)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> Any:
        self._undo()
        return super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch"):
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").startswith("zeromesh."):
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class Observer(Callback):
    """Compares losses, gradients, parameters and, with `modules`, what modules return and read."""

    def __init__(self, plain: PlainRun, bounds: Bounds, subject: SmallRun, *, modules: bool) -> None:
        self.differences: list[Difference] = []
        self.worst: dict[str, dict[str, float]] = {}
        """By kind and name: the largest difference of any step, relative."""
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.copies: dict[str, str] = {}
        """Digests of the parameters that forward read, by step, name and part."""
        self.compared = 0
        """Outputs of modules that were compared."""
        self._digest = hashlib.blake2b(digest_size=16)
        self._plain, self._bounds, self._subject, self._modules = plain, bounds, subject, modules
        self._order = {name: place for place, name in enumerate(plain.order)}
        self._places = {name: place for place, name in enumerate(plain.names)}
        self._first: dict[str, int] = {}
        self._trainer: Any = None
        self._names: dict[int, str] = {}
        self._specs: dict[str, ParameterSpec] = {}
        self._step = 0
        self.begun = False
        """Whether a step has begun."""
        self._numbers: dict[int, int] = {}
        self._seen: set[tuple[int, str, bool]] = set()
        self._read: set[str] = set()
        self._remove: Callable[[], None] = lambda: None

    @property
    def digest(self) -> str:
        """Of every bit of the losses, gradients and parameters of all steps."""
        return self._digest.hexdigest()

    @property
    def step(self) -> int:
        """The present step, from 1; 0 before the first."""
        return self._step + self.begun

    # What the run calls

    def on_train_begin(self, trainer: Any) -> None:
        """Learn the names of the modules that this rank has."""
        self._trainer = trainer
        for bucket in all_buckets(trainer.engine.units):
            for slot in bucket.layout.slots:
                self._specs |= dict.fromkeys((slot.spec.fqn, *slot.spec.aliases), slot.spec)
        for name, module in trainer.model.named_modules():
            # What holds modules of other stages returns what nobody uses.
            if not any(isinstance(each, Stub) for each in module.modules()):
                self._names[id(module)] = name
        if self._modules:
            self._remove = after_every_module(self._after).remove

    def on_step_begin(self, trainer: Any, step: int) -> None:
        """Forget the step before."""
        self._step, self.begun = step - 1, True
        self._numbers, self._seen, self._read = {}, set(), set()

    def on_pre_optimizer_step(self, trainer: Any, step: int) -> None:
        """Compare the losses of microbatches and all gradients."""
        plain = self._plain.steps[step - 1]
        for number, loss in enumerate(trainer.run.model.stepper.losses):
            block = self._block(number)
            if block < len(plain.sums):
                wanted = plain.sums[block]
                allowed = self._bounds.number(step - 1, wanted, "loss")
                self._compare_numbers("loss", "", float(loss), wanted, allowed, microbatch=number)
        if self._subject.config.optimizer.in_backward:
            return
        for name in self._plain.names:
            found = trainer.gradient(name) if name in self._plain.trained else None
            if found is not None:
                allowed = self._bounds.gradient(step - 1, name)
                self._compare("gradient", name, found, plain.gradients[name], allowed)

    def on_step_end(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Compare the numbers of the step, and all parameters."""
        plain, bounds = self._plain.steps[step - 1], self._bounds
        self.losses.append(float(metrics["loss"]))
        self.norms.append(float(metrics["grad_norm"] or 0.0))
        self._digest.update(repr((self.losses[-1], self.norms[-1])).encode())
        allowed = bounds.number(step - 1, plain.loss, "loss")
        self._compare_numbers("loss", "of the step", self.losses[-1], plain.loss, allowed)
        if not self._subject.config.optimizer.in_backward:
            allowed = bounds.number(step - 1, plain.norm, "norm")
            self._compare_numbers("norm", "", self.norms[-1], plain.norm, allowed)
        for kind, wanted in (("parameter", plain.parameters), ("average", plain.averages)):
            for name, found in trainer.state_dict(ema=kind == "average") if wanted else ():
                allowed = bounds.parameter(step - 1, name)
                self._compare("parameter" if kind == "parameter" else "average", name, found, wanted[name], allowed)

    def close(self) -> None:
        """Take the hook off."""
        self._remove()
        self._trainer = None

    # What the hook calls

    def _after(self, module: nn.Module, output: Any) -> None:
        """A module has run, in this rank's part of the model or anywhere else in this process."""
        name = self._names.get(id(module))
        if name is None or self._trainer is None or self._trainer.engine is None:
            return
        mode, position = self._trainer.engine.present
        if mode not in (PassMode.FORWARD, PassMode.BACKWARD) or position is None:
            return
        number = self._numbers.setdefault(position.first_sample, len(self._numbers))
        again = mode is PassMode.BACKWARD
        if (number, name, again) in self._seen:
            return
        self._seen.add((number, name, again))
        if not number and not again:
            self._look_at_weights(name, module)
        wanted = self._plain.outputs.get((self._step, self._block(number), name))
        found = first_tensor(output)
        if wanted is None or found is None:
            return
        if self._trainer.mesh.pipeline.size > 1 and bool(found.isnan().all()):
            return  # It follows from what stands for a module of another stage, and is used by nothing.
        with torch.no_grad():
            share = self._share_of(wanted, found, name, module)
            if share is not None:
                self.compared += 1
                kind: Kind = "recomputed" if again else "output"
                allowed = self._bounds.outputs(share)
                self._compare(kind, name, found, share, allowed, microbatch=number)

    def _look_at_weights(self, name: str, module: nn.Module) -> None:
        """Compare the parameters of a module that has just run with those that the plain process had then."""
        for leaf, parameter in module._parameters.items():
            full = f"{name}.{leaf}" if name else leaf
            spec = self._specs.get(full)
            if parameter is None or spec is None or isinstance(parameter, AtRest) or full in self._read:
                continue
            self._read.add(full)
            with torch.no_grad():
                value = parameter.detach()
                wanted = _local(self._plain.steps[self._step].read[full], spec)
                if wanted.shape == value.shape:
                    before = max(0, self._step - 1)
                    self._compare("weight", full, value, wanted, self._bounds.parameter(before, full, read=True))
                part = "" if spec.region.is_whole else str(self._trainer.mesh.tensor.index)
                key = f"{self._step}|{spec.name}|{part}"
                self.copies[key] = hashlib.blake2b(_bytes(value), digest_size=8).hexdigest()

    def _share_of(self, whole: Tensor, found: Tensor, name: str, module: nn.Module) -> Tensor | None:
        """What this rank has of a module's output; None where that is not known."""
        if found.shape == whole.shape:
            return whole
        if found.dim() != whole.dim():
            return None
        dims = [dim for dim in range(whole.dim()) if found.shape[dim] != whole.shape[dim]]
        if len(dims) != 1:
            return None
        (dim,), tensor = dims, self._trainer.mesh.tensor
        spec = self._specs.get(f"{name}.weight")
        if spec is not None and not spec.region.is_whole and dim == whole.dim() - 1:
            features = spec.region.dims[1 if getattr(module, "transposed", False) else 0]
            if sum(each.length for each in features) == found.shape[dim]:
                return torch.cat([whole.narrow(dim, each.start, each.length) for each in features], dim)
        size = found.shape[dim]
        return whole.narrow(dim, tensor.index * size, size) if size * tensor.size == whole.shape[dim] else None

    # Comparison

    def _block(self, number: int) -> int:
        """Which microbatch of the global batch is this rank's number `number`."""
        return number * self._subject.data_ranks + int(self._trainer.mesh.data_index)

    def _compare(
        self, kind: Kind, name: str, found: Tensor, wanted: Tensor, allowed: float, *, microbatch: int | None = None
    ) -> None:
        if kind in ("gradient", "parameter"):
            self._digest.update(_bytes(found))
        if found.shape != wanted.shape:
            self._note(
                kind, name, float("nan"), 0.0, microbatch, f"it is {list(found.shape)}, not {list(wanted.shape)}"
            )
            return
        apart, scale = norm_of(found.double() - wanted.double()), norm_of(wanted)
        relative = apart / scale if scale else apart
        # Of what is zero but for rounding a part of it says nothing.
        if allowed and scale > allowed:
            worst = self.worst.setdefault(kind, {})
            worst[name] = max(worst.get(name, 0.0), relative)
        if not apart <= allowed:
            some = differing_elements(found, wanted, allowed) if kind in ("gradient", "parameter", "weight") else ""
            self._note(kind, name, relative, allowed / scale if scale else allowed, microbatch, some)

    def _compare_numbers(
        self, kind: Kind, name: str, found: float, wanted: float, allowed: float, *, microbatch: int | None = None
    ) -> None:
        apart, scale = abs(found - wanted), abs(wanted) or 1.0
        worst = self.worst.setdefault(kind, {})
        worst[name] = max(worst.get(name, 0.0), apart / scale)
        if not apart <= allowed:
            detail = f"{found:.12g}, not {wanted:.12g}"
            self._note(kind, name, apart / scale, allowed / scale, microbatch, detail)

    def _note(
        self, kind: Kind, name: str, distance: float, allowed: float, microbatch: int | None, detail: str = ""
    ) -> None:
        """Keep a difference, of the first step in which there is one of its kind."""
        known = [each for each in self.differences if each.kind == kind]
        if self._first.setdefault(kind, self._step) != self._step or len(known) >= _MOST:
            return
        places = self._order if kind in ("output", "recomputed") else self._places
        self.differences.append(
            Difference(
                kind=kind,
                name=name,
                step=self._step + 1,
                microbatch=None if microbatch is None else microbatch + 1,
                ranks=(int(self._trainer.mesh.rank),),
                distance=distance,
                allowed=allowed,
                place=places.get(name, 0),
                detail=detail,
            )
        )


def _local(whole: Tensor, spec: ParameterSpec) -> Tensor:
    """The part of a whole parameter that a rank has."""
    region = spec.region
    if region.is_whole or region.shape != tuple(whole.shape):
        return whole
    local = whole.new_empty(region.local_shape)
    for here, there in region.boxes():
        local[here] = whole[there]
    return local


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
