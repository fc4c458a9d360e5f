"""Loops of a user's own over a partitioned model are those of plain PyTorch, or are refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from tests.distributed.contract.shard_cases import LOOPS, LOSSES
from tests.support.workers import Workers
from zeromesh.errors import PhaseError
from zeromesh.trainer.shard import engine_of

EXACT = 1e-9
NAMES = sorted({*LOSSES, *LOOPS} - {"unused_by_others"})  # At other stages ranks run units in one order.
FOLLOWED: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (2, {"stage": 3, "name": name}) for name in NAMES},
    **{
        f"{name} at stage {stage}": (2, {"stage": stage, "name": name})
        for name, stage in [("zero_between", 1), ("unused", 2), ("toggled", 1), ("decayed", 1), ("weights", 1)]
    },
    **{f"{name} alone": (1, {"stage": 3, "name": name}) for name in ("fallible", "retained")},
    "offload": (2, {"stage": 3, "name": "toggled", "offload": {"optimizer": "host", "parameters": "host"}}),
    "accumulation": (2, {"stage": 3, "name": "toggled", "accumulation": 3}),
    "frozen at first": (2, {"stage": 3, "name": "toggled", "frozen": "backbone.blocks.1"}),
    "replicate": (2, {"stage": 3, "name": "toggled", "parallel": {"replicate": 2}}),
    "a step that ends early": (2, {"stage": 1, "name": "unused_by_others", "accumulation": 2}),
}


@pytest.mark.parametrize("row", FOLLOWED)
def test_loop_is_that_of_plain_pytorch(workers: Workers, row: str) -> None:
    ranks, arguments = FOLLOWED[row]
    assert max(workers.run(ranks, "shard_cases:follows", **arguments)) < EXACT


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_loop_at_every_stage(workers: Workers, stage: int, ranks: int) -> None:
    for name in NAMES:
        assert max(workers.run(ranks, "shard_cases:follows", stage=stage, name=name)) < EXACT, name


@pytest.mark.parametrize(("case", "most"), [("adversaries", EXACT), ("averages", EXACT), ("deferred", 1e-6)])
def test_several_models_averages_and_a_model_on_meta(workers: Workers, case: str, most: float) -> None:
    assert max(workers.run(2, f"shard_cases:{case}", stage=3)) < most


WORDS = {
    "step without backward": "call loss.backward() before",
    "grad read": "optimizer.gradient(name)",
    "grad set": "optimizer.gradient(name)",
    "torch clips": "optimizer.clip_grad_norm_(max_norm)",
    "GradScaler": "in place of a GradScaler",
    "third backward": "the step has had its 2 backwards (accumulation=2)",
    "step twice": "call optimizer.zero_grad() after it",
    "old graph": "run forward again",
    "sharded twice": "is partitioned already",
    "in two models": "is partitioned already",
    "other parameters": "that the model has not",
    "states": "zeromesh.save(directory, model, optimizer)",
    "state of one": "zeromesh.save(directory, model, optimizer)",
    "no checkpoint": "before shard() partitions it",
    "optimizer copied": "cannot be copied or pickled",
    "optimizer pickled": "cannot be copied or pickled",
    "shared": "leave it out",
    "no directory": "'directory': ",
    "replaced": "backbone.blocks.1.norm.weight was added, removed or replaced after shard()",
    "group": "add groups to the torch optimizer before shard()",
    "torch saves": "zeromesh.state_dict(model)",
    "copied": "zeromesh.gathered(model, [",
    "pickled": "zeromesh.gathered(model, [",
    "read": "zeromesh.gathered(model, ['scale'])",
}


@pytest.mark.parametrize("stage", [1, 3])
def test_refusals_say_what_to_do_and_leave_the_model_usable(workers: Workers, stage: int) -> None:
    for found in workers.run(2, "shard_cases:refused", stage=stage):
        assert float(found.pop("apart")) < EXACT
        assert len(found) >= 13
        for name, said in found.items():
            assert WORDS[name] in said, (name, said)


def test_copies_belong_to_nobody(workers: Workers) -> None:
    for found in workers.run(2, "shard_cases:copies"):
        assert found.pop("apart") < EXACT
        assert found == {"outputs": [True, True], "kept": [False, False], "again": True}


@pytest.mark.parametrize("stage", [1, 3])
def test_forgotten_models_are_freed(workers: Workers, stage: int) -> None:
    assert workers.run(2, "shard_cases:forgotten", stage=stage) == [[], []]


def test_checkpoint_goes_on_over_other_ranks(workers: Workers, tmp_path: Path) -> None:
    assert max(map(max, workers.run(2, "shard_cases:saved", folder=str(tmp_path)))) < EXACT
    for ranks, stage in ((1, 3), (3, 1)):
        for step, apart in workers.run(ranks, "shard_cases:loaded", folder=str(tmp_path), stage=stage):
            assert step == 1, "the damaged one is skipped"
            assert apart < EXACT


@pytest.mark.parametrize("adapted", [False, True])
def test_generate_with_other_prompts_on_each_rank(workers: Workers, adapted: bool) -> None:
    assert all(workers.run(2, "shard_cases:generated", adapted=adapted))


def test_names_are_compared_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of all parameters of a large model take longer than a short step."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    zeromesh.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    engine, weight = engine_of(model), model[1].weight
    engine.require_same_parameters()
    with monkeypatch.context() as patch:
        patch.setattr(model, "named_parameters", lambda: pytest.fail("names were compared"))
        engine.require_same_parameters()
    model[1].weight = nn.Parameter(torch.ones(2, 2))
    for _ in range(2):
        with pytest.raises(PhaseError, match=r"1\.weight was added, removed or replaced"):
            engine.require_same_parameters()
    model[1].weight = weight
    engine.require_same_parameters()
    zeromesh.unshard(model)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_buffer_of_quantized_values_stays() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.quantize_per_tensor(torch.eye(2), 0.5, 0, torch.qint8))
    zeromesh.shard(model)
    assert dict(zeromesh.state_dict(model))["table"].dequantize().equal(torch.eye(2))
    zeromesh.unshard(model)
