"""Modules given to process sets: the model computes what it does on one process, and each rank has its own parameters alone."""

import pytest

from tests.simulated.device import compiler
from tests.support.workers import Workers


@pytest.mark.parametrize(
    ("size", "recompute", "device"), [(1, False, ""), (2, False, ""), (3, True, ""), (2, False, "sim")]
)
def test_parts_live_on_different_ranks(workers: Workers, size: int, recompute: bool, device: str) -> None:
    if device and compiler() is None:
        pytest.skip("needs a C++ compiler for the simulated device")
    last = size - 1
    homes = {"left": [last], "right": [0], "middle": [0, 1][:size], "embedding": [last], "frozen": [0]}
    for rank, found in enumerate(workers.run(size, "placement_cases:trains", device=device, recompute=recompute)):
        placed, alone = found["placed"], found["alone"]
        assert found["homes"] == homes
        assert placed["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        assert placed["norms"] == pytest.approx(alone["norms"], rel=1e-6)
        assert found["evaluated"][0] == pytest.approx(found["evaluated"][1], rel=1e-9)
        for kind in ("gradients", "parameters"):
            mine = {name for name in alone[kind] if rank in homes.get(name.partition(".")[0], range(size))}
            assert placed[kind].keys() == mine
            for name in mine:
                assert _flat(placed[kind][name]) == pytest.approx(_flat(alone[kind][name]), rel=1e-9, abs=1e-12), name


def test_dropout_is_alike_where_activations_are(workers: Workers) -> None:
    found = workers.run(3, "placement_cases:draws")
    assert all(each["losses"] == found[0]["losses"] for each in found)
    assert all(each["next"] == found[0]["next"] for each in found)
    for name in ("middle.0.weight", "head.weight"):
        holders = [each["parameters"][name] for each in found if name in each["parameters"]]
        assert len(holders) == (2 if name.startswith("middle") else 3)
        assert all(each == holders[0] for each in holders)


def test_what_cannot_be_placed_is_refused(workers: Workers) -> None:
    found = workers.run(2, "placement_cases:refusals")
    for said in found:
        assert said[0] == "placement of 'centre' on process set somewhere: the model has no module of that name"
        assert said[1] == "placement: left.up is inside left, which is placed as a whole; name one of them"
        assert said[2].startswith(
            "placement: left.down.bias and right.down.bias are one parameter in parts of the model"
        )
    assert found[0][3] == "ran"
    assert found[1][3].startswith("0 on process set somewhere returned 2 tensors, where its shapes promise 1")


def _flat(value: object) -> list[float]:
    return [each for part in value for each in _flat(part)] if isinstance(value, list) else [float(value)]  # type: ignore[arg-type]
