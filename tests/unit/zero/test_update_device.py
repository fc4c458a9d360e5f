"""Where updates are computed that are not in a device's memory: the faster place, the same one on all ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.devices import DEVICE, accelerated
from zeromesh.offload import Ledger, Tiers
from zeromesh.optim.optimizer_step import choose_device, clip_factor, time_update
from zeromesh.options import OptimizerSettings, ZeroOptions
from zeromesh.settings.keys import UpdateOn

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def mesh(device: torch.device, others: tuple[float, float] | None = None) -> Any:
    def gather_integers(mine: list[int]) -> list[list[int]]:
        return [mine] if others is None else [mine, [int(1e9 * seconds) for seconds in others]]

    return SimpleNamespace(device=device, world=SimpleNamespace(gather_integers=gather_integers))


def found(host: float, device: float) -> Any:
    return lambda where: host if where.type == "cpu" else device


@pytest.mark.parametrize(
    ("wanted", "states_on_device", "times", "others", "place"),
    [
        ("auto", False, (1.0, 2.0), None, "cpu"),
        ("auto", False, (2.0, 1.0), None, "cuda"),
        ("auto", False, (2.0, 1.0), (1.0, 9.0), "cpu"),
        ("auto", True, (1.0, 2.0), None, "cuda"),
        ("host", False, (2.0, 1.0), None, "cpu"),
        ("host", True, (2.0, 1.0), None, "cuda"),
        ("device", False, (1.0, 2.0), None, "cuda"),
    ],
)
def test_the_faster_place_is_taken_unless_told(
    wanted: UpdateOn, states_on_device: bool, times: tuple[float, float], others: tuple[float, float] | None, place: str
) -> None:
    device, note = choose_device(wanted, mesh(CUDA, others), found(*times), states_on_device=states_on_device)
    assert device.type == place
    assert (note is not None) == (wanted == "auto" and not states_on_device)
    if note is not None:
        assert f"{'the CPU' if place == 'cpu' else 'the device'} (tried" in note


def test_a_cpu_has_nothing_to_choose() -> None:
    def untried(_device: torch.device) -> float:
        raise AssertionError("nothing is to be tried")

    for wanted in ("auto", "host", "device"):
        assert choose_device(wanted, mesh(CPU), untried, states_on_device=False) == (CPU, None)  # type: ignore[arg-type]


def tried(name: Any, device: torch.device) -> float:
    tiers = Tiers(device=device, ledger=Ledger())
    return time_update(device, tiers, ZeroOptions(optimizer=OptimizerSettings(name=name)))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_trial_takes_time(name: Any) -> None:
    assert 0 < tried(name, CPU) < 1000


@accelerated
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_trial_on_an_accelerator_takes_time(name: Any) -> None:
    assert 0 < tried(name, DEVICE) < 1000


@pytest.mark.parametrize("norm", [0.0, 1e-7, 0.999, 1.0, 1.0000005, 1.000002, 37.0])
def test_clipping_multiplies_as_torch_does(norm: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.full((1,), norm, dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    assert norm * clip_factor(norm, 1.0) == pytest.approx(float(parameter.grad), rel=1e-15)
