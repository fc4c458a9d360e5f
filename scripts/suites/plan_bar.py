"""A bar for plans: layouts that people chose by hand, each of which a plan has to find or beat by its own prediction.

    python scripts/suites/plan_bar.py                    all of them, about three minutes
    python scripts/suites/plan_bar.py --run 5 --machine FILE   then also runs that many small ones here, beside what was predicted
                                              for them with the machine file that `zeromesh plan --measure` wrote here

A layout that the plan itself holds for too large is no bar, and is printed as such. The exit code is 1 where a plan is beaten.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from zeromesh.offload import Purpose, TierChoice
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.formatting import human_bytes, human_seconds, table_lines
from zeromesh.trainer.planning.auto import subject_of
from zeromesh.trainer.planning.estimate import GATHERED, Estimator
from zeromesh.trainer.planning.layouts import Layout
from zeromesh.trainer.planning.machine import Machine, find_machine
from zeromesh.trainer.planning.planner import Plan, Planner, memory_per_rank, why_not
from zeromesh.trainer.planning.subject import Subject

HOST, FILE, HALF = TierChoice(tier="host"), TierChoice(tier="file"), TierChoice(tier="host", fraction=0.5)
_WARM = 3


def _llama(hidden: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
    }


MODELS = {
    "1B": _llama(2048, 5632, 22, 32, 4, 32000),
    "3B": _llama(3072, 8192, 28, 24, 8, 128256),
    "8B": _llama(4096, 14336, 32, 32, 8, 128256),
    "70B": _llama(8192, 28672, 80, 64, 8, 128256),
}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A layout by hand, for a model on so many ranks of a machine."""

    model: str
    device: str
    layout: Layout
    lora: bool = False
    samples: int = 16
    length: int = 2048

    def placed(self) -> Layout:
        """The layout with the microbatches that it comes to."""
        return replace(self.layout, accumulation=-(-self.samples // (self.layout.micro * self.layout.data)))


_BLOCK = {"recompute": "block"}
BARS: Sequence[Bar] = [
    Bar(model="1B", device="8GB", lora=True, layout=Layout(stage=1, micro=1, recompute="block")),
    Bar(model="1B", device="16GB", layout=Layout(stage=1, micro=1, recompute="block", optimizer=HOST)),
    Bar(model="1B", device="24GB", layout=Layout(stage=1, micro=1, recompute="block")),
    Bar(model="1B", device="rtx-4090", layout=Layout(shard=2, stage=3, micro=2, recompute="block")),
    Bar(model="3B", device="12GB", lora=True, layout=Layout(stage=1, micro=2, recompute="block")),
    Bar(model="3B", device="16GB", layout=Layout(stage=3, micro=2, recompute="block", optimizer=HOST, parameters=HOST)),
    Bar(model="3B", device="24GB", layout=Layout(stage=1, micro=2, recompute="block", optimizer=HOST)),
    Bar(model="3B", device="40GB", layout=Layout(shard=2, stage=3, micro=1, recompute="block")),
    Bar(model="8B", device="16GB", layout=Layout(stage=3, micro=1, recompute="block", optimizer=FILE, parameters=HOST)),
    Bar(model="8B", device="16GB", lora=True, layout=Layout(stage=3, micro=4, recompute="block", parameters=HOST)),
    Bar(model="8B", device="12GB", lora=True, layout=Layout(stage=3, micro=2, recompute="block", parameters=FILE)),
    Bar(model="8B", device="24GB", layout=Layout(stage=3, micro=4, recompute="block", optimizer=FILE, parameters=HALF)),
    Bar(model="8B", device="24GB", lora=True, layout=Layout(stage=1, micro=2, recompute="block")),
    Bar(model="8B", device="24GB", layout=Layout(shard=4, stage=3, micro=2, recompute="block", optimizer=HOST)),
    Bar(model="8B", device="h100", layout=Layout(stage=1, micro=2, recompute="block", optimizer=HOST)),
    Bar(model="8B", device="h100", samples=64, layout=Layout(shard=8, stage=3, micro=2, recompute="selective")),
    Bar(model="8B", device="a100", samples=64, layout=Layout(shard=2, tensor=4, sequence=True, stage=1, micro=4)),
    Bar(model="70B", device="h100", samples=64, layout=Layout(shard=8, stage=3, micro=1, recompute="block", optimizer=HOST)),
    Bar(
        model="70B",
        device="h100",
        samples=256,
        layout=Layout(pipeline=4, shard=2, tensor=8, sequence=True, stage=1, micro=1, schedule="1f1b"),
    ),
    Bar(
        model="70B",
        device="40GB",
        samples=256,
        layout=Layout(pipeline=8, tensor=8, sequence=True, stage=1, micro=1, recompute="block", optimizer=HOST),
    ),
]


@cache
def _subject(model: str, lora: bool, samples: int, length: int) -> Subject:
    keys: dict[str, Any] = {
        "model.config": MODELS[model],
        "data.sequence_length": length,
        "batch.global_size": samples,
        **({"model.lora": {"rank": 16}} if lora else {}),
    }
    return subject_of(load_config(None, [f"{key}={json.dumps(value)}" for key, value in keys.items()]), device="cuda")


@dataclass(frozen=True, kw_only=True)
class Result:
    """A bar beside its plan."""

    bar: Bar
    plan: Plan
    seconds: float
    """Predicted for the layout by hand."""
    why_not: str

    @property
    def beaten(self) -> bool:
        """True where the layout by hand fits, and is faster than all of the plan."""
        best = self.plan.best
        return not self.why_not and (best is None or best.seconds > self.seconds * 1.001)


def tried(bar: Bar) -> Result:
    """Plan for the ranks of a layout, and estimate that alone."""
    ranks = bar.layout.ranks
    machine = find_machine(bar.device, devices=min(ranks, 8))
    subject = _subject(bar.model, bar.lora, bar.samples, bar.length)
    plan = Planner(subject, machine).plan(ranks)
    estimate = Estimator(subject, machine, machine.host.devices).estimate(bar.placed())
    room = memory_per_rank(machine, min(ranks, machine.host.devices))
    refused = subject.refusal(bar.placed())
    return Result(bar=bar, plan=plan, seconds=estimate.seconds, why_not=refused or why_not(estimate, room))


def _row(result: Result) -> tuple[str, ...]:
    bar, best = result.bar, result.plan.best
    return (
        f"{bar.model}{' LoRA' if bar.lora else ''}",
        f"{bar.layout.ranks} x {bar.device}",
        str(bar.placed()),
        human_seconds(result.seconds) if not result.why_not else "too large",
        human_seconds(best.seconds) if best else "nothing",
        human_bytes(best.device_bytes) if best else "",
        str(best.layout) if best else "",
        "BEATEN" if result.beaten else "",
    )


_SMALL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}
SMALL: Sequence[Layout] = [
    Layout(stage=1, micro=4),
    Layout(stage=3, micro=2, recompute="block", optimizer=FILE, parameters=FILE),
    Layout(shard=2, stage=3, micro=2),
    Layout(shard=2, stage=2, micro=4, recompute="block"),
    Layout(pipeline=2, stage=1, micro=1),
]


def _runs(count: int, machine: Machine) -> Iterator[tuple[str, ...]]:
    """Run small layouts, and yield what was predicted and measured: bytes of states by the ledger, and seconds of a step."""
    for layout in SMALL[:count]:
        with tempfile.TemporaryDirectory() as folder:
            keys = {
                "model.config": _SMALL,
                "data.sequence_length": 128,
                "data.eval_fraction": 0.0,
                "batch.global_size": 8,
                "precision.compute": "float32",
                "run.max_steps": _WARM + 5,
                "run.eval_at_end": False,
                "run.output_dir": folder,
                "checkpoint.every_steps": 0,
                **layout.values_by_key(),
            }
            placed = replace(layout, accumulation=-(-8 // (layout.micro * layout.data)))
            words = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
            config = load_config(None, words)
            estimate = Estimator(subject_of(config), machine, layout.ranks).estimate(placed)
            file = Path(folder, "config.yaml")
            file.write_text("{}\n")
            command = [sys.executable, "-m", "zeromesh", "train", str(file), "--nproc", str(layout.ranks), *words]
            subprocess.run(command, check=True, capture_output=True)
            states, seconds = _measured(Path(folder))
            named = (*_STATES.values(), GATHERED)  # The ledger has what is gathered among parameters.
            predicted = sum(estimate.device.get(name, 0) for name in named)
            yield (
                str(placed),
                *(human_bytes(predicted), human_bytes(states), f"{predicted / states - 1:+.1%}"),
                *(human_seconds(estimate.seconds), human_seconds(seconds), f"{estimate.seconds / seconds - 1:+.0%}"),
            )


_STATES = {
    each.name.lower(): each.value for each in (Purpose.PARAMETERS, Purpose.MASTER, Purpose.MOMENTS, Purpose.GRADIENT_BUCKETS)
}
"""Purposes of the ledger that are compared, by their names in metrics."""


def _measured(folder: Path) -> tuple[int, float]:
    """The most bytes of states and buffers by the ledger in the last step, and the median seconds of steps."""
    lines = [json.loads(line) for path in folder.rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    steps = [line for line in lines if "device" in line.get("memory", {})]
    held = steps[-1]["memory"]["device"]
    seconds = median(line["step_seconds"] for line in steps[_WARM:])
    return sum(nbytes for name, nbytes in held.items() if name in _STATES), seconds


def main() -> int:
    """Print the table; the exit code is 1 where a layout by hand beats its plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=int, default=0, metavar="N", help="small layouts that are run here")
    parser.add_argument("--machine", default="laptop", help="of which their times are predicted, as of plan --device")
    options = parser.parse_args()
    results = []
    for bar in BARS:
        results.append(tried(bar))
        print(" | ".join(_row(results[-1])), flush=True)
    if options.run:
        columns = ("layout that ran here", "states predicted", "measured", "", "step predicted", "measured", "")
        rows = list(_runs(options.run, find_machine(options.machine)))
        sys.stdout.writelines(f"{line}\n" for line in table_lines(columns, rows))
    beaten = [result for result in results if result.beaten]
    print(f"{len(BARS)} layouts by hand, {len(beaten)} better than their plan")
    return 1 if beaten else 0


if __name__ == "__main__":
    raise SystemExit(main())
