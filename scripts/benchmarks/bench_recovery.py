"""Seconds of a start, of a recovery and of a growth, and the memory of all ranks: `python scripts/benchmarks/bench_recovery.py`.

`configs/elastic.yaml` on ranks of this host, with a checkpoint every 20 steps. Each round runs these ways, in turn: ranks that stay
when one is lost (`kept`, the default), ranks that are all forked anew (`forked`, `recovery.survivors: restart`), ranks that all
start as processes which import for themselves (`fresh`), and ranks in which NVIDIA's in-process restart enters `Trainer.fit` anew
(`nvrx`, see scripts/bench/nvrx.py), where nvidia-resiliency-ext is installed. Printed are medians over rounds (lowest, highest):

    start      from the command to the end of the first step
    memory     proportional set size of the command's processes in step 22, which counts a page of n processes as n parts
    recovery   from `kill -9` of a rank, in step 22, to the end of the next step that is new or done again
    steps      of the run that are done again

The way `grown` starts half of the ranks, and in step 22 a second launcher with the other half. Printed are the seconds from the
second command to the first step of all ranks, the longest time between two steps around the growth, without a usual step, and how
many steps are done again and processes of the first launcher have ended."""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.report import MEBIBYTE, Spread

from zeromesh.environment import LOOPBACK
from zeromesh.launch.rendezvous import TRAINER

_CONFIG = Path(__file__).parents[2] / "configs/elastic.yaml"
_NVRX = Path(__file__).parents[1] / "bench/nvrx.py"
_FORMS = {"kept": (TRAINER, "keep"), "forked": (TRAINER, "restart"), "fresh": ((), "restart")}
_WAYS = (*_FORMS, "nvrx", "grown")
_CHANGED_IN = 22
_AROUND = 3  # steps before and after a growth
_LAUNCHER = """\
import sys
from zeromesh.environment import python_arguments
from zeromesh.launch.leader import Nodes
from zeromesh.launch.rendezvous import launch_workers
processes, modules, *words = sys.argv[1:]
arguments = python_arguments("zeromesh", ("train", "--worker", "--", *words))
found = dict(nodes=Nodes(max_restarts=1), modules=modules.split())
sys.exit(int(launch_workers(arguments, processes=int(processes), **found)))
"""

Figures = dict[str, float]
Launcher = subprocess.Popen[bytes]


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=_WAYS, choices=_WAYS)
    parser.add_argument("--rank", type=int, default=-1, help="that is lost")
    parser.add_argument("--signal", default="SIGKILL", choices=("SIGKILL", "SIGSEGV", "SIGSTOP"))
    parser.add_argument("--nvrx-seconds", type=float, default=1.0, help="all intervals of NVRx; 1 is its default")
    parser.add_argument("words", nargs="*", help="further keys of the configuration, such as zero.stage=1")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # Ends what was started, too.
    ways = list(dict.fromkeys(options.ways))
    if "nvrx" in ways and any(find_spec(name) is None for name in ("nvidia_resiliency_ext", "defusedxml", "pynvml")):
        print("nvrx is left out: nvidia-resiliency-ext is not installed, or what it imports", file=sys.stderr)
        ways.remove("nvrx")
    found: dict[str, list[Figures]] = {way: [] for way in ways}
    for number in range(options.rounds):
        for way in ways[:: 1 - 2 * (number % 2)]:
            with tempfile.TemporaryDirectory() as folder:
                found[way].append(_grow(Path(folder), options) if way == "grown" else _lose(Path(folder), options, way))
            load = os.getloadavg()[0]
            print(f"round {number + 1}, {way}, load {load:.1f}: {found[way][-1]}", file=sys.stderr, flush=True)
    print(f"{options.ranks} ranks, {len(os.sched_getaffinity(0))} cores; medians of {options.rounds} rounds (lowest, highest)")
    grown = {way: found.pop(way) for way in ("grown",) if way in found}
    _print_table("ranks | start, s | memory, MiB | recovery, s | steps", found)
    for way, other in (("kept", "fresh"), ("forked", "fresh"), ("kept", "nvrx")):
        if way in found and other in found:
            pairs = list(zip(found[way], found[other], strict=True))
            names = ("start", "memory", "recovery")
            ratios = [Spread.of(own[name] / beside[name] for own, beside in pairs).text(2) for name in names]
            print(f"| {way}, as a part of {other} | {' | '.join(ratios)} | |")
    _print_table("ranks | all ranks train after, s | longest gap, s | steps | ended", grown)


def _print_table(head: str, found: dict[str, list[Figures]]) -> None:
    if found:
        print(f"\n| {head} |\n|{(head.count('|') + 1) * '---|'}")
    for way, runs in found.items():
        digits = {name: 0 if name in ("memory", "steps", "ended") else 1 for name in runs[0]}
        texts = [Spread.of(run[name] for run in runs).text(number) for name, number in digits.items()]
        print(f"| {way} | {' | '.join(texts)} |")


def _lose(folder: Path, options: argparse.Namespace, way: str) -> Figures:
    """Run until a rank is lost, and the next step."""
    words = [str(_CONFIG), f"run.output_dir={folder}", "batch.global_size=16", f"run.max_steps={_CHANGED_IN + 5}"]
    if way == "nvrx":
        given = [str(_NVRX), str(options.ranks), str(options.nvrx_seconds), *words]
    else:
        modules, survivors = _FORMS[way]
        given = ["-c", _LAUNCHER, str(options.ranks), " ".join(modules), *words, f"recovery.survivors={survivors}"]
    run, began = folder / "elastic", time.time()
    with _commands() as start:
        launcher = start([sys.executable, *given, *options.words])
        steps = _steps(run / "metrics.jsonl", launcher)
        first = next(steps)["time"]
        while next(steps)["step"] < _CHANGED_IN:
            pass
        processes = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
        memory = sum(each.memory_full_info().pss for each in processes) / MEBIBYTE
        killed = time.time()
        os.kill(_pids(run)[options.rank], getattr(signal, options.signal))
        before = max(line["step"] for line in _lines(run / "metrics.jsonl"))
        again = next(line for line in steps if line["time"] > killed + 0.2)
        done_again = _recovery(run)["lost_steps"] if way == "kept" else max(0, before + 1 - again["step"])
        # A new rank 0 may write the line of a step again that nobody computes again.
        while again["step"] + done_again <= before:
            again = next(steps)
    return {"start": first - began, "memory": memory, "recovery": again["time"] - killed, "steps": done_again}


def _grow(folder: Path, options: argparse.Namespace) -> Figures:
    """Run on half of the ranks until a second launcher brings the other half, and a few steps more."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        endpoint = f"{LOOPBACK}:{probe.getsockname()[1]}"
    words = [str(_CONFIG), f"run.output_dir={folder}", "batch.global_size=16", "run.max_steps=1000000", *options.words]
    place = ["--nproc", str(options.ranks // 2), "--nnodes", "1:2", "--rdzv-endpoint", endpoint]
    command, run = [sys.executable, "-m", "zeromesh", "train", *words, *place], folder / "elastic"
    with _commands() as start:
        launcher = start(command)
        steps = _steps(run / "metrics.jsonl", launcher)
        while next(steps)["step"] < _CHANGED_IN:
            pass
        pids, began = _pids(run), time.time()
        start(command)
        while not (run / "recoveries.jsonl").exists():
            next(steps)
        grown = _recovery(run)
        while next(steps)["step"] < grown["step"] + 2 * _AROUND:
            pass
        ended = len({*pids} - {*_pids(run)})
        lines = _lines(run / "metrics.jsonl")
    numbers, times = [line["step"] for line in lines], [line["time"] for line in lines]
    if numbers != list(range(1, len(numbers) + 1)):
        raise RuntimeError(f"{run / 'metrics.jsonl'} has the steps {numbers}, which are not each there once")
    seconds = {line["step"]: after - before for line, before, after in zip(lines[1:], times, times[1:], strict=False)}
    around = {step: each for step, each in seconds.items() if abs(step - grown["step"] - 1) <= _AROUND}
    usual = statistics.median(each for step, each in seconds.items() if step not in around)
    first = times[grown["step"]]
    return {"start": first - began, "gap": max(around.values()) - usual, "steps": grown["lost_steps"], "ended": ended}


@contextmanager
def _commands() -> Iterator[Callable[[Sequence[str]], Launcher]]:
    """Start commands that say nothing, whose processes are all killed afterwards."""
    launchers: list[Launcher] = []

    def start(command: Sequence[str]) -> Launcher:
        launchers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return launchers[-1]

    try:
        yield start
    finally:
        running = [psutil.Process(each.pid) for each in launchers if each.poll() is None]
        for process in [each for launcher in running for each in (*launcher.children(recursive=True), launcher)]:
            if process.is_running():
                process.kill()
        for launcher in launchers:
            launcher.wait()


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file, which may be there later."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _recovery(run: Path) -> dict[str, Any]:
    """Return the first line of a run's recoveries, which comes shortly after that of the step."""
    deadline = time.monotonic() + 10
    while not (lines := _lines(run / "recoveries.jsonl")):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{run / 'recoveries.jsonl'} has no line after the step that followed")
        time.sleep(0.01)
    return lines[0]


def _pids(run: Path) -> list[int]:
    return [each["pid"] for each in json.loads((run / "ranks.json").read_text())["ranks"]]


def _steps(path: Path, launcher: Launcher) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run as they come. Raises `RuntimeError` when the run has ended."""
    seen = 0
    while launcher.poll() is None:
        # A restart takes lines away, of steps that come again.
        new = [line for line in _lines(path) if line["time"] > seen]
        seen = new[-1]["time"] if new else seen
        yield from new
        time.sleep(0.005)
    raise RuntimeError(f"the run ended with exit code {launcher.returncode}")


if __name__ == "__main__":
    main()
