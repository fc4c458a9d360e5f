"""Peak memory beside other systems, which all update after backward: zeromesh in its default configuration too."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.launch import installed, run_system
from bench.workload import Dtype, Workload

LIMITS: dict[tuple[str, Dtype], float] = {
    ("fsdp2", "bf16"): 0.65,
    ("fsdp2", "fp32"): 0.55,
    ("deepspeed-3", "bf16"): 0.5,
    ("deepspeed-3", "fp32"): 0.42,
}
"""The most that zeromesh may take of what a system takes."""
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """Peaks above imports of the rank that needed most, in bytes."""

    system: str
    dtype: Dtype
    ours: int
    theirs: int

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.ours / self.theirs

    @property
    def problems(self) -> tuple[str, ...]:
        """The ratio in words, if it exceeds its limit; else empty."""
        limit = LIMITS[self.system, self.dtype]
        return (f"{self.ratio:.2f} of {self.system} in {self.dtype}, and {limit} are allowed",) * (self.ratio > limit)


def measure(base: Workload, dtype: Dtype) -> list[Beside]:
    """Every system that is installed, on the same workload. Raises RunError where a run fails."""
    workload = replace(base, dtype=dtype, in_backward=False)
    systems = [system for system, kind in LIMITS if kind == dtype and installed(system)]
    ours = run_system("zeromesh-3", workload).peak_bytes if systems else 0
    return [Beside(system=system, dtype=dtype, ours=ours, theirs=run_system(system, workload).peak_bytes) for system in systems]


def table(found: Sequence[Beside]) -> str:
    """Markdown, in MiB."""
    rows = ["| system | dtype | zeromesh | the system | ratio |", "|---|---|---|---|---|"]
    for each in found:
        cells = (each.system, each.dtype, f"{each.ours / _MEBIBYTE:.0f}", f"{each.theirs / _MEBIBYTE:.0f}")
        rows.append(f"| {' | '.join(cells)} | {each.ratio:.2f} |")
    return "\n".join(rows)
