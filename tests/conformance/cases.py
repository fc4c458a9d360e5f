"""Cases that workers run: training by the engine, and the reference."""

from __future__ import annotations

import gc
import hashlib
import math
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from zeromesh.errors import StorageError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Ledger, Purpose, Tier, resident_bytes, tensor_bytes
from zeromesh.optim.optimizer_step import StepOutcome
from zeromesh.parallelize import Divided, divide
from zeromesh.pipeline.pipeline import MicrobatchWork, StepDriver
from zeromesh.rng import Streams
from zeromesh.settings.keys import ParallelOptions
from zeromesh.units.build import open_tiers
from zeromesh.weight_init.weight_sources import BuiltSource
from zeromesh.zero.engine import ZeroEngine

from . import reference
from .models import SUBJECTS, Batch
from .recipe import SMALL, Extra, Layout, Problem


def leaks(mesh: Mesh, stage: int, transport: str, runs: int) -> dict[str, list[int]]:
    files, mappings, resident = [], [], []
    layout = Layout(stage=stage, transport=transport)
    for _ in range(runs):
        run = Run.start(mesh, SMALL, layout)
        run.step(0)
        run.close()
        del run
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")))
        mappings.append(Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:"))
        resident.append(resident_bytes())
    return {"files": files, "mappings": mappings, "resident": resident}


@dataclass
class Run:
    """One training run on this rank: the model, its engine, and what has happened so far."""

    mesh: Mesh
    problem: Problem
    layout: Layout
    model: Any
    engine: ZeroEngine
    divided: Divided = field(default_factory=Divided)
    losses: list[float] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)

    @classmethod
    def start(cls, mesh: Mesh, problem: Problem, layout: Layout, arena: int | None = None) -> Run:
        """Build the model and its engine, whose device has `arena` bytes for states and what is gathered."""
        model = reference.build(problem)
        _checkpoint_activations(model, layout.checkpointing)
        if layout.compile:
            for block in model.blocks:
                block.forward = torch.compile(block.forward, backend="aot_eager")
        for buffer in model.buffers():
            buffer.data = buffer.data.to(mesh.device)
        options = layout.options(problem)
        tiers = open_tiers(mesh, options)
        if arena is not None:
            tiers.ledger = Ledger({Tier.DEVICE: arena})
        source = BuiltSource(model)
        schedule: Any = layout.schedule
        parallel = ParallelOptions(sequence=layout.sequence, schedule=schedule, chunks=layout.chunks)
        divided = divide(model, mesh, parallel)
        engine = ZeroEngine.build(model, mesh, options, source, tiers, divided.cuts)
        return cls(mesh=mesh, problem=problem, layout=layout, model=model, engine=engine, divided=divided)

    @classmethod
    def of(cls, mesh: Mesh, problem: Problem, layout: Layout, model: Any) -> Run:
        engine = ZeroEngine.build(model, mesh, layout.options(problem))
        return cls(mesh=mesh, problem=problem, layout=layout, model=model, engine=engine)

    def microbatches(self, step: int) -> list[tuple[int, Batch]]:
        """This rank's microbatches of a step, each with its first sample's number in the batch."""
        batch, data = self.batch_of(step), self.mesh.data.size
        micro, rest = divmod(self.problem.samples, data * self.layout.accumulation)
        assert rest == 0
        starts = [(number * data + self.mesh.data_index) * micro for number in range(self.layout.accumulation)]
        return [(start, reference.part(batch, start, start + micro)) for start in starts]

    def batch_of(self, step: int) -> Batch:
        batch = reference.batch_of(self.problem, step)
        return {name: values.to(self.mesh.device) for name, values in batch.items()}

    def step(self, number: int, *, before_update: Callable[[], None] | None = None, factor: float = 1.0) -> StepOutcome:
        subject, batch = SUBJECTS[self.problem.model], self.batch_of(number)
        count = subject.count(batch)
        parts = self.microbatches(number)
        total = torch.zeros(1, dtype=torch.float64)
        self.engine.begin_step(number)
        seed, first = self.engine.options.seed, number * self.problem.samples
        streams = [Streams(seed, number, first + start) for start, _ in parts]
        work = [MicrobatchWork(batch=m, streams=drawn, seed=1.0 / count) for (_, m), drawn in zip(parts, streams, strict=True)]
        with self.problem.arithmetic() if self.divided.pipeline is not None else nullcontext():
            losses = self._driver.train(self.engine, work, lambda m, _: self.loss_of(m, factor))
        total += torch.stack(losses).double().sum().cpu()
        self.mesh.pipeline.all_reduce(total, "loss")
        self.mesh.data.all_reduce(total, "loss")
        self.losses.append(float(total) / count)
        if before_update is not None:
            before_update()
        outcome = self.engine.finish_step()
        self.outcomes.append(outcome)
        return outcome

    def loss_of(self, micro: Batch, factor: float) -> torch.Tensor:
        with self.problem.arithmetic():
            return SUBJECTS[self.problem.model].loss_sum(self.model, micro) * factor

    def evaluate(self) -> float:
        subject, batch = SUBJECTS[self.problem.model], self.batch_of(0)
        work = [MicrobatchWork(batch=batch)]
        with self.problem.arithmetic():
            losses = self._driver.evaluate(self.engine, work, lambda m, _: self.loss_of(m, 1.0))
        total = torch.stack(losses).double().cpu()
        return float(self.mesh.pipeline.all_reduce(total, "loss")) / subject.count(batch)

    @property
    def _driver(self) -> StepDriver:
        return self.divided.pipeline or StepDriver(self.mesh)

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone().cpu() for name, tensor in self.engine.state.parameters()}

    def gradients(self) -> dict[str, torch.Tensor]:
        state = self.engine.state
        found = {name: state.gradient(name) for name in state.names()}
        return {name: tensor.cpu() for name, tensor in found.items() if tensor is not None}

    def digest(self) -> str:
        tensors: list[torch.Tensor] = []
        for unit in self.engine.units:
            for bucket in unit.buckets:
                tensors.append(bucket.master.load(torch.device("cpu")))
                optimizer = self.engine.optimizer_step.optimizer_of(bucket)
                moments = sorted(optimizer.moments.items() if optimizer else ())
                tensors += [moment.load(torch.device("cpu")) for _, moment in moments]
        return digest(tensors)

    def close(self) -> None:
        self.engine.close()
        self.divided.close()


def train(mesh: Mesh, problem: dict[str, Any], layout: dict[str, Any], extra: dict[str, Any], out: str = "") -> dict[str, Any]:
    more, gradients, digests = Extra(**extra), {}, []
    run = Run.start(mesh, Problem(**problem), Layout(**layout))

    def read_gradients() -> None:
        gradients.update(run.gradients())

    for step in range(run.problem.steps):
        wanted = step == more.gradient_step and not run.layout.in_backward
        bad = more.infinite and (mesh.rank, step) == (more.infinite["rank"], more.infinite["step"])
        run.step(step, before_update=read_gradients if wanted else None, factor=math.inf if bad else 1.0)
        if more.inspect_every and step % more.inspect_every == 0:
            _inspect(run)
        digests.append(run.digest())
    result = {
        "losses": run.losses,
        "norms": [outcome.grad_norm for outcome in run.outcomes],
        "skipped": [outcome.skipped for outcome in run.outcomes],
        "scales": [outcome.loss_scale for outcome in run.outcomes],
        "final_loss": run.evaluate(),
        "digests": digests,
    }
    parameters = run.parameters()
    result["parameters"] = digest(tensor for _, tensor in sorted(parameters.items()))
    if out and mesh.rank == 0:
        save(out, gradients, parameters)
    run.close()
    return result


def in_arena(mesh: Mesh, problem: dict[str, Any], layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two steps by each layout on a device that has room for three quarters of its shards: the loss, or why it cannot be."""
    task, results = Problem(**problem), []
    resident = Run.start(mesh, task, Layout(accumulation=2))  # whose gradients stay
    states = resident.engine.ledger.by_purpose(Tier.DEVICE)
    arena = (states[Purpose.MASTER] + states[Purpose.MOMENTS] + states[Purpose.GRADIENTS]) * 3 // 4
    resident.close()
    for layout in layouts:
        try:
            run = Run.start(mesh, task, Layout(**layout), arena)
        except StorageError as error:
            results.append({"refused": str(error)})
            continue
        for step in range(2):
            run.step(step)
        results.append({"loss": run.losses[-1]})
        run.close()
    return results


def reference_run(mesh: Mesh, problem: dict[str, Any], out: str) -> dict[str, Any]:
    trained = reference.train_plainly(Problem(**problem))
    save(out, trained.gradients, trained.parameters)
    return {"losses": trained.losses, "norms": trained.norms, "final_loss": trained.final_loss}


def save(path: str, gradients: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]) -> None:
    tensors = {f"gradient/{name}": tensor.contiguous() for name, tensor in gradients.items()}
    tensors |= {f"parameter/{name}": tensor.contiguous().clone() for name, tensor in parameters.items()}
    save_file(tensors, f"{path}.part")
    os.replace(f"{path}.part", path)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(tensor_bytes(tensor).numpy().tobytes())
    return found.hexdigest()


def _checkpoint_activations(model: Any, kind: str) -> None:
    if kind == "hf":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif kind == "call":
        model.recompute = True


def _inspect(run: Run) -> None:
    run.evaluate()
    run.parameters()
    name = run.engine.state.names()[-1]
    with run.engine.gathered([name]):
        assert not run.model.get_parameter(name).isnan().any()
    if hasattr(run.model, "generate"):
        with torch.no_grad():
            run.model.generate(torch.zeros(1, 2, dtype=torch.long), max_new_tokens=2, do_sample=False)
