"""Steps on a device: the host waits for it once in each, and what ranks launch follows from the program alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulated import device
from tests.support.workers import Workers

pytestmark = pytest.mark.skipif(device.compiler() is None, reason="the simulated device needs a C++ compiler")
FULL = pytest.mark.full
NARROW = {"compute": "bfloat16", "master": "float32", "reduce": "float32"}
UPDATES = {"optimizer": {"in_backward": True}, "run": {"clip_norm": 0, "on_nonfinite": "stop"}}
Losses = Callable[..., list[float]]


@pytest.fixture(scope="module")
def plain(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Losses of one rank on the CPU, by the data that it trains on."""
    found: dict[str, list[float]] = {}

    def losses(**data: Any) -> list[float]:
        if (key := repr(data)) not in found:
            folder = str(tmp_path_factory.mktemp("plain"))
            (run,) = workers.run(1, "device_step_cases:fit", folder=folder, sections={}, **data)
            found[key] = run["losses"]
        return found[key]

    return losses


def each(sections: dict[str, Any], *marks: pytest.MarkDecorator, name: str, **more: Any) -> Any:
    return pytest.param(sections, more, marks=marks, id=name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("sections", "more"),
    [
        # All accumulate two microbatches and clip, but where they say otherwise.
        each({"zero": {"stage": 0}}, FULL, name="stage 0"),
        each({"zero": {"stage": 1}}, FULL, name="stage 1"),
        each({"zero": {"stage": 2}}, FULL, name="stage 2"),
        each({"zero": {"stage": 3}}, FULL, name="stage 3"),
        each({"zero": {"reduce_once": True}}, FULL, name="stage 3, reduced once"),
        each({"precision": {**NARROW, "compute": "float16"}}, name="float16 with its scale", bound=0.02),
        each({"precision": {**NARROW, "reduce": "bfloat16"}}, FULL, name="sent in bfloat16", bound=0.02),
        each({"parallel": {"tensor": 2}}, FULL, name="tensor"),
        each({"parallel": {"tensor": 2, "sequence": True}}, name="tensor, sequence"),
        each({"parallel": {"pipeline": 2}}, name="pipeline"),
        each({"optimizer": {"name": "adagrad", "lr": 1e-2}}, FULL, name="adagrad", bound=1.0),
        each(UPDATES, FULL, name="updates inside backward", bound=0.1),
        each({"model": {"activation_checkpointing": "block"}}, FULL, name="recomputed"),
        each({}, name="padded", data="padded"),
        each({}, FULL, name="packed", data="packed"),
        each({}, FULL, name="a user's loss", own_loss=True),
    ],
)
def test_the_host_waits_once_a_step(
    workers: Workers, plain: Losses, tmp_path: Path, sections: dict[str, Any], more: dict[str, Any]
) -> None:
    bound = more.pop("bound", 1e-9)
    found = workers.run(2, "device_step_cases:fit", device="sim", folder=str(tmp_path), sections=sections, **more)
    for rank in found:
        # The first two steps allocate, look at what the model does to its logits, and copy constants.
        assert rank["waits"][2:] == [["copy out"]] * 2
        assert rank["losses"] == pytest.approx(plain(**more), rel=bound)


def test_ranks_that_divide_layers_draw_alike_again_after_them(workers: Workers, tmp_path: Path) -> None:
    """Dropout draws from the device's generator, which is each rank's own inside a layer that is divided."""
    layouts: dict[int, dict[str, Any]] = {1: {}, 2: {"parallel": {"tensor": 2}}}
    one, two = (
        workers.run(ranks, "device_step_cases:fit", device="sim", folder=str(tmp_path), sections=sections, model="dropout")[0]
        for ranks, sections in layouts.items()
    )
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-9)


def test_the_host_waits_once_a_step_of_a_users_loop(workers: Workers) -> None:
    on_cpu, on_device = (workers.run(2, "device_step_cases:own_loop", device=device) for device in ("", "sim"))
    for wanted, rank in zip(on_cpu, on_device, strict=True):
        assert rank["waits"][2:] == [["copy out"]] * 2
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=1e-9)


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        pytest.param(2, {"zero": {"stage": 2}}, marks=FULL, id="stage 2"),
        pytest.param(2, {"zero": {"stage": 3}}, marks=FULL, id="stage 3"),
        pytest.param(4, {"parallel": {"replicate": 2}}, id="replicas"),
    ],
)
def test_what_is_launched_does_not_depend_on_time(workers: Workers, tmp_path: Path, ranks: int, sections: dict[str, Any]) -> None:
    """Some hosts are far ahead of their devices, others find all done."""
    found = workers.run(ranks, "device_step_cases:launches", device="sim", folder=str(tmp_path), sections=sections)
    for rank in found:
        assert rank["order"] == found[0]["order"]
        assert len(rank["reductions"]) == 4 * 4 // ranks
        for ahead, total in rank["reductions"]:
            assert total >= 7
            assert ahead >= total - 1, "only what the root gets last may be launched when autograd has ended"
