"""The predicted memory of each rank of a divided workload: states from the layout, activations measured alone, one constant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from bench.account import TOLERANCE, Prediction
from bench.divided import Form
from bench.divided_activations import cut_stages, divide_layers
from bench.launch import Run, measure_activations
from bench.measure import Measurements
from bench.workload import Workload
from zeromesh.offload import Purpose
from zeromesh.optim.fused_optimizer import GroupRules
from zeromesh.units.build import plan_layouts
from zeromesh.units.plan import ModelCuts, plan_model
from zeromesh.zero.memory_model import MemoryModel

MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """One rank: predicted and measured, in bytes; by purpose, the formula's and the ledger's."""

    system: str
    rank: int
    predicted: Prediction
    constant: int
    peak: int
    ledger: Mapping[str, int]

    @property
    def difference(self) -> float:
        """The difference of the prediction from what the system saw, as a part of that."""
        return (self.predicted.total + self.constant) / self.peak - 1

    @property
    def problems(self) -> list[str]:
        """The deviations from the prediction."""
        found = []
        if dict(self.predicted.staying) != dict(self.ledger):
            found.append(f"{self.system}, rank {self.rank}: the ledger is not the formula")
        if abs(self.difference) > TOLERANCE:
            found.append(f"{self.system}, rank {self.rank}: {self.difference:+.1%} from the system's figure")
        return found


def account(runs: Mapping[str, Sequence[Run]], workload: Workload, constant: int) -> list[RankMemory]:
    """Every rank of every system of zeromesh, by the run whose peak is the median."""
    found = []
    for system, rounds in runs.items():
        name = system.removeprefix("zeromesh-")
        if name == system:
            continue
        run = sorted(rounds, key=lambda each: each.peak_bytes)[len(rounds) // 2]
        for rank, said in enumerate(run.ranks):
            found.append(
                RankMemory(
                    system=system,
                    rank=rank,
                    predicted=predict(name, workload, rank),
                    constant=constant,
                    peak=said["peak_bytes"],
                    ledger=said["notes"]["ledger"],
                )
            )
    return found


def predict(name: str, workload: Workload, rank: int) -> Prediction:
    """Bytes of a rank, without the constant."""
    form = Form.of(name, workload.ranks)
    options = form.options(workload)
    with torch.device("meta"):
        model = workload.build_model()
    if form.tensor > 1:
        cuts = ModelCuts(parts=divide_layers(model, form, rank).parts)
    else:
        stages = cut_stages(model, form, rank)
        cuts = ModelCuts(chunks=len(stages.own), chunk_of=lambda name: stages.own.index(stages.stage_of(name)))
    plan = plan_model(model, workload.compute, GroupRules(options.optimizer).group_of, cuts)
    footprint = MemoryModel(plan_layouts(plan, 1), options, 1, "local")
    staying = {purpose.name: nbytes for purpose, nbytes in footprint.terms.items()}
    shards = staying.pop(Purpose.GRADIENTS.name) if not options.gradients_keep_memory(torch.device("cpu")) else 0
    activations = measure_activations(workload, part=(name, rank)).peak
    return Prediction(staying=staying, passing=footprint.gathered + shards, activations=activations)


def constant_of(workload: Workload) -> int:
    """Bytes that are neither states nor activations: as in `memory_report.py`, of the undivided model at stage 3."""
    plain = replace(workload, divided=False, microbatches=1, warmup=6, timed=0, sampled=0)
    return Measurements(plain).constant(workload.dtype)


def table(lines: Sequence[RankMemory]) -> str:
    """Markdown."""
    rows = [
        "| system | rank | states that stay | that come and go | activations | constant | sum | system's figure | difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        predicted = line.predicted
        numbers = (
            sum(predicted.staying.values()),
            predicted.passing,
            predicted.activations,
            line.constant,
            predicted.total + line.constant,
            line.peak,
        )
        cells = " | ".join(f"{number / MEBIBYTE:.1f}" for number in numbers)
        rows.append(f"| {line.system} | {line.rank} | {cells} | {line.difference:+.1%} |")
    return "\n".join(rows)
