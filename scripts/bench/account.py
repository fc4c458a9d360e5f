"""The memory of a rank: what layout and activations predict, beside what the ledger counted and the system saw.

    peak = states that stay + the most that come and go + the most of activations + constant

The two maxima need not fall together. They add up all the same: freed activations leave their memory to the C library's heap, which
keeps it for the next ones (docs/decisions/0006-allocator.md), so it is not free for states that come when activations have gone.
The constant is all that is neither: libraries, holes of the heap, stacks. It is measured on one configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.workload import Dtype

TOLERANCE = 0.1
"""The largest difference that is allowed, as a part of the system's figure."""
MOST_OF_STATES = 1.15
"""The largest growth of processes that is allowed, as a part of the states that more layers add."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One configuration of the workload."""

    dtype: Dtype
    transport: str
    stage: int
    layers: int
    width: int
    recomputed: bool = False
    """True if blocks are recomputed in backward."""

    def __str__(self) -> str:
        recomputed = ", blocks recomputed" if self.recomputed else ""
        return f"{self.dtype}, {self.transport}, stage {self.stage}, {self.layers} layers, width x{self.width}{recomputed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Bytes of a rank, without the constant."""

    staying: Mapping[str, int]
    """States that stay from step to step, by purpose."""
    passing: int
    """The most that states which come and go can take."""
    activations: int
    """The most that activations take."""

    @property
    def states(self) -> int:
        """The highest sum of states."""
        return sum(self.staying.values()) + self.passing

    @property
    def total(self) -> int:
        """States and activations."""
        return self.states + self.activations


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Bytes of the rank that needed most."""

    ledger: Mapping[str, int]
    """By purpose, after the last step."""
    ledger_peak: int
    """The highest sum of the ledger."""
    peak: int
    """The system's figure, above what was there after imports."""

    @property
    def passing(self) -> int:
        """The most that came and went, by the ledger."""
        return self.ledger_peak - sum(self.ledger.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One configuration: predicted and measured."""

    case: Case
    predicted: Prediction
    measured: Measured
    constant: int

    @property
    def total(self) -> int:
        """Predicted, with the constant."""
        return self.predicted.total + self.constant

    @property
    def difference(self) -> float:
        """The difference of the prediction from what the system saw, as a part of that."""
        return self.total / self.measured.peak - 1

    @property
    def problems(self) -> tuple[str, ...]:
        """The deviations from the prediction."""
        found = []
        if dict(self.predicted.staying) != dict(self.measured.ledger):
            found.append("the ledger is not the formula")
        if self.measured.passing > self.predicted.passing:
            found.append("more came and went than the formula allows")
        return (*found, *_apart(self.difference))


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """The cost of more layers: the same case twice, first with few. The constant is in both, and falls out."""

    few: Line
    many: Line

    @property
    def states(self) -> int:
        """Bytes by which states grow."""
        return self.many.predicted.states - self.few.predicted.states

    @property
    def activations(self) -> int:
        """Bytes by which activations grow."""
        return self.many.predicted.activations - self.few.predicted.activations

    @property
    def peak(self) -> int:
        """Bytes by which the system's figure grows."""
        return self.many.measured.peak - self.few.measured.peak

    @property
    def difference(self) -> float:
        """The difference of the prediction from what the system saw, as a part of that."""
        return (self.states + self.activations) / self.peak - 1

    @property
    def problems(self) -> tuple[str, ...]:
        """The deviations from the prediction."""
        over = self.peak > MOST_OF_STATES * self.states
        return (*_apart(self.difference), *((f"more than {MOST_OF_STATES} of the states",) if over else ()))


def _apart(difference: float) -> tuple[str, ...]:
    return (f"more than {TOLERANCE:.0%} from the system's figure",) if abs(difference) > TOLERANCE else ()
