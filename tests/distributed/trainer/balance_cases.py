"""Cases of unequal shares that workers run: what a step computes is what one plain process does."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.plain import Gradients, apart, clones, distance, error_of, plain_fit, sentence_loss, stopping
from tests.support.trainer_cases import VOCABULARY, llama, seeded, sentences, settings
from zeromesh import Callback, Trainer
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.data.sampler import BatchPlan, SampleOrder
from zeromesh.trainer.monitoring import step_stats
from zeromesh.trainer.monitoring.step_metrics import read_metrics

EXACT = 1e-12


class Sizes(nn.Module):
    """A language model that notes the samples of each of its microbatches in training."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.sizes: list[int] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.sizes.append(len(input_ids))
        logits = self.head(torch.tanh(self.embed(input_ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def mean_of_samples(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The model's own loss, a mean over samples."""
    return model(**batch) * len(batch["input_ids"]), len(batch["input_ids"])


def whole_sentences(count: int = 29) -> list[dict[str, torch.Tensor]]:
    """Sentences of which each word is a target."""
    return [{"input_ids": each["input_ids"], "labels": each["input_ids"]} for each in sentences(count)]


def shares(mesh: Mesh, folder: str, given: list[int], sizes: list[list[int]], stage: int = 3, **more: Any) -> None:
    """Four steps with a list of shares give the losses, gradients and weights of a plain process, whose batches are whole;
    `sizes` are those of the microbatches of each rank in a step."""
    sections = {name: dict(section) for name, section in more.items()}
    batch = {"global_size": 16, "micro_size": 2, "balance": given, **sections.pop("batch", {})}
    config = settings(folder, batch=batch, zero={"stage": stage}, **sections)
    data, words = sentences(29), whole_sentences()
    plan = BatchPlan(global_size=16, micro_size=1, data_ranks=1, epoch_size=29, last=batch.get("last", "carry"))
    order = SampleOrder(length=29, seed=5)
    rows = [[order.dataset_index(each) for each in plan.samples_of(step)] for step in range(4)]
    plain = plain_fit(seeded(llama), data, config, rows=rows)
    watched, model = Gradients(plain), seeded(llama)
    with Trainer(model, config, data, callbacks=[watched]) as trainer:
        report = trainer.fit()
    assert max(apart(report.losses, plain.losses), watched.worst, distance(clones(model), plain.states[-1])) <= EXACT
    if "parallel" in sections:
        return
    # The blocks are those of the shares.
    other = seeded(Sizes)
    with Trainer(other, settings(f"{folder}/sizes", batch=batch, zero={"stage": stage}, **sections), words) as trainer:
        losses = trainer.fit().losses
        assert other.sizes[: len(sizes[0])] == sizes[trainer.mesh.data_index]
    assert apart(losses, plain_fit(seeded(Sizes), words, config, mean_of_samples, rows=rows).losses) <= EXACT


def by_samples(mesh: Mesh, folder: str) -> None:
    """With `average: samples` a microbatch's mean counts by its samples: as in a plain process that has the same blocks."""
    batch = {"global_size": 14, "micro_size": 3, "balance": [2, 1], "average": "samples"}
    config = settings(folder, batch=batch)
    data, model = sentences(29), seeded(llama)
    with Trainer(seeded(llama), config, train_dataset=data) as trainer:
        losses = trainer.fit().losses
    cuts = [(0, 4), (4, 6), (6, 10), (10, 12), (12, 14)]

    def mean(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        parts = [({name: value[a:b] for name, value in batch.items()}, b - a) for a, b in cuts]
        means = [(sentence_loss(model, part), rows) for part, rows in parts]
        return torch.stack([total / count * rows for (total, count), rows in means]).sum(), 14

    assert apart(losses, plain_fit(model, data, config, mean).losses) <= EXACT


def by_speed(mesh: Mesh, folder: str, slow: int, workers: int) -> None:
    """A rank that takes longer takes fewer samples after a while, and a run that goes on begins with the same shares; the losses
    and the weights are those of a plain process."""
    batch = {"global_size": 16, "micro_size": 8 // mesh.world_size, "balance": "speed"}
    config = settings(folder, batch=batch, run={"max_steps": 12}, checkpoint={"every_steps": 6}, data={"workers": workers})
    data, seconds = whole_sentences(), 0.02 if mesh.rank == slow else 0.002
    plain = plain_fit(seeded(Sizes), data, config, mean_of_samples)
    measured = step_stats.Balance.after

    def after(self: step_stats.Balance, result: step_stats.StepResult) -> str | None:
        """On a machine that does other things too, what is measured would be anything."""
        share = (self._loader.feed.plan.shares or (8 // mesh.world_size,) * mesh.world_size)[mesh.rank]
        return measured(self, replace(result, seconds=1.0 + seconds * share, idle=1.0))

    with patch.object(step_stats, "_STEPS", 3), patch.object(step_stats.Balance, "after", after):
        first, losses = seeded(Sizes), list[float]()
        with Trainer(first, config, data, callbacks=[stopping(6)]) as trainer:
            losses += trainer.fit().losses
        model = seeded(Sizes)
        with Trainer(model, config, data, callbacks=[Callback()]) as trainer:
            losses += trainer.fit().losses
    assert max(apart(losses, plain.losses), distance(clones(model), plain.states[-1])) <= EXACT
    lines = read_metrics(Path(folder) / "run" / "metrics.jsonl")
    even = {str(rank): 8 // mesh.world_size for rank in range(mesh.world_size)}
    taken = [[*line.get("shares", even).values()] for line in lines]
    assert taken[3] == taken[0]
    assert taken[6] == taken[5], "a run that goes on shares out as before"
    assert sum(taken[5]) == 8
    assert taken[5][slow] == min(taken[5]) < 8 // mesh.world_size
    # Nothing that workers have prefetched is of shares that are no longer.
    assert first.sizes + model.sizes == [each[mesh.rank] for each in taken for _ in range(2)]


def left(mesh: Mesh, folder: str) -> None:
    """A list for more ranks than are left: the run goes on evenly."""
    batch = {"micro_size": 2, "balance": [3, 2, 1]}
    model = seeded(Sizes)
    config = settings(folder, batch=batch)
    with patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": "1"}), Trainer(model, config, whole_sentences()) as each:
        each.fit()
    assert model.sizes == [2] * 8


def refused(mesh: Mesh, folder: str, wanted: str, kind: str = "llama", **sections: Mapping[str, Any]) -> None:
    """What would not be exact, or could not be cut, ends before the first step with an error that names the key."""
    data: Any = sentences()
    model: Any = {"llama": lambda: seeded(llama), "normed": lambda: Normed(), "experts": experts}.get(kind, llama)()
    if kind == "normed":
        data = [{"x": torch.ones(4)}] * 16
    if kind == "stream":
        data = _Stream(data)

    def fit() -> None:
        with Trainer(model, settings(folder, **sections), data) as trainer:
            trainer.fit()

    assert wanted in error_of(fit), error_of(fit)


class _Stream:
    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class Normed(nn.Module):
    """Its loss depends on which samples are in a microbatch together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).square().mean()


def experts() -> Any:
    """A model whose auxiliary loss is one of whole microbatches."""
    import transformers as tf

    from tests.support.trainer_cases import LLAMA

    config = tf.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    return tf.MixtralForCausalLM(config)
