"""Each seeded bug makes training silently wrong: it runs to its end on all ranks, and what it leaves differs."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.plain import apart, distance
from tests.support.seeded_bugs import BUGS, SeededBug, plant
from tests.support.workers import Workers
from zeromesh.trainer.config.load import load_config

SHORT = {"row-sum-missing", "lost-bucket"}
PARAMETERS = [pytest.param(bug, id=bug.name, marks=[] if bug.name in SHORT else pytest.mark.full) for bug in BUGS]


LEAST = 1e-4
"""By which part losses, norms or weights differ at least. Runs without a bug repeat themselves bit by bit."""


@pytest.mark.parametrize("bug", PARAMETERS)
def test_a_planted_bug_bites(workers: Workers, tmp_path: Path, bug: SeededBug) -> None:
    def run(planted: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        case = "seeded_bug_cases:trained_with"
        seen = workers.run(bug.ranks, case, bug=bug.name, planted=planted, folder=str(tmp_path))
        numbers = [[number for step in rank["steps"] for number in step] for rank in seen]
        assert all(math.isfinite(number) for rank in numbers for number in rank)
        return numbers[0], torch.load(tmp_path / f"{bug.name}-{planted}.pt")

    (numbers, weights), (wrong_numbers, wrong_weights) = run(False), run(True)
    assert max(apart(wrong_numbers, numbers), distance(wrong_weights, weights)) > LEAST


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_what_is_planted_is_taken_back(bug: SeededBug) -> None:
    places: list[tuple[Any, str]] = []
    bug.plant(lambda holder, attribute, _: places.append((holder, attribute)))

    def now() -> list[Any]:
        return [getattr(holder, attribute) for holder, attribute in places]

    before = now()
    with plant(bug.name):
        assert not any(one is other for one, other in zip(before, now(), strict=True))
    assert before == now() != []
    load_config(bug.config())
    re.compile(bug.named)
    assert [each.name for each in BUGS].count(bug.name) == 1


@pytest.fixture(scope="module")
def sound() -> set[str]:
    """Layouts that were verified without a bug."""
    return set()


@pytest.mark.full
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_verification_finds_and_names_it(workers: Workers, tmp_path: Path, sound: set[str], bug: SeededBug) -> None:
    def verified(planted: bool) -> list[str]:
        case = "seeded_bug_cases:verified"
        found: list[str] = workers.run(
            bug.ranks, case, timeout=120, bug=bug.name, planted=planted, folder=str(tmp_path)
        )[0]
        return found

    layout = repr(bug.layout)
    if layout not in sound and (differing := verified(False)):
        pytest.fail(f"without a bug: {differing[0]}")
    sound.add(layout)
    found = verified(True)
    assert found
    assert re.search(bug.named, found[0]), found[0]
