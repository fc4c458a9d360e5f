"""Losses of the quickstart with states and weights in fewer bits, beside the default.

`python scripts/benchmarks/bench_states.py --folder /a/disk` trains `configs/quickstart.yaml` for 300 steps with the settings of
each row, on the same data in the same order. A row is compared with the one that has its compute dtype and all else in float32.
Losses are means over the last 50 steps; the exit code is 1 where one is more than 0.5 % above.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

_BFLOAT16 = ("precision.compute=bfloat16",)
_LION = ("optimizer.name=lion", "optimizer.lr=2e-4")
_ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "float32": ("float32", ()),
    "states: bfloat16": ("float32", ("optimizer.states=bfloat16",)),
    "states: int8": ("float32", ("optimizer.states=int8",)),
    "compute: bfloat16": ("compute: bfloat16", _BFLOAT16),
    "master: none": ("compute: bfloat16", (*_BFLOAT16, "precision.master=none")),
    "master: none, states: bfloat16": (
        "compute: bfloat16", (*_BFLOAT16, "precision.master=none", "optimizer.states=bfloat16"),
    ),
    "master: kahan, states: bfloat16": (
        "compute: bfloat16", (*_BFLOAT16, "precision.master=kahan", "optimizer.states=bfloat16"),
    ),
    "master: kahan, states: int8": (
        "compute: bfloat16", (*_BFLOAT16, "precision.master=kahan", "optimizer.states=int8"),
    ),
    "lion": ("lion", _LION),
    "lion, states: int8": ("lion", (*_LION, "optimizer.states=int8")),
}  # fmt: skip
"""Each row's row to compare with, and its settings."""
_LAST, _ALLOWED = 50, 0.005


def main() -> int:
    """Train the rows that the command line names, and print them; the exit code is 1 where a loss is too high."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where runs lie; one that is finished is read again")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the run's seed")
    parser.add_argument("--only", nargs="*", default=list(_ROWS), help="rows to train, each after the one beside it")
    options = parser.parse_args()
    print("| settings | loss | of the default's | evaluation loss | of the default's | s a step |")
    print("|---|---|---|---|---|---|", flush=True)
    found: dict[str, tuple[float, float, float]] = {}
    for name in dict.fromkeys(each for wanted in options.only for each in (_ROWS[wanted][0], wanted)):
        default, settings = _ROWS[name]
        found[name] = _trained(options.folder, name, (f"run.seed={options.seed}", *settings), options.steps)
        loss, evaluated, seconds = found[name]
        ratios = [each / other for each, other in zip(found[name][:2], found[default][:2], strict=True)]
        print(f"| {name} | {loss:.4f} | {ratios[0]:.4f} | {evaluated:.4f} | {ratios[1]:.4f} | {seconds:.2f} |", flush=True)
    too_high = [name for name, (loss, *_) in found.items() if loss > (1 + _ALLOWED) * found.get(_ROWS[name][0], (loss,))[0]]
    print(*(f"{name}: the loss is too high" for name in too_high), sep="\n", file=sys.stderr)
    return 1 if too_high else 0


def _trained(folder: Path, name: str, settings: tuple[str, ...], steps: int) -> tuple[float, float, float]:
    """Train unless the run is finished, and return its mean loss at the end, its evaluation loss, and its median seconds a step."""
    run = f"{name.replace(': ', '-').replace(', ', '-')}-{settings[0].replace('run.seed=', 'seed-')}-{steps}"
    arguments = [f"run.output_dir={folder}", f"run.name={run}", f"run.max_steps={steps}", f"run.eval_every={steps}"]
    if not (folder / run / "evaluations.jsonl").exists():
        config = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
        command = [sys.executable, "-m", "zeromesh", "train", str(config), *arguments, *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    (*_, evaluated) = (folder / run / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    last = [row["loss"] for row in rows if row["step"] > steps - _LAST]
    return (statistics.fmean(last), json.loads(evaluated)["eval_loss"], statistics.median(row["step_seconds"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
