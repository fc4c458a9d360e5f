"""A step's logged figures: its result, users' values, utilization, memory, slow ranks, which `balance: speed` gives less."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from zeromesh.errors import ConfigError, some
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Ledger, peak_bytes
from zeromesh.offload.accelerator import device_memory, is_accelerator
from zeromesh.optim.optimizer_step import StepOutcome
from zeromesh.telemetry.step_recorder import Figures
from zeromesh.trainer.data.loader import BatchLoader
from zeromesh.trainer.data.sampler import shares_by
from zeromesh.trainer.formatting import human_count, table_lines
from zeromesh.trainer.models.flops import ModelFlops, peak_flops
from zeromesh.trainer.monitoring.expert_load import relative_loads
from zeromesh.trainer.monitoring.rank_records import slowest
from zeromesh.trainer.monitoring.step_metrics import STEP_FIELDS


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """A step over all ranks, with the `outcome` of its update. `loss` is the mean over targets, `tokens` counts inputs."""

    loss: float
    tokens: int
    unit: str = "tokens"  # The unit that `tokens` counts: samples, if the model has no `input_ids`.
    outcome: StepOutcome
    seconds: float
    idle: float = 0.0  # Seconds in which this rank has waited for others.
    communication: Figures = field(default_factory=dict)  # The figures of this rank's traffic, by axis and collective.
    phases: Mapping[str, float] = field(default_factory=dict)  # This rank's seconds of the step, by phase.
    bubble: Mapping[str, float] = field(default_factory=dict)
    """The pipeline bubble as a fraction of the step, `predicted` and `measured`."""
    stop_signal: int = 0  # The signal by which some rank was asked to stop after this step; 0: none.
    judged: Mapping[str, Any] = field(default_factory=dict)  # What `Judge` has done about a suspicious step.
    loads: Mapping[str, Tensor] = field(default_factory=dict)  # The tokens that chose each expert, by module.


class StepStats:
    """Makes the lines of the steps of one run; all ranks create it together. `samples` is the size of a global batch."""

    def __init__(self, flops: ModelFlops | None, mesh: Mesh, dtype: torch.dtype, samples: int, ledger: Ledger) -> None:
        self._flops, self._samples, self._ledger, self._peak = flops, samples, ledger, 0.0
        self.notes: list[str] = []  # Lines about the peak throughput that utilization refers to, if any.
        if flops is not None:
            own_peak, how = peak_flops(mesh.device, dtype)
            self._peak = float(sum(row[0] for row in mesh.world.gather_integers([int(own_peak)])))
            most = f"all ranks can do {human_count(self._peak)} a second, {how}"
            self.notes.append(f"model FLOPs: {human_count(flops.of_step(1, 0))} a token without attention; {most}")

    def line(self, result: StepResult, *, step: int, lr: float, tokens: int, peak: int) -> dict[str, Any]:
        """Return the line of a step in `metrics.jsonl`; `tokens` since the start of training, `peak` bytes of the rank with the
        most. `grad_norm` is before clipping, `mfu` model FLOPs utilization; `phases` and `memory` are this rank's."""
        outcome = result.outcome
        line: dict[str, Any] = {"step": step, "loss": result.loss, "grad_norm": outcome.grad_norm, "lr": lr}
        line |= {"tokens": tokens, "tokens_per_second": result.tokens / result.seconds}
        line |= {"step_seconds": result.seconds, "peak_memory_bytes": peak}
        if result.unit != "tokens":
            line["unit"] = result.unit
        if outcome.skipped:
            line |= {"skipped": True, "cause": outcome.cause}
        if outcome.loss_scale != 1.0:
            line["loss_scale"] = outcome.loss_scale
        line |= {f"{tier.value}_wait_seconds": round(seconds, 4) for tier, seconds in outcome.waited.items()}
        if result.bubble:
            line["bubble"] = {name: round(part, 4) for name, part in result.bubble.items()}
        if result.loads:
            line["expert_load"] = relative_loads(result.loads)
        if result.communication:
            line["communication"] = result.communication
        if self._flops is not None and result.tokens:
            needed = self._flops.of_step(result.tokens, result.tokens / self._samples)
            line["mfu"] = round(needed / (result.seconds * self._peak), 5)
        if result.phases:
            line["phases"] = {phase: round(seconds, 6) for phase, seconds in result.phases.items()}
        line["memory"] = {
            tier.value: {purpose.name.lower(): nbytes for purpose, nbytes in purposes.items()}
            for tier, purposes in self._ledger.take_highest().items()
        }
        return line


class UserScalars:
    """The means since the last logged line of the values of losses, `trainer.log` and callbacks, over all ranks."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor | float]] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        """Add numbers, or one-element tensors, which are read at the next line. Other values and `STEP_FIELDS` are left out."""
        for name, value in values.items():
            number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
            if number and name not in STEP_FIELDS:
                self._values.setdefault(name, []).append(value.detach() if isinstance(value, Tensor) else float(value))

    def take(self, mesh: Mesh) -> dict[str, float]:
        """Return the means, and reset them; all ranks call it, and their names may differ."""
        sums = {name: [sum(map(float, values)), len(values)] for name, values in self._values.items()}
        self._values = {}
        if not int(mesh.world.all_reduce_max(torch.tensor([len(sums)]), "values that are logged")[0]):
            return {}
        rows = mesh.world.gather_json(sums, "values that are logged")
        means = {}
        for name in sorted({name for row in rows for name in row}):
            total, count = map(sum, zip(*(row[name] for row in rows if name in row), strict=True))
            means[name] = total / count
        return means


def require_free_names(values: Mapping[str, Any], whose: str) -> None:
    """Raise `ConfigError` for names of fields of a step's line."""
    if reserved := sorted(values.keys() & STEP_FIELDS):
        raise ConfigError(f"{whose}: {', '.join(reserved)} is a field of every step's line; choose another name")


def rank_figures(mesh: Mesh, busy: float = 0.0) -> tuple[int, tuple[float, ...]]:
    """Return the largest peak memory of all ranks, in bytes, and each rank's `busy` seconds; all ranks call it."""
    peak = device_memory(mesh.device).peak if is_accelerator(mesh.device) else peak_bytes()
    rows = mesh.world.gather_integers([peak, int(1e6 * busy)])
    return max(rows)[0], tuple([row[1] / 1e6 for row in rows])


def traffic_table(figures: Figures, *, steps: int = 1) -> list[str]:
    """Return a table of `figures`, which are sums over `steps` steps: calls, MiB and milliseconds per step."""
    rows = []
    for axis, collectives in figures.items():
        for name, row in collectives.items():
            calls, nbytes, seconds = (row[key] / steps for key in ("calls", "bytes", "seconds"))
            rows.append((axis, name, f"{calls:,.1f}", f"{nbytes / 2**20:,.2f}", f"{1e3 * seconds:,.2f}"))
    numbers = ("calls", "MiB", "ms")
    return table_lines(("axis", "collective", *numbers), rows, numbers)


_WINDOW = 10  # The least number of steps that are compared together.
_FACTOR = 1.5  # times the other ranks' median, from which a rank counts as slow
_LEAST_DELAY = 0.05  # The least delay per step, in seconds, that is reported.
_SILENT_STEPS = 100  # The least number of steps between two lines about the same rank.


@dataclass(slots=True)
class Stragglers:
    """Compares the ranks' seconds at work in steps after the first, without waits for one another and work between steps."""

    _busy_seconds: list[float] = field(default_factory=list)
    """This rank's seconds at work in each step since the last comparison."""
    _last_note: dict[int, int] = field(default_factory=dict)
    _begun: bool = False

    def add(self, seconds: float, waited: float) -> None:
        """Add a step of `seconds`, `waited` of which were spent waiting for other ranks."""
        if self._begun:
            self._busy_seconds.append(max(0.0, seconds - waited))
        self._begun = True

    @property
    def busy(self) -> float:
        """The mean seconds per step that this rank was at work since the last comparison."""
        return sum(self._busy_seconds) / max(1, len(self._busy_seconds))

    def compare(self, step: int, busy: Sequence[float]) -> str | None:
        """Compare `busy` of all ranks every `_WINDOW` steps; returns a line about a slow rank, unless it has had one recently."""
        steps = len(self._busy_seconds)
        if steps < _WINDOW:
            return None
        self._busy_seconds = []
        slow, most, usual = slowest(dict(enumerate(busy)))
        silent = step - self._last_note.get(slow, -_SILENT_STEPS) < _SILENT_STEPS
        if silent or most < max(_FACTOR * usual, usual + _LEAST_DELAY):
            return None
        self._last_note[slow] = step
        what = f"rank {slow} is slow: over {steps} steps it was at work for {1000 * most:.0f} ms a step"
        return f"{what}, the others for {1000 * usual:.0f} ms, and waited for it"


_STEPS = 20  # that are measured, between two changes of shares, or before waits are known
_USUAL_WAITS, _LEAST_PATIENCE = 20, 5.0  # times the longest usual wait, and seconds
MOST_SHARE = 2  # times `batch.micro_size`, as activations take memory by the sample
_WORTH = 0.95  # of a round's time, which other shares have to save a part of


class Patience:
    """Finds after which seconds without progress a rank at work is late (`parallel.timeout_seconds: auto`)."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._waits = mesh, list[float]()

    def after(self, result: StepResult, *, syncs: bool) -> str | None:
        """Count a step, after which replicas are alike if it `syncs`; all ranks call it. Returns a line once the value is known."""
        watch = self._mesh.watch
        if math.isfinite(watch.step_seconds):
            return None
        # On a device, a collective waits for what was launched before it.
        self._waits.append(result.seconds if is_accelerator(self._mesh.device) else result.idle)
        if len(self._waits) <= _STEPS or not syncs:  # Steps between syncs show nothing of the wait at one.
            return None
        longest = max(self._mesh.world.gather_json(max(self._waits[1:]), "usual waits"))
        watch.step_seconds = seconds = max(_LEAST_PATIENCE, _USUAL_WAITS * longest)
        return f"a rank at work is late after {seconds:.1f} seconds without progress (parallel.timeout_seconds: auto)"


class Balance:
    """Measures the data ranks' own work, without waits for one another, and shares out by their `paces`, in seconds a sample."""

    def __init__(self, loader: BatchLoader, mesh: Mesh, paces: Sequence[float]) -> None:
        """Go on with rank 0's `paces`, or evenly where they are of another number of data ranks; all ranks call it."""
        self._loader, self._mesh, self._busy = loader, mesh, list[float]()
        known = mesh.world.gather_json([*paces], "paces of data ranks")[0]
        self.paces: Sequence[float] = known if len(known) == loader.feed.plan.data_ranks else ()
        if self.paces:
            loader.share_out(self._shares(self.paces))

    def after(self, result: StepResult) -> str | None:
        """Count a step. Now and then all ranks, which call it together, share out anew to save time; returns a line then."""
        self._busy.append(max(0.0, result.seconds - result.idle))
        if len(self._busy) <= _STEPS:
            return None
        own, self._busy = median(self._busy[1:]), []  # In the first, workers start and memory is taken.
        plan = self._loader.feed.plan
        shares = plan.shares or (plan.micro_size,) * plan.data_ranks
        rows = self._mesh.world.gather_integers([self._mesh.data_index, max(1, int(1e6 * own))])
        # The ranks of a tensor or context group wait for the slowest of them.
        busy = [max(row[1] for row in rows if row[0] == rank) / 1e6 for rank in range(plan.data_ranks)]
        paces = [*map(operator.truediv, busy, shares)]
        if self.paces:  # Half of a new measurement counts, so that one that is wrong does little.
            paces = [(old + new) / 2 for old, new in zip(self.paces, paces, strict=True)]
        wanted = self._shares(paces)
        now, then = (max(map(operator.mul, each, paces)) for each in (shares, wanted))
        if then > _WORTH * now:
            return None
        self.paces = paces
        self._loader.share_out(wanted)
        slow, most, usual = slowest(dict(enumerate(paces)))
        taken = f"of each round of {plan.round_size} samples, data ranks take {some(wanted, 16)} (batch.balance: speed)"
        return f"{taken}: each takes data rank {slow} {most / usual:.1f} times as long as the others"

    def _shares(self, paces: Sequence[float]) -> tuple[int, ...]:
        plan = self._loader.feed.plan
        return shares_by(paces, plan.round_size, MOST_SHARE * plan.micro_size)
