"""What an engine refuses before it starts, and what it makes of odd but legal requests."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.models import stack
from zeromesh.environment import read_environment
from zeromesh.errors import ConfigError, LayoutError
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.optim.optimizer_step import LossScaler
from zeromesh.options import OptimizerSettings, Precision, ZeroOptions
from zeromesh.settings.keys import ScalerSettings
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.setup.engine_options import biases_and_norms, engine_options
from zeromesh.zero.engine import ZeroEngine


@pytest.fixture
def alone() -> Mesh:
    """A mesh of this process."""
    return Mesh(MeshShape(), read_environment({}), device=torch.device("cpu"), timeout_seconds=5)


def optimizer(**changes: Any) -> ZeroOptions:
    return ZeroOptions(optimizer=OptimizerSettings(**changes))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stage": 5}, "zero.stage is 5; it must be one of"),
        ({"prefetch": -1}, "zero.prefetch is -1"),
        (
            {"optimizer_in_backward": True, "on_nonfinite": "stop", "clip_norm": 1.0},
            "optimizer.in_backward needs run.clip_norm 0",
        ),
        ({"optimizer_in_backward": True}, "optimizer.in_backward needs run.on_nonfinite: stop"),
        (
            {
                "optimizer_in_backward": True,
                "on_nonfinite": "stop",
                "precision": Precision(compute=torch.float16, loss_scale=ScalerSettings()),
            },
            "cannot run with a loss scale",
        ),
    ],
)
def test_impossible_options(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        ZeroOptions(**given)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        ZeroOptions(prefetch=-1, optimizer_in_backward=True, clip_norm=1.0)
    assert len(error.value.problems) == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"compute": torch.float64}, "precision.master is torch.float32, less than precision.compute"),
        ({"compute": torch.float32, "reduce": torch.float16}, "precision.reduce is torch.float16, less than"),
        ({"compute": torch.float16, "reduce": torch.bfloat16}, "differ: an update needs equal ones"),
        ({"master": torch.float64}, "differ: an update needs equal ones"),
    ],
)
def test_sums_and_master_weights_are_not_narrower(given: dict[str, torch.dtype], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        Precision(**given)


def test_what_the_engine_would_refuse_is_no_valid_configuration() -> None:
    """Else it would be said only when all ranks have met."""
    widths, choices = ("float32", "float64"), itertools.product((False, True), ("skip", "stop"), (0.0, 1.0))
    dtypes = list(itertools.product(("bfloat16", "float16", *widths), widths, widths))
    valid = 0
    for (in_backward, on_nonfinite, clip), (compute, master, reduce) in itertools.product(choices, dtypes):
        sections = {
            "precision": {"compute": compute, "master": master, "reduce": reduce},
            "optimizer": {"in_backward": in_backward},
            "run": {"on_nonfinite": on_nonfinite, "clip_norm": clip},
        }
        try:
            config = load_config(sections)
        except ConfigError:
            continue
        engine_options(config, accumulation=1)
        valid += 1
    # Seven settings of dtypes, with either clip_norm; two of them are float16, which needs `skip`. In backward, `stop` alone.
    assert valid == 2 * (7 + 5) + 5


def test_the_roles_of_dtypes_are_one_line() -> None:
    line = Precision(compute=torch.bfloat16).table("adamw")
    assert line == (
        "precision: parameters and gradients bfloat16, sums float32, master weights and adamw moments float32, "
        "no loss scale"
    )


def test_a_pattern_that_matches_nothing(alone: Mesh) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.no_decay: \*\.scale matches no parameter"):
        ZeroEngine.build(stack(), alone, optimizer(no_decay=("*norm*", "*.scale")))


def test_parameters_wider_than_their_master_weights(alone: Mesh) -> None:
    model = stack()
    model.blocks[1].norm.double()
    with pytest.raises(LayoutError, match=r"blocks\.1\.norm\.weight is torch\.float64, wider than precision\.master"):
        ZeroEngine.build(model, alone, ZeroOptions())


def test_optimizers_that_need_whole_matrices(alone: Mesh) -> None:
    with pytest.raises(ConfigError, match="Muon and Adafactor need whole matrices"):
        ZeroEngine.build(nn.Linear(8, 8), alone, optimizer(name="muon"))


def test_the_loss_scale_halves_and_grows() -> None:
    scaler = LossScaler(ScalerSettings(initial_scale=4.0, growth_interval=2))
    seen = []
    for overflow in (True, True, True, False, False, False, False):
        scaler.update(overflow=overflow)
        seen.append(scaler.scale)
    assert seen == [2.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0]
    fixed = LossScaler(None)
    fixed.update(overflow=True)
    assert fixed.scale == 1.0


def test_a_mark_exempts_a_parameter_from_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight._no_weight_decay = True  # type: ignore[assignment]
    assert biases_and_norms(model) == ["0.bias", "1.weight", "1.bias"]
