"""`Trainer.verify`: right layouts pass, wrong ones and planted bugs, which make training silently wrong, are found and located."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.plain import apart, distance
from tests.support.seeded_bugs import BUGS, SeededBug, plant
from tests.support.tables import row
from tests.support.workers import Workers
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.verification.certificate import Difference, merged

CASES = "verification_cases"
CONFIGS = sorted(path.name for path in (Path(__file__).parents[3] / "configs").iterdir() if path.name != "dpo.yaml")
"""Those whose steps are zeromesh's own: verify refuses the loop of TRL by name."""
DIVIDED = {"tensor": 2}
STAGED = {"pipeline": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {"parallel": {"tensor": 2, "pipeline": 2, "sequence": False}, "zero": {"stage": 1}},
    "qwen3": {"parallel": DIVIDED, "zero": {"stage": 3}},
    "gemma": {"parallel": DIVIDED, "zero": {"stage": 2}},
    "mistral": {"parallel": STAGED, "zero": {"stage": 1}},
    "phi": {"parallel": {"context": 2}, "zero": {"stage": 1}},
    "gpt2": {"parallel": {"tensor": 2, "pipeline": 2, "schedule": "zero_bubble"}, "zero": {"stage": 1}},
    "gpt-neox": {"parallel": STAGED, "zero": {"stage": 2}},
    "opt": {"parallel": {"replicate": 2}, "zero": {"stage": 3}},
    "mixtral": {"parallel": {"replicate": 2}, "zero": {"stage": 2}},
    "bert": {"parallel": DIVIDED, "zero": {"stage": 3}},
    "modernbert": {"zero": {"stage": 3}},
    "t5": {"zero": {"stage": 3}},
    "vit": {"zero": {"stage": 2}},
    "whisper": {"zero": {"stage": 3}},
    "mamba": {"zero": {"stage": 3}, "offload": {"optimizer": "host", "parameters": "host"}},
}


def test_a_right_layout_passes(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(2, f"{CASES}:small_llama", folder=str(tmp_path), fault="", checks=["resume"])[0]
    assert found["passed"], found
    assert found["outputs"] > 100
    assert found["gradients"] == 21
    certificate = json.loads((tmp_path / "run/certificate.json").read_text())
    assert certificate["passed"]
    assert certificate["layout"]["layout"] == "2 ranks: shard 2"
    assert set(certificate["digests"]) == {"config", "weights", "data"}


def test_a_codec_is_all_that_changes_the_frozen_weights(workers: Workers, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    sections = {"model": {"lora": {"rank": 2}, "weights": "fp4"}, "parallel": {"tensor": 2}}
    found = workers.run(2, f"{CASES}:small_llama", folder=str(tmp_path), fault="", checks=[], **sections)[0]
    assert found["passed"], found
    notes = json.loads((tmp_path / "run/certificate.json").read_text())["notes"]
    assert re.fullmatch(r"fp4 rounds 14 matrices by 0\.1\d of their norm", notes[-1]), notes


@pytest.mark.parametrize(
    ("fault", "kind", "name"),
    [
        pytest.param("output", "output", "model.layers.1.mlp", id="a module"),
        pytest.param("scale", "gradient", "", id="a scale", marks=pytest.mark.full),
        pytest.param("error", "error", "", id="an error", marks=pytest.mark.full),
    ],
)
def test_what_is_wrong_is_found_and_named(workers: Workers, tmp_path: Path, fault: str, kind: str, name: str) -> None:
    found = workers.run(2, f"{CASES}:small_llama", folder=str(tmp_path), fault=fault, checks=[])[0]
    assert not found["passed"]
    first = found["found"][0]
    assert (first[0], first[2]) == (kind, 1)
    if kind == "error":
        assert found["located"].startswith("the run ends in step 1, and rank 0 says: ")
        assert "shapes do not fit" in found["located"]
    if name:
        assert first[1] == name
        assert first[3] == [1]
        assert "model.layers.1.mlp in step 1, microbatch 1 on rank 1" in found["located"]


def difference(*values: Any) -> Difference:
    return Difference(**dict(zip(Difference.__slots__, values, strict=False)))


def test_the_difference_nearest_to_the_cause_is_first_and_is_a_sentence() -> None:
    """An exact run before others, then by step, kind, microbatch and place, however large; of all ranks the largest."""
    order = [("initial", 0, "w", 0.1), ("output", 1, "b", 0.1, 7, 0), ("output", 1, "a", 0.2, 3, 1)]
    order += [("output", 1, "b", 0.3, 7, 1), ("loss", 1, "", 9.0), ("error", 2, "", 0.0, 0, -1, (), "exact", "no")]
    order += [("check", 1, "", 0.0, 0, -1, (), "resume", "what")]
    rows = [[difference(*values[:3], each, *values[4:]) for values in reversed(order)] for each in (0.0, 0.0)]
    found = merged([*rows, [difference(*values) for values in order]])
    assert list(found) == [replace(difference(*values), ranks=(0, 1, 2)) for values in order]
    said = [replace(each, ranks=(2,)).sentence().removesuffix(" on rank 2") for each in found]
    assert said[1] == "the output of b in step 1, microbatch 0 on rank 2 differs by 0.1"
    assert said[0] == "the initial value of w on rank 2 differs by 0.1"
    assert said[4:] == ["the loss in step 1 on rank 2 differs by 9", "no", "what in step 1"]


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("ranks", "case", "arguments"),
    [
        row(2, "users_loss"),
        *(row(4, "architecture", FULL, name=name, **layout) for name, layout in LAYOUTS.items()),
        *(row(4, "example", FULL, name=name, overrides=[]) for name in CONFIGS),
    ],
)
def test_losses_architectures_and_examples_pass(
    workers: Workers, tmp_path: Path, ranks: int, case: str, arguments: dict[str, Any]
) -> None:
    found = workers.run(ranks, f"{CASES}:{case}", folder=str(tmp_path), **arguments)[0]
    assert found["passed"], found
    assert case != "example" or found["seconds"] < 120


def test_a_large_model_of_ones_own_is_refused(workers: Workers, tmp_path: Path) -> None:
    assert "Sequential has 2,266,510 parameters" in workers.run(2, f"{CASES}:refused", folder=str(tmp_path))[0]


# Seeded bugs: each runs to its end on all ranks, and what it leaves differs.

SHORT = {"lost-bucket", "labels-swapped"}
LEAST = 1e-4
"""By which part losses, norms or weights differ at least. Runs without a bug repeat themselves bit by bit."""
each_bug = pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, id=name, marks=[] if name in SHORT else pytest.mark.full) for name, bug in BUGS.items()]
)
def test_a_planted_bug_bites(workers: Workers, tmp_path: Path, bug: SeededBug) -> None:
    def run(planted: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        seen = workers.run(bug.ranks, f"{CASES}:trained_with", bug=bug.name, planted=planted, folder=str(tmp_path))
        numbers = [[number for step in rank["steps"] for number in step] for rank in seen]
        assert all(math.isfinite(number) for rank in numbers for number in rank)
        return numbers[0], torch.load(tmp_path / f"{bug.name}-{planted}.pt")

    (numbers, weights), (wrong_numbers, wrong_weights) = run(False), run(True)
    assert max(apart(wrong_numbers, numbers), distance(wrong_weights, weights)) > LEAST


@each_bug
def test_a_planted_bug_is_taken_back(bug: SeededBug) -> None:
    before = getattr(bug.holder, bug.attribute)
    with plant(bug.name):
        assert getattr(bug.holder, bug.attribute) is not before
    assert getattr(bug.holder, bug.attribute) is before
    load_config(bug.config())
    re.compile(bug.named)


@pytest.fixture(scope="module")
def sound() -> set[str]:
    """Layouts that were verified without a bug."""
    return set()


@pytest.mark.full
@each_bug
def test_verification_finds_and_names_it(workers: Workers, tmp_path: Path, sound: set[str], bug: SeededBug) -> None:
    def verified(planted: bool) -> list[str]:
        arguments = {"bug": bug.name, "planted": planted, "folder": str(tmp_path)}
        found: list[str] = workers.run(bug.ranks, f"{CASES}:verified", timeout=120, **arguments)[0]
        return found

    layout = repr(bug.layout)
    if layout not in sound and (differing := verified(False)):
        pytest.fail(f"without a bug: {differing[0]}")
    sound.add(layout)
    found = verified(True)
    assert found
    assert re.search(bug.named, found[0]), found[0]
