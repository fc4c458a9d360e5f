"""`Generator` gives the tokens and log-probabilities of the library's own `generate` in one process, under every layout."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.inference.feature_cases import FEATURES
from tests.distributed.inference.generator_cases import MODELS
from tests.support.tables import tried
from tests.support.workers import PoolOptions, Workers

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, {"zero": {"stage": 0}}),
    "sharded": (2, {"zero": {"stage": 3, "gathered_budget": 0}}),
    "tensor": (2, {"parallel": {"tensor": 2}}),
    "pipeline": (2, {"parallel": {"pipeline": 2}}),
    "tensor-pipeline": (4, {"parallel": {"tensor": 2, "pipeline": 2}}),
    "sharded-pipeline": (4, {"parallel": {"pipeline": 2}, "zero": {"gathered_budget": 0}}),
    "file": (2, {"offload": {"parameters": "file"}}),
    "stored": (2, {"offload": {"parameters": "file"}}),
    "host": (2, {"offload": {"parameters": "host"}}),
    "interleaved": (2, {"parallel": {"pipeline": 2, "chunks": 2, "schedule": "interleaved"}}),
    "tensor-4": (4, {"parallel": {"tensor": 4}}),
    "data-tensor": (4, {"parallel": {"tensor": 2}, "zero": {"stage": 0}}),
    "data-pipeline": (4, {"parallel": {"pipeline": 2}, "zero": {"stage": 0}}),
    "hybrid": (4, {"parallel": {"replicate": 2}, "zero": {"gathered_budget": 0}}),
}
FEW: dict[str, tuple[str, ...]] = {
    "bart-decoder": ("sharded", "pipeline"),
    "bert": ("pipeline", "sharded"),
    "longrope": ("pipeline", "data"),
    "dynamic": ("sharded", "pipeline"),
    "qwen3_next": ("pipeline", "sharded"),
    "llama4": ("pipeline", "sharded"),
    "gemma4": ("sharded", "tensor"),
    "recurrent_gemma": ("sharded", "data", "host"),
    "ctrl": ("pipeline", "sharded"),
    "led": ("sharded", "data"),
    "git": ("pipeline", "sharded"),
    "moshi": ("sharded", "pipeline"),
    "t5gemma": ("sharded", "data"),
}
"""Models that are tried in a few layouts, as others are like them: in the first of them in the short run too, most of them."""
ALIKE = {"dynamic", "t5gemma", "bart-decoder", "git"}
"""What longrope, t5 with gemma4, llama with bert, and gemma4 show."""
SHORT = {(model, layouts[0]) for model, layouts in FEW.items() if model not in ALIKE}
SHORT |= {("llama", "sharded"), ("gpt2", "pipeline"), ("qwen3_moe", "stored"), ("t5", "tensor")}
_STAGED = {"pipeline", "tensor-pipeline", "sharded-pipeline"}
IMPOSSIBLE: dict[str, set[str]] = {"t5": _STAGED, "bart": {*_STAGED, "tensor"}}
"""Layouts that these models cannot be divided for, in training either."""
ALONE = {"llama-deep": {"interleaved"}, "llama-heads": {"tensor-4", "data-tensor", "data-pipeline", "hybrid"}}
"""Models for a few layouts, which no other model is tried in."""
CASES: list[Any] = [
    pytest.param(model, layout, marks=() if (model, layout) in SHORT else pytest.mark.full)
    for model in MODELS
    for layout in LAYOUTS
    if layout not in IMPOSSIBLE.get(model, ())
    and layout in FEW.get(model, LAYOUTS)
    and (layout in ALONE[model] if model in ALONE else layout not in set().union(*ALONE.values()))
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_tokens_are_those_of_one_process(workers: Workers, tmp_path: Path, model: str, layout: str) -> None:
    ranks, sections = LAYOUTS[layout]
    if layout == "file":
        sections = {"offload": {"parameters": "file", "directory": str(tmp_path / "swap")}}
    arguments: dict[str, Any] = {"folder": str(tmp_path), "model": model, "sections": sections}
    rounds = workers.run(ranks, "generator_cases:agrees", timeout=120.0, **arguments)
    assert all(each == rounds[0] for each in rounds)


SHARDED, WHOLE, STAGED = {"zero": {"gathered_budget": 0}}, {"zero": {"stage": 0}}, {"parallel": {"pipeline": 2}}


test_generation = tried(
    "generator_cases",
    [
        pytest.param(1, "reads_into_place", {"shard": "1GB"}, marks=pytest.mark.full),
        (2, "reads_into_place", {"shard": "1GB"}),
        (1, "reads_into_place", {"shard": "2MB"}),
        (2, "agrees", {"model": "llama", "prompts": 1, "sections": SHARDED}),
        (2, "penalises", {}),
        (2, "from_a_run", {}),
        (2, "is_not_finite", {"sections": SHARDED}),
        pytest.param(2, "is_not_finite", {"sections": STAGED}, marks=pytest.mark.full),
        (2, "cancels", {"sections": {"zero": {"stage": 3}}}),
        pytest.param(2, "cancels", {"sections": STAGED}, marks=pytest.mark.full),
        (2, "finds_flips", {"sections": WHOLE}),
        *(
            pytest.param(ranks, "finds_flips", {"sections": sections}, marks=pytest.mark.full)
            for ranks, sections in (
                (4, {"zero": {"stage": 3}, "parallel": {"replicate": 2}}),
                (2, {**WHOLE, "parallel": {"tensor": 2}}),
                (2, {**WHOLE, **STAGED}),
            )
        ),
    ],
)


test_generation_in_processes_of_its_own = tried(
    "generator_cases",
    [(1, "takes", {"tier": "none"}), (1, "takes", {"tier": "file"}), (2, "refuses", {}), (2, "refuses_states_in_stages", {})],
    fresh=True,
)


def test_prompts_without_a_result_are_named_when_a_rank_dies(workers: Workers, tmp_path: Path) -> None:
    with workers.fresh(PoolOptions(size=2, timeout_seconds=5)) as pool:
        survivor, victim = pool.outcomes("generator_cases:loses_a_rank", timeout=30, folder=str(tmp_path))
    assert (survivor.error, victim.error) == ("", "died"), survivor.traceback


PAGE = Path(__file__).parents[3] / "docs" / "generation-features.md"
COLUMNS = ("data", "sharded", "tensor", "pipeline")
FEW_FEATURES = ["greedy search", "beams", "DoLa", "guidance_scale", "stop_strings"]


def table() -> dict[str, dict[str, str]]:
    """The cells of each feature by their columns, without notes."""
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    head, *features = [[cell.split("[")[0].strip(" `") for cell in row] for row in rows]
    return {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in features}


def test_the_page_has_every_feature() -> None:
    assert list(table()) == list(FEATURES)


FEATURE_CASES: list[Any] = [
    ("pipeline", FEW_FEATURES),
    *[pytest.param(layout, list(FEATURES), marks=pytest.mark.full) for layout in COLUMNS],
]


@pytest.mark.parametrize(("layout", "names"), FEATURE_CASES)
def test_what_a_trainer_generates(workers: Workers, tmp_path: Path, layout: str, names: list[str]) -> None:
    ranks, sections = LAYOUTS[layout]
    arguments: dict[str, Any] = {"folder": str(tmp_path), "sections": sections, "names": names}
    for found in workers.run(ranks, "feature_cases:of_a_trainer", timeout=120.0, **arguments):
        for name in names:
            assert found[name].split(":")[0] == table()[name][layout], f"{name}: {found[name]}"


@pytest.mark.full
@pytest.mark.parametrize("layout", COLUMNS)
def test_what_a_generator_generates(workers: Workers, tmp_path: Path, layout: str) -> None:
    ranks, sections = LAYOUTS[layout]
    arguments: dict[str, Any] = {"folder": str(tmp_path), "sections": sections, "names": list(FEATURES)}
    for found in workers.run(ranks, "feature_cases:of_a_generator", timeout=120.0, **arguments):
        for name, cells in table().items():
            wanted = "refused" if cells[layout] == "refused" else cells["Generator"]
            assert found[name].split(":")[0] == wanted, f"{name}: {found[name]}"
