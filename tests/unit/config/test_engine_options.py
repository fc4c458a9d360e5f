"""What an engine refuses before it starts, and what it makes of odd but legal requests."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.models import stack
from zeromesh import options as options_module
from zeromesh.environment import read_environment
from zeromesh.errors import ConfigError, LayoutError
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import STAGING_BYTES, TierChoice
from zeromesh.optim.fused_optimizer import GroupRules, hyperparameters, moment_dtypes
from zeromesh.optim.optimizer_step import LossScaler
from zeromesh.options import OffloadOptions, OptimizerClass, OptimizerSettings, Precision, ZeroOptions
from zeromesh.settings.keys import AverageSettings, ScalerSettings
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.setup.engine_options import biases_and_norms, engine_options
from zeromesh.units.unit import all_buckets
from zeromesh.zero.engine import ZeroEngine


@pytest.fixture
def alone() -> Mesh:
    return Mesh(MeshShape(), read_environment({}), device=torch.device("cpu"), timeout_seconds=5)


def optimizer(**changes: Any) -> ZeroOptions:
    return ZeroOptions(optimizer=OptimizerSettings(**changes))


IN_BACKWARD: dict[str, Any] = {"optimizer_in_backward": True, "on_nonfinite": "stop"}
DIVIDED: dict[str, Any] = {"replicas": "divided"}
ON_HOST = OffloadOptions(parameters=TierChoice(tier="host"))
TO_FILES = TierChoice(tier="file")
WHOLE = OptimizerSettings(own_class=OptimizerClass(parts=(), whole=True, plans={}))  # type: ignore[arg-type]
HALF = Precision(compute=torch.float16, loss_scale=ScalerSettings())


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (ZeroOptions, {"stage": 5}, ["zero.stage is 5; it must be one of"]),
        (ZeroOptions, {"prefetch": -1}, ["zero.prefetch is -1"]),
        (ZeroOptions, {"gathered_budget": -1}, ["zero.gathered_budget is -1; it must be 0 or more bytes, or auto"]),
        (ZeroOptions, {"stage": 2, "offload": ON_HOST}, ["offload.parameters is host at stage 2: only stage 3 gathers"]),
        (ZeroOptions, {"gathered_budget": "1MiB"}, ["zero.gathered_budget is '1MiB'"]),
        (ZeroOptions, {**IN_BACKWARD, "clip_norm": 1.0}, ["optimizer.in_backward needs run.clip_norm 0"]),
        (ZeroOptions, {"optimizer_in_backward": True}, ["optimizer.in_backward needs run.on_nonfinite: stop"]),
        (ZeroOptions, {**IN_BACKWARD, "precision": HALF}, ["cannot run with a loss scale"]),
        (ZeroOptions, {**IN_BACKWARD, "optimizer": WHOLE}, ["cannot run with an optimizer that needs whole tensors"]),
        (ZeroOptions, {**DIVIDED, "stage": 0}, ["zero.replicas is divided, and zero.stage 0 divides nothing"]),
        (ZeroOptions, {**DIVIDED, "optimizer": WHOLE}, ["zero.replicas divided cannot run with an optimizer that needs"]),
        (ZeroOptions, {**DIVIDED, **IN_BACKWARD}, ["optimizer.in_backward cannot run with zero.replicas divided"]),
        (
            ZeroOptions,
            {"prefetch": -1, "optimizer_in_backward": True, "clip_norm": 1.0},
            ["zero.prefetch", "run.clip_norm", "run.on_nonfinite"],
        ),
        # Sums and master weights are not narrower.
        (Precision, {"compute": torch.float64}, ["precision.master is torch.float32, less than", "precision.reduce"]),
        (Precision, {"reduce": torch.float16}, ["precision.reduce is torch.float16, less than", "differ: an update"]),
        (Precision, {"compute": torch.float16, "reduce": torch.bfloat16}, ["differ: an update needs equal ones"]),
        (Precision, {"compute": torch.bfloat16, "reduce": torch.bfloat16, "master": torch.float64}, ["differ: an update"]),
        (Precision, {"master": torch.float64}, ["differ: an update needs equal ones"]),
        (Precision, {"reduce": torch.float64}, ["differ: an update needs equal ones"]),
    ],
)
def test_impossible_options(make: Any, given: dict[str, Any], said: list[str]) -> None:
    """All problems are told at once."""
    with pytest.raises(ConfigError) as error:
        make(**given)
    assert len(error.value.problems) == len(said)
    assert [words for words, problem in zip(said, error.value.problems, strict=True) if words not in problem] == []


@pytest.mark.parametrize(
    ("given", "found"),
    [
        # Whether sums are made before reducing, gradients keep memory or pass through; what travels on a host and on a device.
        ({}, (False, False, False, torch.bfloat16, torch.float32)),
        ({"stage": 2, "accumulation": 2}, (False, True, False, torch.bfloat16, torch.float32)),
        ({"stage": 1, "accumulation": 2}, (True, True, False, torch.float32, torch.float32)),
        ({"reduce_once": True, "accumulation": 2}, (True, True, False, torch.float32, torch.float32)),
        ({"reduce_once": True}, (False, False, False, torch.bfloat16, torch.float32)),
        (IN_BACKWARD, (False, False, True, torch.bfloat16, torch.float32)),
        ({**IN_BACKWARD, "accumulation": 2}, (False, True, False, torch.bfloat16, torch.float32)),
        ({"offload": OffloadOptions(optimizer=TO_FILES)}, (False, True, False, torch.bfloat16, torch.float32)),
        (
            {"offload": OffloadOptions(optimizer=TO_FILES, gradients=TierChoice())},
            (False, False, False, torch.bfloat16, torch.float32),
        ),
        ({**IN_BACKWARD, "offload": OffloadOptions(gradients=TO_FILES)}, (False, False, True, torch.bfloat16, torch.float32)),
        ({"stage": 1, "accumulation": 2, "reduce": torch.bfloat16}, (True, True, False, torch.bfloat16, torch.bfloat16)),
    ],
)
def test_what_becomes_of_gradients_follows_from_the_options(given: dict[str, Any], found: Any) -> None:
    precision = Precision(compute=torch.bfloat16, reduce=given.get("reduce", torch.float32))
    rest = {name: value for name, value in given.items() if name != "reduce"}
    options = ZeroOptions(precision=precision, prefetch=0, gathered_budget=0, **rest)
    wires = (options.wire_dtype(torch.bfloat16, on_device=on_device) for on_device in (False, True))
    stay = options.gradients_keep_memory(torch.device("cpu"))
    assert (options.sums_before_reducing, stay, options.gradients_pass_through, *wires) == found


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


def test_without_a_configuration_defaults_are_those_of_torch() -> None:
    """A configuration has betas and a weight decay of its own."""
    (group,) = torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).param_groups
    decayed, _ = hyperparameters(OptimizerSettings())
    assert all(decayed[name] == group[name] for name in ("betas", "eps", "weight_decay"))
    given = OptimizerSettings(lr=0.5, weight_decay=0.125, eps=1e-6, momentum=0.25)
    values = {"lr": 0.25, "betas": (0.9, 0.999), "eps": 1e-6, "momentum": 0.25, "weight_decay": 0.125}
    scheduled = values | {"betas": (0.75, 0.999), "momentum": 0.75}
    assert hyperparameters(given, 0.5) == [values, values | {"weight_decay": 0.0}]
    assert hyperparameters(given, 0.5, 0.75) == [scheduled, scheduled | {"weight_decay": 0.0}]
    configured, _ = hyperparameters(engine_options(load_config({}), accumulation=1).optimizer)
    assert (configured["betas"], configured["weight_decay"]) == ((0.9, 0.95), 0.1)


def test_groups_by_name() -> None:
    rules = GroupRules(OptimizerSettings(no_decay=("*.bias", "norm", "x?")))
    assert [rules.group_of(each) for each in ("a.bias", "norm", "a.norm", "bias")] == [1, 1, 0, 0]
    assert [[*moment_dtypes(OptimizerSettings(name="sgd", momentum=each), torch.float32)] for each in (0.0, 0.5)] == [
        [],
        ["momentum_buffer"],
    ]


def test_the_roles_of_dtypes_are_one_line() -> None:
    line = Precision(compute=torch.bfloat16).table("adamw")
    assert line == (
        "precision: parameters and gradients bfloat16, sums float32, master weights float32, adamw moments float32, no loss scale"
    )

    line = Precision(reduce=torch.bfloat16, compute=torch.float32).table("sgd")
    assert "sums float32 of what travels in bfloat16, master weights float32, sgd moments float32" in line
    assert HALF.table("adamw").endswith(", dynamic loss scale")


def test_updates_pass_through_buffers_of_a_share_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert OffloadOptions().staging_on(cpu) == STAGING_BYTES
    assert OffloadOptions(staging_bytes=5).staging_on(cpu) == 5
    monkeypatch.setattr(options_module, "is_accelerator", lambda _: True)
    for total, staging in ((64 * STAGING_BYTES + 64, STAGING_BYTES + 1), (64, STAGING_BYTES)):
        monkeypatch.setattr(options_module, "device_memory", lambda _, total=total: SimpleNamespace(total=total))
        assert OffloadOptions().staging_on(cpu) == staging
        assert OffloadOptions(staging_bytes=5).staging_on(cpu) == 5


def test_what_is_at_the_edge_is_allowed() -> None:
    for given in ({"prefetch": 0}, {"gathered_budget": 0}, {"gathered_budget": None}, {"stage": 0}, {"offload": ON_HOST}):
        ZeroOptions(**given)
    ZeroOptions(stage=2, offload=OffloadOptions(parameters=TierChoice(tier="host", fraction=0.0)))
    ZeroOptions(**{**IN_BACKWARD, "clip_norm": 0.0})


def test_what_an_engine_refuses_of_a_model(alone: Mesh) -> None:
    wide = stack()
    wide.blocks[1].norm.double()
    for model, options, error, said in (
        (wide, ZeroOptions(), LayoutError, r"blocks\.1\.norm\.weight is torch\.float64, wider than precision\.master"),
        (nn.Linear(8, 8), optimizer(name="muon"), ConfigError, "optimizer.name is 'muon', and not adamw or adam"),
    ):
        with pytest.raises(error, match=said):
            ZeroEngine.build(model, alone, options)


@pytest.mark.parametrize(
    ("settings", "overflows", "scales"),
    [
        (ScalerSettings(initial_scale=4.0, growth_interval=2), "1110000", [2.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0]),
        (ScalerSettings(initial_scale=4.0, growth_interval=2), "00010111", [4.0, 8.0, 8.0, 4.0, 4.0, 2.0, 1.0, 1.0]),
        (None, "1", [1.0]),
    ],
)
def test_the_loss_scale_halves_and_grows(settings: ScalerSettings | None, overflows: str, scales: list[float]) -> None:
    """In the step that fills the interval; a fixed one stays."""
    scaler, seen = LossScaler(settings), []
    for overflow in overflows:
        scaler.update(overflow=overflow == "1")
        seen.append(scaler.scale)
    assert seen == scales


def test_an_engine_tells_its_loss_scale_and_its_averages(alone: Mesh) -> None:
    options = ZeroOptions(precision=HALF, average=AverageSettings(decay=0.5))
    engine = ZeroEngine.build(stack(), alone, options)
    assert engine.loss_scale == engine.optimizer_step.scaler.scale > 1
    engine.optimizer_step.scaler.update(overflow=True)
    assert engine.loss_scale == engine.optimizer_step.scaler.scale
    assert engine.optimizer_step.averages is not None
    engine.optimizer_step.averages.count = 1
    for bucket in all_buckets(engine.units):
        assert bucket.average is not None
        bucket.average.write(0, torch.ones(bucket.average.numel, dtype=bucket.average.dtype)).wait()
    assert all(bool((value == 1).all()) for _, value in engine.full_state(averaged=True).parameters())
    assert not all(bool((value == 1).all()) for _, value in engine.state.parameters())
    engine.close()


def test_a_mark_exempts_a_parameter_from_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight._no_weight_decay = True  # type: ignore[assignment]
    assert biases_and_norms(model) == ["0.bias", "1.weight", "1.bias"]
