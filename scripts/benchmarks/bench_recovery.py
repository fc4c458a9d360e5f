"""Seconds of a start and of a recovery, and the memory of all ranks: `python scripts/benchmarks/bench_recovery.py`.

`configs/elastic.yaml` on ranks of this host, with a checkpoint every 20 steps. Each round runs three ways, in turn: ranks that stay
when one is lost (`kept`, the default), ranks that are all forked anew (`forked`, `recovery.survivors: restart`), and ranks that all
start as processes which import for themselves (`fresh`). Printed are medians over rounds (lowest, highest):

    start      from the command to the end of the first step
    memory     proportional set size of the command's processes in step 22, which counts a page of n processes as n parts
    recovery   from `kill -9` of a rank, in step 22, to the end of the next step that is new or done again
    steps      of the run that are done again
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
_WAYS = {"kept": (TRAINER, "keep"), "forked": (TRAINER, "restart"), "fresh": ((), "restart")}
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
    parser.add_argument("--rank", type=int, default=-1, help="that is lost")
    parser.add_argument("--signal", default="SIGKILL", choices=("SIGKILL", "SIGSEGV", "SIGSTOP"))
    parser.add_argument("words", nargs="*", help="further keys of the configuration, such as zero.stage=1")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
    for number in range(options.rounds):
        for way in list(_WAYS)[:: 1 - 2 * (number % 2)]:
            with tempfile.TemporaryDirectory() as folder:
                found[way].append(_run(Path(folder), options, *_WAYS[way]))
            print(f"round {number + 1}, {way}: {found[way][-1]}", file=sys.stderr, flush=True)
    print(
        f"{options.ranks} ranks, {len(os.sched_getaffinity(0))} cores; medians of {options.rounds} rounds (lowest, highest)\n"
    )
    print("| ranks | start, s | memory, MiB | recovery, s | steps |\n|---|---|---|---|---|")
    rows = {way: {name: [run[name] for run in runs] for name in runs[0]} for way, runs in found.items()}
    for way, figures in rows.items():
        print(
            f"| {way} | {' | '.join(Spread.of(values).text(int(name != 'memory')) for name, values in figures.items())} |"
        )
    for way in ("kept", "forked"):
        pairs = {
            name: zip(rows[way][name], rows["fresh"][name], strict=True) for name in ("start", "memory", "recovery")
        }
        ratios = [Spread.of([own / other for own, other in pair]).text(2) for pair in pairs.values()]
        print(f"| {way}, as a part of fresh | {' | '.join(ratios)} | |")


def _run(folder: Path, options: argparse.Namespace, modules: tuple[str, ...], survivors: str) -> dict[str, float]:
    words = [str(_CONFIG), f"run.output_dir={folder}", "batch.global_size=16", f"run.max_steps={_KILLED_IN + 5}"]
    words += [f"recovery.survivors={survivors}", *options.words]
    command = [sys.executable, "-c", _LAUNCHER, str(options.ranks), " ".join(modules), *words]
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
            ranks = json.loads((folder / "elastic/ranks.json").read_text())["ranks"]
            os.kill(ranks[options.rank]["pid"], getattr(signal, options.signal))
            again = next(line for line in steps if line["time"] > killed + 0.2)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    done_again = max(0, _KILLED_IN + 1 - again["step"])
    return {"start": first - began, "memory": memory, "recovery": again["time"] - killed, "steps": done_again}


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
