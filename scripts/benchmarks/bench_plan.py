"""The predictions of a plan beside measurements: memory and seconds of layouts over 1 to 4 ranks, and published tables.

    python scripts/benchmarks/bench_plan.py --machine FILE   about 40 minutes on two cores; prints the tables of its page
    python scripts/benchmarks/bench_plan.py --machine FILE --from docs/benchmarks/plan.json   plans alone, beside those measurements

The machine file is that of `zeromesh plan --measure --ranks 4`. Ranks are fresh processes that train as a user does
(`bench/planned.py`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zeromesh.offload import TierChoice
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.planning.auto import subject_of
from zeromesh.trainer.planning.estimate import Estimate, Estimator
from zeromesh.trainer.planning.layouts import Layout
from zeromesh.trainer.planning.machine import Machine, read_machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.automatic import automatic_table, tried
from bench.launch import run_ranks
from bench.planned import WARM
from bench.published import llama_table, megatron_table

MEBIBYTE = 1 << 20
SAMPLES = 8
_LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
_GPT2 = {"model_type": "gpt2", "n_embd": 384, "n_layer": 8, "n_head": 6, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_QWEN = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
MODELS: dict[str, tuple[Mapping[str, Any], str]] = {
    "llama": (_LLAMA, "bfloat16"),
    "gpt2": (_GPT2, "float32"),
    "qwen3": (_QWEN, "bfloat16"),
}
"""Configurations and the dtypes in which they compute."""
_FILE = TierChoice(tier="file")
_ONE = [
    Layout(stage=1, micro=1),
    Layout(stage=1, micro=4),
    Layout(stage=1, micro=8),
    Layout(stage=1, micro=4, recompute="block"),
    Layout(stage=1, micro=2, optimizer=_FILE),
]
_TWO = [
    *(Layout(shard=2, stage=stage, micro=2) for stage in (0, 1, 2, 3)),
    Layout(shard=2, stage=3, micro=1),
    Layout(shard=2, stage=3, micro=4, recompute="block"),
    Layout(tensor=2, stage=1, micro=4),
    Layout(tensor=2, stage=1, micro=2, sequence=True),
    Layout(pipeline=2, stage=1, micro=1),
    Layout(pipeline=2, stage=1, micro=2, schedule="gpipe"),
    Layout(pipeline=2, stage=1, micro=1, schedule="interleaved", chunks=2),
    Layout(pipeline=2, stage=1, micro=1, schedule="zero_bubble"),
    Layout(shard=2, stage=3, micro=2, optimizer=_FILE, parameters=_FILE),
]
_FOUR = [
    Layout(shard=4, stage=1, micro=1),
    Layout(shard=4, stage=3, micro=2),
    Layout(shard=2, tensor=2, stage=2, micro=2),
    Layout(shard=2, pipeline=2, stage=1, micro=1),
    Layout(tensor=2, pipeline=2, stage=1, micro=2),
    Layout(replicate=2, shard=2, stage=3, micro=1),
]
LAYOUTS = {
    "llama": [*_ONE, *_TWO, *_FOUR],
    "gpt2": [*_ONE[1:4], *_TWO[1::2], *_FOUR[1:5]],
    "qwen3": [*_ONE[::2], *_TWO[::2], *_FOUR[::2]],
}


def placed(layout: Layout) -> Layout:
    """The layout with the microbatches that it comes to."""
    return replace(layout, accumulation=-(-SAMPLES // (layout.micro * layout.data)))


def overrides(model: str, layout: Layout | None = None) -> list[str]:
    """Keys of a run."""
    config, compute = MODELS[model]
    keys: dict[str, Any] = {
        "model.config": config,
        "data.sequence_length": 128,
        "data.eval_fraction": 0.0,
        "batch.global_size": SAMPLES,
        "precision.compute": compute,
        "run.max_steps": WARM + 4,
        "run.eval_at_end": False,
        "checkpoint.every_steps": 0,
        "checkpoint.resume": "never",
        **(layout.values_by_key() if layout is not None else {"batch.micro_size": 1}),
    }
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout with what was predicted and what was measured: bytes of the rank that had most, and median seconds."""

    model: str
    layout: Layout
    estimate: Estimate
    base: int
    """Bytes after imports."""
    peak: int
    seconds: float

    @property
    def predicted(self) -> int:
        """Bytes above imports."""
        return self.estimate.device_bytes - self.base

    @property
    def memory_error(self) -> float:
        """The error of the predicted memory, as a part of what was measured."""
        return self.predicted / self.peak - 1


def measure(model: str, layout: Layout) -> dict[str, Any]:
    """Train a layout in fresh processes."""

    class Ranks:
        ranks, device = layout.ranks, "cpu"

    folder = tempfile.mkdtemp(prefix="zeromesh-plan-")
    keys = [*overrides(model, layout), f"run.output_dir={folder}"]
    try:
        found = run_ranks("bench.planned", Ranks, [json.dumps(keys)], timeout=300)  # type: ignore[arg-type]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rank = max(found, key=lambda each: each["peak"])
    return {
        "model": model,
        "layout": str(layout),
        "peak": rank["peak"],
        "base": rank["base"],
        "seconds": statistics.median(max(step) for step in zip(*(each["seconds"] for each in found), strict=True)),
        "phases": {name: statistics.median(each.get(name, 0.0) for each in rank["phases"]) for name in rank["phases"][0]},
        "ledger": rank["ledger"],
    }


def cases(measured: Sequence[Mapping[str, Any]], machine: Machine) -> Iterator[Case]:
    """Yield the cases that were measured, with predictions."""
    for model, layouts in LAYOUTS.items():
        subject = subject_of(load_config(None, overrides(model)))
        known = {str(placed(layout)): placed(layout) for layout in layouts}
        for line in measured:
            if line["model"] == model and line["layout"] in known:
                layout = known[line["layout"]]
                estimate = Estimator(subject, machine, layout.ranks).estimate(layout)
                yield Case(
                    model=model, layout=layout, estimate=estimate, base=line["base"], peak=line["peak"], seconds=line["seconds"]
                )


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """The correlation of ranks."""

    def ranks(values: Sequence[float]) -> list[int]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [order.index(index) for index in range(len(values))]

    return statistics.correlation(ranks(one), ranks(other))


def table(found: Sequence[Case]) -> str:
    """Markdown."""
    rows = [
        "| model | layout | MiB predicted | measured | off by | ms predicted | measured | off by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in found:
        memory = f"{case.predicted / MEBIBYTE:.0f} | {case.peak / MEBIBYTE:.0f} | {case.memory_error:+.0%}"
        predicted = case.estimate.seconds
        time = f"{1e3 * predicted:.0f} | {1e3 * case.seconds:.0f} | {predicted / case.seconds - 1:+.0%}"
        rows.append(f"| {case.model} | {case.layout} | {memory} | {time} |")
    return "\n".join(rows)


def summary(found: Sequence[Case]) -> Iterator[str]:
    """How well the predictions hold."""
    errors = [abs(case.memory_error) for case in found]
    within = sum(error <= 0.1 for error in errors)
    yield f"memory: {within} of {len(found)} within 10 %, the worst {max(errors):.0%} off"
    for model in dict.fromkeys(case.model for case in found):
        own = [case for case in found if case.model == model]
        order = spearman([case.estimate.seconds for case in own], [case.seconds for case in own])
        first, best = min(own, key=lambda case: case.estimate.seconds), min(own, key=lambda case: case.seconds)
        yield (
            f"{model}: order of step times {order:.2f} (Spearman, {len(own)} layouts); the first row takes "
            f"{first.seconds / best.seconds:.2f} of the best ({first.layout}; {best.layout})"
        )
    order = spearman([case.estimate.seconds for case in found], [case.seconds for case in found])
    yield f"all: order of step times {order:.2f}"


def measure_all(rounds: int) -> Iterator[list[dict[str, Any]]]:
    """Train every layout in so many rounds; after each layout, what was the lowest so far."""
    lowest: dict[tuple[str, str], dict[str, Any]] = {}
    for number in range(rounds):
        for model, layout in ((model, placed(layout)) for model, layouts in LAYOUTS.items() for layout in layouts):
            found = measure(model, layout)
            key = (model, found["layout"])
            before = lowest.setdefault(key, found)
            peak = min(before["peak"], found["peak"])
            lowest[key] = {**min(before, found, key=lambda each: each["seconds"]), "peak": peak}
            print(f"{number + 1}: {model}, {layout}: {found['peak'] / MEBIBYTE:.0f} MiB, {found['seconds']:.3f} s", file=sys.stderr)
            yield list(lowest.values())


def main() -> None:
    """Measure, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, required=True, help="a machine file")
    parser.add_argument("--from", dest="source", type=Path, help="what was measured before")
    parser.add_argument("--out", type=Path, help="where to write what is measured")
    parser.add_argument("--rounds", type=int, default=2, help="of which the lower figures count")
    parser.add_argument("--no-auto", action="store_true", help="leave out what `parallel: auto` takes")
    options = parser.parse_args()
    if options.source is not None:
        measured = json.loads(options.source.read_text())
    else:
        for measured in measure_all(options.rounds):
            if options.out is not None:
                options.out.write_text(json.dumps(measured, indent=1))
    found = list(cases(measured, read_machine(options.machine)))
    print(table(found))
    print()
    print("\n".join(summary(found)))
    if options.source is None and not options.no_auto:
        print()
        print("\n".join(automatic_table(list(tried(options.machine, options.rounds)))))
    print()
    print("\n".join([*megatron_table(), "", *llama_table()]))


if __name__ == "__main__":
    main()
