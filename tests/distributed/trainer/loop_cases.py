"""Cases of the loop that workers run: epochs, evaluations with metrics, flags of callbacks, streams."""

import copy
import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_pt_utils import LabelSmoother

from tests.support.plain import Plain, apart, distance, plain_fit, sentence_loss
from tests.support.trainer_cases import llama, seeded, sentences, settings
from zeromesh import Callback, Trainer
from zeromesh.errors import ZeromeshError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.data.sampler import BatchPlan, SampleOrder
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


def plain_epochs(config: dict[str, Any], epochs: int, last: str, smoothing: float = 0.0) -> Plain:
    """A plain loop over epochs, each of which ends with a smaller batch, or without it."""
    data = sentences()
    plan = BatchPlan(global_size=8, micro_size=1, data_ranks=1, epoch_size=len(data), last=last)  # type: ignore[arg-type]
    order = SampleOrder(length=len(data), seed=5)
    rows = [[order.dataset_index(each) for each in plan.samples_of(step)] for step in range(plan.steps_of(epochs))]
    return plain_fit(seeded(llama), data, config, lambda model, batch: (_mean(model, batch, smoothing), 1), rows=rows)


def _mean(model: Any, batch: dict[str, torch.Tensor], smoothing: float) -> torch.Tensor:
    if smoothing:
        output = model(input_ids=batch["input_ids"])
        found: torch.Tensor = LabelSmoother(epsilon=smoothing)(output, batch["labels"], shift_labels=True)
        return found
    total, count = sentence_loss(model, batch)
    return total / count


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


def epochs(mesh: Mesh, folder: str, last: str, smoothing: float = 0.0) -> dict[str, Any]:
    """Two epochs of 23 samples by global batches of 8."""
    config = settings(
        folder,
        batch={"last": last},
        run={"epochs": 2, "max_steps": None, "eval_every": "epoch", "label_smoothing": smoothing},
        checkpoint={"every_steps": "epoch"},
    )
    diary = Diary()
    trainer = Trainer(seeded(llama), config, train_dataset=sentences(), eval_dataset=sentences(3), callbacks=[diary])
    with trainer:
        report = trainer.fit()
        plain = plain_epochs(config, 2, last, smoothing)
        return {
            "losses": apart(report.losses, plain.losses),
            "parameters": distance(dict(trainer.state_dict()), plain.states[-1]),
            "events": diary.events,
            "steps": [report.final_step, trainer.state.max_steps, trainer.state.epoch, trainer.state.epochs],
        }


def left_when_closed(mesh: Mesh, folder: str, sections: dict[str, Any]) -> int:
    """How many buckets are still there after a run, although the interpreter has not looked for garbage."""
    made: list[weakref.ref[Bucket]] = []

    class Noted(Callback):
        """Notes the buckets of a run while it has them."""

        def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
            if trainer.engine is not None and not made:
                made.extend(map(weakref.ref, all_buckets(trainer.engine.units)))

    def train() -> None:
        config = settings(folder, checkpoint={"every_steps": 1}, **sections)
        with Trainer(
            seeded(llama), config, train_dataset=sentences(), eval_dataset=sentences(3), callbacks=[Noted()]
        ) as trainer:
            trainer.fit()
            trainer.evaluate()

    gc.collect()
    gc.disable()
    try:
        train()
        return sum(bucket() is not None for bucket in made) if made else -1
    finally:
        gc.enable()


def by_samples(mesh: Mesh, folder: str) -> float:
    """A mean over samples, of microbatches of one, beside the plain mean of each sample's mean."""
    config = settings(folder, batch={"micro_size": 1, "average": "samples"}, run={"max_steps": 3})
    data, model = sentences(), seeded(llama).double()
    with Trainer(copy.deepcopy(model), config, train_dataset=data) as trainer:
        losses = trainer.fit().losses

    def mean(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        rows = [{name: values[number : number + 1] for name, values in batch.items()} for number in range(8)]
        return torch.stack([total / count for total, count in (sentence_loss(model, row) for row in rows)]).sum(), 8

    return apart(losses, plain_fit(model, data, config, mean).losses)


def accuracy(prediction: tf.EvalPrediction) -> dict[str, float]:
    """And the order of samples, as a number."""
    found = prediction.predictions.argmax(-1) == prediction.label_ids
    weights = np.arange(1, len(found) + 1)
    return {"accuracy": float(found.mean()), "order": float((weights * prediction.label_ids).sum())}


def metrics(mesh: Mesh, folder: str, samples: int, micro: int, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluation and prediction of uneven data, beside the plain model."""
    model, data = seeded(bert).double().eval(), ragged(samples)
    with torch.no_grad():
        rows = [model(**padded([sample])).logits[0] for sample in data]
    logits = torch.stack(rows)
    labels = torch.tensor([sample["labels"] for sample in data])
    wanted = float(F.cross_entropy(logits, labels))
    config = settings(folder, batch={"eval_micro_size": micro}, **sections)
    trainer = Trainer(
        model,
        config,
        train_dataset=data,
        eval_dataset={"a": data, "b": data[: samples // 2 + 1]},
        data_collator=padded,
        compute_metrics=accuracy,
    )
    with trainer:
        both = trainer.evaluate()
        values = trainer.evaluate(data)
        output = trainer.predict(data)
    right = (logits.argmax(-1) == labels).double()
    return {
        "names": sorted(name for name in both if not name.endswith(("runtime", "per_second"))),
        "loss": abs(values["eval_loss"] - wanted),
        "accuracy": values["eval_accuracy"] == float(right.mean()) == both["eval_a_accuracy"],
        "order": values["eval_order"] == float((torch.arange(1, samples + 1) * labels).sum()),
        "logits": float((torch.from_numpy(output.predictions) - logits).abs().max()),
        "labels": output.label_ids.tolist() == labels.tolist(),
        "test": sorted(output.metrics or {}),
    }


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
        seeded(llama),
        config,
        train_dataset=sentences(),
        eval_dataset=sentences(3),
        callbacks=[callback, tf.PrinterCallback],
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


def patience(mesh: Mesh, folder: str, kind: str) -> dict[str, Any]:
    """A run whose score falls after the second evaluation, and ends for it; the best weights are there in the end."""
    scores = iter([0.3, 0.6, 0.5, 0.6, 0.4, 0.2, 0.1, 0.0])
    kept: dict[int, dict[str, torch.Tensor]] = {}

    class Keep(Callback):
        def on_evaluate(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
            kept[step] = {name: tensor.clone() for name, tensor in trainer.state_dict()}

    run: dict[str, Any] = {"max_steps": 9, "eval_every": 1, "load_best": True, "metric": "score"}
    callbacks: list[Any] = [Keep()]
    if kind == "theirs":
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=3))
    else:
        run["patience"] = 3
    config = settings(folder, run=run, checkpoint={"every_steps": 100, "keep_last": 1})
    trainer = Trainer(
        seeded(bert),
        config,
        train_dataset=ragged(20),
        eval_dataset=ragged(5),
        data_collator=padded,
        compute_metrics=lambda prediction: {"score": next(scores)},
        callbacks=callbacks,
    )
    with trainer:
        report, state = trainer.fit(), trainer.state
        final = dict(trainer.state_dict())
        same = distance(final, kept[2])
    return {
        "steps": report.final_step,
        "best": [state.best_metric, state.best_step],
        "checkpoint": (state.best_checkpoint or "").rpartition("/")[2],
        "difference": same,
    }


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


def towers(mesh: Mesh, folder: str, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several of `towered`, one after the other."""
    return [towered(mesh, f"{folder}/{number}", **case) for number, case in enumerate(cases)]


def towered(
    mesh: Mesh,
    folder: str,
    stage: int,
    optimizer: str = "adamw",
    update: Mapping[str, Any] = MappingProxyType({}),
    **sections: Any,
) -> dict[str, Any]:
    """Train with decay a model whose tower gets a gradient in two steps, by one rank's microbatch alone, and so does torch."""
    cls, theirs, ours = TOWER_OPTIMIZERS[optimizer]
    generator = torch.Generator().manual_seed(1)
    samples = [
        {
            "x": torch.randn(4, generator=generator, dtype=torch.float64),
            "labels": torch.randn(1, generator=generator, dtype=torch.float64),
            "picture": torch.tensor(float(number in (7, 12))),
        }
        for number in range(24)
    ]
    model = seeded(Towered).double()
    plain, passed_over = copy.deepcopy(model), []
    reference = cls(plain.parameters(), lr=1e-2, weight_decay=0.1, **theirs)
    for step in range(6):
        reference.zero_grad()
        for number in range(4 * step, 4 * step + 4):
            (plain(**{name: value[None] for name, value in samples[number].items()})["loss"] / 4).backward()
        reference.step()

    class Watch(Callback):
        def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
            passed_over.append(
                trainer.model.tower.weight is not None and len(trainer._run.model.engine.without_gradient)
            )

    config = settings(
        folder,
        zero={"stage": stage},
        data={"shuffle": False},
        optimizer={"name": optimizer, "lr": 1e-2, "weight_decay": 0.1, **ours, **update},
        schedule={"name": "constant", "warmup_steps": 0},
        run={"max_steps": 6, "clip_norm": 0.0, "on_nonfinite": "stop"},
        **{"batch": {"global_size": 4, "micro_size": 1}, **sections},
    )
    with Trainer(model, config, train_dataset=samples, callbacks=[Watch()]) as trainer:
        trainer.fit()
        found = dict(trainer.state_dict())
    differences = [float((found[name] - each).abs().max()) for name, each in plain.state_dict().items()]
    return {"difference": max(differences), "passed over": passed_over}


def scheduled(mesh: Mesh, folder: str) -> list[float]:
    """Learning rates of a scheduler of torch."""
    rates: list[float] = []

    class Rates(Callback):
        def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
            rates.append(metrics["lr"])

    trainer = Trainer(
        seeded(llama),
        settings(folder),
        train_dataset=sentences(),
        callbacks=[Rates()],
        lr_scheduler=lambda optimizer: StepLR(optimizer, 2, gamma=0.1),
    )
    with trainer:
        trainer.fit()
    return rates


def ordered(mesh: Mesh, folder: str, seeds: list[int | None]) -> list[list[float]]:
    """Losses of two steps for each seed of the data, with one seed of the run and one model."""
    found = []
    for number, seed in enumerate(seeds):
        config = settings(folder, run={"name": f"run-{number}", "max_steps": 2}, data={"seed": seed})
        with Trainer(seeded(llama), config, sentences(24)) as trainer:
            found.append(list(trainer.fit().losses))
    return found


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
