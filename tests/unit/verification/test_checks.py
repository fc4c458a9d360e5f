"""The optional checks of a verification: what each compares, and what it says of a difference."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.trainer_cases import settings
from zeromesh.errors import ConfigError
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.verification.observe import Recorder
from zeromesh.trainer.verification.shrink import SmallRun
from zeromesh.trainer.verification.verify import CHECKS, _digests, _layout, _MaskDigests, _wrong_masks, verify

NAN = float("nan")


def record(recorder: Any, losses: list[float], norms: list[float], weight: list[float]) -> Any:
    recorder.losses, recorder.norms, recorder.parameters = losses, norms, {"w": torch.tensor(weight)}
    return recorder


@pytest.mark.parametrize(
    ("losses", "norms", "weight", "found"),
    [
        ([1.0, NAN], [3.0, 4.0], [1.0, 2.0], []),
        ([1.0 + 2**-52, NAN], [3.0, 4.0], [1.0, 2.0], [("determinism: the loss of step 1 of an equal run", 1, 2**-52)]),
        ([1.0, NAN], [3.0, 4.5], [1.0, 2.0], [("determinism: the norm of step 2 of an equal run", 2, 0.5)]),
        ([1.0, NAN], [3.0, 4.0], [1.0, 4.0], [("determinism: w after an equal run", 0, 2 / 5**0.5)]),
    ],
)
def test_determinism_is_of_bits(losses: Any, norms: Any, weight: Any, found: list[Any]) -> None:
    first = record(Recorder(), [1.0, NAN], [3.0, 4.0], [1.0, 2.0])
    each: Any = SimpleNamespace(recorder=first, subject=SimpleNamespace(config="own"))
    ran: list[Any] = []
    each.run = lambda config, recorder: ran.append([config, record(recorder, losses, norms, weight)])
    differences, said = CHECKS["determinism"](each)
    assert [(one.detail, one.step, pytest.approx(one.size)) for one in differences] == found
    assert {(one.kind, one.run) for one in differences} <= {("check", "determinism")}
    assert (said, len(ran), ran[0][0]) == ("the same bits in a second run", 1, "own")


@pytest.mark.parametrize(
    ("sections", "shard", "world", "stage", "tier"),
    [
        ({"zero": {"stage": 3}, "offload": {"parameters": "host"}}, 2, 2, 1, "none"),
        ({"zero": {"stage": 1}}, 2, 2, 3, "none"),
        ({"zero": {"stage": 2}, "parallel": {"tensor": 2, "pipeline": 2, "schedule": "zero_bubble"}}, 1, 4, 2, "none"),
        ({"zero": {"stage": 3}, "offload": {"parameters": "host"}, "parallel": {"tensor": 2}}, 2, 4, 3, "host"),
    ],
)
def test_a_run_is_resumed_in_another_layout(sections: dict[str, Any], shard: int, world: int, stage: int, tier: str) -> None:
    config = load_config(settings("out", **sections))
    plain = record(Recorder(), [1.0] * 5, [2.0] * 5, [3.0])
    plain.steps, plain.config = plain.losses, config
    mesh = SimpleNamespace(shard=SimpleNamespace(size=shard), world_size=world)
    each: Any = SimpleNamespace(subject=SimpleNamespace(config=config), mesh=mesh, plain=plain)
    ran: list[Any] = []

    def run(config: Any, recorder: Any) -> None:
        ran.append((config, recorder._last, recorder._saves))
        record(recorder, [1.0, 1.5], [2.0] * 2, [3.0])

    each.run = run
    differences, _ = CHECKS["resume"](each)
    assert [(one.kind, one.step, one.run) for one in differences] == [("loss", 5, "resume")], "the last run is compared"
    assert [how[1:] for how in ran] == [(2, True), (3, True), (0, False)]
    own, other, last = (how[0] for how in ran)
    assert own == last
    assert {(one.run.name, one.checkpoint.resume, one.checkpoint.asynchronous) for one in (own, other)} == {
        ("verify-resume", "auto", False)
    }
    assert (own.parallel, own.zero) == (config.parallel, config.zero)
    assert (own.precision.compute, other.precision.compute) == ("float64", "float64")
    parallel = other.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.shard, parallel.schedule) == (1, 1, "auto", "1f1b")
    assert (other.zero.stage, other.offload.model_dump(mode="json")["parameters"]) == (stage, tier)


WHOLE = (4, 8)
SHARE = (4, 4)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[0, 0, {"d": [("a", WHOLE)]}], [1, 0, {"d": [("b", WHOLE)]}]], []),
        ([[0, 0, {"d": [("a", WHOLE)]}], [0, 1, {"d": [("a", WHOLE)]}]], []),
        ([[0, 0, {"d": [("a", SHARE)]}], [0, 1, {"d": [("b", SHARE)]}]], []),
        (
            [[0, 0, {"d": [("a", WHOLE)]}], [0, 1, {"d": [("b", WHOLE)]}]],
            ["d draws otherwise on tensor ranks that compute it alike"],
        ),
        (
            [[0, 0, {"d": [("a", SHARE)]}], [0, 1, {"d": [("a", SHARE)]}]],
            ["d draws alike in data rank 0, microbatch 0 and data rank 0, microbatch 0 (shares 0 and 1)"],
        ),
        (
            [[0, 0, {"d": [("a", WHOLE), ("c", WHOLE)]}], [1, 0, {"d": [("b", WHOLE), ("a", WHOLE)]}]],
            ["d draws alike in data rank 0, microbatch 0 and data rank 1, microbatch 1"],
        ),
        (
            [[0, 0, {"d": [("a", WHOLE)], "e": [("a", WHOLE)]}]],
            ["d and e draw alike in data rank 0, microbatch 0 and data rank 0, microbatch 0"],
        ),
        (
            # A module that is called twice in a microbatch.
            [[0, 0, {"twice": [("a", WHOLE), ("b", WHOLE), ("c", WHOLE), ("a", WHOLE)]}]],
            ["twice draws alike in data rank 0, microbatch 0 and data rank 0, microbatch 1"],
        ),
    ],
)
def test_masks_are_equal_where_and_only_where_ranks_compute_alike(rows: list[Any], said: list[str]) -> None:
    plain: Any = SimpleNamespace(forward={"d": [("x", WHOLE)], "e": [("x", WHOLE)], "twice": [("x", WHOLE)] * 2})
    assert [one.detail for one in _wrong_masks(rows, plain)] == [f"dropout: {each}" for each in said]


class _Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dropout(0.5), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * torch.rand_like(x[:1, :4])[:, :1]


def test_masks_are_digested_by_module() -> None:
    model, x = _Drops(), torch.ones(8, 8)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        with _MaskDigests(model) as digests:
            model(x)
        found.append(digests.forward)
    # Masks of less than 32 elements may be equal by chance.
    assert [name for name in found[0] if name != "second"] == ["first"]
    assert found[0] == found[1] != found[2]
    assert found[0]["first"][0][1] == (8, 8)
    count = len(found[0]["first"])
    digests.after("first", torch.ones(2))
    assert len(digests.forward["first"]) == count
    digests.after("first", torch.full((2,), NAN))
    assert len(digests.forward["first"]) == count - 1


def test_a_check_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="bits, more cannot be checked; there are determinism, resume, dropout"):
        verify(lambda: None, None, UserInputs(), None, ["bits", "resume", "more"], Path())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sections", "sizes", "wanted"),
    [
        ({}, {}, {"layout": "1 rank: one", "zero.stage": 0}),
        (
            {"parallel": {"tensor": 2, "pipeline": 2, "sequence": True}, "zero": {"stage": 1}},
            {"tensor": 2, "pipeline": 2, "shard": 3},
            {
                "layout": "12 ranks: pipeline 2 x shard 3 x tensor 2", "schedule": "1f1b, 1 stages a rank",
                "sequence": "shared out to tensor ranks",
            },
        ),
        (
            {"offload": {"optimizer": "host", "parameters": "file"}, "zero": {"stage": 3}},
            {"shard": 2},
            {"layout": "2 ranks: shard 2", "zero.stage": 3},
        ),
    ],
)  # fmt: skip
def test_the_layout_in_words(sections: dict[str, Any], sizes: dict[str, int], wanted: dict[str, Any]) -> None:
    shape = MeshShape(**{**dict.fromkeys(("pipeline", "replicate", "shard", "tensor"), 1), **sizes})
    mesh: Any = SimpleNamespace(shape=shape, world_size=shape.world_size)
    found = _layout(load_config(settings("out", **{"zero": {"stage": 0}, **sections})), mesh)
    assert {name: found[name] for name in wanted} == wanted
    assert found["precision"] == "float64, master float64, reduce float64"
    assert ("schedule" in found, "sequence" in found) == ("schedule" in wanted, "sequence" in wanted)
    assert ("offload" in found) == ("offload" in sections)


def test_digests_tell_configurations_weights_and_data_apart() -> None:
    def digests(seed: int = 0, token: int = 1, name: str = "a", **how: Any) -> dict[str, str]:
        torch.manual_seed(seed)
        samples = [{"ids": torch.tensor([token]), "name": name}]
        config = load_config(settings(how.pop("folder", "out"), **how))
        return _digests(SmallRun(model=nn.Linear(2, 2), config=config, samples=samples, collate=None, notes=()))

    base = digests()
    assert base == digests(folder=str(Path("elsewhere"))), "where files are changes nothing"
    for changed, other in (
        ("weights", digests(seed=1)), ("data", digests(token=2)), ("data", digests(name="b")),
        ("config", digests(optimizer={"lr": 0.5})),
    ):  # fmt: skip
        assert {name for name in base if base[name] != other[name]} == {changed}
