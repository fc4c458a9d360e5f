"""Step time and peak memory of zeromesh beside other systems, on one workload, in turn: `python scripts/bench_step.py`.

Every round runs every system once, in fresh processes, and each round begins with another one, so that what the machine does
meanwhile falls on all alike. Printed are medians over rounds (lowest, highest) and the ratios of the rounds; `--out` gets the
same as JSON with every single measurement, and as a picture. Progress goes to the standard error.

    --systems   zeromesh, fsdp2, fsdp2-keep (not resharded after forward), ddp, local (no communication), deepspeed
    --stages    ZeRO stages of zeromesh (0-3) and DeepSpeed (1-3)

`--layers 48 --hidden 64 --sequence 16 --systems zeromesh,local --dtype fp32` shows what a block costs where computing costs little.
"""

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from bench import report
from bench.launch import Run, RunError, installed, run_system
from bench.options import list_of
from bench.workload import TORCH_DTYPES, Workload

_SYSTEMS = ("zeromesh", "deepspeed", "fsdp2", "fsdp2-keep", "ddp", "local")
_DEFAULT_SYSTEMS = ("zeromesh", "deepspeed", "fsdp2", "local")


def main() -> int:
    """Run what the command line asks for; the exit code is 1 where a system failed."""
    options = _arguments()
    systems = _systems(options.systems, options.stages)
    base = _workload(options)
    groups: dict[str, dict[str, list[Run]]] = {}
    failures: list[str] = []
    for dtype in options.dtype:
        workload = replace(base, dtype=dtype)
        groups[dtype] = _rounds(systems, workload, options.rounds, failures)
        print(f"\n{workload}; medians of {options.rounds} rounds of {workload.timed} steps (lowest, highest)\n")
        if any(groups[dtype].values()):
            print(report.table(groups[dtype]), flush=True)
    _write(options.out, base, groups)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", type=list_of(_SYSTEMS), default=list(_DEFAULT_SYSTEMS), metavar="A,B,...")
    parser.add_argument("--stages", type=list_of(("0", "1", "2", "3")), default=["3"], metavar="N,N,...")
    parser.add_argument("--dtype", type=list_of(tuple(TORCH_DTYPES)), default=["bf16", "fp32"], metavar="bf16,fp32")
    parser.add_argument("--transport", choices=("auto", "shared", "gloo", "nccl"), default="auto", help="of zeromesh")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1, help="times the hidden size")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size, a multiple of 64")
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a sequence; 16 or fewer: a batch has one")
    parser.add_argument("--activation-checkpointing", action="store_true", help="recompute blocks in backward")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each run")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/bench_step"), help="directory of the JSON file and picture")
    return parser.parse_args()


def _systems(names: list[str], stages: list[str]) -> list[str]:
    """Systems with their stages; one that is not installed is left out, and said so."""
    found = []
    for name in names:
        if name in ("zeromesh", "deepspeed"):
            found += [f"{name}-{stage}" for stage in stages if name == "zeromesh" or stage != "0"]
        else:
            found.append(name)
    missing = [system for system in found if not installed(system)]
    if missing:
        print(f"{', '.join(missing)}: DeepSpeed is not installed, so it is left out", file=sys.stderr)
    return [system for system in found if system not in missing]


def _workload(options: argparse.Namespace) -> Workload:
    workload = Workload(
        layers=options.layers,
        hidden=options.hidden,
        intermediate=options.hidden * 11 // 4,
        heads=options.hidden // 64,
        sequence=options.sequence,
        micro=1 if options.sequence <= 16 else 2,
        ranks=options.ranks,
        device=options.device,
        transport=options.transport,
        checkpointing=options.activation_checkpointing,
        warmup=options.warmup,
        timed=options.steps,
    )
    return workload.wider(options.width)


def _rounds(systems: list[str], workload: Workload, rounds: int, failures: list[str]) -> dict[str, list[Run]]:
    """Run every system once a round. One that fails is tried once more, since processes of others crash at their end at times."""
    found: dict[str, list[Run]] = {system: [] for system in systems}
    for number in range(rounds):
        turn = number % max(1, len(systems))
        for system in systems[turn:] + systems[:turn]:
            if system not in found:
                continue
            began = time.perf_counter()
            run = _run_or_fail(system, workload, failures) or _run_or_fail(system, workload, failures)
            if run is None:
                del found[system]
                continue
            found[system].append(run)
            _tell(number, rounds, workload, run, time.perf_counter() - began)
    return found


def _run_or_fail(system: str, workload: Workload, failures: list[str]) -> Run | None:
    try:
        return run_system(system, workload)
    except RunError as error:
        failures.append(str(error))
        return None


def _tell(number: int, rounds: int, workload: Workload, run: Run, seconds: float) -> None:
    steps = sorted(run.step_seconds)
    middle = 1e3 * steps[len(steps) // 2] if steps else float("nan")
    print(
        f"{workload.dtype} round {number + 1}/{rounds} {run.system}: {middle:.0f} ms a step, "
        f"{run.peak_bytes / report.MEBIBYTE:.0f} MiB ({seconds:.0f} s)",
        file=sys.stderr,
        flush=True,
    )


def _write(folder: Path, workload: Workload, groups: dict[str, dict[str, list[Run]]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    everything = {
        "workload": asdict(workload),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "dtypes": {dtype: report.record(rounds) for dtype, rounds in groups.items()},
    }
    (folder / "bench_step.json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    report.draw(groups, folder / "bench_step.png")
    print(f"\nwritten: {folder / 'bench_step.json'} and {folder / 'bench_step.png'}")


if __name__ == "__main__":
    sys.exit(main())
