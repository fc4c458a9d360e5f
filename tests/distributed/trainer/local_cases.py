"""Cases of local steps that workers run, beside plain models that are trained apart and brought together."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from transformers import TrainerCallback

import zeromesh
from tests.distributed.trainer.expert_cases import KINDS
from tests.support.plain import Sum, apart, clones, distance, error_of, nothing, sentence_loss, stacked, stopping
from tests.support.trainer_cases import llama, seeded, sentences, settings
from zeromesh import Callback, Trainer
from zeromesh.errors import ConfigError, PhaseError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.data.sampler import BatchPlan, SampleOrder
from zeromesh.trainer.monitoring.step_metrics import read_metrics

EXACT = 1e-12
DILOCO = {"lr": 0.7, "momentum": 0.9}
STEPS = 8


@dataclass
class Apart:
    """Plain models that take steps of their own and are brought together after some: the loss of each in each step, with its
    targets, its norms, and the weights after each sync."""

    losses: list[list[tuple[float, int]]] = field(default_factory=list)
    norms: list[list[float]] = field(default_factory=list)
    weights: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)


def samples_of(config: Mapping[str, Any], length: int, ranks: int, replicas: int) -> list[list[list[int]]]:
    """The samples of each replica in each step, as the trainer deals them out to so many data ranks."""
    batch, run = config["batch"], config["run"]
    plan = BatchPlan(global_size=batch["global_size"], micro_size=batch["micro_size"], data_ranks=ranks)
    order, within = SampleOrder(length=length, seed=run["seed"]), ranks // replicas
    return [
        [
            [
                order.dataset_index(sample)
                for rank in range(replica * within, (replica + 1) * within)
                for each in plan.microbatches(step, rank)
                if each.weight
                for sample in each.samples
            ]
            for replica in range(replicas)
        ]
        for step in range(run["max_steps"])
    ]


def train_apart(
    data: Sequence[Any],
    config: Mapping[str, Any],
    rows: Sequence[Sequence[Sequence[int]]],
    syncs: Sequence[int],
    outer: Mapping[str, float],
    before_step: Callable[[Any, int], object] = nothing,
    loss_sum: Sum = sentence_loss,
    build: Callable[[], Any] = llama,
) -> Apart:
    """Train as many models as a step has rows, in float64, each on its own; after the steps `syncs` torch's SGD with Nesterov's
    momentum acts on what they have gone in the mean. Where a step has more rows than the one before, new models begin with all
    that the first one has."""
    section, run, found = config["optimizer"], config["run"], Apart()
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[section.get("name", "adamw")]
    more: dict[str, Any] = {"betas": (0.9, 0.95)} if kind is torch.optim.AdamW else {"momentum": section.get("momentum", 0)}
    replicas: list[tuple[Any, Any, Any]] = []
    center = [nn.Parameter(each.detach().clone()) for each in seeded(build).double().parameters()]
    momentum = outer.get("momentum", 0.0)
    above = torch.optim.SGD(center, lr=outer.get("lr", 1.0), momentum=momentum, nesterov=momentum > 0)
    for step, row in enumerate(rows, 1):
        replicas = replicas[: len(row)]
        while len(replicas) < len(row):
            model = seeded(build).double().train()
            inner = kind(model.parameters(), lr=section["lr"], weight_decay=0.1, **more)
            schedule = tf.get_scheduler("linear", inner, 1, len(rows))
            if step > 1:
                for own, first in zip((model, inner, schedule), replicas[0], strict=True):
                    own.load_state_dict(deepcopy(first.state_dict()))
            replicas.append((model, inner, schedule))
        losses, norms = [], []
        for (model, inner, schedule), samples in zip(replicas, row, strict=True):
            before_step(model, step)
            total, count = loss_sum(model, stacked(data, samples))
            (total / max(1, count)).backward()
            losses.append((float(total.detach()), count))
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), run["clip_norm"] or math.inf))
            norms.append(norm if count else 0.0)
            if count and math.isfinite(norm):
                inner.step()
            schedule.step()
            inner.zero_grad()
        found.losses.append(losses)
        found.norms.append(norms)
        if step in syncs:
            with torch.no_grad():
                for number, each in enumerate(center):
                    there = torch.stack([[*model.parameters()][number] for model, _, _ in replicas])
                    each.grad = each - there.mean(0)
                above.step()
                states = [[*inner.state.values()] for _, inner, _ in replicas]
                for moments in zip(*states, strict=True) if all(states) and "step" in states[0][0] else ():
                    most = max(each["step"] for each in moments)  # They go on as if none had skipped a step.
                    for each in moments:
                        each["step"].copy_(most)
                for model, _, _ in replicas:
                    for own, each in zip(model.parameters(), center, strict=True):
                        own.copy_(each)
            found.weights[step] = clones(replicas[0][0])
    return found


def local(replicas: int, every: int, outer: Mapping[str, float] | None = None, **more: Any) -> dict[str, Any]:
    return {"replicate": replicas, "sync_every": every, **({"outer": dict(outer)} if outer else {}), **more}


class AtSyncs(Callback):
    """The weights after some steps."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps, self.weights = steps, dict[int, dict[str, torch.Tensor]]()

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        if step in self.steps:
            self.weights[step] = {name: each.clone().cpu() for name, each in trainer.state_dict()}


def local_settings(folder: str, parallel: Mapping[str, Any], **sections: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: dict(section) for name, section in sections.items()}
    run = {"max_steps": STEPS, "log_every": 1, **given.pop("run", {})}
    optimizer = {"weight_decay": 0.1, **given.pop("optimizer", {})}
    return settings(folder, parallel=parallel, run=run, optimizer=optimizer, **given)


def lines_of(folder: str) -> list[dict[str, Any]]:
    return read_metrics(Path(folder) / "run" / "metrics.jsonl")


def compare(folder: str, model: Any, watched: AtSyncs, plain: Apart) -> None:
    """Weights after each sync, and losses and norms of the first replica between them, are those of plain models."""
    far = {step: distance(watched.weights[step], plain.weights[step]) for step in plain.weights}
    assert max(far.values()) <= EXACT, far
    assert distance(clones(model), plain.weights[STEPS]) <= EXACT
    wanted = []
    for step, row in enumerate(plain.losses, 1):
        seen = row if step in plain.weights else row[:1]
        wanted.append(sum(loss for loss, _ in seen) / max(1, sum(count for _, count in seen)))
    lines = lines_of(folder)
    known = [number for number, loss in enumerate(wanted) if math.isfinite(loss) and loss]
    assert apart([lines[n]["loss"] for n in known], [wanted[n] for n in known]) <= EXACT
    norms = [row[0] for row in plain.norms]
    known = [number for number, norm in enumerate(norms) if math.isfinite(norm) and norm]
    assert apart([lines[n]["grad_norm"] for n in known], [norms[n] for n in known]) <= EXACT


def exact(
    mesh: Mesh,
    folder: str,
    every: int = 4,
    stage: int = 3,
    replicas: int = 2,
    outer: Mapping[str, float] | None = None,
    inner: Mapping[str, Any] | None = None,
    axes: Mapping[str, int] | None = None,
    build: Callable[[], Any] = llama,
    **sections: Any,
) -> None:
    """Replicas that take local steps are as plain models that are brought together now and then."""
    parallel = local(replicas, every, outer, **(axes or {}))
    config = local_settings(folder, parallel, zero={"stage": stage}, optimizer=inner or {}, **sections)
    data = sentences(8 * STEPS + 1)  # The epoch does not end.
    syncs = [step for step in range(1, STEPS + 1) if step % every == 0 or step == STEPS]
    model, watched = seeded(build), AtSyncs(syncs)
    with Trainer(model, config, data, callbacks=[watched]) as trainer:
        ranks = trainer.mesh.data.size
        trainer.fit()
    rows = samples_of(config, len(data), ranks, replicas)
    compare(folder, model, watched, train_apart(data, config, rows, syncs, outer or {}, build=build))


def experts(mesh: Mesh, folder: str) -> None:
    """Experts are spread over the ranks of each replica."""
    exact(mesh, folder, axes={"expert": 2}, outer=DILOCO, build=KINDS["mixtral"])


def together(mesh: Mesh, folder: str) -> None:
    """Replicas that are averaged after every step, as each evaluates, train as those that sum gradients, where the optimizer is
    plain SGD and each has as many targets."""
    whole = [{"input_ids": each["input_ids"], "labels": each["input_ids"]} for each in sentences(8 * STEPS + 1)]
    more = {"run": {"eval_every": 1, "clip_norm": 0.0}, "optimizer": {"name": "sgd", "lr": 0.05}}
    config = local_settings(folder, local(2, 4), **more)
    model, summed = seeded(llama), seeded(llama)
    with Trainer(model, config, whole, eval_dataset=whole[:3]) as trainer:
        trainer.fit()
    with Trainer(summed, local_settings(folder + "/summed", {"replicate": 2}, **more), whole, eval_dataset=whole[:3]) as trainer:
        trainer.fit()
    assert distance(clones(model), clones(summed)) <= EXACT
    for name in ("loss", "tokens"):
        assert apart([line[name] for line in lines_of(folder)], [line[name] for line in lines_of(folder + "/summed")]) <= EXACT


def equal(mesh: Mesh, folder: str) -> None:
    """Replicas with equal samples are as one."""
    config = local_settings(folder, local(2, 3))
    data = sentences(8 * STEPS + 1)
    rows = samples_of(config, len(data), 2, 2)
    for row in rows:
        for first, second in zip(*row, strict=True):
            data[second] = data[first]
    model = seeded(llama)
    with Trainer(model, config, data) as trainer:
        trainer.fit()
    plain = train_apart(data, config, [row[:1] for row in rows], [STEPS], {})
    assert distance(clones(model), plain.weights[STEPS]) <= EXACT


def traffic(mesh: Mesh, folder: str, outer: Mapping[str, float] | None = None) -> None:
    """A sync sends `2 (R - 1) / R` times the bytes of a rank's master weights, and a local step sends nothing to other replicas.
    Tokens are those of all replicas after a sync; before, the others are taken to have as many as the first."""
    replicas, every = 2, 4
    parallel = {**local(replicas, every, outer), "transport": "gloo"}
    config, data = local_settings(folder, parallel, zero={"stage": 2}), sentences(8 * STEPS + 1)
    ranks = mesh.world_size
    for row in samples_of(config, len(data), ranks, replicas):
        for replica, samples in enumerate(row):
            for sample in samples:  # Replicas have unequal numbers of inputs.
                data[sample] = {name: each[: 12 - 4 * replica] for name, each in data[sample].items()}
    lengths: list[int] = []

    class Watch(Callback):
        def on_train_begin(self, trainer: Trainer) -> None:
            engine = trainer.run.model.require_engine()
            lengths.extend(bucket.length for unit in engine.units for bucket in unit.buckets)

    with Trainer(seeded(llama), config, data, callbacks=[Watch()]) as trainer:
        trainer.fit()
    lines = lines_of(folder)
    summed = round(sum(lengths) * 8 * 2 * (replicas - 1) / replicas)
    sent = [line.get("communication", {}).get("replicate", {}).get("all-reduce", {}).get("bytes", 0) for line in lines]
    assert sent == [summed if step % every == 0 else 0 for step in range(1, STEPS + 1)]
    assert ["world" in line.get("communication", {}) for line in lines] == [step % every == 0 for step in range(1, STEPS + 1)]
    assert [line["tokens"] for line in lines] == [96, 192, 288, 320, 416, 512, 608, 640]


def faulty(mesh: Mesh, folder: str, outer: Mapping[str, float] | None = None) -> None:
    """A replica may skip a step, and have samples without a target, in a sync too; parameters may be frozen meanwhile."""
    config = local_settings(folder, local(2, 4, outer), batch={"micro_size": 4})
    data, syncs = sentences(8 * STEPS + 1), [4, 8]
    rows = samples_of(config, len(data), 2, 2)
    for step, replica in ((2, 1), (4, 0), (5, 0), (8, 1)):
        for sample in rows[step - 1][replica]:
            data[sample]["labels"] = torch.full_like(data[sample]["labels"], -100)
    marked = [data[rows[step - 1][replica][0]]["input_ids"] for step, replica in ((3, 1), (4, 1), (6, 0), (8, 0))]

    def loss_of(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        total, count = sentence_loss(model, batch)
        if any(bool((row == each).all()) for row in batch["input_ids"].cpu() for each in marked):
            total = total * math.nan
        # A count that is a power of two scales gradients without rounding them.
        return (total / count * 64, 64) if count else (total * 0, 0)

    def freeze(model: Any, step: int) -> None:
        if step == 3:
            model.model.layers[0].requires_grad_(False)

    class Freeze(Callback):
        def on_step_begin(self, trainer: Trainer, step: int) -> None:
            freeze(trainer.model, step)

    model, watched = seeded(llama), AtSyncs(syncs)
    with Trainer(model, config, data, compute_loss=loss_of, callbacks=[watched, Freeze()]) as trainer:
        trainer.fit()
    compare(folder, model, watched, train_apart(data, config, rows, syncs, outer or {}, freeze, loss_of))
    told = {line["step"]: line.get("skipped", False) for line in lines_of(folder)}
    assert told == {step: step in (6, 8) for step in range(1, STEPS + 1)}


def lacking(mesh: Mesh, folder: str) -> None:
    """A replica that updates nothing ends a complete run neither on its own ranks alone nor as if all had updated nothing."""

    def loss_of(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        total, count = sentence_loss(model, batch)
        return (total * math.nan if mesh.rank else total), count

    config = local_settings(folder, local(2, 4))
    with Trainer(seeded(llama), config, sentences(8 * STEPS + 1), compute_loss=loss_of) as trainer:
        report = trainer.fit()
    assert (report.final_step, report.skipped_steps) == (STEPS, STEPS // 2)


def resumed(mesh: Mesh, folder: str, before: int, after: int, outer: Mapping[str, float] | None = None) -> None:
    """A run goes on with as many replicas or others: each with its own moments, new ones with those of the first."""
    data, ranks, half = sentences(8 * STEPS + 1), mesh.world_size, STEPS // 2
    model, saves = seeded(llama), {"every_steps": half}
    config = local_settings(folder, local(before, half, outer), checkpoint=saves)
    # The end waits for the sync.
    with Trainer(seeded(llama), config, data, callbacks=[stopping(half - 1)]) as trainer:
        assert trainer.fit().final_step == half
    config = local_settings(folder, local(after, half, outer), checkpoint=saves)
    with Trainer(model, config, data) as trainer:
        trainer.fit()
    rows = [*samples_of(config, len(data), ranks, before)[:half], *samples_of(config, len(data), ranks, after)[half:]]
    plain = train_apart(data, config, rows, [half, STEPS], outer or {})
    assert distance(clones(model), plain.weights[STEPS]) <= EXACT
    other = local_settings(folder, {"replicate": after}, checkpoint=saves, run={"max_steps": STEPS + 2})
    with Trainer(seeded(llama), other, data) as trainer:
        assert "parallel.sync_every" in error_of(trainer.fit, ConfigError)
    other["checkpoint"]["resume"] = str(Path(folder) / "run" / "checkpoints")
    for name, parallel in {"alike": {}, "averages": local(after, 2), "diloco": local(after, 2, DILOCO)}.items():
        other["run"]["name"], other["parallel"] = name, {"replicate": after, **parallel}
        with Trainer(seeded(llama), other, data) as trainer:
            assert trainer.fit().final_step == STEPS + 2


def asked(mesh: Mesh, folder: str) -> None:
    """What a callback asks for between syncs waits for the next one, and what it does itself is refused; averages have the weights
    of syncs, and evaluations are of them."""
    data, held = sentences(8 * STEPS + 1), sentences(5, seed=9)
    config = local_settings(folder, local(2, 4), ema={"decay": 0.75}, checkpoint={"every_steps": 100, "asynchronous": False})

    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                control.should_save, control.should_evaluate = mesh.rank == 1, mesh.rank == 0

    class Takes(Callback):
        def __init__(self, what: str) -> None:
            self.what = what

        def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
            if step == 2:
                getattr(trainer, self.what)(*[folder + "/there"] * (self.what == "save"))

    for what in ("save", "evaluate"):
        other = local_settings(folder + "/" + what, local(2, 4))
        with Trainer(seeded(llama), other, data, eval_dataset=held, callbacks=[Takes(what)]) as trainer:
            assert "between syncs: replicas have weights" in error_of(trainer.fit, PhaseError)
    model, watched = seeded(llama), AtSyncs([4, 8])
    with Trainer(model, config, data, eval_dataset=held, callbacks=[watched, Asks()]) as trainer:
        trainer.fit()
        average = dict(trainer.state_dict(ema=True))
    assert {path.name for path in (Path(folder) / "run" / "checkpoints").iterdir()} >= {"step-00000004"}
    plain = train_apart(data, config, samples_of(config, len(data), 2, 2), [4, 8], {})
    wanted = {name: each.lerp(plain.weights[8][name], 0.25) for name, each in plain.weights[4].items()}
    assert distance(average, wanted) <= EXACT
    lines = read_metrics(Path(folder) / "run" / "evaluations.jsonl")
    assert [line["step"] for line in lines] == [4, 8]
    other = seeded(llama).double()
    for line in lines:
        other.load_state_dict(plain.weights[line["step"]], strict=False)
        with torch.no_grad():
            total, count = sentence_loss(other.eval(), stacked(held, range(len(held))))
        assert apart([line["eval_loss"]], [float(total / count)]) <= EXACT


def late(mesh: Mesh, folder: str) -> None:
    """A replica may be slower by more than the patience of the others."""

    class Slow(Callback):
        def on_step_begin(self, trainer: Trainer, step: int) -> None:
            time.sleep(0.4 * trainer.mesh.rank)

    config = local_settings(folder, {**local(2, 8), "timeout_seconds": 1.5})
    with Trainer(seeded(llama), config, sentences(8 * STEPS + 1), callbacks=[Slow()]) as trainer:
        assert trainer.fit().final_step == STEPS


def refused(mesh: Mesh, folder: str) -> None:
    """Optimizers by their own classes, and loops of one's own."""
    config = local_settings(folder, local(2, 4), optimizer={"name": "lion"})
    with pytest.raises(ConfigError, match="is for the optimizers adamw, adam, adagrad and sgd"):
        Trainer(seeded(llama), config, sentences()).fit()
    with pytest.raises(ConfigError, match=r"parallel\.sync_every: is for zeromesh\.Trainer"):
        zeromesh.shard(seeded(llama), torch.optim.AdamW, parallel=local(2, 4))
    with Trainer(seeded(llama), local_settings(folder, local(2, 4)), sentences()) as trainer:
        assert "local steps are not what one process computes" in error_of(trainer.verify, ConfigError)
