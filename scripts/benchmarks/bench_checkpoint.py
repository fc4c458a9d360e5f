"""Saving and loading beside plain sequential I/O and other systems: `python scripts/benchmarks/bench_checkpoint.py`.

Each system runs in fresh processes and saves and loads the states of one model several times, in turn with plain sequential writes
and reads of as many bytes by the same processes, past the page cache. Printed are medians over rounds (lowest, highest), the
ratio to plain I/O of the same round, and how far memory rose. `--out` gets the same as JSON. Progress goes to the standard error.

Then zeromesh trains the default workload of bench_step.py (bf16, stage 3), in turn with an asynchronous checkpoint every 20 steps
and without: how much longer 100 steps take, and whether each checkpoint was there before the next was due.

    --systems   zeromesh (sharded), zeromesh-tensor (tensor-parallel), deepspeed (stage 3, save_checkpoint), fsdp2
                (torch.distributed.checkpoint)
    --training  rounds of 100 steps with and without checkpoints; 0: none
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.launch import RunError, installed, run_ranks, run_system
from bench.options import list_of
from bench.workload import Workload

_SYSTEMS = ("zeromesh", "zeromesh-tensor", "deepspeed", "fsdp2")
_MEBIBYTE = 1 << 20
_BYTES_PER_PARAMETER = 12
_STEPS, _EVERY = 100, 20


def main() -> int:
    """Run what the command line asks for; the exit code is 1 where a system failed."""
    options = _arguments()
    workload = Workload(dtype="fp32", hidden=1024, intermediate=2816, heads=16, layers=options.layers, ranks=options.ranks)
    found: dict[str, list[dict[str, dict[str, float]]]] = {}
    failures = []
    with tempfile.TemporaryDirectory(prefix="zeromesh-bench-", dir=options.directory) as folder:
        for system in options.systems:
            if system == "deepspeed" and not installed("deepspeed-3"):
                print("DeepSpeed is not installed, so it is left out", file=sys.stderr)
                continue
            began = time.perf_counter()
            target = Path(folder, system)
            try:
                ranks = run_ranks("bench.checkpointing", workload, [system, workload.to_json(), str(target), str(options.rounds)])
                found[system] = [_slowest(rounds) for rounds in zip(*ranks, strict=True)]
            except RunError as error:
                failures.append(f"{system}: {error}")
            shutil.rmtree(target, ignore_errors=True)
            print(f"{system} ({time.perf_counter() - began:.0f} s)", file=sys.stderr, flush=True)
    nbytes = _state_bytes(workload)
    print(f"{nbytes / 1e9:.2f} GB of states, {options.ranks} ranks; medians of {options.rounds} rounds (lowest, highest)\n")
    print("\n".join(_table(found, nbytes)), flush=True)
    training = [_train(number, options, failures) for number in range(options.training)]
    if any(training):
        print("\n".join(_training_lines([each for each in training if each])), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"bytes": nbytes, "ranks": options.ranks, "rounds": found, "training": training}
    (options.out / "checkpoint.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", type=list_of(_SYSTEMS), default=list(_SYSTEMS), metavar="A,B,...")
    parser.add_argument("--layers", type=int, default=12, help="of hidden 1024; 12 are 2 GB of states")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--training", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="where to write (default: the system's for temporary files)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_checkpoint"), help="directory of the JSON file")
    return parser.parse_args()


def _train(number: int, options: argparse.Namespace, failures: list[str]) -> dict[str, Any]:
    """Seconds of 100 steps with and without checkpoints, one after the other, and how long after its step each was there."""
    workload = Workload(ranks=options.ranks, warmup=3, timed=_STEPS, sampled=0)
    found: dict[str, Any] = {}
    for every in (0, _EVERY) if number % 2 else (_EVERY, 0):
        with tempfile.TemporaryDirectory(prefix="zeromesh-bench-", dir=options.directory) as folder:
            began = time.perf_counter()
            try:
                run = run_system("zeromesh-3", replace(workload, checkpoint_every=every, checkpoint_folder=folder))
            except RunError as error:
                failures.append(f"training with a checkpoint every {every} steps: {error}")
                return {}
            found["with" if every else "without"] = sum(run.step_seconds)
            if every:
                found["commits"] = _commits(Path(folder, "bench", "checkpoints"))
        print(f"100 steps, checkpoints every {every} ({time.perf_counter() - began:.0f} s)", file=sys.stderr, flush=True)
    return found


def _commits(checkpoints: Path) -> list[dict[str, float]]:
    """When each checkpoint was begun, and there, by the clocks of its files."""
    return [
        {
            "step": int(path.name.removeprefix("step-")),
            "begun": (path / "trainer_state.json").stat().st_mtime,
            "there": (path / "manifest.json").stat().st_mtime,
        }
        for path in sorted(checkpoints.glob("step-*"))
    ]


def _training_lines(rounds: list[dict[str, Any]]) -> list[str]:
    ratios = [each["with"] / each["without"] for each in rounds]
    took = [commit["there"] - commit["begun"] for each in rounds for commit in each["commits"]]
    spans = [
        after["begun"] - before["there"]
        for each in rounds
        for before, after in zip(each["commits"], each["commits"][1:], strict=False)
    ]
    return [
        "",
        f"{_STEPS} steps with an asynchronous checkpoint every {_EVERY} took {statistics.median(ratios):.3f} of the time without "
        f"({min(ratios):.3f}, {max(ratios):.3f}; {len(rounds)} rounds)",
        f"a checkpoint was there {statistics.median(took):.2f} s after it was begun ({max(took):.2f} s at most), and at least "
        f"{min(spans):.2f} s before the next one",
    ]


def _slowest(ranks: tuple[dict[str, Any], ...]) -> dict[str, dict[str, float]]:
    """One round of a system and of plain I/O: what the rank that needed most has needed."""
    return {which: {name: max(rank[which][name] for rank in ranks) for name in ranks[0][which]} for which in ranks[0]}


def _state_bytes(workload: Workload) -> int:
    import torch

    with torch.device("meta"):
        return _BYTES_PER_PARAMETER * sum(parameter.numel() for parameter in workload.build_model().parameters())


def _table(found: dict[str, list[dict[str, dict[str, float]]]], nbytes: int) -> list[str]:
    lines = [
        "| system | save, GB/s | of plain | load, GB/s | of plain | memory in saving, MiB | in loading, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for system, rounds in found.items():
        cells = [system]
        for action in ("save", "load"):
            seconds = [each["system"][f"{action}_seconds"] for each in rounds]
            plain = [each["plain"][f"{action}_seconds"] for each in rounds]
            cells.append(_spread([nbytes / 1e9 / value for value in seconds]))
            cells.append(_spread([theirs / ours for ours, theirs in zip(seconds, plain, strict=True)]))
        memory = [statistics.median(each["system"][f"{action}_memory"] for each in rounds) for action in ("save", "load")]
        lines.append(f"| {' | '.join([*cells, *(f'{value / _MEBIBYTE:.0f}' for value in memory)])} |")
    return lines


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}, {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
