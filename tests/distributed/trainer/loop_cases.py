"""Cases of the loop that workers run: epochs, evaluations with metrics, flags of callbacks, streams."""

import copy
import gc
import random
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_pt_utils import LabelSmoother

from tests.support.plain import (
    after_steps,
    apart,
    calling,
    distance,
    error_of,
    fitted,
    like,
    plain_fit,
    plain_loop,
    sentence_loss,
    stacked,
)
from tests.support.trainer_cases import llama, seeded, sentences, settings
from zeromesh import Callback, Trainer
from zeromesh.errors import PhaseError, ZeromeshError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.data.loader import Feed
from zeromesh.trainer.data.sampler import BatchPlan, SampleOrder
from zeromesh.trainer.monitoring import step_stats
from zeromesh.trainer.monitoring.console import Console
from zeromesh.units.unit import Bucket, all_buckets


def bert(**changes: Any) -> Any:
    """A tiny classifier of three classes."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = tf.BertConfig(**sizes, vocab_size=64, num_labels=3, max_position_embeddings=32, **changes)
    return tf.AutoModelForSequenceClassification.from_config(config)


def ragged(count: int) -> list[dict[str, Any]]:
    """Token ids of many lengths, each with a class."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, 14, (count,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(1, 64, (length,), generator=generator), "labels": index % 3}
        for index, length in enumerate(lengths)
    ]


def padded(samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of ragged samples."""
    ids = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


class Diary(Callback):
    """Notes the events of epochs, evaluations and checkpoints."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_epoch_begin(self, trainer: Trainer, epoch: int) -> None:
        self.events.append(f"epoch {epoch} at {trainer.state.epoch:g}")

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self.events.append(f"end {epoch} after {trainer.state.step}")

    def on_evaluate(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(f"evaluated {step}")

    def on_save(self, trainer: Trainer, step: int) -> None:
        self.events.append(f"saved {step}")

    def on_substep_end(self, trainer: Trainer, step: int) -> None:
        if step == 1:
            self.events.append("substep")


def epochs(mesh: Mesh, folder: str, last: str, smoothing: float = 0.0) -> None:
    """Two epochs of 23 samples by global batches of 8, which end with a smaller batch or without it, as in a plain loop.

    Smoothed labels are transformers' own, which sums over the vocabulary in float32, whatever the model's dtype.
    """
    config = settings(
        folder,
        batch={"last": last},
        run={"epochs": 2, "max_steps": None, "eval_every": "epoch", "label_smoothing": smoothing},
        checkpoint={"every_steps": "epoch"},
    )
    data, order, diary = sentences(), SampleOrder(length=23, seed=5), Diary()
    plan = BatchPlan(global_size=8, micro_size=1, data_ranks=1, epoch_size=len(data), last=last)  # type: ignore[arg-type]
    rows = [[order.dataset_index(each) for each in plan.samples_of(step)] for step in range(plan.steps_of(2))]

    def mean(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        if not smoothing:
            return sentence_loss(model, batch)
        output = model(input_ids=batch["input_ids"])
        return LabelSmoother(epsilon=smoothing)(output, batch["labels"], shift_labels=True), 1

    plain = plain_fit(seeded(llama), data, config, mean, rows=rows)
    with Trainer(seeded(llama), config, data, sentences(3), callbacks=[diary]) as trainer:
        report = trainer.fit()
        assert apart(report.losses, plain.losses) <= (1e-6 if smoothing else 1e-9)
        assert distance(dict(trainer.state_dict()), plain.states[-1]) <= (1e-4 if smoothing else 1e-9)
        steps = [report.final_step, trainer.state.max_steps, trainer.state.epoch, trainer.state.epochs]
    if last == "carry":
        assert steps == [6, 6, 48 / 23, 2.0]
        return
    each = {"partial": 3, "drop": 2}[last]
    assert steps == [2 * each, 2 * each, 2.0, 2.0]
    assert diary.events.count("substep") == -(-8 // (2 * mesh.world_size)) - 1
    assert [event for event in diary.events if event != "substep"] == [
        "epoch 0 at 0", f"end 0 after {each}", f"evaluated {each}", f"saved {each}",
        "epoch 1 at 1", f"end 1 after {2 * each}", f"evaluated {2 * each}", f"saved {2 * each}",
    ]  # fmt: skip


def left_when_closed(mesh: Mesh, folder: str, sections: dict[str, Any]) -> None:
    """No bucket is still there after a run, although the interpreter has not looked for garbage."""
    made: list[weakref.ref[Bucket]] = []

    def note(trainer: Trainer, step: int) -> None:
        if trainer.engine is not None and not made:
            made.extend(map(weakref.ref, all_buckets(trainer.engine.units)))

    def train() -> None:
        run = {"max_steps": 2, **sections.get("run", {})}
        config = settings(folder, checkpoint={"every_steps": 1}, **{**sections, "run": run})
        with Trainer(seeded(llama), config, sentences(), sentences(3), callbacks=[after_steps(note)]) as trainer:
            trainer.fit()
            trainer.evaluate()

    gc.collect()
    gc.disable()
    try:
        train()
        assert made
        assert not any(bucket() is not None for bucket in made)
    finally:
        gc.enable()


def left_after_an_error(mesh: Mesh, folder: str) -> None:
    """No bucket is still there after an error in the middle of a forward, whose graph refers to the engine."""
    made: list[weakref.ref[Bucket]] = []

    def fail(*_: Any) -> None:
        made.extend(map(weakref.ref, all_buckets(trainer.engine.units)))
        raise ValueError("in the last of the blocks")

    model = seeded(partial(llama, num_hidden_layers=3))
    model.model.layers[-1].register_forward_pre_hook(fail)
    with Trainer(model, settings(folder, model={"loss": "native"}), sentences()) as trainer:
        assert "in the last of the blocks" in error_of(trainer.fit, ValueError)
    gc.collect()
    assert made
    assert not any(bucket() is not None for bucket in made)


def by_samples(mesh: Mesh, folder: str, tokens: int | None = None) -> None:
    """A mean over samples, of microbatches of one, is the plain mean of each sample's mean."""
    batch = {"micro_size": 1, "average": "samples", "tokens": tokens}
    config = settings(folder, batch=batch, run={"max_steps": 3})
    data, model = sentences(), seeded(llama).double()  # A budget of 12 tokens holds one of them.
    with Trainer(copy.deepcopy(model), config, train_dataset=data) as trainer:
        losses = trainer.fit().losses

    def mean(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        rows = [{name: values[number : number + 1] for name, values in batch.items()} for number in range(8)]
        return torch.stack([total / count for total, count in (sentence_loss(model, row) for row in rows)]).sum(), 8

    assert apart(losses, plain_fit(model, data, config, mean).losses) <= 1e-9


def uneven(count: int = 23) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Sentences of 3 to 12 words, and the same with padding that is no target, which a causal model does not see."""
    whole = sentences(count)
    lengths = torch.randint(3, 13, (count,), generator=torch.Generator().manual_seed(9)).tolist()
    short = [{name: each[name][-size:] for name in each} for each, size in zip(whole, lengths, strict=True)]
    return short, [padded_sentences([each, whole[0]], rows=1) for each in short]


def padded_sentences(samples: Sequence[Mapping[str, Any]], rows: int | None = None) -> dict[str, torch.Tensor]:
    """A batch of sentences; of one row, without its dimension."""
    pad = nn.utils.rnn.pad_sequence
    ids = pad([sample["input_ids"] for sample in samples], batch_first=True)
    labels = pad([sample["labels"] for sample in samples], batch_first=True, padding_value=-100)
    return {"input_ids": ids[:rows].squeeze(0) if rows else ids, "labels": labels[:rows].squeeze(0) if rows else labels}


TOKENS = 40


def tokens(mesh: Mesh, folder: str, resumes: bool = False, **sections: Mapping[str, Any]) -> None:
    """Microbatches of at most 40 tokens give the losses, weights and evaluations of plain batches, on any number of ranks, also
    from the middle on."""
    data, whole = uneven()
    batch = {"micro_size": 1, "tokens": TOKENS, **sections.pop("batch", {})}
    every = {"every_steps": 5, "asynchronous": False, "keep_last": 3}
    every |= {"resume": f"{folder}/run/checkpoints/step-00000005", "every_steps": 0} if resumes else {}
    place = f"{folder}/again" if resumes else folder
    config = settings(place, batch=batch, run={"max_steps": 10}, checkpoint=every, **sections)
    plain = plain_fit(seeded(llama), whole, config)
    sizes: list[int] = []

    def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        found = padded_sentences(samples)
        sizes.append(found["input_ids"].numel())
        return found

    def blocks(feed: Feed, step: int, cut: Any = Feed.blocks) -> Any:
        before = len(sizes)
        found = cut(feed, step)
        del sizes[before:]  # Batches of single samples, which tell their lengths, are not run.
        return found

    with patch.object(Feed, "blocks", blocks), Trainer(seeded(llama).double(), config, data, data, collate) as trainer:
        if not resumes:
            with torch.no_grad():
                total, count = sentence_loss(seeded(llama).double(), stacked(whole, range(len(whole))))
            assert trainer.evaluate()["eval_loss"] == pytest.approx(float(total) / count, rel=1e-9)
        sizes.clear()
        report = trainer.fit()
        first = len(plain.losses) - len(report.losses)
        assert first == (5 if resumes else 0)
        assert apart(report.losses, plain.losses[first:]) <= 1e-9
        assert distance(dict(trainer.state_dict()), plain.states[-1]) <= 1e-9
    if "data" in sections:  # A worker process collates.
        return
    assert max(sizes) <= TOKENS
    # Fewer forwards than samples, and no rank runs more of them than the others.
    assert len({row[0] for row in mesh.world.gather_integers([len(sizes)])}) == 1
    assert len(sizes) * mesh.data.size < 10 * 8


def unequal_lengths(mesh: Mesh, folder: str) -> str:
    """The samples of one rank are longer than those of the others."""
    data, _ = uneven()
    rows = data if mesh.rank else sentences()
    config = settings(folder, batch={"micro_size": 1, "tokens": TOKENS})
    return error_of(lambda: fitted(seeded(llama), config, rows, data_collator=padded_sentences), ZeromeshError)


def accuracy(prediction: tf.EvalPrediction) -> dict[str, float]:
    """And the order of samples, as a number."""
    found = prediction.predictions.argmax(-1) == prediction.label_ids
    weights = np.arange(1, len(found) + 1)
    return {"accuracy": float(found.mean()), "order": float((weights * prediction.label_ids).sum())}


def metrics(mesh: Mesh, folder: str, samples: int, micro: int | None, sections: Mapping[str, Any]) -> None:
    """Evaluation and prediction of uneven data are those of the plain model."""
    model, data = seeded(bert).double().eval(), ragged(samples)
    with torch.no_grad():
        logits = torch.stack([model(**padded([sample])).logits[0] for sample in data])
    labels = torch.tensor([sample["labels"] for sample in data])
    wanted = {"loss": float(F.cross_entropy(logits, labels))}
    wanted |= accuracy(tf.EvalPrediction(predictions=logits.numpy(), label_ids=labels.numpy()))
    batch = {"eval_micro_size": micro} if micro else {"micro_size": 1, "tokens": 30}
    config = settings(folder, batch=batch, **sections)
    sets = {"a": data, "b": data[: samples // 2 + 1]}
    with Trainer(model, config, data, sets, padded, compute_metrics=accuracy) as trainer:
        both, values, output = trainer.evaluate(), trainer.evaluate(data), trainer.predict(data)
    like({name: values[f"eval_{name}"] for name in wanted}, wanted, rel=0, abs_=1e-9)
    assert both["eval_a_accuracy"] == values["eval_accuracy"]
    like(torch.from_numpy(output.predictions), logits, rel=0, abs_=1e-9)
    assert output.label_ids.tolist() == labels.tolist()
    named = {"epoch", "eval_loss", *(f"eval_{part}_{name}" for part in "ab" for name in wanted)}
    assert {name for name in both if not name.endswith(("runtime", "per_second"))} == named
    speed = ["test_runtime", "test_samples_per_second", "test_steps_per_second"]
    assert sorted(output.metrics or {}) == ["test_accuracy", "test_loss", "test_order", *speed]


class Theirs(TrainerCallback):
    """Notes all events of transformers, and sets flags."""

    def __init__(self, flags: Mapping[str, str]) -> None:
        self.flags = flags
        self.events: list[str] = []
        self.logs: list[dict[str, float]] = []

    def _note(self, name: str, state: Any, control: Any) -> Any:
        self.events.append(f"{name} {state.global_step}")
        flag = self.flags.get(f"{name} {state.global_step}")
        if flag is not None:
            setattr(control, flag.lstrip("-"), not flag.startswith("-"))
            return control
        return None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        self.logs.append(dict(logs))
        return self._note("on_log", state, control)


def _event(name: str) -> Any:
    def method(self: Theirs, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return self._note(name, state, control)

    return method


for _name in (
    *("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin", "on_substep_end"),
    *("on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_evaluate", "on_save", "on_prediction_step"),
):
    setattr(Theirs, _name, _event(_name))


def theirs(mesh: Mesh, folder: str, flags: Mapping[str, str], alone: bool, **run: Any) -> dict[str, Any]:
    """A run with a callback of transformers; `alone`: only that of rank 1 sets any."""
    config = settings(folder, batch={"last": "partial"}, run={"max_steps": 6, **run}, checkpoint={"every_steps": 4})
    callback = Theirs({} if alone and mesh.rank != 1 else flags)
    trainer = Trainer(
        seeded(llama), config, train_dataset=sentences(), eval_dataset=sentences(3), callbacks=[callback, tf.PrinterCallback]
    )
    with trainer:
        report = trainer.fit()
        steps = sorted(int(each.name.split("-")[1]) for each in (trainer.run_directory / "checkpoints").glob("step-*"))
    return {
        "events": callback.events,
        "steps": [report.final_step],
        "saved": steps,
        "losses": list(report.losses),
        "logs": callback.logs,
    }


def patience(mesh: Mesh, folder: str, kind: str) -> None:
    """A run whose score on rank 0 falls after the second evaluation ends for it; the best weights are there in the end. By
    `run.patience` it has ended for the same command too, and goes on for another; by a callback after the next evaluation."""
    scores = iter([0.3, 0.6, 0.5, 0.6, 0.4, 0.2, 0.1, 0.0])
    kept: dict[int, dict[str, torch.Tensor]] = {}

    def keep(trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        kept[step] = {name: tensor.clone() for name, tensor in trainer.state_dict()}

    theirs = kind == "theirs"
    run = {"max_steps": 9, "eval_every": 1, "load_best": True, "metric": "score", "patience": 0 if theirs else 3}

    def begun(**changes: Any) -> Trainer:
        config = settings(folder, run={**run, **changes}, checkpoint={"every_steps": 100, "keep_last": 1})
        stops = [EarlyStoppingCallback(early_stopping_patience=3)] if theirs else []
        score = {"compute_metrics": lambda prediction: {"score": random.random() if mesh.rank else next(scores)}}
        callbacks = [calling(on_evaluate=keep), *stops]
        return Trainer(seeded(bert), config, ragged(20), ragged(5), padded, callbacks=callbacks, **score)

    with begun() as trainer:
        report, state = trainer.fit(), trainer.state
        assert distance(dict(trainer.state_dict()), kept[2]) == 0.0
    assert (report.final_step, state.best_metric, state.best_step) == (5, 0.6, 2)
    assert (state.best_checkpoint or "").rpartition("/")[2] == "step-00000002"
    with begun() as trainer:
        report = trainer.fit()
        assert distance(dict(trainer.state_dict()), kept[2]) == 0.0
    assert (report.final_step, len(report.losses)) == ((6, 1) if theirs else (5, 0))
    with begun(**({"max_steps": 10} if theirs else {"patience": 4})) as trainer:
        report = trainer.fit()
    assert (report.final_step, len(report.losses)) == (7 if theirs else 6, 1)


class Stream:
    """A stream without a length; how often it was read."""

    def __init__(self, count: int) -> None:
        self.samples = sentences(count)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def streamed(mesh: Mesh, folder: str, steps: int, shuffle: bool) -> dict[str, Any]:
    """Train on a stream up to `steps`, going on from what is there."""
    config = settings(
        folder,
        data={"shuffle": shuffle, "shuffle_window": 12},
        run={"max_steps": steps},
        schedule={"name": "constant", "warmup_steps": 0},
        checkpoint={"every_steps": 2},
    )
    with Trainer(seeded(llama), config, train_dataset=Stream(21)) as trainer:
        losses = trainer.fit().losses
        return {"losses": list(losses), "parameters": {n: float(p.double().norm()) for n, p in trainer.state_dict()}}


class Towered(nn.Module):
    """A model of which a part is used by some samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.tower, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, picture: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x)
        if bool(picture.any()):
            hidden = hidden + self.tower(x)
        return {"loss": ((self.head(hidden) - labels) ** 2).mean()}


TOWER_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95)}, {"betas": [0.9, 0.95]}),
    "adam": (torch.optim.Adam, {"betas": (0.9, 0.95)}, {"betas": [0.9, 0.95]}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"eps": 1e-8}, {}),
}
"""By name torch's class, and the values of both."""


WITHOUT_GRADIENTS: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 3},
    {"stage": 0, "optimizer": "sgd"},
    {"stage": 2, "optimizer": "sgd", "offload": {"optimizer": "host", "gradients": "host"}},
    {"stage": 3, "optimizer": "adam", "offload": {"optimizer": "file", "parameters": "file"}},
    *({"stage": stage, "update": {"in_backward": True}} for stage in range(4)),
    {"stage": 3, "optimizer": "sgd", "update": {"in_backward": True}},
    {"stage": 1, "optimizer": "adagrad", "update": {"in_backward": True}, "offload": {"optimizer": "host"}},
]
"""Two ranks, of which one has a gradient of the tower in two of six steps, and none has one in the others."""


def towers(mesh: Mesh, folder: str) -> None:
    """A part without a gradient is left alone."""
    for number, case in enumerate(WITHOUT_GRADIENTS):
        towered(mesh, f"{folder}/{number}", **case)


def towered(
    mesh: Mesh, folder: str, stage: int, optimizer: str = "adamw", update: Mapping[str, Any] = MappingProxyType({}), **sections: Any
) -> None:
    """Train with decay a model whose tower gets a gradient in two steps, by one rank's microbatch alone, and so does torch."""
    cls, theirs, ours = TOWER_OPTIMIZERS[optimizer]
    generator, passed_over = torch.Generator().manual_seed(1), list[int]()
    samples = [
        {
            "x": torch.randn(4, generator=generator, dtype=torch.float64),
            "labels": torch.randn(1, generator=generator, dtype=torch.float64),
            "picture": torch.tensor(float(number in (7, 12))),
        }
        for number in range(24)
    ]
    model = seeded(Towered).double()
    plain = copy.deepcopy(model)

    def mean(model: Any, batch: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
        rows = ({name: value[None] for name, value in sample.items()} for sample in batch)
        return torch.stack([model(**row)["loss"] for row in rows]).mean()

    reference = cls(plain.parameters(), lr=1e-2, weight_decay=0.1, **theirs)
    wanted = plain_loop(plain, [samples[first : first + 4] for first in range(0, 24, 4)], mean, reference).states[-1]

    def watch(trainer: Trainer, step: int) -> None:
        passed_over.append(len(trainer.placed.require_engine().without_gradient))

    config = settings(
        folder,
        zero={"stage": stage},
        data={"shuffle": False},
        optimizer={"name": optimizer, "lr": 1e-2, "weight_decay": 0.1, **ours, **update},
        schedule={"name": "constant", "warmup_steps": 0},
        run={"max_steps": 6, "clip_norm": 0.0, "on_nonfinite": "stop"},
        **{"batch": {"global_size": 4, "micro_size": 1}, **sections},
    )
    found = fitted(model, config, samples, callbacks=[after_steps(watch)])
    like({name: found[name] for name in wanted}, wanted, rel=0, abs_=1e-12)
    assert passed_over == [2, 0, 2, 0, 2, 2]


def scheduled(mesh: Mesh, folder: str) -> None:
    """Learning rates of a scheduler of torch."""
    rates: list[float] = []
    noting = calling(on_step_end=lambda _trainer, _step, now: rates.append(now["lr"]))
    given: Any = {"callbacks": [noting], "lr_scheduler": lambda optimizer: StepLR(optimizer, 2, gamma=0.1)}
    fitted(seeded(llama), settings(folder), sentences(), **given)
    assert rates == pytest.approx([1e-2, 1e-2, 1e-3, 1e-3])


def halving(mesh: Mesh, folder: str) -> None:
    """A hook on rank 0 alone, which halves the gradients of its shards: all ranks compute the norm anew."""

    def halve(trainer: Trainer, step: int) -> None:
        assert trainer.engine is not None
        for bucket in all_buckets(trainer.engine.units):
            if bucket.grad is not None:
                bucket.grad /= 2

    norms: list[list[float]] = []
    for number, hooks in enumerate(({}, {"on_pre_optimizer_step": halve} if mesh.rank == 0 else {})):
        seen: list[float] = []
        noting = calling(on_step_end=lambda *now, seen=seen: seen.append(now[2]["grad_norm"]), **hooks)
        config = settings(folder, run={"name": f"run-{number}", "max_steps": 2}, zero={"stage": 2})
        fitted(seeded(llama), config, sentences(), callbacks=[noting])
        norms.append(seen)
    assert norms[0][0] / 2 < norms[1][0] < norms[0][0]


def ordered(mesh: Mesh, folder: str) -> None:
    """The seed of the data is one of its own: losses of two steps for each, with one seed of the run and one model."""
    found = []
    for number, seed in enumerate((None, 5, 4)):
        config = settings(folder, run={"name": f"run-{number}", "max_steps": 2}, data={"seed": seed})
        with Trainer(seeded(llama), config, sentences(24)) as trainer:
            found.append(list(trainer.fit().losses))
    assert found[0] == found[1] != found[2]


def raising(mesh: Mesh, folder: str, theirs: bool) -> list[str]:
    """What is raised by a callback on the last rank."""

    def fail(*_: Any, **__: Any) -> None:
        if mesh.rank == mesh.world_size - 1:
            raise ValueError("no more")

    made: Any = type("Other", (TrainerCallback,), {}) if theirs else type("Ours", (Callback,), {})
    made.on_step_end = fail
    trainer = Trainer(seeded(llama), settings(folder), train_dataset=sentences(), callbacks=[made()])
    try:
        trainer.fit()
    except (ValueError, ZeromeshError) as error:
        return [type(error).__name__, str(error), *getattr(error, "__notes__", [])]
    return ["nothing was raised"]


class _Sleepy(list[Any]):
    """Samples, of which some take their time on rank 1."""

    step, asleep = 0, False

    def __getitem__(self, index: Any) -> Any:
        if self.step == 23 and not self.asleep:
            self.asleep = True
            time.sleep(1.2)
        return super().__getitem__(index)


def late_at_work(mesh: Mesh, folder: str) -> None:
    """`parallel.timeout_seconds: auto` bounds what ranks do at work in a step: data, callbacks and evaluations may take longer."""
    data, told, asleep = _Sleepy(sentences(40)), list[str](), list[str]()
    model = seeded(llama)

    def begin(trainer: Trainer, step: int) -> None:
        data.step = step if mesh.rank == 1 else 0

    def end(trainer: Trainer, step: int, metrics: Any) -> None:
        if data.step == 24:
            time.sleep(1.2)

    def forward(*_: Any) -> None:
        when = "evaluation" if not model.training else f"step {data.step}"
        if mesh.rank == 1 and when not in asleep and when in ("evaluation", "step 26"):
            asleep.append(when)
            time.sleep(1.2 if when == "evaluation" else 2.5)

    model.model.layers[1].register_forward_pre_hook(forward)
    given = settings(folder, run={"max_steps": 30, "eval_every": 25}, parallel={"timeout_seconds": "auto"})
    callback = calling(on_step_begin=begin, on_step_end=end)
    with (
        patch.multiple(step_stats, _LEAST_PATIENCE=0.5, _USUAL_WAITS=0),
        patch.object(Console, "note", lambda self, *lines: told.extend(filter(None, lines))),
        Trainer(model, given, data, sentences(8), callbacks=[callback]) as trainer,
    ):
        error = error_of(trainer.fit)
        assert sum("late after 0.5 seconds without progress" in line for line in told) == 1
    assert asleep == (["evaluation", "step 26"] if mesh.rank == 1 else []), error
    late = "did not end within 0.5 seconds (parallel.timeout_seconds) and no peer made progress. rank 1 "
    assert late in error, error
    assert "model.layers.1 at step 26" in error, error


def spent(mesh: Mesh, folder: str, offload: Mapping[str, str]) -> None:
    """A gradient by which backward has updated is refused or right, never that of earlier microbatches."""
    update = {"optimizer": {"in_backward": True}, "run": {"clip_norm": 0.0, "on_nonfinite": "stop", "max_steps": 2}}
    config = settings(folder, offload=dict(offload), batch={"global_size": 8, "micro_size": 1}, **update)
    plain, refused = plain_fit(seeded(llama).train(), sentences(), config), set[bool]()

    def read(trainer: Trainer, step: int) -> None:
        for name, wanted in plain.gradients[step - 1].items():
            with suppress(PhaseError):
                found = trainer.gradient(name)
                assert found is not None
                torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12, msg=name)
                refused.add(False)
                continue
            refused.add(True)

    fitted(seeded(llama), config, sentences(), callbacks=[calling(on_pre_optimizer_step=read)])
    assert refused == {bool(offload)}
