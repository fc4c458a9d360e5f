"""Samples shared out by speed (`batch.balance: speed`): a rank that needs longer for each takes fewer of every round."""

import operator
from collections.abc import Sequence
from statistics import median

from zeromesh.errors import some
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.data.loader import BatchLoader
from zeromesh.trainer.data.sampler import shares_by
from zeromesh.trainer.monitoring.rank_waits import slowest
from zeromesh.trainer.monitoring.step_stats import StepResult

_STEPS = 20  # that are measured between two changes
_MOST = 2  # times `batch.micro_size`, as activations take memory by the sample
_WORTH = 0.95  # of a round's time, which other shares have to save a part of


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
        """Count a step. Every so many steps, compare all ranks, which call it together, and share out anew where that saves a part
        of a round's time; returns a line about it."""
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
        return (
            f"of each round of {plan.round_size} samples, data ranks take {some(wanted, 16)} (batch.balance: speed): each takes "
            f"data rank {slow} {most / usual:.1f} times as long as the others"
        )

    def _shares(self, paces: Sequence[float]) -> tuple[int, ...]:
        plan = self._loader.feed.plan
        return shares_by(paces, plan.round_size, _MOST * plan.micro_size)
