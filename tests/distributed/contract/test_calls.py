"""Methods for all ranks: called on one, with wrong arguments, or in another order than by the others."""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoint_cases import configured
from tests.support.plain import calling
from tests.support.tables import row, tried
from tests.support.trainer_cases import llama, sentences
from tests.support.workers import PoolOptions, Workers
from zeromesh import Callback, Trainer
from zeromesh.errors import DataError, LayoutError, PhaseError, ZeromeshError
from zeromesh.mesh.process_mesh import Mesh

NAME = "model.embed_tokens.weight"


def _gathered(trainer: Trainer) -> None:
    with trainer.gathered([NAME]):
        pass


CALLS: dict[str, Callable[[Trainer], object]] = {
    "evaluate": lambda trainer: trainer.evaluate(),
    "predict": lambda trainer: trainer.predict(sentences()),
    "save": lambda trainer: trainer.save(trainer.run_directory / "model"),
    "save_pretrained": lambda trainer: trainer.model.save_pretrained(trainer.run_directory / "model"),
    "generate": lambda trainer: trainer.generate(sentences()[0]["input_ids"][None], max_new_tokens=2),
    "state_dict": lambda trainer: dict(trainer.state_dict()),
    "gathered": _gathered,
    "fit": lambda trainer: trainer.fit(),
    "run": lambda trainer: trainer.run,
}


def _trainer(folder: str, transport: str, seconds: float, *callbacks: Callback) -> Trainer:
    sections = {"parallel": {"timeout_seconds": seconds, "transport": transport}, "checkpoint": {"every_steps": 0}}
    config = configured(folder, 2, {**sections, "zero": {"stage": 3, "gathered_budget": 0}})
    return Trainer(llama(), config, sentences(), sentences(), callbacks=callbacks)


def _outcome(call: Callable[[], object]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        call()
    except ZeromeshError as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
    return {"error": "", "text": "", "seconds": time.monotonic() - began}


def alone(mesh: Mesh, *, folder: str, transport: str, calls: list[str], seconds: float) -> Mapping[str, Any]:
    """What became of each call on the first rank alone; what became of training on both where it was made in a step."""
    found = {}
    for name in calls:
        where, _, method = name.rpartition(" ")
        call: Callable[[Trainer], object] = CALLS.get(method, lambda trainer: trainer.gradient(NAME))
        inside = lambda trainer, step, call=call: trainer.mesh.rank or call(trainer)  # noqa: E731
        callbacks = [calling(on_pre_optimizer_step=inside)] if where else []
        trainer = _trainer(f"{folder}/{name}", transport, seconds, *callbacks)
        mesh.world.barrier("the next case")
        if where:
            found[name] = _outcome(trainer.fit)
        else:
            _ = trainer.mesh if method == "run" else trainer.run
            if mesh.rank == 0:
                found[name] = _outcome(partial(call, trainer))
        mesh.world.barrier("the end of the case")
    return found


def differing(mesh: Mesh, *, folder: str) -> dict[str, Any]:
    """The first rank evaluates where the other saves; and one rank alone gives a dataset that cannot be used."""
    trainer = _trainer(f"{folder}/differing", "shared", 20.0)
    trainer.run  # noqa: B018
    found = {"differing": _outcome(lambda: CALLS["evaluate" if mesh.rank == 0 else "save"](trainer))}
    mesh.world.barrier("the next case")
    trainer = _trainer(f"{folder}/left", "shared", 20.0)
    trainer.run  # noqa: B018
    dataset: Any = sentences() if mesh.rank == 0 else "no dataset"
    found["left"] = _outcome(lambda: trainer.evaluate(dataset))
    mesh.world.barrier("the end of the case")
    return found


def refused(mesh: Mesh, *, folder: str, transport: str) -> None:
    """Calls that are refused before anything is begun, by all ranks and by one of them, and then training."""
    trainer = _trainer(folder, transport, 20.0)
    with pytest.raises(DataError):
        trainer.evaluate("no dataset")  # type: ignore[arg-type]
    if mesh.rank == 1:
        with pytest.raises(PhaseError):
            trainer.gradient(NAME)
        with pytest.raises(LayoutError):
            trainer.gathered(["no.such"]).__enter__()
    assert math.isfinite(trainer.fit().final_loss)
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    trainer.close()


METHODS = {
    "evaluate": "trainer.evaluate()",
    "predict": "trainer.predict()",
    "save": "trainer.save()",
    "save_pretrained": "trainer.save()",
    "generate": "trainer.generate()",
    "state_dict": "trainer.state_dict()",
    "gathered": "trainer.gathered(['model.embed_tokens.weight'])",
    "gradient": "trainer.gradient('model.embed_tokens.weight')",
    "fit": "trainer.fit()",
    "run": "the first method of the trainer that needs a run",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("transport", "hosts", "calls"),
    [
        ("shared", 0, ["evaluate", "state_dict", "fit", "run", "step gradient"]),
        pytest.param("shared", 0, ["save", "predict", "save_pretrained", "generate", "gathered"], marks=pytest.mark.full),
        ("gloo", 0, ["step evaluate"]),
        pytest.param("gloo", 0, ["evaluate", "state_dict"], marks=pytest.mark.full),
        pytest.param("gloo", -2, ["step gradient"], marks=pytest.mark.full),
        pytest.param("gloo", -2, ["evaluate"], marks=pytest.mark.full),
    ],
)
def test_a_method_for_all_ranks_that_one_calls_names_itself_and_the_rank_that_did_not_come(
    workers: Workers, tmp_path: Path, transport: str, hosts: int, calls: list[str]
) -> None:
    arguments = {"folder": str(tmp_path), "transport": transport, "calls": calls, "seconds": 1.0}
    with workers.fresh(PoolOptions(size=2, hosts=hosts)) as pool:
        first, second = pool.run("test_calls:alone", **arguments)
    assert list(first) == calls
    for name in calls:
        method = METHODS[name.rpartition(" ")[2]]
        for found in (first[name], second.get(name, first[name])):
            assert found["error"] == "CollectiveError"
            assert f"{method} must be called on all ranks: rank 0 called it, and rank 1 did not" in found["text"]
            assert found["seconds"] < 8


def test_ranks_that_make_different_calls_are_told_both(workers: Workers, tmp_path: Path) -> None:
    with workers.fresh(PoolOptions(size=2)) as pool:
        first, second = pool.run("test_calls:differing", folder=str(tmp_path))
    for found in (first["differing"], second["differing"]):
        assert "rank 0 called trainer.evaluate() and rank 1 called trainer.save()" in found["text"]
    assert second["left"]["error"] == "DataError"
    assert "rank 1 has left trainer.evaluate() with DataError" in first["left"]["text"]
    assert first["left"]["seconds"] < 10


test_a_call_that_is_refused_leaves_nothing_behind = tried(
    "test_calls", [row(2, "refused", transport=transport) for transport in ("shared", "gloo")]
)
