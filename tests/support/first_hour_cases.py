"""What a person does in the first hours, on workers."""

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.input_cases import command
from tests.support.plain import error_of
from tests.support.trainer_cases import LLAMA, llama, seeded, sentences, settings
from zeromesh import Trainer
from zeromesh.errors import ConfigError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.tokenizer import ByteTokenizer
from zeromesh.trainer.monitoring.step_metrics import read_metrics

SMALL = {
    "model": {"config": {"model_type": "llama", **LLAMA, "vocab_size": 256}},
    "data": {"train": "text.txt", "sequence_length": 16, "eval_samples": 5},
    "precision": {"compute": "float64", "master": "float64", "reduce": "float64"},
    "batch": {"global_size": 8, "micro_size": 2},
    "run": {"max_steps": 4},
    "checkpoint": {"every_steps": 2},
}


def evaluated(mesh: Mesh, folder: str) -> None:
    """`zeromesh evaluate` of a run, a checkpoint, its configuration, an exported model, against the run's own evaluation."""
    root = Path(folder)
    if mesh.rank == 0:
        (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
        (root / "small.yaml").write_text(json.dumps(SMALL))
    mesh.world.barrier("files")
    with contextlib.chdir(root):
        found = {"train": command(mesh, ["train", "small.yaml"])}
        checkpoint = "runs/small/checkpoints/step-00000002"
        if mesh.rank == 0:
            found["export"] = command(mesh, ["checkpoint", "export", "runs/small", "hf", "--dtype", "keep"])
        mesh.world.barrier("export")
        for name, source in {"run": "runs/small", "checkpoint": checkpoint, "config": "small.yaml"}.items():
            found[name] = command(mesh, ["evaluate", source])
        keys = [f"data.{key}={value}" for key, value in SMALL["data"].items()]
        keys += ["data.tokenizer=bytes"]  # The directory has none.
        keys += [f"precision.{role}=float64" for role in ("compute", "master", "reduce")]
        found["hf"] = command(mesh, ["evaluate", "hf", *keys])
        found["all"] = command(mesh, ["evaluate", "runs/small", "data.eval_samples=null"])
        if mesh.rank:
            return
        own = read_metrics("runs/small/evaluations.jsonl")[-1]["eval_loss"]
        run, mid, config, whole = read_metrics("runs/small/evaluated.jsonl")
        (other,) = read_metrics("runs/hf/evaluated.jsonl")
    assert {name: said for name, said in found.items() if said["code"]} == {}
    assert (run["step"], mid["step"], config["step"]) == (4, 2, 4)
    assert run["eval_loss"] == config["eval_loss"] == own
    assert own not in (mid["eval_loss"], whole["eval_loss"])
    assert other["eval_loss"] == pytest.approx(own, rel=1e-9)
    assert f"step 4: evaluation loss {own:.4f} over 75 targets" in found["run"]["out"]
    assert "evaluation: 5 of " in found["train"]["out"]


def names(mesh: Mesh) -> list[str]:
    """What runs are called that nobody has named: in a script, a package and a notebook."""
    found = []
    for file in ("/a/my train.py", "/a/pkg/__main__.py", None):
        main = type(sys)("__main__")
        if file:
            main.__file__ = file
        with mock.patch.dict(sys.modules, {"__main__": main}):
            found += [TrainerConfig().run.name, TrainerConfig().run.name]
    return found


def again(mesh: Mesh, folder: str) -> None:
    """A cell of a notebook that is run three times without closing its trainer, the third time with another model."""
    found, said = list[int](), list[io.StringIO]()
    for count in (2, 2, 1):
        model = seeded(lambda count=count: llama(num_hidden_layers=count))
        config = settings(folder, run={"name": "cell", "max_steps": 2}, checkpoint={"every_steps": 1})
        trainer = Trainer(model, config, sentences())
        said.append(io.StringIO())
        with contextlib.redirect_stdout(said[-1]):
            refusal = error_of(lambda trainer=trainer: found.append(len(trainer.fit().losses)), ConfigError)
    assert found == [2, 0]
    why = "nothing was trained: run 'cell' is complete at step 2 of 2; raise run.max_steps, or choose another run.name"
    assert why in said[1].getvalue()
    assert "done:" not in said[1].getvalue()
    assert "model.config.num_hidden_layers: 2 then, 1 now" in refusal
    assert "give this run another run.name" in refusal


def complete(mesh: Mesh, folder: str) -> None:
    """Runs that are complete by the smaller one of two limits, which the second start names."""
    for name, epochs, limit in (("a", 4, "run.max_steps"), ("b", 1, "run.epochs")):
        said = io.StringIO()
        for _ in range(2):
            config = settings(folder, run={"name": name, "epochs": epochs}, checkpoint={"every_steps": 2})
            with contextlib.redirect_stdout(said), Trainer(seeded(llama), config, sentences()) as trainer:
                trainer.fit()
        assert f"; raise {limit}, or choose another run.name" in said.getvalue()


def tokenized(mesh: Mesh, folder: str) -> dict[str, Any]:
    """How many texts this rank tokenised in three runs over one text, the last with longer sequences; their losses."""
    root, texts, counts, losses = Path(folder), [], [], []
    if mesh.rank == 0:
        (root / "text.jsonl").write_text("".join(json.dumps({"text": f"row {n} " * 9}) + "\n" for n in range(40)))
    mesh.world.barrier("text")
    encode = ByteTokenizer.encode

    def counted(self: ByteTokenizer, given: Sequence[str], **options: Any) -> Any:
        texts.extend(given)
        return encode(self, given, **options)

    with mock.patch.object(ByteTokenizer, "encode", counted):
        for name, length in (("a", 16), ("b", 16), ("c", 24)):
            texts.clear()
            data = {"train": str(root / "text.jsonl"), "cache": str(root / "cache"), "sequence_length": length}
            model = {"config": {"model_type": "llama", **LLAMA, "vocab_size": 256}}
            with Trainer(None, settings(folder, data=data, model=model, run={"name": name, "max_steps": 2})) as trainer:
                losses.append(trainer.fit().losses)
            counts.append(len(texts))
    return {"texts": counts, "losses": losses}
