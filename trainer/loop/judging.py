"""Judging a step before its update: is it the data, or a machine that computes wrongly?

    the sums of a step have come     not finite, or far above the median of accepted steps: the step is suspicious
    it is computed again             its microbatches by the next data rank, and then by their own
    a microbatch has other bits      a third data rank votes; the odd one out is named, and ends
    all bits are equal               it is the data, which is passed over or accepted, or the run ends

A microbatch is bit for bit the same on every data rank, as its random numbers belong to its samples. What is compared are the loss
and digests of the gradients before any sum. An audit compares one microbatch of each data rank, computed before a usual step."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from zeromesh.errors import CollectiveError, ConfigError, MachineError, ranks_text
from zeromesh.mesh.mesh_shape import MODEL_AXES
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.trainer.config.sections.outputs import RecoverySection
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.full_state import persistent_buffers

Computed = tuple[Tensor, dict[int, float]]
"""This rank's part of the sums of a step, and the losses that it counts, by microbatch; see `Stepper`."""
_Value = tuple[tuple[str, ...], tuple[int | None, ...]]
"""The losses of a microbatch and digests of its gradients, None for a usual step, on the ranks that compute it together."""


@dataclass(kw_only=True)
class Judge:
    """Judges the steps of an engine; all ranks make the same calls. `accepted` returns losses and gradient norms of the latest
    steps with an update. Raises `ConfigError` for what cannot be judged."""

    settings: RecoverySection
    mesh: Mesh
    engine: ZeroEngine
    streams: bool  # The data are a stream, which cannot be read again.
    accepted: Callable[[], Sequence[tuple[float, float]]]
    _again: Callable[[int, slice], Computed] = field(init=False)
    """Computes microbatches of a data rank again; all ranks call it."""
    _found: dict[tuple[int, int], list[tuple[int, _Value]]] = field(init=False)
    """The parts that data ranks have computed in this step, by the data rank and the number of a microbatch."""

    def __post_init__(self) -> None:
        where = "recovery.audit_steps" if self.settings.audit_steps else "recovery.spike_factor"
        if buffers := persistent_buffers(self.engine.model):
            raise ConfigError(f"a forward that is not counted may change {min(buffers)}; leave it out", where=where)
        inexact = is_accelerator(self.mesh.device) and not torch.are_deterministic_algorithms_enabled()
        lacking = {
            "of a stream": self.streams,
            "with one data rank": self.mesh.data.size == 1,
            # Gradients of a rank's experts are of the tokens of all ranks, which compute other microbatches then.
            "with experts on other data ranks (parallel.expert)": self.mesh.shape.swaps_tokens,
            "without run.deterministic": inexact,
        }
        why = next((reason for reason, holds in lacking.items() if holds), None)
        self._compares = why is None
        if self.settings.audit_steps and why is not None:
            raise ConfigError(f"a microbatch {why} has no equal bits elsewhere to compare; leave it out", where=where)

    def begin(self, step: int, microbatches: int, again: Callable[[int, slice], Computed]) -> None:
        """Begin a step. If an audit is due, another data rank computes a microbatch, before all are computed."""
        every = self.settings.audit_steps
        number = step // max(1, every) % microbatches
        self._again, self._found, self._numbers = again, defaultdict(list), range(microbatches)
        self._audited = range(number, number + 1) if every and (step + 1) % every == 0 else range(0)
        if self._audited:
            self._repeat(1, self._audited)
            self.engine.optimizer_step.gradients.digests = Counter()

    def judge(self, sums: Tensor, losses: Mapping[int, float], count: int | None) -> tuple[Tensor, dict[str, Any]]:
        """Judge a step by its `sums` over all ranks, float64 `[5]`, and the losses of this rank; `count` as in `Stepper`. Returns
        the sums to go on with, and for a suspicious step its `cause` and the `act`. Raises `MachineError` on ranks that compute
        wrongly, and `CollectiveError` on those that can go on without them."""
        cause, own = self._suspicion(sums, count), self.mesh.data.index
        if self._audited:
            self._collect(own, self._audited, losses)
            if not cause and any(_odd_ones(self._found)):
                cause = "an audit found other bits of the same microbatch"
        if not cause:
            return sums, {}
        act = {"cause": cause, "act": "computed again"}
        if self._compares:
            self._collect(own, self._numbers, losses)
            sums = self._examine(sums, act)
            cause = self._suspicion(sums, count)
        if cause:
            act["act"] = self.settings.on_spike if self.settings.spike_factor else "on_nonfinite"
        return sums, act

    def _suspicion(self, sums: Tensor, count: int | None) -> str:
        loss, targets, _, squares, _ = sums.tolist()
        norm = math.sqrt(squares) / self.engine.loss_scale / (targets if count is None else 1)
        factor, accepted = self.settings.spike_factor, self.accepted()
        for number, (name, value) in enumerate({"loss": loss / targets, "gradient norm": norm}.items()):
            if not math.isfinite(value):  # Overflows are usual under a loss scale.
                return f"the {name} is {value}" if self.engine.options.precision.loss_scale is None else ""
            usual = median(each[number] for each in accepted) if accepted else 0.0
            if len(accepted) == self.settings.spike_window and 0 < factor * usual < value:
                return f"the {name} {value:.4g} is above {factor:g} times {usual:.4g}, a median of steps"
        return ""

    def _examine(self, sums: Tensor, act: dict[str, Any]) -> Tensor:
        """Compute a step again on other ranks and on its own, and return its sums then; raises an error for wrong machines."""
        self._repeat(1, self._numbers)
        again = self._repeat(0, self._numbers)
        odd, unclear = _odd_ones(self._found)
        if unclear and self.mesh.data.size > 2:
            self._repeat(2, self._numbers)
            odd, unclear = _odd_ones(self._found)
        if len(odd) == 1 and not unclear:
            ranks = self.mesh.shape.groups(*MODEL_AXES)[odd.pop()]
            text = f"{ranks_text(ranks)} computes wrongly: {act['cause']}, and others agree on other bits of the same microbatches"
            if self.mesh.rank not in ranks:
                raise CollectiveError(text)
            error = MachineError(text)
            error.left_out = not is_accelerator(self.mesh.device)  # A new process would have the same device.
            raise error
        if odd or unclear:
            differ = "the bits of its microbatches differ between ranks, of which no two outvote one"
            what = "a machine computes wrongly, or none reproducibly. Three data ranks on machines of one kind find out which"
            raise MachineError(f"{act['cause']}, and {differ}: {what}")
        same = repr(again.tolist()) == repr(sums.tolist())
        act["bits"] = "are equal on all ranks" if same else "differ from the first ones, and are equal on all ranks now"
        return again

    def _repeat(self, offset: int, numbers: range) -> Tensor:
        """Compute these microbatches of the data rank `offset` before this one, and return the sums over all ranks."""
        source = (self.mesh.data.index - offset) % self.mesh.data.size
        self.engine.optimizer_step.gradients.digests = Counter()
        sums, losses = self._again(source, slice(numbers.start, numbers.stop))
        self._collect(source, numbers, losses, numbers.start)
        return self.mesh.world.all_reduce(sums, "sums of a step that is computed again")

    def _collect(self, source: int, numbers: range, losses: Mapping[int, float], first: int = 0) -> None:
        """Exchange what each rank has computed of microbatches of a data rank, which it has counted from `first` on."""
        gradients = self.engine.optimizer_step.gradients
        digests, gradients.digests = gradients.digests, None
        # The text of a loss has all of its bits but those of a NaN.
        own = [(str(losses.get(each - first)), None if digests is None else digests[each - first]) for each in numbers]
        rows = self.mesh.world.gather_json([source, own], "what was computed again")
        for data_rank, ranks in enumerate(self.mesh.shape.groups(*MODEL_AXES)):
            for at, number in enumerate(numbers):
                value: Any = tuple(zip(*(rows[rank][1][at] for rank in ranks), strict=True))
                self._found[rows[ranks[0]][0], number].append((data_rank, value))


def _odd_ones(votes: Mapping[Any, Sequence[tuple[int, _Value]]]) -> tuple[set[int], bool]:
    """Return the data ranks with another value of a microbatch than several agree on, and if a microbatch has no such value."""
    odd, unclear = set[int](), False
    for found in votes.values():
        holders = defaultdict[_Value, set[int]](set)
        for rank, value in found:
            holders[value].add(rank)
        agreed = [value for value, ranks in holders.items() if value[1][0] is not None and len(ranks) > 1]
        unclear |= len(agreed) != 1
        for losses, digests in agreed[:1]:
            odd |= {rank for rank, (own, kept) in found if own != losses or (kept[0] is not None and kept != digests)}
    return odd, unclear
