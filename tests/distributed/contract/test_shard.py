"""Loops of a user's own over a partitioned model are those of plain PyTorch, or are refused by name."""

import copy
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from tests.distributed.contract.shard_cases import EXACT, LOOPS, LOSSES
from tests.support.tables import row, tried
from tests.support.workers import Workers
from zeromesh.checkpoint.io.format import DTYPES
from zeromesh.errors import LayoutError, PhaseError
from zeromesh.trainer.shard import engine_of

NAMES = sorted({*LOSSES, *LOOPS} - {"unused_by_others"})  # At other stages ranks run units in one order.
DIVIDED_FILES = {"replicas": "divided", "parallel": {"replicate": 2}, "offload": {"optimizer": "file", "directory": gettempdir()}}
FOLLOWED: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (2, {"stage": 3, "name": name}) for name in NAMES},
    **{
        f"{name} at stage {stage}": (2, {"stage": stage, "name": name})
        for name, stage in [("zero_between", 1), ("unused", 2), ("toggled", 1), ("decayed", 1), ("weights", 1)]
    },
    **{f"{name} alone": (1, {"stage": 3, "name": name}) for name in ("fallible", "retained")},
    "offload": (2, {"stage": 3, "name": "toggled", "offload": {"optimizer": "host", "parameters": "host"}}),
    "accumulation": (2, {"stage": 3, "name": "toggled", "accumulation": 3}),
    "by turns, offloaded": (2, {"stage": 3, "name": "by_turns", "offload": {"gradients": "host"}}),
    "by turns, frozen": (2, {"stage": 2, "name": "by_turns", "accumulation": 3, "frozen": "backbone.blocks.1"}),
    "frozen at first": (2, {"stage": 3, "name": "toggled", "frozen": "backbone.blocks.1"}),
    "replicate": (2, {"stage": 3, "name": "toggled", "parallel": {"replicate": 2}}),
    "divided, on files": (2, {"stage": 3, "name": "toggled", **DIVIDED_FILES}),
    "a step that ends early": (2, {"stage": 1, "name": "unused_by_others", "accumulation": 2}),
}


@pytest.mark.sampled(2)
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


test_other_loops_copies_and_refusals = tried(
    "shard_cases",
    [
        *(row(2, case, stage=3) for case in ("adversaries", "averages", "deferred")),
        row(1, "averages", stage=0),
        row(2, "read_between", stage=3),
        row(2, "read_between", stage=1),
        row(2, "read_between", stage=3, counts=False, parallel={"replicate": 2}),
        *(row(2, case, stage=stage) for case in ("refused", "forgotten") for stage in (1, 3)),
        row(2, "copies"),
        *(row(ranks, "evaluated") for ranks in (1, 2)),
        *(row(2, "generated", adapted=adapted) for adapted in (False, True)),
    ],
    folder=False,
)


def test_checkpoint_goes_on_over_other_ranks(workers: Workers, tmp_path: Path) -> None:
    assert max(map(max, workers.run(2, "shard_cases:saved", folder=str(tmp_path)))) < EXACT
    for ranks, stage in ((1, 3), (3, 1)):
        for step, apart in workers.run(ranks, "shard_cases:loaded", folder=str(tmp_path), stage=stage):
            assert step == 1, "the damaged one is skipped"
            assert apart < EXACT


@pytest.mark.parametrize(("first", "main"), [(torch.float32, torch.bfloat16), (torch.float32, torch.float32)])
def test_a_model_computes_in_the_dtype_of_most_elements(first: torch.dtype, main: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3, dtype=first), nn.Linear(3, 16, dtype=main))
    model = copy.deepcopy(plain)
    optimizer = zeromesh.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)[1]
    found = []
    for each, step in ((plain, torch.optim.SGD(plain.parameters(), lr=0.1).step), (model, optimizer.step)):
        out = each[1](each[0](torch.ones(2, 4, dtype=first)).to(main))
        out.float().square().sum().backward()
        step()
        found.append((out, each[0].weight.dtype, each[1].weight.dtype))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:] == (first, main)
    zeromesh.unshard(model)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=0.02, atol=1e-3)


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
        with pytest.raises(PhaseError, match=r"1\.weight was added, removed, replaced or moved"):
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


def test_buffers_of_every_dtype_of_files_are_saved_and_loaded(tmp_path: Path) -> None:
    model, made = nn.Linear(2, 2), dict[str, torch.Tensor]()
    for code, dtype in DTYPES.items():
        made[code] = torch.arange(3).to(dtype) if code != "F8_E8M0" else torch.tensor([0.5, 1, 2]).to(dtype)
        model.register_buffer(code, made[code].clone())
    zeromesh.shard(model)
    zeromesh.save(tmp_path, model)
    for buffer in model.buffers():
        buffer.view(torch.uint8).zero_()
    zeromesh.load(tmp_path, model)
    assert all(model.get_buffer(code).view(torch.uint8).equal(each.view(torch.uint8)) for code, each in made.items())
    zeromesh.unshard(model)


def test_groups_of_a_checkpoint_are_known_by_their_parameters(tmp_path: Path) -> None:
    def made(*groups: dict[str, Any]) -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        parts = {"first": model[0].parameters(), "second": model[1].parameters(), "all": model.parameters()}
        taken = [{**each, "params": parts[each["params"]]} for each in groups]
        return zeromesh.shard(model, torch.optim.AdamW(taken))

    first, second = {"params": "first", "lr": 0.5}, {"params": "second", "lr": 0.25, "weight_decay": 0.0}
    zeromesh.save(tmp_path, *made(first, second))
    model, optimizer = made({"params": "second", "lr": 0.1}, {"params": "first", "lr": 0.2})
    zeromesh.load(tmp_path, model, optimizer)
    assert [(each["lr"], each["weight_decay"]) for each in optimizer.param_groups] == [(0.25, 0.0), (0.5, 0.01)]
    for groups in ([{"params": "all", "lr": 0.1}], [first]):
        model, optimizer = made(*groups)
        with pytest.raises(LayoutError, match=r"group of 0.bias, 0.weight|group of 1.bias, 1.weight"):
            zeromesh.load(tmp_path, model, optimizer)
        assert optimizer.param_groups[0]["lr"] == groups[0]["lr"]
        assert zeromesh.load(tmp_path, model) == {}
