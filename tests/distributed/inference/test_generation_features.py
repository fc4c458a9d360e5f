"""docs/generation-features.md says of each feature of `generate` what it does in each layout."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.inference.feature_cases import FEATURES
from tests.distributed.inference.test_generator import LAYOUTS
from tests.support.workers import Workers

PAGE = Path(__file__).parents[3] / "docs" / "generation-features.md"
COLUMNS = ("data", "sharded", "tensor", "pipeline")
SHORT = ["greedy search", "beams", "DoLa", "guidance_scale", "stop_strings"]


def table() -> dict[str, dict[str, str]]:
    """The cells of each feature by their columns, without notes."""
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    head, *features = [[cell.split("[")[0].strip(" `") for cell in row] for row in rows]
    return {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in features}


def test_the_page_has_every_feature() -> None:
    assert list(table()) == list(FEATURES)


CASES: list[Any] = [
    ("pipeline", SHORT),
    *[pytest.param(layout, list(FEATURES), marks=pytest.mark.full) for layout in COLUMNS],
]


@pytest.mark.parametrize(("layout", "names"), CASES)
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
