"""The bytes of a rank by purpose, predicted and measured: `python scripts/benchmarks/memory_report.py`.

For each configuration zeromesh trains in fresh processes. Bytes by purpose of the formula (`zero/memory_model.py`) stand beside the
ledger's, which must be equal. States, activations (measured alone, without an engine) and a constant stand beside the highest
proportional set size that the system saw above imports, which must be within 10 %. The constant is measured once per dtype, on the
default workload at stage 3 over shared memory. Then the peak's growth from 8 to 32 layers, blocks recomputed, stands beside that of
states and activations, and the peak beside those of FSDP2 and of DeepSpeed, if it is installed; both with the update after
backward, as by default. The exit code is 1 where something is not as predicted. Progress goes to the standard error.

    --sizes     layers and width, as 8x1 (the default workload), 16x1, 8x2
    --update    inside backward (`optimizer.in_backward`), where gradient shards come and go, or after it, where they stay
"""

import argparse
import json
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench import beside, memory_tables
from bench.account import Case, Growth, Line
from bench.beside import Beside
from bench.launch import RunError
from bench.measure import MANY_LAYERS, Measurements
from bench.options import list_of
from bench.workload import TORCH_DTYPES, Dtype, Workload

_TRANSPORTS = ("shared", "gloo")
_STAGES = ("0", "1", "2", "3")


def main() -> int:
    """Run what the command line asks for; the exit code is 1 where something failed or is not as predicted."""
    options = _arguments()
    workload = _workload(options)
    measurements = Measurements(workload)
    by_default = Measurements(replace(workload, in_backward=False))
    peers: list[Beside] = []
    lines: list[Line] = []
    grown: list[Growth] = []
    failures: list[str] = []
    for dtype in options.dtype:
        for case in _cases(options, dtype):
            with _noted(failures):
                lines.append(measurements.line(case))
        if not options.no_growth:
            with _noted(failures):
                grown.append(by_default.growth(dtype))
        if not options.no_peers:
            with _noted(failures):
                peers += beside.measure(workload, dtype)
    print(page(workload, lines, grown, peers))
    _write(options.out, workload, lines, grown, peers)
    failures += problems(lines, grown) + [problem for each in peers for problem in each.problems]
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def problems(lines: Iterable[Line], grown: Iterable[Growth]) -> list[str]:
    """Return the deviations from the prediction."""
    found = [f"{line.case}: {problem}" for line in lines for problem in line.problems]
    return found + [f"growth to {each.many.case}: {problem}" for each in grown for problem in each.problems]


def page(workload: Workload, lines: Sequence[Line], grown: Sequence[Growth], peers: Sequence[Beside] = ()) -> str:
    """All tables, in MiB of the rank that needed most."""
    parts = [f"{workload.ranks} ranks, {workload.steps} steps; MiB of the rank that needed most"]
    for title, group in _groups(lines).items():
        constant = group[0].constant / memory_tables.MEBIBYTE
        parts += [f"### {title}", "By purpose, formula / ledger:", memory_tables.purposes(group)]
        parts += [f"At the peak, with a constant of {constant:.1f}:", memory_tables.peaks(group)]
    if grown:
        parts += ["### More layers, blocks recomputed", memory_tables.growth(grown)]
    if peers:
        parts += ["### Beside others, updates after backward", beside.table(peers)]
    return "\n\n".join(parts)


@contextmanager
def _noted(failures: list[str]) -> Iterator[None]:
    """A configuration that does not run is noted, and the others go on."""
    try:
        yield
    except RunError as error:
        failures.append(str(error))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", type=list_of(tuple(TORCH_DTYPES)), default=["bf16", "fp32"], metavar="bf16,fp32")
    parser.add_argument("--transport", type=list_of(_TRANSPORTS), default=list(_TRANSPORTS), metavar="shared,gloo")
    parser.add_argument("--stages", type=list_of(_STAGES), default=list(_STAGES), metavar="N,N,...")
    parser.add_argument("--sizes", type=_sizes, default=[(8, 1), (16, 1), (8, 2)], metavar="8x1,16x1,8x2")
    parser.add_argument("--update", choices=("inside", "after"), default="inside")
    parser.add_argument("--no-growth", action="store_true", help=f"do not run {MANY_LAYERS} layers")
    parser.add_argument("--no-peers", action="store_true", help="do not run other systems")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("runs/memory_report"), help="directory of the JSON file and picture")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error("--ranks must be 2 or more: one rank shares nothing")
    return options


def _sizes(text: str) -> list[tuple[int, int]]:
    """`8x1,16x1` to layers and widths."""
    found = []
    for each in text.split(","):
        layers, _, width = each.partition("x")
        if not (layers.isdigit() and width.isdigit()):
            raise argparse.ArgumentTypeError(f"{each}: give layers and width as 8x1, separated by commas")
        found.append((int(layers), int(width)))
    return found


def _workload(options: argparse.Namespace) -> Workload:
    """Memory is watched in every step."""
    return Workload(ranks=options.ranks, in_backward=options.update == "inside", warmup=options.steps, timed=0, sampled=0)


def _cases(options: argparse.Namespace, dtype: Dtype) -> Iterator[Case]:
    for transport in options.transport:
        for layers, width in options.sizes:
            for stage in options.stages:
                yield Case(dtype=dtype, transport=transport, stage=int(stage), layers=layers, width=width)


def _groups(lines: Iterable[Line]) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(f"{line.case.dtype}, {line.case.transport}", []).append(line)
    return found


def _write(folder: Path, workload: Workload, lines: Sequence[Line], grown: Sequence[Growth], peers: Sequence[Beside]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    everything = {
        "workload": asdict(workload),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "lines": [memory_tables.record(line) for line in lines],
        "growth": [asdict(each) for each in grown],
        "peers": [asdict(each) for each in peers],
    }
    (folder / "memory.json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    if lines:
        memory_tables.draw(_groups(lines), folder / "memory.png")
    print(f"\nwritten: {folder / 'memory.json'} and {folder / 'memory.png'}")


if __name__ == "__main__":
    sys.exit(main())
