"""Seconds of a start and of a restart, and the memory of all ranks: `python scripts/benchmarks/bench_recovery.py`.

`configs/elastic.yaml` on ranks of this host, with a checkpoint every 20 steps. Each round runs both ways, in turn: `forked` ranks,
as `zeromesh train --nproc` starts them, and `fresh` ones, each of which imports for itself. Printed are medians over rounds
(lowest, highest):

    start      from the command to the end of the first step
    memory     proportional set size of the command's processes in step 22, which counts a page of n processes as n parts
    restart    from `kill -9` of the last rank, in step 22, to the end of the first step after it
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.report import MEBIBYTE, Spread

from zeromesh.launch.rendezvous import TRAINER

_CONFIG = Path(__file__).parents[2] / "configs/elastic.yaml"
_WAYS = {"forked": TRAINER, "fresh": ()}
_KILLED_IN = 22
_LAUNCHER = """\
import sys
from zeromesh.environment import python_arguments
from zeromesh.launch.rendezvous import Nodes, launch_workers
processes, modules, *words = sys.argv[1:]
arguments = python_arguments("zeromesh", ("train", "--worker", "--", *words))
found = dict(nodes=Nodes(max_restarts=1), modules=modules.split())
sys.exit(int(launch_workers(arguments, processes=int(processes), **found)))
"""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
    for number in range(options.rounds):
        for way in list(_WAYS)[:: 1 - 2 * (number % 2)]:
            with tempfile.TemporaryDirectory() as folder:
                found[way].append(_run(Path(folder), options.ranks, _WAYS[way]))
            print(f"round {number + 1}, {way}: {found[way][-1]}", file=sys.stderr, flush=True)
    print(
        f"{options.ranks} ranks, {len(os.sched_getaffinity(0))} cores; medians of {options.rounds} rounds (lowest, highest)\n"
    )
    print("| ranks | start, s | memory, MiB | restart, s |\n|---|---|---|---|")
    rows = {way: {name: [run[name] for run in runs] for name in runs[0]} for way, runs in found.items()}
    for way, figures in rows.items():
        print(
            f"| {way} | {' | '.join(Spread.of(values).text(int(name != 'memory')) for name, values in figures.items())} |"
        )
    ratios = [Spread.of(map(float.__truediv__, *(rows[way][name] for way in _WAYS))).text(2) for name in rows["fresh"]]
    print(f"| forked as a part of fresh | {' | '.join(ratios)} |")


def _run(folder: Path, ranks: int, modules: tuple[str, ...]) -> dict[str, float]:
    words = [str(_CONFIG), f"run.output_dir={folder}", "batch.global_size=16", f"run.max_steps={_KILLED_IN + 5}"]
    command = [sys.executable, "-c", _LAUNCHER, str(ranks), " ".join(modules), *words]
    began = time.time()
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as launcher:
        try:
            steps = _steps(folder / "elastic/metrics.jsonl", launcher)
            first = next(steps)["time"]
            while next(steps)["step"] < _KILLED_IN:
                pass
            processes = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
            memory = sum(each.memory_full_info().pss for each in processes) / MEBIBYTE
            killed = time.time()
            os.kill(json.loads((folder / "elastic/ranks.json").read_text())["ranks"][-1]["pid"], signal.SIGKILL)
            again = next(line["time"] for line in steps if line["time"] > killed + 0.2)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    return {"start": first - began, "memory": memory, "restart": again - killed}


def _steps(path: Path, launcher: "subprocess.Popen[bytes]") -> Iterator[dict[str, Any]]:
    """Yield the lines of a run as they come. Raises `RuntimeError` when the run has ended."""
    seen = 0
    while launcher.poll() is None:
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        # A restart takes lines away, of steps that come again.
        new = [line for line in lines if line["time"] > seen]
        seen = new[-1]["time"] if new else seen
        yield from new
        time.sleep(0.005)
    raise RuntimeError(f"the run ended with exit code {launcher.returncode}")


if __name__ == "__main__":
    main()
