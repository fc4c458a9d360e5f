"""A model on a mesh: errors that end it, its averages, memory that it needs, and what `shard` and `Trainer` refuse."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from zeromesh.errors import CheckpointError, ConfigError, PhaseError
from zeromesh.trainer import Trainer, model_on_mesh
from zeromesh.trainer.loop import trained_model
from zeromesh.trainer.loop.trained_model import TrainedModel
from zeromesh.trainer.model_on_mesh import PlacedModel, least_free_bytes
from zeromesh.trainer.shard import engine_of


def placed(engine: Any = None, module: Any = None, **more: Any) -> Any:
    """A model on a mesh that notes the errors which it tells other ranks, and whether its console was closed."""
    told: list[BaseException] = []
    watch = SimpleNamespace(operations_begun=3, may_hang=False)
    closed: list[int] = []
    given: Any = dict.fromkeys(("hub_form", "processing_class"))
    return PlacedModel(
        config=SimpleNamespace(ema=SimpleNamespace(decay=0.0), told=told, closed=closed),  # type: ignore[arg-type]
        mesh=SimpleNamespace(watch=watch, fail=told.append, call=lambda _: pytest.fail("a call of all ranks")),  # type: ignore[arg-type]
        console=SimpleNamespace(close=lambda: closed.append(1)),  # type: ignore[arg-type]
        module=module,
        divided=None,  # type: ignore[arg-type]
        engine=engine,
        **given,
        **more,
    )


@pytest.mark.parametrize(
    ("begun", "hangs", "abandoned", "told", "failure"),
    [
        (3, False, None, 0, ""),
        (3, False, True, 0, ""),
        (3, False, False, 0, "ValueError: why"),
        (4, False, True, 1, "ValueError: why"),
        (3, True, True, 1, "ValueError: why"),
    ],
)
def test_an_error_ends_a_model_whose_ranks_it_may_have_parted(
    begun: int, hangs: bool, abandoned: bool | None, told: int, failure: str
) -> None:
    model = placed(None if abandoned is None else SimpleNamespace(abandon_pass=lambda: abandoned))
    error = ValueError("why")
    with pytest.raises(ValueError, match="why") as raised, model.guarded(""):  # noqa: PT012
        model.mesh.watch.operations_begun, model.mesh.watch.may_hang = begun, hangs
        raise error
    assert raised.value is error
    assert (model.config.told, model.failure, model.config.closed) == ([error] * told, failure, [1])
    if not failure:
        with model.guarded(""):
            pass
        assert model.config.closed == [1, 1]
        return
    with pytest.raises(PhaseError, match="this generator ended with ValueError: why; make a new one"):
        model.require_sound()


def test_a_whole_model_has_its_averages_for_a_while() -> None:
    module = nn.Linear(2, 1)
    weight, average = module.weight.data, torch.full((1, 2), 7.0)
    model = placed(module=module, averages={"weight": average})
    with pytest.raises(KeyError), model.averaged():  # noqa: PT012
        assert module.weight.data is not weight
        assert module.weight.tolist() == [[7.0, 7.0]]
        raise KeyError
    assert module.weight.tolist() == weight.tolist()
    with pytest.raises(ConfigError, match=r"set ema\.decay"):
        model.require_average(True)
    model.config.ema.decay = 0.5
    model.require_average(True)
    found, averaged = dict(model.state_dict()), dict(model.state_dict(ema=True))
    assert (found["weight"].tolist(), averaged["weight"].tolist()) == (weight.tolist(), [[7.0, 7.0]])
    assert torch.equal(found["bias"], averaged["bias"])
    assert not found["bias"].requires_grad
    with model.gathered(["weight"]):
        pass
    with pytest.raises(PhaseError, match="whole again"):
        model.require_engine()


def test_memory_of_a_host_is_shared_by_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_on_mesh, "available_bytes", lambda: 100)
    world = SimpleNamespace(all_reduce_max=lambda free, what: torch.maximum(free, torch.tensor([-40])))
    mesh: Any = SimpleNamespace(device=torch.device("cpu"), environment=SimpleNamespace(local_world_size=2), world=world)
    assert least_free_bytes(mesh) == 40, "that of another rank"
    mesh.environment.local_world_size = 3
    assert least_free_bytes(mesh) == 33


@pytest.mark.parametrize(
    ("free", "averages", "whole"), [(0, False, True), (80, False, True), (79, False, False), (120, True, True), (119, True, False)]
)
def test_a_model_becomes_whole_where_it_and_its_copies_fit(
    monkeypatch: pytest.MonkeyPatch, free: int, averages: bool, whole: bool
) -> None:
    monkeypatch.setattr(trained_model, "least_free_bytes", lambda _: free)
    monkeypatch.setattr(trained_model, "Stepper", lambda *_: "stepper")
    done: list[str] = []
    own, before = torch.ones(1), SimpleNamespace(loss=None)
    weights = SimpleNamespace(numel=10, make_whole=lambda _: done.append("whole"))
    average = SimpleNamespace(parameters=lambda: [("w", own)])
    engine = SimpleNamespace(
        options=SimpleNamespace(
            offload=SimpleNamespace(parameters=SimpleNamespace(leaves_device=lambda _: False)),
            precision=SimpleNamespace(master=torch.float32),
            evaluates_average=False,
        ),
        full_state=lambda averaged: average if averaged else weights,
        optimizer_step=SimpleNamespace(averages=1 if averages else None),
        close=lambda: done.append("closed"),
    )
    model: Any = object.__new__(TrainedModel)
    vars(model).update(
        engine=engine, module=None, averages={}, divided=SimpleNamespace(restore=None), stepper=before,
        console=SimpleNamespace(note=done.append), mesh=SimpleNamespace(device=None),
        restore_modules=lambda: done.append("restored"),
    )  # fmt: skip
    model.make_whole()
    if whole:
        assert (done, model.engine, model.stepper) == (["whole", "closed", "restored"], None, "stepper")
        assert (model.averages.keys() == {"w"}) is averages
        assert not averages or model.averages["w"] is not own
        model.make_whole()
    else:
        assert (model.engine, model.stepper, len(done)) == (engine, before, 1)
        assert "does not fit in one rank's memory" in done[0]


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reduce": "max"}, "reduce is 'max'; allowed are mean and sum"),
        ({"optimizer": lambda parameters: 3}, r"optimizer is a int; give a torch.optim.Optimizer"),
        ({"parallel": 2}, "parallel is 2; give a mapping of keys of that section"),
        ({"parallel": {"pipeline": 2}}, "parallel.pipeline is 2: a loop of one's own calls the whole model"),
        *(({"offload": {name: "file"}}, "file needs a directory on the disk") for name in ("optimizer", "gradients", "parameters")),
    ],
)
def test_what_cannot_be_partitioned_so_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        zeromesh.shard(nn.Linear(2, 2), **options)


def test_a_model_that_reduces_gradients_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="model is a DataParallel, which reduces gradients itself"):
        zeromesh.shard(nn.DataParallel(nn.Linear(2, 2)))


def test_settings_that_a_loop_has_itself_are_named(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "zero": {"stage": 1, "prefetch": 2},
        "run": {"seed": 3, "name": "a", "max_steps": 4},
        "batch": {"global_size": 4},
        "checkpoint": {"keep_last": 2, "frozen": "whole"},
    }
    model = nn.Linear(2, 2).double()
    with caplog.at_level(logging.WARNING):
        zeromesh.shard(model, sgd(model), config, stage=2)
    said = [each.getMessage() for each in caplog.records if "settings" in each.getMessage()]
    assert [each.partition(": ")[2] for each in said] == ["batch, run.max_steps, checkpoint.keep_last"]
    options = engine_of(model).options
    assert (options.stage, options.prefetch, options.seed, options.clip_norm) == (2, 2, 3, 0.0)
    assert (options.precision.compute, options.precision.sums) == (torch.float64, torch.float64)
    zeromesh.unshard(model)


def test_without_an_optimizer_parameters_are_frozen_until_the_model_is_whole(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    assert zeromesh.shard(model)[1] is None
    assert not model(torch.ones(1, 2)).requires_grad
    assert zeromesh.load(tmp_path, model) is None
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="has weights and no checkpoint"):
        zeromesh.load(tmp_path, model)
    zeromesh.unshard(model)
    assert [each.requires_grad for each in model.parameters()] == [True, True, False, False]
    assert not {"no_sync", "zero_grad"} & vars(model).keys()
    with pytest.raises(ConfigError, match="this Sequential is not partitioned"):
        zeromesh.unshard(model)


def test_what_a_trainer_does_not_take_is_named_with_what_it_takes() -> None:
    with pytest.raises(ConfigError, match=r"zeromesh\.transformers"):
        Trainer(args=3)
    with pytest.raises(ConfigError) as refused:
        Trainer(learning_rate=3, stage=3, micro_sizes=3)
    assert [each.partition("; ")[2] for each in refused.value.problems] == [
        *("it is optimizer.lr here", "config has the key zero.stage", "docs/api/trainer.md has what there is")
    ]
    with pytest.raises(AttributeError, match="Trainer has no nothing; docs"):
        Trainer().nothing  # noqa: B018
    for hook in ("training_step", "compute_loss", "create_optimizer", "get_train_dataloader"):
        with pytest.raises(ConfigError, match=f"Own overrides {hook}, which"):
            type("Own", (Trainer,), {hook: None})()
