"""`parallel: auto` in configurations of this repository, beside other layouts that the same plan has."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.launch import run_ranks
from bench.planned import WARM
from bench.processes import SCRIPTS
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.planning.auto import plan_config
from zeromesh.trainer.planning.layouts import Layout

CONFIGS = {"quickstart.yaml": 2, "tensor.yaml": 2, "pipeline.yaml": 2, "zero2-bf16.yaml": 2, "hybrid.yaml": 4}
"""Files of `configs/`, and the ranks that run them."""
_MICROS, _OTHERS = 3, 5
_STEPS = WARM + 12
_SHORT = {
    "run.max_steps": _STEPS,
    "run.eval_every": 0,
    "run.eval_at_end": False,
    "data.eval_fraction": 0.0,
    "checkpoint.every_steps": 0,
    "checkpoint.resume": "never",
}
_GIVEN = ("model.activation_checkpointing", "offload.optimizer", "offload.parameters", "offload.activations")
_AUTO = ("parallel=auto", "zero.stage=auto", "batch.micro_size=auto")


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A layout of a configuration: seconds of a step as they were planned, and the lower of two measured medians."""

    config: str
    layout: str
    automatic: bool
    planned: float
    seconds: float = float("inf")


def layouts_of(config: str, ranks: int, machine: Path) -> list[tuple[Layout, float]]:
    """The first row of the plan, the same with other microbatches, and the fastest rows of other meshes and stages."""
    keys = [*_AUTO, *_keys()]
    read = load_config(_path(config), keys, ranks=ranks)
    plan, *_ = plan_config(read, _GIVEN, device=str(machine), ranks=ranks, host=ranks)
    micros: dict[object, tuple[Layout, float]] = {}
    kinds: dict[object, tuple[Layout, float]] = {}
    first = plan.rows[0].layout
    for row in (row for row in plan.rows if row.fits):
        layout, found = row.layout, (row.layout, row.seconds)
        kind = (layout.pipeline, layout.tensor, layout.replicate, layout.stage)
        if kind == (first.pipeline, first.tensor, first.replicate, first.stage):
            micros.setdefault(layout.micro, found)
        else:
            kinds.setdefault(kind, found)
    return [*list(micros.values())[:_MICROS], *list(kinds.values())[:_OTHERS]]


def tried(machine: Path, rounds: int = 2) -> Iterator[Tried]:
    """Plan and train each configuration by `auto` itself and in other layouts, one after the other, in so many rounds."""
    os.environ["XDG_CACHE_HOME"] = cache = tempfile.mkdtemp(prefix="zeromesh-plan-")
    Path(cache, "zeromesh").mkdir()
    shutil.copyfile(machine, Path(cache, "zeromesh", "machine.yaml"))
    for config, ranks in CONFIGS.items():
        chosen = layouts_of(config, ranks, machine)
        found = [
            Tried(config=config, layout=str(layout), automatic=not index, planned=seconds)
            for index, (layout, seconds) in enumerate(chosen)
        ]
        for _ in range(rounds):
            for index, (layout, _) in enumerate(chosen):
                keys = [f"{key}={json.dumps(value)}" for key, value in layout.values_by_key().items()]
                name, seconds = _measured(config, ranks, keys if index else _AUTO)
                if not index and name != str(layout):
                    raise RuntimeError(f"{config} took {name}, the plan says {layout}")
                found[index] = replace(found[index], seconds=min(seconds, found[index].seconds))
        yield from found
    shutil.rmtree(cache)


def automatic_table(found: list[Tried]) -> Iterator[str]:
    """Markdown."""
    yield "| configuration | layout | ms planned | measured | of the best |"
    yield "|---|---|---|---|---|"
    within = 0
    for config, ranks in CONFIGS.items():
        own = [each for each in found if each.config == config]
        best = min(each.seconds for each in own)
        for each in own:
            name = f"{config}, {ranks} ranks" if each.automatic else ""
            layout = f"**{each.layout}** (auto)" if each.automatic else each.layout
            within += each.automatic and each.seconds <= 1.1 * best
            numbers = f"{1e3 * each.planned:.0f} | {1e3 * each.seconds:.0f} | {each.seconds / best:.2f}"
            yield f"| {name} | {layout} | {numbers} |"
    yield ""
    yield f"{within} of {len(CONFIGS)} within 10 % of the best that was tried"


def _measured(config: str, ranks: int, keys: Any) -> tuple[str, float]:
    class Ranks:
        device = "cpu"

    Ranks.ranks = ranks  # type: ignore[attr-defined]
    folder = tempfile.mkdtemp(prefix="zeromesh-plan-")
    every = [*keys, *_keys(), f"run.output_dir={folder}"]
    try:
        found = run_ranks("bench.planned", Ranks, [json.dumps(every), _path(config)], timeout=300)  # type: ignore[arg-type]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    steps = [max(step) for step in zip(*(each["seconds"] for each in found), strict=True)]
    return found[0]["auto"], sorted(steps)[len(steps) // 2]


def _keys() -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in _SHORT.items()]


def _path(config: str) -> str:
    return str(SCRIPTS.parent / "configs" / config)
