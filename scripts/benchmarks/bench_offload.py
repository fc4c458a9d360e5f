"""Offload: bandwidth of the file tier, step time and memory with each tier beside DeepSpeed, a large model in little memory.

    bandwidth   raw, through the stream of updates, and with computing that takes as long: `--parts bandwidth`
    steps       zeromesh with nothing, the optimizer, everything on files; DeepSpeed with everything on NVMe (needs libaio-dev);
                rounds of all in turn, each in fresh processes: `--parts steps`
    large       a Llama of 1.06 billion parameters on one CPU rank, everything on files: `--parts large` (18 GiB of disk, minutes)

`python scripts/benchmarks/bench_offload.py --folder /a/disk` runs all of them. `--out` gets JSON, and a picture of one step.
Progress goes to the standard error.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench import report, timeline
from bench.launch import Run, RunError, installed, run_system
from bench.options import list_of
from bench.streaming import Bench
from bench.workload import TORCH_DTYPES, Workload

_PARTS = ("bandwidth", "steps", "large")
_ELEMENTS = 32 << 20
"""The elements of each of four tensors in the measurement of bandwidth: 0.5 GiB together."""
_OURS, _THEIRS = "zeromesh-3", "deepspeed-3"


def main() -> int:
    """Run what the command line asks for; the exit code is 1 where something failed."""
    options = _arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"machine": platform.machine(), "torch": torch.__version__, "time": time.strftime("%F %T")}
    failures: list[str] = []
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="zeromesh-bench-offload-") as folder:
        if "bandwidth" in options.parts:
            found["bandwidth"] = _bandwidth(Path(folder), options.rounds)
        if "steps" in options.parts:
            found["steps"] = _steps(folder, options, failures)
        if "large" in options.parts:
            found["large"] = _large(folder, options.large_steps, failures)
    (options.out / "offload.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=list_of(_PARTS), default=list(_PARTS), metavar="A,B,...")
    parser.add_argument("--dtype", type=list_of(tuple(TORCH_DTYPES)), default=["bf16"], metavar="bf16,fp32")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where swap files lie")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each run")
    parser.add_argument("--large-steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/bench_offload"))
    return parser.parse_args()


def _bandwidth(folder: Path, rounds: int) -> dict[str, float]:
    torch.set_num_threads(1)
    bench = Bench(folder, _ELEMENTS)
    try:
        found = bench.measure(rounds)
    finally:
        bench.close()
    longer = max(found.compute_seconds, found.io_seconds)
    print(
        f"file tier, read and written at once: raw {found.raw / 1e9:.2f} GB/s; the stream without computing "
        f"{found.stream / found.raw:.2f} of it, with AdamW {found.update / found.raw:.2f} of it\n"
        f"computing {found.compute_seconds:.2f} s, reading and writing {found.io_seconds:.2f} s, both {found.busy_seconds:.2f} s: "
        f"{found.busy_seconds / longer:.2f} of the longer one\n",
        flush=True,
    )
    return asdict(found)


def _workloads(base: Workload) -> Iterator[tuple[str, str, Workload]]:
    """Name, system and workload of everything that is compared."""
    yield "zeromesh, nothing offloaded", _OURS, base
    yield "zeromesh, optimizer on host", _OURS, replace(base, offload="host")
    yield "zeromesh, optimizer on file", _OURS, replace(base, offload="optimizer")
    everything = replace(base, offload="file")
    yield "zeromesh, all on file", _OURS, everything
    yield "zeromesh, all on file, clipped", _OURS, replace(everything, clip=1.0)
    if installed(_THEIRS):
        yield "DeepSpeed, all on NVMe", _THEIRS, everything
        yield "DeepSpeed, all on NVMe, clipped", _THEIRS, replace(everything, clip=1.0)


def _steps(folder: str, options: argparse.Namespace, failures: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in options.dtype:
        base = Workload(dtype=dtype, folder=folder, timed=options.steps, timeline=True)
        rows = list(_workloads(base))
        rounds: dict[str, list[Run]] = {name: [] for name, _, _ in rows}
        for number in range(options.rounds):
            for name, system, workload in rows[number % len(rows) :] + rows[: number % len(rows)]:
                began = time.perf_counter()
                try:
                    rounds[name].append(run_system(system, workload))
                except RunError as error:
                    failures.append(f"{name}: {error}")
                print(f"round {number + 1}, {name} ({time.perf_counter() - began:.0f} s)", file=sys.stderr, flush=True)
        print(f"{base}; medians of {options.rounds} rounds of {base.timed} steps (lowest, highest)\n")
        if measured := {name: runs for name, runs in rounds.items() if runs}:
            print(_table(measured), flush=True)
        found[dtype] = {name: [_record(run) for run in runs] for name, runs in rounds.items()}
        drawn = {name: runs[-1].ranks[0]["notes"].get("events") for name, runs in rounds.items() if runs}
        timeline.draw(options.out / f"offload-{dtype}.png", {name: events for name, events in drawn.items() if events})
    return found


def _table(rounds: dict[str, list[Run]]) -> str:
    """Markdown: medians, and ratios to the last system with everything on its disk."""
    reference = next((name for name in rounds if name.startswith("DeepSpeed")), next(iter(rounds)))
    lines = [f"| | ms a step | MiB a rank | time / {reference} | memory / {reference} |", "|---|---|---|---|---|"]
    for name, runs in rounds.items():
        times, memory = _spread(runs, "ms"), _spread(runs, "MiB")
        other = rounds[reference]
        ratios = [
            report.Spread.of(_figure(run, what) / _figure(theirs, what) for run, theirs in zip(runs, other, strict=False))
            for what in ("ms", "MiB")
        ]
        lines.append(f"| {name} | {times.text(0)} | {memory.text(0)} | {ratios[0].text(2)} | {ratios[1].text(2)} |")
    return "\n".join(lines) + "\n"


def _spread(runs: list[Run], what: str) -> report.Spread:
    return report.Spread.of(_figure(run, what) for run in runs)


def _figure(run: Run, what: str) -> float:
    """Median milliseconds of a run's steps, or its MiB."""
    if what == "MiB":
        return run.peak_bytes / report.MEBIBYTE
    return 1e3 * report.Spread.of(run.step_seconds).median


def _record(run: Run) -> dict[str, Any]:
    """Return the part of a run that is kept: everything but the events of its timeline."""
    events = run.ranks[0]["notes"].get("events", [])
    return {
        "step_seconds": run.step_seconds,
        "cpu_seconds": run.cpu_seconds,
        "peak_bytes": run.peak_bytes,
        "losses": run.losses,
        "recorded_step": timeline.totals(events) if events else {},
    }


def _large(folder: str, steps: int, failures: list[str]) -> dict[str, Any]:
    """In a process of its own, whose highest resident memory the system tells."""
    command = [sys.executable, "-m", "bench.large", folder, str(steps)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    if done.returncode:
        failures.append(f"large: {done.stderr[-4000:]}")
        return {}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"Llama of {found['parameters'] / 1e9:.2f} billion parameters, bf16, AdamW, clipped at 1, 1 x 512 tokens, one CPU rank: "
        f"{found['swap_bytes'] / 2**30:.1f} GiB on file, VmHWM {found['peak_bytes'] / 2**30:.2f} GiB, "
        f"{found['step_seconds']:.0f} s a step, of these {found['file_wait_seconds']:.0f} s waiting for files; "
        f"losses {', '.join(f'{loss:.3f}' for loss in found['losses'])}\n",
        flush=True,
    )
    return found


if __name__ == "__main__":
    sys.exit(main())
