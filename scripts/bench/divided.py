"""zeromesh on the workload with the model divided over two ranks: by its layers, or into stages of a pipeline.

tensor-STAGE        tensor parallelism, and the ZeRO stage on a data axis of one rank
1f1b, zero_bubble   a pipeline of one stage a rank
interleaved         a pipeline of two stages a rank
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.ours import configuration
from bench.probe import Probe
from bench.workload import Workload
from zeromesh.environment import read_environment
from zeromesh.kernels.cpu_matmul import allocate_buffers
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import prevent_fragmentation, reuse_freed_memory
from zeromesh.options import ZeroOptions
from zeromesh.parallelize import Divided, divide
from zeromesh.pipeline.pipeline import MicrobatchWork, StepDriver
from zeromesh.pipeline.schedule import Timeline
from zeromesh.rng import Streams
from zeromesh.settings.keys import ParallelOptions
from zeromesh.telemetry.step_recorder import Collective
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.losses.losses import Loss, make_loss
from zeromesh.trainer.models.prepare import use_fastest_linear
from zeromesh.trainer.setup.engine_options import engine_options
from zeromesh.weight_init.weight_sources import build_deferred, materialize_buffers
from zeromesh.zero.engine import ZeroEngine

CHUNKS = {"interleaved": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a system divides the model."""

    tensor: int = 1
    pipeline: int = 1
    stage: int = 1
    schedule: Any = "1f1b"

    @classmethod
    def of(cls, name: str, ranks: int) -> Form:
        """Return the form of the system of this name, without `zeromesh-`."""
        kind, _, rest = name.partition("-")
        return cls(tensor=ranks, stage=int(rest)) if kind == "tensor" else cls(pipeline=ranks, schedule=name)

    def parallel(self, workload: Workload) -> ParallelOptions:
        """Return the options that `divide` is given."""
        transport: Any = workload.transport
        return ParallelOptions(transport=transport, schedule=self.schedule, chunks=CHUNKS.get(self.schedule, 1))

    def options(self, workload: Workload) -> ZeroOptions:
        """Return the options that the engine is given."""
        config = load_config(configuration(workload, self.stage, "runs"))
        return engine_options(config, accumulation=workload.microbatches)


class Training:
    """The model of one rank, its engine, and the steps."""

    def __init__(self, name: str, workload: Workload) -> None:
        environment = read_environment()
        form = self.form = Form.of(name, workload.ranks)
        shape = MeshShape.resolve(environment.world_size, tensor=form.tensor, pipeline=form.pipeline)
        self.mesh = Mesh(shape, environment, device=torch.device("cpu"), timeout_seconds=60)
        reuse_freed_memory()
        allocate_buffers()
        self._workload = workload
        built = build_deferred(workload.build_model, workload.seed)
        materialize_buffers(built.model, self.mesh.device, workload.seed, source=built.source)
        self.model: nn.Module = built.model
        self.loss: Loss = make_loss(self.model)  # Tried on the undivided model, as by the trainer.
        self.divided: Divided = divide(self.model, self.mesh, form.parallel(workload))
        self.model.train()
        use_fastest_linear(self.model, workload.compute, "cpu")
        options, cuts = form.options(workload), self.divided.cuts
        self.engine = ZeroEngine.build(self.model, self.mesh, options, built.source, cuts=cuts)
        prevent_fragmentation()

    def step(self, number: int, tokens: Tensor) -> float:
        """One step on `[microbatches x micro, sequence]` token ids; the mean loss."""
        micro = self._workload.micro
        parts = [{"input_ids": part, "labels": part} for part in tokens.split(micro)]
        count = sum(self.loss.count(part) or 0 for part in parts)
        seed = 1.0 / count
        self.engine.begin_step(number)
        streams = [Streams(self.engine.options.seed, number, place * micro) for place in range(len(parts))]
        total = torch.zeros(1, dtype=torch.float64)
        work = [MicrobatchWork(batch=part, streams=drawn, seed=seed) for part, drawn in zip(parts, streams, strict=True)]
        driver = self.divided.pipeline or StepDriver(self.mesh)
        total += torch.stack(driver.train(self.engine, work, self._sum)).double().sum()
        self.mesh.pipeline.all_reduce(total, "loss")
        self.engine.finish_step()
        return float(total) / count

    def _sum(self, batch: Mapping[str, Any], seed: float) -> Tensor:
        return self.loss(self.model, batch, seed=seed)


def train(name: str, workload: Workload, probe: Probe) -> None:
    """Run the workload, and note what the rank says of itself."""
    training = Training(name, workload)
    tokens = workload.tokens()
    pipeline, tensor = training.divided.pipeline, training.divided.tensor
    steps: list[tuple[Timeline, Timeline]] = []
    largest: list[int] = []
    probe.training()
    for number in range(workload.steps):
        if tensor is not None and number == workload.steps - 1:
            _watch(tensor._exchange, largest)
        probe.begin()
        probe.end(training.step(number, tokens[number]))
        found = pipeline.timelines() if pipeline is not None and workload.is_timed(number) else None
        steps += [found] if found is not None else []
    probe.close()
    ledger = {purpose.name: nbytes for purpose, nbytes in training.engine.ledger.by_purpose().items()}
    probe.found.notes = {
        "ledger": ledger,
        "ledger_peak": training.engine.ledger.peak(),
        "largest_exchanged": max(largest, default=0),
        "bubbles": [(predicted.bubble, measured.bubble) for predicted, measured in steps],
        "spans": _spans([measured for _, measured in steps]),
    }


def _watch(exchange: Any, found: list[int]) -> None:
    """From now on note the bytes of every tensor that ranks exchange, or that an exchange makes."""
    start = exchange._start

    def noted(kind: Collective, tensor: Tensor, *rest: Any) -> Any:
        found.append(tensor.nbytes * (exchange.size if kind is Collective.ALL_GATHER else 1))
        return start(kind, tensor, *rest)

    exchange._start = noted


def _spans(steps: list[Timeline]) -> list[list[tuple[str, int, int, float, float]]]:
    """Return the actions of each rank in the step whose bubble is the median: kind, chunk, microbatch, start and end."""
    if not steps:
        return []
    middle = sorted(steps, key=lambda step: step.bubble)[len(steps) // 2]
    return [
        [(each.kind.value, each.chunk, each.microbatch, start, end) for each, start, end in zip(*spans, strict=True)]
        for spans in zip(middle.actions, middle.starts, middle.ends, strict=True)
    ]
