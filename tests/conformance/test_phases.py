"""What may be done when: the life of a unit, parameters at rest, the model between steps."""

import copy
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.plain import error_of
from tests.support.workers import Pool, Workers
from zeromesh.errors import LayoutError, PhaseError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Ledger
from zeromesh.pipeline.pipeline import MicrobatchWork, StepDriver
from zeromesh.units.unit import Phase, Unit
from zeromesh.zero.engine import ZeroEngine

from . import reference
from .cases import Run
from .models import SUBJECTS, VOCABULARY, Stack, stack, text_batch
from .recipe import SMALL, Layout, Problem

LEGAL = {(Phase.RESTING, Phase.GATHERING), (Phase.GATHERING, Phase.LIVE), (Phase.LIVE, Phase.RESTING)}


refusal = partial(error_of, kind=PhaseError)


def resting_parameters(mesh: Mesh, transport: str, budget: int | None) -> dict[str, Any]:
    """What a user finds out about parameters between steps at stage 3; each names itself when it is read or written."""
    run = Run.start(mesh, SMALL, Layout(transport=transport, budget=budget))
    shapes = {name: list(p.shape) for name, p in reference.build(SMALL).named_parameters()}
    states = []
    for step in range(2):
        parameters = dict(run.model.named_parameters())
        uses = [torch.sum, lambda p: p.data.add_(1), lambda p: torch.stack([p]), copy.deepcopy, lambda p: p.clamp_(0)]
        states.append(
            {
                "shapes": {name: list(p.shape) for name, p in parameters.items()} == shapes,
                "silent": [name for name, p in parameters.items() for use in uses if name not in refusal(partial(use, p))],
                "model": "trainer.state_dict()" in refusal(lambda: copy.deepcopy(run.model)),
                "saved": "trainer.state_dict()" in refusal(lambda: torch.save(run.model.state_dict(), os.devnull)),
                "gradients": [name for name, p in parameters.items() if p.grad is not None],
            }
        )
        run.step(step)
        run.evaluate()
    run.close()
    return {"states": states}


def phases(mesh: Mesh, stage: int, transport: str) -> dict[str, Any]:
    run = Run.start(mesh, SMALL, Layout(stage=stage, transport=transport))
    engine, model = run.engine, run.model
    ids = run.batch_of(0)["input_ids"][:2]
    unit = engine.units[1]
    wrong = Phase.LIVE if unit.phase is Phase.RESTING else Phase.GATHERING
    found = {"transition": refusal(lambda: unit.enter(wrong)), "unit": unit.name}
    found["outside"] = refusal(lambda: model(input_ids=ids))
    found["unknown"] = refusal(lambda: engine.state.parameter("no.such"), kind=LayoutError)
    run.step(0)
    found["outside later"] = refusal(lambda: model.model(input_ids=ids))
    with engine.evaluation():
        found["nested"] = refusal(lambda: _train(engine, lambda: model(ids)))
        model(input_ids=ids)
    found["norm"] = run.step(1).grad_norm
    run.close()
    return found


def _train(engine: ZeroEngine, loss_of: Callable[[], torch.Tensor]) -> None:
    StepDriver(engine.mesh).train(engine, [MicrobatchWork(batch={})], lambda _batch, _seed: loss_of())


def looking(mesh: Mesh, stage: int, transport: str, budget: int | None) -> dict[str, Any]:
    """Evaluation, generation and `gathered` against a plain model that holds the same parameters."""
    run = Run.start(mesh, SMALL, Layout(stage=stage, transport=transport, budget=budget))
    run.step(0)
    plain = reference.build(SMALL).to(mesh.device)
    reference.convert(plain, torch.float64)
    names = run.engine.state.names()
    for name, tensor in run.parameters().items():
        plain.get_parameter(name).data.copy_(tensor)
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]], device=mesh.device)
    settings = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    subject, batch = SUBJECTS["llama"], run.batch_of(0)
    with torch.no_grad():
        wanted_loss = float(subject.loss_sum(plain, batch)) / subject.count(batch)
        wanted_tokens = plain.generate(prompt, **settings).tolist()
        tokens = run.model.generate(prompt, **settings).tolist()
        hidden = torch.equal(run.model.model(prompt).last_hidden_state, plain.model(prompt).last_hidden_state)
    with run.engine.gathered(names[:2]):
        equal = [torch.equal(run.model.get_parameter(n), plain.get_parameter(n)) for n in names[:2]]
    outcome = {
        "loss": run.evaluate() == wanted_loss,
        "tokens": tokens == wanted_tokens,
        "hidden": hidden,
        "gathered": equal,
        "norm": run.step(1).grad_norm,
    }
    run.close()
    return outcome


def misuse_of_backward(mesh: Mesh) -> dict[str, str]:
    """One rank. Backward called by the user's own loss, and reentrant checkpointing; each spoils its engine."""
    ids = text_batch(torch.Generator().manual_seed(0), 2)["input_ids"].to(mesh.device)
    found = {}

    def start(model: Stack) -> ZeroEngine:
        options = Layout().options(Problem(model="stack", decay=False))
        return ZeroEngine.build(model, mesh, options)

    own = stack()
    engine = start(own)

    def calls_backward() -> torch.Tensor:
        loss = own(ids).sum()
        loss.backward()
        return loss

    engine.begin_step(0)
    found["own"] = refusal(lambda: _train(engine, calls_backward))
    engine.close()
    old = stack(2)
    block = old.blocks[0]

    def twice(x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(block, x, use_reentrant=True)
        return checkpoint(block, x, use_reentrant=True)

    engine = start(old)
    engine.begin_step(0)
    found["reentrant"] = refusal(lambda: _train(engine, lambda: old.head(twice(old.embedding(ids))).logsumexp(-1).sum()))
    engine.close()
    return found


def interrupted_call(mesh: Mesh) -> dict[str, Any]:
    run = Run.start(mesh, SMALL, Layout())
    run.step(0)
    bad = torch.full((1, 4), VOCABULARY + 5, device=mesh.device)
    with torch.no_grad():
        error = refusal(lambda: run.model(input_ids=bad), kind=Exception)
        again = run.model(input_ids=torch.ones(1, 4, dtype=torch.long, device=mesh.device)).logits.isfinite().all().item()
        refusal(lambda: run.model(input_ids=bad), kind=Exception)
    norm = run.step(1).grad_norm
    run.close()
    return {"error": bool(error), "again": again, "norm": norm}


def made_whole(mesh: Mesh) -> dict[str, Any]:
    run = Run.start(mesh, SMALL, Layout())
    run.step(0)
    wanted = run.parameters()
    run.engine.state.make_whole(lambda: None)
    run.close()
    parameters = dict(run.model.named_parameters())
    equal = all(torch.equal(parameters[name].cpu(), value) for name, value in wanted.items())
    run.model(input_ids=torch.ones(1, 4, dtype=torch.long, device=mesh.device)).logits.sum().backward()
    gradients = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in parameters.values())
    return {"equal": equal, "gradients": gradients}


@pytest.mark.parametrize("old", Phase)
@pytest.mark.parametrize("new", Phase)
def test_the_table_of_transitions(old: Phase, new: Phase) -> None:
    unit = Unit(3, "layers.3", nn.Module(), (), Ledger())
    unit.phase = old
    if (old, new) in LEGAL:
        unit.enter(new)
        assert unit.phase is new
        return
    with pytest.raises(PhaseError, match=r"unit layers\.3 is .* and cannot become"):
        unit.enter(new)


@pytest.mark.parametrize(("transport", "budget"), [("shared", None), ("shared", 0), ("gloo", 0), ("gloo", 100_000)])
def test_parameters_at_rest_name_themselves(workers: Workers, transport: str, budget: int | None) -> None:
    for found in workers.run(2, "test_phases:resting_parameters", transport=transport, budget=budget):
        for state in found["states"]:
            assert state == {"shapes": True, "silent": [], "model": True, "saved": True, "gradients": []}


@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_not_allowed_says_so(fresh_pool: Callable[..., Pool], stage: int, transport: str) -> None:
    for found in fresh_pool(2).run("test_phases:phases", stage=stage, transport=transport):
        assert f"unit {found['unit']} is" in found["transition"]
        assert "outside a training step" in found["outside"]
        assert "outside a training step" in found["outside later"]
        assert "during evaluation" in found["nested"]
        assert "no.such" in found["unknown"]
        assert math.isfinite(found["norm"])


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_model_can_be_used_between_steps(workers: Workers, stage: int, transport: str, budget: int | None) -> None:
    for found in workers.run(2, "test_phases:looking", stage=stage, transport=transport, budget=budget):
        assert math.isfinite(found.pop("norm"))
        assert found == {"loss": True, "tokens": True, "hidden": True, "gathered": [True, True]}


def test_backward_belongs_to_the_engine(fresh_pool: Callable[..., Pool]) -> None:
    (found,) = fresh_pool(1).run("test_phases:misuse_of_backward")
    assert "let the trainer call backward" in found["own"]
    assert "use_reentrant=False" in found["reentrant"]


def test_a_users_call_that_fails_does_not_end_training(workers: Workers) -> None:
    for found in workers.run(2, "test_phases:interrupted_call"):
        assert found["error"]
        assert found["again"]
        assert math.isfinite(found["norm"])


def test_a_model_made_whole_is_ordinary(workers: Workers) -> None:
    for found in workers.run(2, "test_phases:made_whole"):
        assert found == {"equal": True, "gradients": True}
