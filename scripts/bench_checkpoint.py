"""Saving and loading beside plain sequential I/O and other systems: `python scripts/bench_checkpoint.py`.

Systems run in turn, each in fresh processes, and save and load the states of one model several times. `plain` writes and reads as
many bytes with the same processes past the page cache and does nothing else. Printed are medians over rounds (lowest, highest),
bandwidth against plain's, and how far memory rose. `--out` gets the same as JSON. Progress goes to the standard error.

    --systems   plain, zeromesh, deepspeed (stage 3, save_checkpoint), fsdp2 (torch.distributed.checkpoint)
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.launch import RunError, installed, run_ranks
from bench.options import list_of
from bench.workload import Workload

_SYSTEMS = ("plain", "zeromesh", "deepspeed", "fsdp2")
_MEBIBYTE = 1 << 20
_BYTES_PER_PARAMETER = 12


def main() -> int:
    """Run what the command line asks for; the exit code is 1 where a system failed."""
    options = _arguments()
    workload = Workload(
        dtype="fp32", hidden=1024, intermediate=2816, heads=16, layers=options.layers, ranks=options.ranks
    )
    found: dict[str, list[dict[str, float]]] = {}
    failures = []
    with tempfile.TemporaryDirectory(prefix="zeromesh-bench-", dir=options.directory) as folder:
        for system in options.systems:
            if system == "deepspeed" and not installed("deepspeed-3"):
                print("DeepSpeed is not installed, so it is left out", file=sys.stderr)
                continue
            began = time.perf_counter()
            target = Path(folder, system)
            try:
                ranks = run_ranks(
                    "bench.checkpointing", workload, [system, workload.to_json(), str(target), str(options.rounds)]
                )
                found[system] = [_slowest(rounds) for rounds in zip(*ranks, strict=True)]
            except RunError as error:
                failures.append(f"{system}: {error}")
            shutil.rmtree(target, ignore_errors=True)
            print(f"{system} ({time.perf_counter() - began:.0f} s)", file=sys.stderr, flush=True)
    nbytes = _state_bytes(workload)
    print(
        f"{nbytes / 1e9:.2f} GB of states, {options.ranks} ranks; medians of {options.rounds} rounds (lowest, highest)\n"
    )
    print("\n".join(_table(found, nbytes)), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"bytes": nbytes, "ranks": options.ranks, "rounds": found}
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
    parser.add_argument(
        "--directory", type=Path, default=None, help="where to write (default: the system's for temporary files)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench_checkpoint"), help="directory of the JSON file")
    return parser.parse_args()


def _slowest(ranks: tuple[dict[str, Any], ...]) -> dict[str, float]:
    """One round: what the rank that needed most has needed."""
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def _state_bytes(workload: Workload) -> int:
    import torch

    with torch.device("meta"):
        return _BYTES_PER_PARAMETER * sum(parameter.numel() for parameter in workload.build_model().parameters())


def _table(found: dict[str, list[dict[str, float]]], nbytes: int) -> list[str]:
    lines = [
        "| system | save, GB/s | of plain | load, GB/s | of plain | memory in saving, MiB | in loading, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for system, rounds in found.items():
        cells = [system]
        for action in ("save", "load"):
            speeds = [nbytes / 1e9 / each[f"{action}_seconds"] for each in rounds]
            cells.append(f"{statistics.median(speeds):.2f} ({min(speeds):.2f}, {max(speeds):.2f})")
            plain = [nbytes / 1e9 / each[f"{action}_seconds"] for each in found.get("plain", [])]
            cells.append(f"{statistics.median(speeds) / statistics.median(plain):.2f}" if plain else "-")
        memory = [statistics.median(each[f"{action}_memory"] for each in rounds) for action in ("save", "load")]
        lines.append(f"| {' | '.join([*cells, *(f'{value / _MEBIBYTE:.0f}' for value in memory)])} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
