"""How long a step takes where its data takes long to collate: `OMP_NUM_THREADS=1 python scripts/benchmarks/bench_data.py`.

One rank computes 100 ms a microbatch, and each batch takes 50 ms to collate: it waits, as for a disk or a server, or it computes on
one core, as a tokenizer does. Both are a fixed amount of work, measured at the start. Prints for each number of workers the median
step, and its ratio to the median step of runs without collation, lowest to highest round. Takes about a minute and a half.
"""

import contextlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh import Callback, Trainer

ROUNDS, STEPS, WARM_UP = 3, 10, 3
COMPUTE, COLLATE, MICROBATCHES = 0.1, 0.05, 2


@dataclass(slots=True)
class Work:
    """A fixed amount of work: products of matrices, `[192, 192]` float32."""

    count: int
    matrix: Tensor = field(default_factory=lambda: torch.full((192, 192), 1 / 192))

    def __call__(self) -> None:
        value = self.matrix
        for _ in range(self.count):
            value = value @ self.matrix

    @classmethod
    def of(cls, seconds: float) -> "Work":
        """Return the work that takes `seconds` now."""
        count, best = 100, float("inf")
        for _ in range(100):  # the least of many, as others may compute at the same time
            began = time.perf_counter()
            cls(count)()
            best = min(best, time.perf_counter() - began)
        return cls(round(count * seconds / best))


class Computes(nn.Module):
    """Does its work, and has a parameter."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.work = work

    def forward(self, x: Tensor) -> Tensor:
        self.work()
        return self.linear(x)


class Steps(Callback):
    """Takes the times of steps."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        self.at.append(time.perf_counter())

    def median(self) -> float:
        times = self.at[WARM_UP:]
        return statistics.median(after - before for before, after in pairwise(times))


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """A sum, and how many numbers it is of."""
    made = model(batch["x"])
    return made.square().sum(), made.numel()


def seconds_per_step(work: Work, collating: Callable[[], None], workers: int) -> float:
    """The median step of a run."""

    def collate(samples: list[Tensor]) -> dict[str, Tensor]:
        collating()
        return {"x": torch.stack(samples)}

    steps = Steps()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        config: dict[str, Any] = {
            "data": {"workers": workers},
            "batch": {"global_size": 2 * MICROBATCHES, "micro_size": 2},
            "precision": {"compute": "float32"},
            "run": {"output_dir": folder, "name": "run", "max_steps": STEPS + WARM_UP},
            "checkpoint": {"every_steps": 0},
            "profile": {"step_figures": False},
        }
        dataset: Any = list(torch.randn(64, 64))
        with Trainer(Computes(work), config, dataset, data_collator=collate, compute_loss=loss_of, callbacks=[steps]) as trainer:
            trainer.fit()
    return steps.median()


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    compute, burn = Work.of(COMPUTE), Work.of(COLLATE)
    kinds: dict[str, Callable[[], None]] = {"none": lambda: None, "waits": lambda: time.sleep(COLLATE), "computes": burn}
    cases = [("none", 0), *((kind, workers) for kind in ("waits", "computes") for workers in (0, 1, 2))]
    found: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for _ in range(ROUNDS):
        for kind, workers in cases:
            found[kind, workers].append(seconds_per_step(compute, kinds[kind], workers))
    alone = found["none", 0]
    print(
        f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, {MICROBATCHES} microbatches a step, "
        f"compute {COMPUTE * 1e3:.0f} ms, collation {COLLATE * 1e3:.0f} ms a microbatch\n\n"
        "| collation | workers | step, ms | of compute alone |\n|---|---|---|---|"
    )
    for (kind, workers), times in found.items():
        ratios = sorted(time / base for time, base in zip(times, alone, strict=True))
        print(
            f"| {kind} | {workers} | {statistics.median(times) * 1e3:.1f} | "
            f"{statistics.median(ratios):.3f} ({ratios[0]:.3f}, {ratios[-1]:.3f}) |"
        )


if __name__ == "__main__":
    main()
