"""A certificate's differences, in order and in words, and its lines."""

import json
from typing import Any

import pytest

from zeromesh.trainer.verification.certificate import Certificate, Difference, PassRecord, merged


def difference(kind: str = "output", **values: Any) -> Difference:
    return Difference(**{"kind": kind, "step": 1, "name": "a", "size": 0.5, **values})


def certificate(*differences: Difference, **values: Any) -> Certificate:
    record = PassRecord(
        losses=[1.5, 1.25], plain_losses=[1.5, 1.25], norms=[2.0], plain_norms=[2.0], bound=1e-9,
        gradients={"a": 2e-12, "b": 1e-12}, parameters={"a": 3e-12}, outputs=1200,
    )  # fmt: skip
    bare = PassRecord(losses=[1.0], plain_losses=[1.0], norms=[], plain_norms=[], bound=0.1, parameters={"a": 0.05})
    given: dict[str, Any] = {
        "passed": not differences, "differences": differences, "layout": {"layout": "2 ranks: shard 2"},
        "versions": {"zeromesh": "1", "torch": "2"}, "digests": {"data": "x"}, "passes": {"exact": record, "own": bare},
        "checks": {"resume": "saved"}, "notes": ("its own data",), "seconds": 2.4,
    }  # fmt: skip
    return Certificate(**{**given, **values})


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (difference(), "the output of a in step 1 differs by 0.5"),
        (difference("average", step=0), "the averaged weight of a differs by 0.5"),
        (difference("gradient", microbatch=0), "the gradient of a in step 1, microbatch 0 differs by 0.5"),
        (difference("loss", name="", size=0.0, detail="nobody"), "the loss in step 1 (nobody)"),
        (difference("norm", name="", ranks=(0, 2)), "the norm in step 1 on ranks 0, 2 differs by 0.5"),
        (difference("parameter", ranks=tuple(range(10))), "the parameter of a in step 1 on ranks 0, 1, 2, 3, 4, 5, 6, 7 "
         "and 2 more differs by 0.5"),
        (difference("rounding", detail="too much", ranks=(1,)), "too much in step 1 on rank 1 differs by 0.5"),
        (difference("error", detail="it ends", ranks=(1,), size=0.0), "it ends"),
        (difference("check", step=0, size=float("inf")), "the check of a differs by inf"),
    ],
)  # fmt: skip
def test_sentences(found: Difference, sentence: str) -> None:
    assert found.sentence() == sentence


def test_ranks_of_equal_differences_are_joined_and_others_are_not() -> None:
    base = difference(size=0.1)
    same = difference(size=0.3, place=4, detail="x")
    others = [difference(run="resume"), difference("gradient"), difference(step=2), difference(name="b")]
    others.append(difference(microbatch=1))
    found = merged([[base, *others], [], [difference(size=0.2), same, base]])
    assert len(found) == 6
    joined = next(each for each in found if each.ranks == (0, 2))
    assert (joined.size, joined.place, joined.detail) == (0.3, 4, "x")
    assert [each.ranks for each in found if each is not joined] == [(0,)] * 5
    assert found[-1].run == "resume"
    assert merged([[], []]) == ()


def test_the_lines_of_a_certificate() -> None:
    lines = certificate().lines()
    assert lines == [
        "layout: 2 ranks: shard 2",
        "small run: its own data",
        "exact: losses 1.5, 1.25",
        "exact: largest difference 3e-12 (bound 1e-09), 2 gradients in each step, 1 parameters, 1,200 outputs of modules",
        "own: losses 1",
        "own: largest difference 0.05 (bound 0.1), 1 parameters",
        "resume: saved",
        "PASSED in 2 s with zeromesh 1, torch 2",
    ]
    many = [difference(name=str(number)) for number in range(14)]
    lines = certificate(*many).lines()[7:]
    assert lines[0] == "FIRST DIFFERENCE: the output of 0 in step 1 differs by 0.5"
    assert lines[1:12] == [f"  also: {each.sentence()}" for each in many[1:12]]
    assert lines[12:] == ["  and 2 more", "FAILED in 2 s with zeromesh 1, torch 2"]
    assert certificate(*many[:12]).lines()[-2] == f"  also: {many[11].sentence()}"


def test_a_certificate_as_json() -> None:
    found = json.loads(certificate(difference(size=float("inf")), difference(name="b")).to_json())
    assert (found["kind"], found["version"], found["passed"]) == ("zeromesh certificate", 1, False)
    assert found["located"] == "the output of a in step 1 differs by inf"
    assert [each["name"] for each in found["differences"]] == ["a", "b"]
    assert isinstance(found["differences"][0]["size"], str)
    assert json.loads(certificate().to_json())["located"] == ""
