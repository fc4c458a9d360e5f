"""Cases of bad inputs that workers run: each says how it was refused, and whether anything was trained before."""

import contextlib
import io
import json
import shutil
import traceback
from collections.abc import Callable as Function
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import nn

from tests.support.plain import after_steps, sentence_loss
from tests.support.trainer_cases import Pictures, gpt2, llama, sentences, settings
from zeromesh import Callback, Trainer
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.cli.main import main


def prepare(mesh: Mesh, folder: str) -> None:
    """Model directories, whole and damaged in several ways."""
    root = Path(folder)
    model = llama()
    model.save_pretrained(root / "good")
    for name in ("none", "pickle", "cut", "config", "shapes"):
        shutil.copytree(root / "good", root / name)
    for name in ("none", "pickle"):
        (root / name / "model.safetensors").unlink()
    torch.save(model.state_dict(), root / "pickle/pytorch_model.bin")
    with (root / "cut/model.safetensors").open("r+b") as file:
        file.truncate(20_000)
    (root / "config/config.json").write_text('{"model_type": "llama", ')
    values = json.loads((root / "good/config.json").read_text())
    (root / "shapes/config.json").write_text(json.dumps({**values, "intermediate_size": 64}))


def command(mesh: Mesh, words: list[str]) -> dict[str, Any]:
    """What `zeromesh WORDS` would print, and its exit code."""
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: Any = main(words)
        except SystemExit as error:
            code = error.code
        except BaseException:  # noqa: BLE001 - a traceback is what the test looks for
            traceback.print_exc()
            code = -1
    return {"code": code, "out": out.buffer.getvalue().decode(), "err": err.getvalue()}


class NoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def altered(change: Function[[dict[str, Any]], Any], start: int = 0) -> list[dict[str, Any]]:
    """Sentences, of which those from `start` on are changed."""
    found: list[dict[str, Any]] = sentences()
    for sample in found[start:]:
        change(sample)
    return found


def _set(**values: Function[[torch.Tensor], Any]) -> Function[[dict[str, Any]], None]:
    def change(sample: dict[str, Any]) -> None:
        sample.update({name: function(sample[name]) for name, function in values.items()})

    return change


def _rows() -> Any:
    ids = [list(range(12))] * 9
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})


def _vectors() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.ones(4)} for _ in range(9)]


INPUTS: dict[str, Function[[dict[str, Any]], Trainer]] = {
    "no samples": lambda c: Trainer(llama(), c, []),
    "splits": lambda c: Trainer(llama(), c, datasets.DatasetDict(train=_rows(), test=_rows())),
    "stream": lambda c: Trainer(llama(), c, _rows(), _rows().to_iterable_dataset()),
    "batches": lambda c: Trainer(llama(), c, torch.utils.data.DataLoader(sentences(), 3)),  # type: ignore[arg-type]
    "a name": lambda c: Trainer(llama(), c, "stdlib"),  # type: ignore[arg-type]
    "tuples": lambda c: Trainer(llama(), c, torch.utils.data.TensorDataset(torch.ones(9, 2))),
    "ragged": lambda c: Trainer(llama(), c, altered(_set(input_ids=lambda x: x[:7], labels=lambda x: x[:7]), 5)),
    "masked": lambda c: Trainer(llama(), c, altered(_set(labels=lambda x: torch.full_like(x, -100)))),
    "masked evaluation": lambda c: Trainer(llama(), c, sentences(), altered(_set(labels=lambda x: torch.full_like(x, -100)))),
    "vocabulary": lambda c: Trainer(llama(), c, altered(_set(input_ids=lambda x: x + 60))),
    "negative": lambda c: Trainer(llama(), c, altered(_set(input_ids=lambda x: x - 60))),
    "fractions": lambda c: Trainer(llama(), c, altered(_set(input_ids=lambda x: x.float()))),
    "no labels": lambda c: Trainer(llama(), c, altered(lambda sample: sample.pop("labels"))),
    "short labels": lambda c: Trainer(llama(), c, altered(_set(labels=lambda x: x[:5]))),
    "no inputs": lambda c: Trainer(llama(), c, altered(lambda sample: sample.update(tokens=sample.pop("input_ids")))),
    "long": lambda c: Trainer(gpt2(), c, altered(_set(input_ids=lambda x: x.repeat(4), labels=lambda x: x.repeat(4)))),
    "no loss": lambda c: Trainer(NoLoss(), c, _vectors()),
    "frozen": lambda c: Trainer(llama().requires_grad_(False), c, sentences()),
    "model name": lambda c: Trainer("gpt2", c, sentences()),  # type: ignore[arg-type]
    "no model": lambda c: Trainer(lambda: None, c, sentences()),  # type: ignore[arg-type, return-value]
    "callback": lambda c: Trainer(llama(), c, sentences(), callbacks=[Callback]),  # type: ignore[list-item]
    "mean": lambda c: Trainer(llama(), c, sentences(), compute_loss=lambda model, batch: model(**batch).loss),
    "detached": lambda c: Trainer(llama(), c, sentences(), compute_loss=_detached),
    "collator": lambda c: Trainer(llama(), c, sentences(), data_collator=lambda samples: samples),
    "only evaluation": lambda c: Trainer(llama(), c, eval_dataset=sentences()),
    "tokenizer": lambda c: Trainer(None, {**c, "data": {"train": __file__}}, processing_class="bert"),
    "fields": lambda c: Trainer(Pictures(loss=True), c, _vectors()),
    "blocks": lambda c: Trainer(NoLoss(), {**c, "model": {"compile": True}}, _vectors(), compute_loss=_detached),
    "config": lambda c: Trainer(llama(), [c], sentences()),  # type: ignore[arg-type]
}


def _detached(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    total, count = sentence_loss(model, batch)
    return total.detach(), count


def refused(mesh: Mesh, folder: str, name: str) -> dict[str, Any]:
    """How an input is refused by `Trainer(...)` or `fit()`."""
    steps: list[int] = []
    trainer: Trainer | None = None
    try:
        trainer = INPUTS[name](settings(folder, precision={"compute": "float32", "master": "float32", "reduce": "float32"}))
        trainer.events.add(after_steps(lambda _, step: steps.append(step)))
        trainer.fit()
    except Exception as error:  # noqa: BLE001 - what it is, is what the test asks
        return {"error": type(error).__name__, "message": str(error), "steps": steps}
    finally:
        if trainer is not None:
            trainer.close()
    return {"error": "", "message": "", "steps": steps}


def accepted(mesh: Mesh, folder: str) -> dict[str, list[float]]:
    """Forms of one dataset, which are all the same to the trainer."""
    data = sentences()
    columns = {name: [row[name].tolist() for row in data] for name in ("input_ids", "labels")}
    rows = datasets.Dataset.from_dict({**columns, "idx": list(range(len(data))), "text": ["a"] * len(data)})
    forms: dict[str, Any] = {
        "tensors": data,
        "lists": [{name: row[name].tolist() for name in row} for row in data],
        "arrays": [{name: row[name].numpy() for name in row} for row in data],
        "rows": rows,
        "torch rows": rows.with_format("torch", columns=["input_ids", "labels"]),
    }
    found = {}
    for name, form in forms.items():
        torch.manual_seed(1)
        with Trainer(llama().eval(), settings(folder), form) as trainer:
            found[name] = list(trainer.fit().losses)
    return found


def names(mesh: Mesh) -> list[str]:
    return list(INPUTS)
