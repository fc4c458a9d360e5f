"""The trainer over tensor and pipeline axes does what it does on one process, whatever else it is told to do."""

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.devices import DEVICE
from tests.support.plain import apart, distance
from tests.support.workers import PoolOptions, Workers

FULL = pytest.mark.full
WAIT = {"timeout_seconds": 20}
AXES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "data 2": (2, {}),
    "tensor 2": (2, {"tensor": 2}),
    "sequence 2": (2, {"tensor": 2, "sequence": True}),
    "pipeline 2": (2, {"pipeline": 2}),
    "gpipe": (2, {"pipeline": 2, "schedule": "gpipe"}),
    "interleaved": (2, {"pipeline": 2, "schedule": "interleaved", "chunks": 2}),
    "zero bubble": (2, {"pipeline": 2, "schedule": "zero_bubble"}),
    "by hand": (2, {"pipeline": 2, "stages": [1, 3]}),
    "pipeline 2 x tensor 2": (4, {"pipeline": 2, "tensor": 2}),
    "data 2 x tensor 2": (4, {"tensor": 2}),
    "data 2 x pipeline 2": (4, {"pipeline": 2}),
    "pipeline 4": (4, {"pipeline": 4}),
    "context 2": (2, {"context": 2}),
    "heads 2": (2, {"context": 2, "context_method": "heads"}),
    "context 3": (3, {"context": 3}),
    "context 4": (4, {"context": 4}),
    "context 2 x data 2": (4, {"context": 2}),
    "context 2 x replicate 2": (4, {"context": 2, "replicate": 2}),
    "context 2 x tensor 2": (4, {"context": 2, "tensor": 2}),
    "context 2 x sequence 2": (4, {"context": 2, "tensor": 2, "sequence": True}),
    "context 2 x pipeline 2": (4, {"context": 2, "pipeline": 2}),
}
MANY = ("tensor 2", "pipeline 2", "interleaved", "zero bubble", "pipeline 2 x tensor 2", "data 2 x pipeline 2")

FILES, HOST = {"tier": "file"}, {"tier": "host"}
STATES = ("optimizer", "parameters", "gradients")
RAGGED = {"batch": {"global_size": 10, "micro_size": 3}}
PLAIN = {"compute": "bfloat16", "master": "float32", "reduce": "float32"}
HALF = {**PLAIN, "compute": "float16", "loss_scale": {"initial_scale": 2.0**20}}
WAYS: dict[str, dict[str, Any]] = {
    "ragged": {"sections": RAGGED},
    "a loss of one's own": {"sections": RAGGED, "own_loss": True},
    "tied": {"kind": "gpt2"},
    "its own base model": {"kind": "own base"},
    "dropout": {"kind": "dropout"},
    "frozen": {"kind": "frozen"},
    "experts": {"kind": "mixtral"},
    "classifier": {"kind": "bert"},
    "in backward": {
        "sections": {"optimizer": {"in_backward": True}, "run": {"clip_norm": 0.0, "on_nonfinite": "stop"}},
        "look": False,
    },
    "recomputed": {"sections": {"model": {"activation_checkpointing": "block"}}},
    "smoothed": {"sections": {"run": {"label_smoothing": 0.1}}},
    "the model's own loss": {"sections": {"model": {"loss": "native"}}},
    "recomputed in part": {"sections": {"model": {"activation_checkpointing": "selective"}}},
    "on files": {"sections": {"offload": dict.fromkeys(STATES, FILES)}},
    "on the host": {"sections": {"offload": dict.fromkeys(STATES, HOST)}},
    "inputs on files": {"sections": {"offload": {"activations": FILES}, "model": {"activation_checkpointing": "block"}}},
    "bfloat16": {"sections": {"precision": PLAIN}},
    "float16": {"sections": {"precision": HALF}},
}
TOLERANCES = {"bfloat16": 3e-2, "float16": 3e-2, "experts": 1e-7, "the model's own loss": 1e-6}
"""Beside 1e-9. Experts are chosen in float32, and losses of transformers computed in it."""
TWO_BLOCKS = ("gpt2", "dropout", "mixtral", "bert")
STAGES = (
    *(("tensor 2", 3), ("sequence 2", 2), ("pipeline 2", 1), ("gpipe", 3), ("interleaved", 2), ("zero bubble", 3)),
    *(("by hand", 3), ("pipeline 2 x tensor 2", 3), ("data 2 x tensor 2", 3), ("data 2 x tensor 2", 1)),
    *(("data 2 x pipeline 2", stage) for stage in (0, 1, 2, 3)),
    ("pipeline 4", 3),
    *(("context 2", stage) for stage in (0, 1, 2, 3)),
    *((each, 3) for each in ("heads 2", "context 3", "context 4", "context 2 x replicate 2")),
    *(("context 2 x data 2", stage) for stage in (0, 1, 2, 3)),
    *((each, 2) for each in ("context 2 x tensor 2", "context 2 x sequence 2", "context 2 x pipeline 2")),
)
CASES = [
    *(("", axes, stage) for axes, stage in STAGES),
    *(
        (way, axes, 3)
        for way in WAYS
        for axes in MANY
        if (way, axes) != ("in backward", "zero bubble")
        and not (WAYS[way].get("kind") in TWO_BLOCKS and axes == "interleaved")
        and not (way == "dropout" and "tensor" in axes)  # a tensor group draws numbers of its own
    ),
    *(
        (way, axes, 3)
        for way in WAYS
        for axes in ("context 2", "heads 2", "context 2 x tensor 2", "context 2 x pipeline 2")
        if way not in ("a loss of one's own", "classifier", "dropout")  # refused, or of a share's own numbers
    ),
]
QUICK = {
    ("", "sequence 2", 2), ("", "pipeline 2 x tensor 2", 3), ("ragged", "pipeline 2", 3),
    ("its own base model", "pipeline 2", 3), ("recomputed", "zero bubble", 3),
}  # fmt: skip

Reference = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def reference(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What one process does, found out once for each way."""
    known: dict[str, tuple[Path, dict[str, Any]]] = {}

    def find(**way: Any) -> tuple[Path, dict[str, Any]]:
        key = repr(way)
        if key not in known:
            folder = tmp_path_factory.mktemp("one")
            known[key] = folder, workers.run(1, "parallel_cases:fit", folder=str(folder), **way)[0]
        return known[key]

    return find


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("way", "axes", "stage"), [pytest.param(*case, marks=() if case in QUICK else FULL) for case in CASES])
def test_a_run_over_any_axes_is_that_of_one_process(
    workers: Workers, reference: Reference, tmp_path: Path, way: str, axes: str, stage: int
) -> None:
    """Whatever a run may do: all that can be seen is compared."""
    arguments = dict(WAYS[way]) if way else {}
    sections = arguments.pop("sections", {})
    plain, wanted = reference(**arguments, sections=sections)
    size, parallel = AXES[axes]
    sections = {**sections, "parallel": {**WAIT, **parallel}, "zero": {"stage": stage}}
    bound = TOLERANCES.get(way, 1e-9)
    for found in workers.run(size, "parallel_cases:fit", timeout=120, folder=str(tmp_path), **arguments, sections=sections):
        for numbers in ("losses", "norms", "evaluations"):  # One that is not finite is a word.
            both = list(zip(found[numbers], wanted[numbers], strict=True))
            assert all(a == b or apart([a], [b]) <= bound for a, b in both), (numbers, both)
        assert (found["tokens"], found["skipped"]) == (wanted["tokens"], wanted["skipped"])
        assert found["whole"] == found["gathered"] == 0.0
        assert found["logits"] <= bound
        assert found["left"] == []
        told = found["told"].get("tensor", [])
        assert ("all-reduce" in told) == ("tensor" in parallel)
        assert "sequence" not in parallel or {"all-gather", "reduce-scatter"} <= {*told}
        assert ("point to point" in found["told"].get("pipeline", [])) == ("pipeline" in parallel)
        assert (found["bubble"] is not None) == ("pipeline" in parallel)
    ours, theirs = torch.load(tmp_path / "seen.pt"), torch.load(plain / "seen.pt")
    for what, tensors in theirs.items():
        assert not tensors or way == "float16" or distance(ours[what], tensors) <= 100 * bound, what


@FULL
@pytest.mark.parametrize("axes", ["tensor 2", "pipeline 2"])
def test_compiled_blocks(workers: Workers, reference: Reference, tmp_path: Path, axes: str) -> None:
    size, parallel = AXES[axes]
    _, wanted = reference()
    sections = {"parallel": {**parallel, "timeout_seconds": 200}, "model": {"compile": True}}
    found = workers.run(size, "parallel_cases:fit", timeout=400, folder=str(tmp_path), look=False, sections=sections)
    assert apart(found[0]["losses"], wanted["losses"]) <= 1e-9


def over(axes: str, **more: Any) -> dict[str, Any]:
    """Arguments of a case over these axes."""
    return {"axes": {**WAIT, **AXES[axes][1], **more}}


@pytest.mark.parametrize(
    ("axes", "rank"),
    [
        pytest.param("tensor 2", 1, marks=FULL),
        pytest.param("pipeline 2", 1, marks=FULL),
        pytest.param("pipeline 2", 0, marks=FULL),
        ("pipeline 2 x tensor 2", 3),
    ],
)
def test_what_is_not_finite_on_one_rank_is_skipped_by_all(workers: Workers, tmp_path: Path, axes: str, rank: int) -> None:
    """Also where it is a copy of what another rank counts."""
    found = workers.run(AXES[axes][0], "parallel_cases:poisoned", folder=str(tmp_path), rank=rank, **over(axes))
    assert {each["skipped"] for each in found} == {1}
    assert len({each["weights"] for each in found}) == 1
    skipped = [line for line in found[0]["lines"] if "skipped" in line]
    assert [line["step"] for line in skipped] == [2]
    assert skipped[0]["cause"].startswith("the gradient norm is inf: gradients of unit ")


@pytest.mark.parametrize(
    ("axes", "rank", "number"),
    [
        ("tensor 2", 1, signal.SIGTERM),
        ("pipeline 2", 0, signal.SIGINT),
        *(pytest.param("pipeline 2 x tensor 2", rank, signal.SIGTERM, marks=FULL) for rank in range(4)),
    ],
)
def test_one_rank_that_is_told_to_stop_stops_all(
    workers: Workers, tmp_path: Path, axes: str, rank: int, number: signal.Signals
) -> None:
    arguments = {"folder": str(tmp_path), "rank": rank, "number": int(number), **over(axes)}
    found = workers.run(AXES[axes][0], "parallel_cases:signalled", **arguments)
    assert set(found) == {"SystemExit 143" if number == signal.SIGTERM else "KeyboardInterrupt"}
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.full
def test_initial_weights_and_a_second_run_do_not_depend_on_axes(workers: Workers, tmp_path: Path) -> None:
    given, losses = {}, {}
    for axes in ("one", "tensor 2", "interleaved"):
        size, case = AXES[axes][0], {"folder": str(tmp_path / axes), **over(axes)}
        given[axes] = workers.run(size, "parallel_cases:given", **case)
        losses[axes] = workers.run(size, "parallel_cases:again", **case)[0]
    (wanted,) = given["one"]
    assert all(found == wanted for rows in given.values() for found in rows)
    assert wanted["config"] == wanted["callable"] == wanted["meta"] != wanted["built"] == wanted["source"]
    assert all(apart(found, losses["one"]) <= 1e-9 for found in losses.values())


LAYOUTS = ("data 2", "tensor 2", "pipeline 2", "pipeline 2 x tensor 2")
ORDERS = (("tensor 2", "pipeline 2", "llama"),)


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        pytest.param(first, second, kind, marks=() if (first, second, kind) in ORDERS else (FULL,))
        for first in LAYOUTS
        for second in LAYOUTS
        for kind in ("llama", "gpt2")
        if kind == "llama" or "tensor" not in first + second  # a tensor group draws numbers of its own for dropout
    ],
)
def test_a_run_goes_on_over_other_axes(workers: Workers, tmp_path: Path, first: str, second: str, kind: str) -> None:
    losses = []
    for folder, steps, axes in (("a", 6, "data 2"), ("b", 3, first), ("b", 6, second)):
        size, parallel = AXES[axes]
        sections = {"parallel": {**WAIT, **parallel}}
        case = {"folder": f"{tmp_path}/{folder}", "steps": steps, "sections": sections, "kind": kind}
        losses.append(workers.run(size, "checkpoint_cases:trained", **case)[0]["losses"])
    straight, before, after = losses
    assert len(before) == len(after) == 3
    assert apart(before + after, straight) <= 1e-9


@FULL
def test_a_tensor_group_draws_the_same_after_an_interruption(workers: Workers, tmp_path: Path) -> None:
    sections = {"parallel": {**WAIT, "tensor": 2}}
    found = [
        workers.run(2, "checkpoint_cases:trained", folder=f"{tmp_path}/{f}", steps=n, sections=sections, kind="gpt2")[0]
        for f, n in (("a", 10), ("b", 5), ("b", 10))
    ]
    assert found[1]["losses"] + found[2]["losses"] == found[0]["losses"]


@pytest.mark.skipif(DEVICE.type == "sim", reason="what moves the simulated device's tensors says itself who is gone")
@pytest.mark.parametrize(
    ("axes", "rank", "count", "stage"),
    [
        ("tensor 2", 1, 9, 3),
        ("pipeline 2", 0, 5, 3),
        ("pipeline 2", 1, 5, 1),
        pytest.param("pipeline 2 x tensor 2", 2, 7, 3, marks=FULL),
        pytest.param("interleaved", 1, 9, 3, marks=FULL),
    ],
)
def test_a_rank_that_is_killed_is_named_by_all(
    workers: Workers, tmp_path: Path, axes: str, rank: int, count: int, stage: int
) -> None:
    """A survivor waits in an exchange of the tensor group, for a neighbour's activations, or for gradients."""
    with workers.fresh(PoolOptions(size=AXES[axes][0])) as pool:
        began = time.monotonic()
        case = {"folder": str(tmp_path), "rank": rank, "count": count, "stage": stage, **over(axes)}
        outcomes = pool.outcomes("parallel_cases:killed", timeout=40, **case)
        assert time.monotonic() - began < WAIT["timeout_seconds"]
    assert outcomes[rank].error == "died"
    for outcome in outcomes:
        if outcome.rank != rank:
            assert outcome.error == "CollectiveError", outcome
            assert f"rank {rank} " in outcome.message, outcome.message


@pytest.mark.parametrize(
    ("size", "axes", "case", "said"),
    [
        (4, {"tensor": 4}, {"kind": "two heads"},
         "2 query heads cannot be divided among 4 ranks; parallel.tensor may be at most 2"),
        (4, {"pipeline": 4}, {"kind": "gpt2"}, "2 blocks cannot be cut into 4 pipeline stages"),
        (2, {"pipeline": 2, "stages": [1, 2]}, {}, "has 3 of them, the model 4"),
        (2, {"pipeline": 2, "stages": [4]}, {}, "parallel.stages has 1 numbers of blocks for 2"),
        (2, {"tensor": 2, "plan": {"*.nothing": "colwise"}}, {}, "matches no module of Llama"),
        (2, {"tensor": 2, "plan": {"*.q_proj": "sideways"}}, {}, "there is no style 'sideways'"),
        (2, {"pipeline": 2}, {"kind": "pictures"}, "Pictures cannot be cut into pipeline stages"),
        (2, {"tensor": 2}, {"kind": "pictures"}, "there is no tensor-parallel plan for Pictures"),
        (4, {"pipeline": 2, "tensor": 2, "sequence": True}, {"length": 11}, "of 11 tokens cannot be shared out to 2 tensor ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_before_training_and_by_all(
    workers: Workers, tmp_path: Path, size: int, axes: dict[str, Any], case: dict[str, Any], said: str
) -> None:
    found = workers.run(size, "parallel_cases:refused", folder=str(tmp_path), axes={**WAIT, **axes}, **case)
    assert len(set(found)) == 1
    assert found[0].startswith("0 ")
    assert said in found[0]


@pytest.mark.parametrize("axes", ["tensor 2", "pipeline 2"])
def test_ranks_that_compute_together_are_given_one_batch(workers: Workers, tmp_path: Path, axes: str) -> None:
    found = workers.run(2, "parallel_cases:refused", folder=str(tmp_path), own=True, **over(axes))
    # The rank that compares second may hear of the other's error first, which names the same.
    assert any(said.startswith("1 DataError: ") for said in found)
    assert all(re.search(r"^1 .*DataError: rank [01] got other data than rank [01]", said) for said in found), found


def test_a_model_that_is_trained_may_be_called_where_it_is_all_there(workers: Workers, tmp_path: Path) -> None:
    """Tensor ranks answer together; of stages each would have but a part."""
    for axes in ("tensor 2", "pipeline 2"):
        arguments = {"folder": str(tmp_path / axes), "refused": axes == "pipeline 2", **over(axes)}
        workers.run(2, "parallel_cases:called", **arguments)
