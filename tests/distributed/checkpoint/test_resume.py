"""A run that is cut and resumed computes what an uninterrupted one does, whatever the layouts of its parts."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tables import row, tried
from tests.support.workers import Workers

FULL = pytest.mark.full
BF16 = {"compute": "bfloat16", "master": "float32", "reduce": "float32"}


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by kind and name, as the safetensors library reads them."""
    found = {}
    for path in sorted(checkpoint.rglob("*.safetensors")):
        kind = path.relative_to(checkpoint).as_posix().partition("-0")[0]
        found |= {f"{kind} {name}": tensor for name, tensor in load_file(path).items()}
    return found


def unequal(left: Path, right: Path) -> list[str]:
    """Names of tensors that are not the same bit by bit."""
    a, b = tensors(left), tensors(right)
    assert len(a) > 20
    return [name for name in {*a, *b} if name not in a or name not in b or not torch.equal(a[name], b[name])]


def step(folder: Path, number: int) -> Path:
    return folder / "run" / "checkpoints" / f"step-{number:08d}"


def train(workers: Workers, size: int, folder: Path, steps: int, case: str = "trained", **given: Any) -> dict[str, Any]:
    """Train up to `steps` in a folder, going on from what is there; what rank 0 says."""
    arguments = {"folder": str(folder), "steps": steps, "sections": {}, **given}
    return dict(workers.run(size, f"checkpoint_cases:{case}", **arguments)[0])


def full(*values: Any) -> Any:
    return pytest.param(*values, marks=FULL)


@pytest.mark.parametrize(
    ("size", "stage", "sections", "kind"),
    [
        full(2, 0, {}, "llama"),
        full(2, 1, {}, "llama"),
        full(3, 2, {}, "gpt2"),
        (2, 2, {}, "gpt2"),
        full(2, 3, {}, "gpt2"),
        full(1, 3, {}, "llama"),
        (2, 3, {"precision": BF16}, "llama"),
        full(2, 1, {"precision": {**BF16, "compute": "float16"}}, "llama"),
        full(2, 2, {"optimizer": {"name": "sgd", "momentum": 0.9, "lr": 0.1}}, "llama"),
        full(2, 3, {"optimizer": {"name": "adagrad"}}, "llama"),
        full(2, 3, {"checkpoint": {"asynchronous": False}}, "llama"),
        full(2, 3, {"optimizer": {"in_backward": True}, "run": {"clip_norm": 0.0, "on_nonfinite": "stop"}}, "llama"),
        full(2, 3, {"parallel": {"transport": "gloo"}}, "llama"),
    ],
)
def test_half_and_half_is_the_whole_bit_by_bit(
    workers: Workers, tmp_path: Path, size: int, stage: int, sections: dict[str, Any], kind: str
) -> None:
    case = {"sections": {"zero": {"stage": stage}, **sections}, "kind": kind}
    straight = train(workers, size, tmp_path / "a", 10, **case)
    first, second = (train(workers, size, tmp_path / "b", steps, **case) for steps in (5, 10))
    assert first["losses"] + second["losses"] == straight["losses"] == second["all"]
    assert len(second["losses"]) == 5
    assert unequal(step(tmp_path / "a", 10), step(tmp_path / "b", 10)) == []
    assert unequal(step(tmp_path / "a", 5), step(tmp_path / "a", 10)) != []


@pytest.mark.parametrize("replicas", [pytest.param("whole", marks=pytest.mark.full), "divided"])
def test_hybrid_sharding_resumes_bit_by_bit(workers: Workers, tmp_path: Path, replicas: str) -> None:
    hybrid = {"parallel": {"replicate": 2}, "zero": {"replicas": replicas}}
    for folder, steps in (("a", 4), ("b", 2), ("b", 4)):
        train(workers, 4, tmp_path / folder, steps, replicate=2, sections=hybrid)
    assert unequal(step(tmp_path / "a", 4), step(tmp_path / "b", 4)) == []


def test_states_that_replicas_divide_are_read_by_any_layout(workers: Workers, tmp_path: Path) -> None:
    straight = train(workers, 1, tmp_path / "a", 4)["losses"]
    losses = []
    for steps, (size, replicate, replicas) in enumerate(
        ((4, 2, "divided"), (2, 2, "whole"), (3, 3, "divided"), (2, 1, "divided")), 1
    ):
        sections = {"parallel": {"replicate": replicate}, "zero": {"replicas": replicas}}
        given = {"mirror": str(tmp_path / f"mirror-{steps}")} if steps > 1 else {}
        losses += train(workers, size, tmp_path / "b", steps, replicate=replicate, sections=sections, **given)["losses"]
        if given:
            mirrored = tmp_path / f"mirror-{steps}" / "step-00000000"
            assert unequal(step(tmp_path / "b", steps - 1), mirrored) == []
    assert max(abs(a - b) / abs(b) for a, b in zip(losses, straight, strict=True)) <= 1e-9


LAYOUTS = ((4, 3), (2, 1), (3, 2), (1, 3), (5, 3), (4, 0), (2, 2), (3, 1))


@FULL
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-9), ("float32", 1e-5)])
def test_any_sequence_of_sizes_and_stages(workers: Workers, tmp_path: Path, dtype: str, bound: float) -> None:
    sections: dict[str, Any] = {"precision": {"compute": dtype, "master": dtype, "reduce": dtype}}
    total = 5 * len(LAYOUTS)
    straight = train(workers, 2, tmp_path / "a", total, sections=sections)
    losses: list[float] = []
    for number, (size, stage) in enumerate(LAYOUTS):
        mirror, steps = tmp_path / f"mirror-{number}", 5 * number + 5
        changed = {**sections, "zero": {"stage": stage}}
        losses += train(workers, size, tmp_path / "b", steps, sections=changed, mirror=str(mirror))["losses"]
        if number:
            assert unequal(step(tmp_path / "b", 5 * number), mirror / "step-00000000") == []
    assert len(losses) == total
    assert max(abs(a - b) / abs(b) for a, b in zip(losses, straight["losses"], strict=True)) <= bound


def test_what_collators_draw_depends_on_neither_layout_nor_interruption(workers: Workers, tmp_path: Path) -> None:
    one = train(workers, 1, tmp_path / "a", 6, noisy=True)
    train(workers, 3, tmp_path / "b", 3, noisy=True)
    other = train(workers, 2, tmp_path / "b", 6, noisy=True)
    assert max(abs(a - b) / b for a, b in zip(one["all"], other["all"], strict=True)) <= 1e-9
    plain = train(workers, 1, tmp_path / "c", 6)
    assert max(abs(a - b) for a, b in zip(one["all"], plain["all"], strict=True)) > 1e-3


@pytest.mark.parametrize(("before", "after"), [("float32", "bfloat16"), ("bfloat16", "float32"), full("bfloat16", "float16")])
def test_master_weights_cross_a_change_of_precision(workers: Workers, tmp_path: Path, before: str, after: str) -> None:
    for size, steps, compute in ((2, 2, before), (3, 3, after)):
        given = {"mirror": str(tmp_path / "m")} if steps == 3 else {}
        train(workers, size, tmp_path / "b", steps, sections={"precision": {**BF16, "compute": compute}}, **given)
    was, now = tensors(step(tmp_path / "b", 2)), tensors(tmp_path / "m" / "step-00000000")
    for name in (name.removeprefix("model ") for name in was if name.startswith("model ")):
        old = was.get(f"optimizer/master {name}", was[f"model {name}"])
        new = now.get(f"optimizer/master {name}", now[f"model {name}"])
        assert old.dtype == new.dtype == torch.float32
        assert torch.equal(old, new), name


test_a_checkpoint_is_a_model_of_transformers = tried(
    "checkpoint_cases", [row(2, "opened", FULL, compute="float32"), row(2, "opened", compute="bfloat16")]
)


@pytest.mark.parametrize("size", [1, 2])
def test_what_a_damaged_checkpoint_has_half_overwritten_is_not_used(workers: Workers, tmp_path: Path, size: int) -> None:
    train(workers, size, tmp_path, 5)
    victim = max(step(tmp_path, 5).rglob("*.safetensors"), key=lambda path: path.name)
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    for found in workers.run(size, "checkpoint_cases:after_damage", folder=str(tmp_path), steps=10):
        assert "are not what rank" in found[0]
        assert all(said.startswith("PhaseError: this run ended after 0 whole steps with CheckpointError") for said in found[1:])


def test_every_checkpoint_is_kept_where_the_number_is_zero(workers: Workers, tmp_path: Path) -> None:
    train(workers, 1, tmp_path, 5, sections={"checkpoint": {"every_steps": 1, "keep_last": 0}})
    assert all(step(tmp_path, number).is_dir() for number in range(1, 6))


def test_a_checkpoint_under_another_name_is_not_taken_for_it(workers: Workers, tmp_path: Path) -> None:
    train(workers, 2, tmp_path, 5)
    shutil.copytree(step(tmp_path, 5), step(tmp_path, 7))
    said = " ".join(train(workers, 2, tmp_path, 10, "noted")["said"].split())
    assert "step-00000007 is of step 5 by its manifest" in said
    assert "resumed from step 5" in said
