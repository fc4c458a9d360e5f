"""A plain loop over `zeromesh.shard` beside `zeromesh.Trainer`, at stage 3, in turn: `python scripts/benchmarks/bench_shard.py`.

Both compute the model's own loss. Prints a table for a small and a middle model, with clipping: medians of rounds (lowest,
highest), and what part of the loop's time the Trainer takes.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench import report
from bench.launch import Run, run_system
from bench.workload import Workload

_ROUNDS = 3
_SYSTEMS = ("zeromesh-3", "shard-3")


def main() -> None:
    """Measure and print."""
    middle = Workload(dtype="fp32", loss="native", clip=1.0)
    small = replace(middle, hidden=256, intermediate=704, layers=4, heads=4, sequence=64, timed=24)
    for workload in (small, middle):
        rounds: dict[str, list[Run]] = {system: [] for system in _SYSTEMS}
        for number in range(_ROUNDS):
            for system in _SYSTEMS[:: 1 if number % 2 else -1]:
                rounds[system].append(run_system(system, workload))
        print(f"\n{workload}\n\n{report.table(rounds)}", flush=True)


if __name__ == "__main__":
    main()
