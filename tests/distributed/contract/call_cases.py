"""Cases of methods for all ranks that one rank calls alone, or with wrong arguments, run by workers."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tests.support.checkpoint_cases import configured
from tests.support.trainer_cases import llama, sentences
from zeromesh import Callback, Trainer
from zeromesh.errors import ZeromeshError
from zeromesh.mesh.process_mesh import Mesh

NAME = "model.embed_tokens.weight"


class Alone(Callback):
    """Calls something in a step, on the first rank."""

    def __init__(self, call: Callable[[Trainer], object]) -> None:
        self._call = call

    def on_pre_optimizer_step(self, trainer: Trainer, step: int) -> None:
        if trainer.mesh.rank == 0:
            self._call(trainer)


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
        callbacks = [Alone(call)] if where else []
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


def refused(mesh: Mesh, *, folder: str, transport: str) -> dict[str, Any]:
    """Calls that are refused before anything is begun, by all ranks and by one of them, and then training."""
    trainer = _trainer(folder, transport, 20.0)
    found = {"dataset": _outcome(lambda: trainer.evaluate("no dataset"))}  # type: ignore[arg-type]
    if mesh.rank == 1:
        found["gradient"] = _outcome(lambda: trainer.gradient(NAME))
        found["unknown"] = _outcome(lambda: trainer.gathered(["no.such"]).__enter__())
    found["loss"] = trainer.fit().final_loss
    found["evaluated"] = trainer.evaluate()["eval_loss"]
    trainer.close()
    return found
