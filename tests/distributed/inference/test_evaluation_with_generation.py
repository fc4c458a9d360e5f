"""Evaluations that generate give the tokens of the library's own `generate` in one process, under every layout."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.inference.test_generator import ALONE, IMPOSSIBLE, LAYOUTS
from tests.support.workers import PoolOptions, Workers

SHORT = {("llama", "sharded"), ("t5", "tensor")}
CASES = [
    (model, layout)
    for model in ("llama", "gpt2", "t5", "bart")
    for layout in LAYOUTS
    if layout not in {*IMPOSSIBLE.get(model, ()), *set[str]().union(*ALONE.values()), "stored"}
]
# Weights of a training are not read from files, and the model has too few blocks for interleaved stages.
EVERY = [name for name in LAYOUTS if name not in ("file", "stored", "interleaved")]


def row(case: str, layout: str, *marks: pytest.MarkDecorator, **arguments: Any) -> Any:
    return pytest.param(case, layout, arguments, marks=marks, id=" ".join([case, layout, *map(str, arguments.values())]))


FULL, SHARDED = pytest.mark.full, "sharded"
ROWS: list[Any] = [
    *(row("agrees", layout, *([] if (model, layout) in SHORT else [FULL]), model=model) for model, layout in CASES),
    *(
        row("agrees", layout, FULL, model=model, count=7, fields={"num_beams": 3})
        for layout in (SHARDED, "tensor")
        for model in ("llama", "t5")
    ),
    # Fewer samples than ranks.
    row("agrees", "sharded on 4", FULL, model="llama", count=9),
    *(
        row(case, layout, *([] if layout == short else [FULL]))
        for case, short in (("averages", SHARDED), ("several", "data"))
        for layout in EVERY
    ),
    *(
        row("beams", layout, *([] if (layout, model) == ("tensor", "llama") else [FULL]), model=model)
        for layout in EVERY
        if "pipeline" not in layout
        for model in ("llama", "t5")
    ),
    *(row("samples_prompts", layout) for layout in (SHARDED, "pipeline")),
    row("samples_prompts", "tensor", FULL),
    row("refuses", "alone"),
    row("tokenized", "alone"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("case", "layout", "arguments"), ROWS)
def test_what_is_generated_is_that_of_one_process(
    workers: Workers, tmp_path: Path, case: str, layout: str, arguments: dict[str, Any]
) -> None:
    ranks, sections = {**LAYOUTS, "sharded on 4": (4, LAYOUTS[SHARDED][1]), "alone": (2, None)}[layout]
    if layout == "file":
        sections = {"offload": {"parameters": "file", "directory": str(tmp_path / "swap")}}
    given = {} if sections is None else {"sections": sections}
    workers.run(ranks, f"evaluation_cases:{case}", timeout=120.0, folder=str(tmp_path), **given, **arguments)


@pytest.mark.full
def test_a_sample_without_a_prompt_is_named_on_all_ranks(workers: Workers, tmp_path: Path) -> None:
    with workers.fresh(PoolOptions(size=2, timeout_seconds=5)) as pool:
        pool.run("evaluation_cases:lacks_a_prompt", timeout=60.0, folder=str(tmp_path))


@pytest.mark.full
def test_what_is_drawn_does_not_depend_on_the_layout(workers: Workers, tmp_path: Path) -> None:
    drawn = []
    for layout in EVERY:
        ranks, sections = LAYOUTS[layout]
        drawn += workers.run(ranks, "evaluation_cases:draws", folder=str(tmp_path / layout), sections=sections)
    assert all(each == drawn[0] for each in drawn), drawn
