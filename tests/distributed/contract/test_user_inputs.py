"""What users give: things that differ between ranks, scalars to log, models and schedulers whose settings are kept or put back."""

import json
import re
from collections.abc import Callable as Function
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, StepLR

from tests.support.plain import calling, compare, distance, error_of, fitted, plain_fit, plain_loop, stacked
from tests.support.tables import row, tried
from tests.support.trainer_cases import gpt2, seeded, sentences, settings
from tests.support.workers import Workers
from zeromesh import Callback, Trainer
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.process_set import differences
from zeromesh.trainer.data.sampler import SampleOrder
from zeromesh.trainer.monitoring.tracking import step_row


class Counting(nn.Module):
    """A linear model with a buffer, both as torch's generator has them."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(80, 80) for _ in range(2))
        self.head = nn.Linear(80, width)
        self.register_buffer("shift", torch.randn(80))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x + self.shift))
        return self.head(x)


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(80, generator=generator, dtype=torch.float64)} for _ in range(count)]


def squares(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return model(batch["x"]).square().sum(), len(batch["x"])


def _of(way: str, value: Any) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    section, _, key = way.partition(".")
    if key:
        return {section: {key: value}}, {}
    made: dict[str, Function[[Any], Any]] = {
        "train_dataset": samples,
        "eval_dataset": lambda counts: {name: samples(n) for name, n in counts.items()},
        "lr_scheduler": lambda _: lambda optimizer: StepLR(optimizer, 1),
        "callbacks": lambda _: [Callback()],
        "model": lambda width: Counting(width).double(),
    }
    return {}, {} if value is None else {way: made[way](value)}


def refused(mesh: Mesh, folder: str, ways: list[tuple[str, Any, Any]]) -> list[str]:
    """For each way, name and values of rank 0 and of the others: the error with which a run begins."""
    found = []
    for way, first, other in ways:
        torch.manual_seed(0)
        sections, arguments = _of(way, first if mesh.rank == 0 else other)
        base = settings(folder, run={"max_steps": 2})
        config = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
        arguments = {"model": Counting().double(), "train_dataset": samples(9), **arguments}
        found.append(error_of(partial(fitted, config=config, compute_loss=squares, **arguments)))
    return found


def weights(mesh: Mesh, folder: str, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train models that each rank has drawn with a seed of its own; how far they are from a plain loop with those of rank 0."""
    torch.manual_seed(0)
    plain = plain_fit(Counting(), samples(23), settings(folder), squares)
    found = []
    for layout in layouts:
        torch.manual_seed(mesh.rank)
        model = Counting().double()
        apart, _ = compare(model, settings(folder, **layout), samples(23), plain, compute_loss=squares)
        found.append({"parameters": apart["parameters"], "shift": float(model.shift.sum())})
    return found


WAYS = [
    ("run.max_steps", 2, 3, r"ConfigError: .*run\.max_steps is 2 on rank 0, 3 on rank 1"),
    ("run.log_every", 1, 0, r"ConfigError: .*run\.log_every is 1 on rank 0, 0 on rank 1"),
    ("run.epochs", 1, 2, r"ConfigError: .*run\.epochs is 1\.0 on rank 0, 2\.0 on rank 1"),
    ("data.shuffle", True, False, r"ConfigError: .*data\.shuffle is True on rank 0, False on rank 1"),
    ("schedule.name", "linear", "cosine", r"ConfigError: .*schedule\.name is linear on rank 0, cosine on rank 1"),
    ("optimizer.lr", 0.1, 0.2, r"ConfigError: .*optimizer\.lr is 0\.1 on rank 0, 0\.2 on rank 1"),
    ("zero.stage", 2, 3, r"ConfigError: .*zero\.stage is 2 on rank 0, 3 on rank 1"),
    ("parallel.tensor", 1, 2, r"ConfigError: .*different meshes: .*tensor is 1 on rank 0, 2 on rank 1"),
    ("parallel.order", "launch", "topology", r"ConfigError: .*different meshes: order is launch on rank 0"),
    ("train_dataset", 9, 10, r"DataError: .*train_dataset is 9 samples on rank 0, 10 samples on rank 1"),
    ("eval_dataset", {"a": 4}, {"a": 5}, r"DataError: .*eval_dataset\['a'\] is 4 samples on rank 0, 5 samples on rank 1"),
    ("eval_dataset", {"a": 4}, {"b": 4}, r"DataError: .*eval_dataset\['b'\] is \(absent\) on rank 0"),
    ("eval_dataset", {"a": 4}, None, r"ConfigError: .*eval_dataset is given on rank 0, not given on rank 1"),
    ("lr_scheduler", 1, None, r"ConfigError: .*lr_scheduler is given on rank 0, not given on rank 1"),
    ("callbacks", 1, None, r"ConfigError: .*callbacks is some on rank 0, none on rank 1"),
    ("model", 6, 7, r"LayoutError: .*parameter head\.weight is \[6, 80\] torch\.float64 trained on rank 0, \[7, 80\]"),
    ("run.name", "run", "run", r"^$"),
]


def test_what_differs_is_named_with_its_ranks(workers: Workers, tmp_path: Path) -> None:
    ways = [way[:3] for way in WAYS]
    for found in workers.run(2, "test_user_inputs:refused", folder=str(tmp_path), ways=ways):
        for (way, _, _, pattern), text in zip(WAYS, found, strict=True):
            assert re.search(pattern, text), (way, text)


def test_weights_given_built_are_those_of_the_first_rank(workers: Workers, tmp_path: Path) -> None:
    """Buffers too, at every stage and in copies of a model."""
    layouts = [{"zero": {"stage": stage}, "run": {"name": f"stage{stage}"}} for stage in (0, 2, 3)]
    layouts.append({"parallel": {"replicate": 2}, "run": {"name": "replicate"}})
    first, second = workers.run(2, "test_user_inputs:weights", folder=str(tmp_path), layouts=layouts)
    assert all(each["parameters"] <= 1e-9 for each in (*first, *second))
    assert [each["shift"] for each in first] == [each["shift"] for each in second]


def test_differences_are_short() -> None:
    rows = [{"a": "1", "b": "x" * 500}, {"a": "2", "b": "y"}, {"a": "2", "b": "y", "c": "new"}]
    assert differences(rows, [4, 5, 6]) == [
        "a is 1 on rank 4, 2 on ranks 5, 6",
        f"b is {'x' * 97}... on rank 4, y on ranks 5, 6",
        "c is (absent) on ranks 4, 5, new on rank 6",
    ]
    assert differences(rows[:1] * 3, [0, 1, 2]) == []
    many = [{str(n): str(rank) for n in range(20)} for rank in range(2)]
    assert differences(many, [0, 1])[8:] == ["and 12 more"]


class Adding(Callback):
    def on_optimizer_step(self, trainer: Trainer, step: int) -> None:
        trainer.log(rank=trainer.mesh.rank, of_a_step=10.0 * step)
        if trainer.mesh.rank == 1:
            trainer.log(only_one=torch.tensor(7.0))

    def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        metrics["added"] = step


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = Counting()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"loss": self.inside(x).square().mean(), "auxiliary": x.sum(), "half": 0.5, "outputs": x}


def logged(mesh: Mesh, folder: str) -> dict[str, Any]:
    def loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int, dict[str, Any]]:
        return model(batch["x"]).square().sum(), len(batch["x"]), {"mean_x": batch["x"].mean(), "reward/total": 2}

    found: dict[str, Any] = {}
    data = samples(16)
    ways: dict[str, tuple[nn.Module, Any, Any]] = {
        "loss": (Counting().double(), loss, [Adding()]),
        "outputs": (Parts().double(), None, []),
    }
    for name, (model, compute, callbacks) in ways.items():
        config = settings(folder, run={"name": name, "max_steps": 4, "log_every": 2}, data={"shuffle": False})
        with Trainer(model, config, data, compute_loss=compute, callbacks=callbacks) as trainer:
            trainer.fit()
            if name == "loss":
                found["taken"] = error_of(partial(trainer.log, loss=1.0), ValueError)
        lines = (Path(folder) / name / "metrics.jsonl").read_text().splitlines() if mesh.rank == 0 else []
        found[name] = [json.loads(line) for line in lines]
    found["x"] = [float(each["x"].mean()) for each in data]
    return found


def test_scalars_are_means_since_the_last_line(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(2, "test_user_inputs:logged", folder=str(tmp_path))[0]
    first, second = found["loss"]
    x = found["x"]
    assert first["mean_x"] == second["mean_x"] == pytest.approx(sum(x) / len(x))
    assert (first["reward/total"], first["rank"], first["only_one"]) == (2, 0.5, 7)
    assert (first["of_a_step"], second["of_a_step"]) == (15, 35)
    assert (first["added"], second["added"]) == (1, 2.5)  # What is added at the end of a step comes with the next line.
    assert "trainer.log: loss is a field" in found["taken"]
    line = found["outputs"][0]
    assert line["half"] == 0.5
    assert line["auxiliary"] == pytest.approx(sum(x) / len(x) * 80 * 2)
    assert "outputs" not in line
    assert step_row(first).values["train/reward/total"] == 2


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Doubled() for _ in range(2))
        self.head = nn.Linear(80, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * (1 if self.training else 3)


class Doubled(nn.Module):
    """A block above 4096 elements that also gives more in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(80, 80)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * (1 if self.training else 2)


def _forget(trainer: Trainer, *_: object) -> None:
    trainer.model.eval()


FORGETFUL = calling(on_step_end=_forget, on_substep_end=_forget)
"""Puts the model into evaluation mode, and leaves it so."""


def _frozen() -> Any:
    model = Modes()
    model.blocks[0].eval()
    return model


def _trained(folder: str, name: str, build: Function[[], Any], callbacks: Any = (), **sections: Any) -> float:
    reference = seeded(build)
    reference = getattr(reference, "_orig_mod", reference)
    frozen = [module for module in reference.modules() if not module.training] if reference.training else []
    reference.train = lambda mode=True: reference  # type: ignore[method-assign]  # a plain loop keeps the modes it was given
    plain = plain_fit(reference, samples(23), settings(folder), squares)
    assert all(not module.training for module in frozen)
    config = settings(folder, run={"name": name}, **sections)
    model = seeded(build).double()
    return compare(model, config, samples(23), plain, callbacks=callbacks, compute_loss=squares)[0]["parameters"]


def modes(mesh: Mesh, folder: str, stages: list[int]) -> None:
    """A forgotten `model.eval()` is undone, modules frozen in evaluation mode stay so, and a compiled model has its own names."""
    ways: dict[str, tuple[Function[[], Any], list[Any]]] = {
        "forgotten": (Modes, [FORGETFUL]),
        "frozen": (_frozen, [FORGETFUL]),
        "compiled": (lambda: torch.compile(Modes(), backend="eager"), []),
    }
    for stage in stages:
        for name, (build, callbacks) in ways.items():
            assert _trained(folder, f"{name}{stage}", build, callbacks, zero={"stage": stage}) <= 1e-9, (name, stage)


def compiled_fields(mesh: Mesh, folder: str) -> None:
    """A compiled Hugging Face model, and one that recomputes its layers because its user has said so."""
    build = partial(gpt2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    plain = plain_fit(seeded(build), sentences(), settings(folder))
    for name, change in (("compiled", partial(torch.compile, backend="eager")), ("recomputed", _recomputing)):
        model = change(seeded(build).double())
        with Trainer(model, settings(folder, run={"name": name}), sentences()) as trainer:
            flags = {bool(m.gradient_checkpointing) for m in trainer.model.modules() if hasattr(m, "gradient_checkpointing")}
            trainer.fit()
            end = {key: value.clone() for key, value in trainer.state_dict()}
        assert distance(end, plain.states[-1]) <= 1e-9, name
        assert name == "compiled" or flags == {True}
    model = seeded(build)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    config = settings(folder, run={"name": "reentrant"})
    assert "use_reentrant=True" in error_of(lambda: Trainer(model, config, sentences()).fit(), ValueError)


def _recomputing(model: Any) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _one_cycle(optimizer: Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=2e-2, total_steps=6)


def _cyclic(optimizer: Optimizer) -> LRScheduler:
    return CyclicLR(optimizer, base_lr=1e-3, max_lr=2e-2, step_size_up=2, base_momentum=0.7, max_momentum=0.95)


def momentum(mesh: Mesh, folder: str) -> None:
    data = samples(23)
    for name, make in (("adamw", _one_cycle), ("adamw", _cyclic), ("sgd", _one_cycle), ("sgd", _cyclic)):
        model = seeded(Modes).double()
        optimizer: Optimizer = (
            AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
            if name == "adamw"
            else SGD(model.parameters(), lr=1e-2, momentum=0.8, weight_decay=0.1)
        )
        order = SampleOrder(length=len(data), seed=5)
        rows = [[order.dataset_index(index) for index in range(first, first + 8)] for first in range(0, 32, 8)]
        plain = plain_loop(
            model,
            [stacked(data, each) for each in rows],
            lambda model, batch: squares(model, batch)[0] / 8,
            optimizer,
            clip_norm=0.5,
            schedule=make(optimizer),
        )
        key = f"{name} {make.__name__}"
        own = {"momentum": 0.8} if name == "sgd" else {}
        config = settings(folder, optimizer={"name": name, **own}, run={"name": key.replace(" ", "-")})
        model = seeded(Modes).double()
        found = fitted(model, config, data, compute_loss=squares, lr_scheduler=make)
        assert distance(found, plain.states[-1]) <= 1e-9, key
    for name, said in (("sgd", "optimizer.momentum"), ("adagrad", "adagrad")):
        config = settings(folder, optimizer={"name": name}, run={"name": "refused"})
        run = partial(fitted, seeded(Modes).double(), config, data, compute_loss=squares, lr_scheduler=_one_cycle)
        assert said in error_of(run, ValueError)


test_modes_fields_and_momentum = tried(
    "test_user_inputs", [row(2, "modes", stages=[0, 3]), row(2, "compiled_fields"), row(2, "momentum")]
)
