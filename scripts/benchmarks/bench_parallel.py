"""Tensor and pipeline parallelism on two ranks beside PyTorch's own, in turn: `python scripts/benchmarks/bench_parallel.py`.

Every round runs every system once, in fresh processes, and each round begins with another one, so that what the machine does
meanwhile falls on all alike. Printed are medians over rounds (lowest, highest), the least time of any step, ratios of the rounds,
what pipelines stood still, and each rank's memory beside what layout and activations predict. `--out` gets the same as JSON with
every single measurement, and a picture of one step of each schedule. The exit code is 1 where a system failed, where memory is not
as predicted, or where the logits of a divided head were put together. Progress goes to the standard error.

    --kinds        tensor (micro-batches of 2 x 256 tokens, one a step), pipeline (8 a step)
    --stages       ZeRO stages of zeromesh beside tensor parallelism, on a data axis of one rank
    --schedules    of zeromesh's pipeline
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from zeromesh.pipeline.schedule import UNIT_TIMES, make_schedule, simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench import bubbles, divided_predict, report
from bench.divided import CHUNKS
from bench.launch import Run, RunError, run_system
from bench.options import list_of
from bench.workload import TORCH_DTYPES, Workload

_KINDS = ("tensor", "pipeline")
_SCHEDULES = ("1f1b", "zero_bubble", "interleaved", "gpipe")
_PEERS = {"tensor": "dtensor", "pipeline": "schedule1f1b"}
_MICROBATCHES = {"tensor": 1, "pipeline": 8}


def main() -> int:
    """Run what the command line asks for."""
    options = _arguments()
    failures: list[str] = []
    record: dict[str, Any] = {}
    for kind in options.kinds:
        for dtype in options.dtype:
            workload = _workload(options, kind, dtype)
            rounds = _rounds(_systems(options, kind), workload, options.rounds, failures)
            record[f"{kind}, {dtype}"] = _report(options, kind, workload, rounds, failures)
    options.out.mkdir(parents=True, exist_ok=True)
    everything = {"torch": torch.__version__, "machine": f"{platform.system()} {platform.machine()}", "parts": record}
    (options.out / "parallel.json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten: {options.out / 'parallel.json'}")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", type=list_of(_KINDS), default=list(_KINDS), metavar="tensor,pipeline")
    parser.add_argument("--stages", type=list_of(("1", "2", "3")), default=["1", "3"], metavar="N,N,...")
    parser.add_argument("--schedules", type=list_of(_SCHEDULES), default=list(_SCHEDULES[:3]), metavar="A,B,...")
    parser.add_argument("--dtype", type=list_of(tuple(TORCH_DTYPES)), default=["bf16", "fp32"], metavar="bf16,fp32")
    parser.add_argument("--transport", choices=("auto", "shared", "gloo"), default="auto", help="of zeromesh")
    parser.add_argument("--no-memory", action="store_true", help="do not predict memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each run")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/bench_parallel"), help="directory of the JSON file and picture")
    return parser.parse_args()


def _systems(options: argparse.Namespace, kind: str) -> list[str]:
    ours = [f"tensor-{stage}" for stage in options.stages] if kind == "tensor" else options.schedules
    return [*(f"{report.OURS}{each}" for each in ours), _PEERS[kind]]


def _workload(options: argparse.Namespace, kind: str, dtype: Any) -> Workload:
    return Workload(
        dtype=dtype,
        divided=True,
        microbatches=_MICROBATCHES[kind],
        transport=options.transport,
        warmup=options.warmup,
        timed=options.steps,
    )


def _rounds(systems: list[str], workload: Workload, rounds: int, failures: list[str]) -> dict[str, list[Run]]:
    """Run every system once a round. One that fails is not run again."""
    found: dict[str, list[Run]] = {system: [] for system in systems}
    for number in range(rounds):
        turn = number % len(systems)
        for system in systems[turn:] + systems[:turn]:
            if system not in found:
                continue
            began = time.perf_counter()
            try:
                run = run_system(system, workload, module="bench.divided_worker")
            except RunError as error:
                failures.append(str(error))
                del found[system]
                continue
            found[system].append(run)
            steps, seconds = sorted(run.step_seconds), time.perf_counter() - began
            _tell(
                f"{workload.dtype} round {number + 1}/{rounds} {system}: {1e3 * steps[len(steps) // 2]:.0f} ms a step, "
                f"{run.peak_bytes / report.MEBIBYTE:.0f} MiB ({seconds:.0f} s)"
            )
    return {system: runs for system, runs in found.items() if runs}


def _report(
    options: argparse.Namespace, kind: str, workload: Workload, rounds: dict[str, list[Run]], failures: list[str]
) -> dict[str, Any]:
    """Print the tables of one kind and dtype; everything as JSON."""
    print(f"\n## {kind}, {workload.dtype}\n\n{workload}; {options.rounds} rounds of {workload.timed} steps\n")
    found: dict[str, Any] = {"workload": asdict(workload), **report.record(rounds)}
    print(f"{report.table(rounds)}\n\n{_least(rounds, _PEERS[kind])}", flush=True)
    if kind == "pipeline":
        unit = {f"{report.OURS}{name}": _unit_bubble(name, workload) for name in options.schedules}
        print(f"\n{bubbles.table(rounds, unit)}", flush=True)
        options.out.mkdir(parents=True, exist_ok=True)
        bubbles.draw(rounds, options.out / f"pipeline-{workload.dtype}.png")
    else:
        _check_exchanged(rounds, workload, failures)
    if not options.no_memory:
        try:
            lines = divided_predict.account(rounds, workload, divided_predict.constant_of(workload))
        except RunError as error:
            failures.append(str(error))
            return found
        print(f"\n{divided_predict.table(lines)}", flush=True)
        failures += [problem for line in lines for problem in line.problems]
        found["memory"] = [{**asdict(line), "difference": line.difference} for line in lines]
    return found


def _least(rounds: Mapping[str, Sequence[Run]], peer: str) -> str:
    """The quickest step of each system: what the rest of the machine does only adds to it."""
    least = {system: 1e3 * min(min(run.step_seconds) for run in runs) for system, runs in rounds.items()}
    rows = [f"| system | least ms of any step | as a part of {peer} |", "|---|---|---|"]
    for system, milliseconds in least.items():
        part = f"{milliseconds / least[peer]:.2f}" if peer in least else ""
        rows.append(f"| {system} | {milliseconds:.0f} | {part} |")
    return "\n".join(rows)


def _unit_bubble(name: Any, workload: Workload) -> float:
    chunks = CHUNKS.get(name, 1)
    schedule = make_schedule(name, ranks=workload.ranks, microbatches=workload.microbatches, chunks=chunks)
    return simulate(schedule, lambda _, action: UNIT_TIMES[action.kind]).bubble


def _check_exchanged(rounds: Mapping[str, Sequence[Run]], workload: Workload, failures: list[str]) -> None:
    """The largest tensor that ranks exchanged is a hidden state, not logits."""
    hidden = workload.micro * workload.sequence * workload.hidden * workload.compute.itemsize
    for system, runs in rounds.items():
        largest = max((run.ranks[0]["notes"] or {}).get("largest_exchanged", 0) for run in runs)
        if largest:
            print(f"\n{system}: the largest exchanged tensor has {largest:,} bytes, a hidden state {hidden:,}")
        if largest > hidden:
            failures.append(f"{system}: ranks exchanged {largest:,} bytes at once, more than a hidden state of {hidden:,}")


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
