"""Step time and peak memory of zeromesh beside FSDP2, DDP and DeepSpeed, on one workload, in one run.

    python scripts/bench_step.py                                bf16 and fp32, stage 3, FSDP2, DeepSpeed 3, no communication
    python scripts/bench_step.py --dtype bf16 --stages 1 2 3    other stages; DeepSpeed runs at the same ones
    python scripts/bench_step.py --transport gloo               zeromesh without host-shared memory

Every round runs every system once, in turn, in fresh processes, so that what else the machine does meets all of them. The table has
medians over rounds, with the lowest and the highest; ratios are medians of zeromesh over medians of the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench.launch import Run, RunError, installed, run_system
from bench.workload import Workload

_MIB = 2**20


class Results:
    """Runs by system, and what they come to."""

    def __init__(self) -> None:
        self.runs: dict[str, list[Run]] = {}

    def add(self, run: Run) -> None:
        """Keep a run."""
        self.runs.setdefault(run.system, []).append(run)

    def step_ms(self, system: str) -> list[float]:
        """Median step of each round, in milliseconds."""
        return [1e3 * statistics.median(run.step_seconds) for run in self.runs[system]]

    def cpu_ms(self, system: str) -> list[float]:
        """Median processor time of a step in each round, in milliseconds."""
        return [1e3 * statistics.median(run.cpu_seconds) for run in self.runs[system]]

    def peak_mib(self, system: str) -> list[float]:
        """Peak of each round, in MiB."""
        return [run.peak_bytes / _MIB for run in self.runs[system]]

    def table(self) -> str:
        """A markdown table, with ratios of each zeromesh system to every other."""
        ours = [system for system in self.runs if system.startswith("zeromesh-")]
        columns = ["step ms (min, max)", "processor ms", "peak MiB (min, max)", "last loss"]
        head = ["system", *columns, *(f"{mine}: time, processor, memory" for mine in ours)]
        lines = [_row(head), _row(["---"] * len(head))]
        for system, runs in self.runs.items():
            cells = [system, _spread(self.step_ms(system)), f"{statistics.median(self.cpu_ms(system)):.0f}"]
            cells += [_spread(self.peak_mib(system)), f"{runs[-1].losses[-1]:.4f}"]
            cells += [self._ratios(mine, system) if mine != system else "" for mine in ours]
            lines.append(_row(cells))
        return "\n".join(lines)

    def _ratios(self, mine: str, other: str) -> str:
        pairs = (self.step_ms, self.cpu_ms, self.peak_mib)
        ratios = (statistics.median(measure(mine)) / statistics.median(measure(other)) for measure in pairs)
        return ", ".join(f"{ratio:.2f}" for ratio in ratios)

    def record(self) -> dict[str, dict[str, list[float]]]:
        """For a JSON file."""
        return {
            system: {
                "step_ms": self.step_ms(system),
                "processor_ms": self.cpu_ms(system),
                "peak_mib": self.peak_mib(system),
                "losses": list(self.runs[system][-1].losses),
            }
            for system in self.runs
        }


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}, {max(values):.0f})"


def measure(workload: Workload, systems: Sequence[str], rounds: int) -> Results:
    """Run every system once per round; one that fails is said and left out of the rest."""
    results, broken = Results(), set()
    for turn in range(rounds):
        for system in systems:
            if system in broken:
                continue
            print(f"round {turn + 1} of {rounds}: {system}", file=sys.stderr, flush=True)
            try:
                results.add(run_system(system, workload))
            except RunError as error:
                broken.add(system)
                print(error, file=sys.stderr, flush=True)
    return results


def draw(results: Results, title: str, path: Path) -> None:
    """Bars of time and of memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    names = list(results.runs)
    colours = ["tab:blue" if name.startswith("zeromesh-") else "lightgrey" for name in names]
    for axis, values, label in zip(
        axes, (results.step_ms, results.peak_mib), ("step, ms", "peak above imports, MiB"), strict=True
    ):
        axis.barh(names, [statistics.median(values(name)) for name in names], color=colours)
        axis.invert_yaxis()
        axis.set_xlabel(label)
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def chosen_systems(stages: Sequence[int], named: Sequence[str] | None) -> list[str]:
    """The systems of a run, without those that are not installed, which is said."""
    default = [f"zeromesh-{stage}" for stage in stages] + ["fsdp2", *(f"deepspeed-{s}" for s in stages if s), "local"]
    systems = list(named or default)
    for system in [each for each in systems if not installed(each)]:
        print(f"{system} is not installed and is left out: pip install 'zeromesh[bench]'", file=sys.stderr)
        systems.remove(system)
    return systems


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    parser.add_argument("--stages", nargs="+", type=int, default=[3])
    parser.add_argument("--systems", nargs="+", help="zeromesh-N, local, ddp, fsdp2, fsdp2-keep, deepspeed-N")
    parser.add_argument("--transport", default="auto", choices=["auto", "shared", "gloo", "nccl"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a run")
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    systems = chosen_systems(options.stages, options.systems)
    base = Workload(
        layers=options.layers,
        transport=options.transport,
        device=options.device,
        timed=options.steps,
        checkpointing=options.activation_checkpointing,
    )
    for dtype in options.dtype:
        workload = replace(base, dtype=dtype)
        results = measure(workload, systems, options.rounds)
        print(
            f"\n{workload}; transport {options.transport}; {options.rounds} rounds\n\n{results.table()}\n", flush=True
        )
        stem = options.out / f"step-{dtype}-{options.transport}"
        stem.with_suffix(".json").write_text(
            json.dumps({"workload": str(workload), "systems": results.record()}, indent=1)
        )
        draw(results, str(workload), stem.with_suffix(".png"))


if __name__ == "__main__":
    main()
