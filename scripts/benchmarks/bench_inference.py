"""Inference: memory and step time with weights on each tier, and how fast a generator starts from a checkpoint.

    memory      16 prompts on one rank: peaks above imports, and a decode step beside reading the weights once: `memory`
    start       from the call of `Generator` to ready beside a plain reader of the same files, on one and two ranks: `start`

`python scripts/benchmarks/bench_inference.py --folder /a/disk` runs both with a Llama of 1.06 billion parameters in bfloat16, which
it writes there first (2 GiB; about 10 GiB of memory). `--out` gets JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.launch import RunError, run_ranks
from bench.processes import python_path
from bench.report import MEBIBYTE, Spread
from bench.workload import Workload

_Failures = list[str]
_NONE: dict[str, Any] = {"zero": {"stage": 0}}
_SHARDED: dict[str, Any] = {"zero": {"stage": 3}}
_HOST: dict[str, Any] = {"offload": {"parameters": "host"}}
_FILE: dict[str, Any] = {"offload": {"parameters": "file"}}


def main() -> int:
    """Run what the command line asks for; the exit code is 1 where something failed."""
    options = _arguments()
    options.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"time": time.strftime("%F %T")}
    failures: _Failures = []
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="zeromesh-bench-inference-") as name:
        _python("model", {"folder": name, "layers": 1 if options.checkpoint else options.layers})
        if options.checkpoint is not None:
            Path(name, "large").rename(Path(name, "small"))
            Path(name, "large").symlink_to(options.checkpoint.resolve())
        for part in options.parts or _PARTS:
            found[part] = _PARTS[part](Path(name), options, failures)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*_PARTS, []], help="what to measure; all if nothing is named")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where the model and swap files lie")
    parser.add_argument("--layers", type=int, default=18, help="of the model; 18 are 1.06 billion parameters")
    parser.add_argument("--checkpoint", type=Path, default=None, help="a run's checkpoint to start from in place of the model")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each row")
    parser.add_argument("--steps", type=int, default=12, help="decode steps that are timed")
    parser.add_argument("--only", default="", help="measure rows whose name contains this")
    parser.add_argument("--out", type=Path, default=None, help="a file for JSON")
    return parser.parse_args()


def _python(what: str, arguments: dict[str, Any]) -> None:
    """Run the worker's module by itself, outside of any launch."""
    command = [sys.executable, "-m", "bench.inference", what, json.dumps(arguments)]
    subprocess.run(command, env={"PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"}, check=True)


def _ranks(name: str, what: str, ranks: int, arguments: dict[str, Any], failures: _Failures, folder: Path) -> list[Any]:
    began = time.perf_counter()
    try:
        return run_ranks("bench.inference", Workload(ranks=ranks), [what, json.dumps({"folder": str(folder), **arguments})])
    except RunError as error:
        failures.append(f"{name}: {error}")
        return []
    finally:
        print(f"{what}, {name} ({time.perf_counter() - began:.0f} s)", file=sys.stderr, flush=True)


def _memory(folder: Path, options: argparse.Namespace, failures: _Failures) -> dict[str, Any]:
    swap = {"parameters": "file", "directory": str(folder / "swap")}
    rows = {"in memory": _NONE, "host": _HOST, "file": _FILE, "file, copied into `offload.directory`": {"offload": swap}}
    print(
        f"\n16 prompts on one rank; medians of {options.steps} steps, after each of which the weights are read (lowest, highest)\n"
    )
    print("| parameters | start, peak MiB | generating, peak MiB | s a step | s to read the weights once | step / read |")
    print("|---|---|---|---|---|---|", flush=True)
    found: dict[str, Any] = {}
    for name, sections in rows.items():
        if options.only not in name:
            continue
        arguments = {"sections": sections, "steps": options.steps}
        for row in _ranks(name, "memory", 1, arguments, failures, folder):
            found[name] = row
            steps, reads = Spread.of(row["step_seconds"]), Spread.of(row["read_seconds"])
            ratio = Spread.of(step / read for step, read in zip(row["step_seconds"], row["read_seconds"], strict=True))
            print(
                f"| {name} | {row['start_bytes'] / MEBIBYTE:.0f} | {row['peak_bytes'] / MEBIBYTE:.0f} | {steps.text(2)} "
                f"| {reads.text(2)} | {ratio.text(2)} |",
                flush=True,
            )
    return found


def _start(folder: Path, options: argparse.Namespace, failures: _Failures) -> dict[str, Any]:
    swap = {"parameters": "file", "directory": str(folder / "swap")}
    table: dict[str, tuple[int, dict[str, Any]]] = {
        "in memory, 1 rank": (1, _NONE),
        "in memory, 2 ranks, whole on each": (2, _NONE),
        "in memory, 2 ranks, sharded": (2, _SHARDED),
        "in memory, 2 ranks, tensor": (2, {"parallel": {"tensor": 2}}),
        "host, 1 rank": (1, _HOST),
        "host, 2 ranks": (2, _HOST),
        "file, 1 rank": (1, _FILE),
        "file, 2 ranks": (2, _FILE),
        "file, 1 rank, copied into `offload.directory`": (1, {"offload": swap}),
    }
    print(f"\nfrom the call of Generator to ready; the rank that took longest, medians of {options.rounds} starts\n")
    print("| parameters | files | part, MiB | peak, MiB | start, s | of it reading, s | plain reading, s | plain / reading |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    found: dict[str, Any] = {}
    for name, (ranks, sections) in table.items():
        for cold in (False, True):
            if options.only not in name:
                continue
            arguments = {"sections": sections, "rounds": options.rounds, "cold": cold}
            state = "on the disk" if cold else "in the page cache"
            if rows := _ranks(f"{name}, {state}", "start", ranks, arguments, failures, folder):
                found[f"{name}, {state}"] = rows
                print(f"| {name} | {state} | {_start_row(rows)} |", flush=True)
    return found


def _start_row(ranks: list[Any]) -> str:
    def slowest(key: str) -> list[float]:
        return [max(times) for times in zip(*(rank[key] for rank in ranks), strict=True)]

    ratio = Spread.of(plain / own for plain, own in zip(slowest("plain"), slowest("reading"), strict=True))
    sizes = " | ".join(f"{max(rank[key] for rank in ranks) / MEBIBYTE:.0f}" for key in ("part_bytes", "peak_bytes"))
    times = " | ".join(f"{statistics.median(slowest(key)):.2f}" for key in ("seconds", "reading", "plain"))
    return f"{sizes} | {times} | {ratio.text(2)}"


_PARTS: dict[str, Callable[[Path, argparse.Namespace, _Failures], dict[str, Any]]] = {"memory": _memory, "start": _start}


if __name__ == "__main__":
    raise SystemExit(main())
