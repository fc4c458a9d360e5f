"""Tables that others have published, and what a plan says of the same layouts from a machine file alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from zeromesh.errors import LayoutError
from zeromesh.offload import TierChoice
from zeromesh.telemetry.step_recorder import StepPhase
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.planning.auto import subject_of
from zeromesh.trainer.planning.estimate import Estimate, Estimator
from zeromesh.trainer.planning.layouts import Layout
from zeromesh.trainer.planning.machine import find_machine
from zeromesh.trainer.planning.planner import memory_per_rank, why_not
from zeromesh.trainer.planning.subject import Subject

LENGTH, VOCABULARY = 2048, 51200
_MICROS = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class MegatronRow:
    """A row of table 1 of Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM"
    (arXiv 2104.04473), measured on Selene: hosts of 8 A100 of 80 GB."""

    name: str
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    achieved: float
    """TFLOP/s of a GPU, by the formula below."""

    @property
    def flops(self) -> float:
        """Operations of a step by the paper's formula, with those of recomputation: 96 B s l h^2 (1 + s / 6h + V / 16lh)."""
        width, depth = self.hidden, self.layers
        return (
            96 * self.batch * LENGTH * depth * width**2
            * (1 + LENGTH / (6 * width) + VOCABULARY / (16 * depth * width))
        )  # fmt: skip


def _row(name: str, *numbers: float) -> MegatronRow:
    heads, hidden, layers, tensor, pipeline, gpus, batch = map(int, numbers[:-1])
    return MegatronRow(
        name=name,
        heads=heads,
        hidden=hidden,
        layers=layers,
        tensor=tensor,
        pipeline=pipeline,
        gpus=gpus,
        batch=batch,
        achieved=numbers[-1],
    )


MEGATRON = (
    _row("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
    _row("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138),
    _row("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142),
    _row("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135),
    _row("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138),
    _row("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140),
    _row("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148),
    _row("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155),
    _row("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163),
    _row("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 163),
)


def of_configuration(config: dict[str, Any], batch: int, length: int) -> Subject:
    """A model on a GPU in bfloat16, tokens of any kind."""
    keys = {
        "model.config": config,
        "data.sequence_length": length,
        "batch.global_size": batch,
        "batch.micro_size": 1,
        "precision.compute": "bfloat16",
    }
    return subject_of(load_config(None, [f"{key}={value!r}" for key, value in keys.items()]), device="cuda")


def megatron_table() -> Iterator[str]:
    """Markdown: the paper's rows beside a plan's, with whole blocks recomputed, of the best microbatch and number of chunks."""
    yield "| model | GPUs | tensor | pipeline | published TFLOP/s | planned | ratio | layout |"
    yield "|---|---|---|---|---|---|---|---|"
    machine, within = find_machine("a100"), 0
    for row in MEGATRON:
        config = {
            "model_type": "gpt2",
            "n_embd": row.hidden,
            "n_layer": row.layers,
            "n_head": row.heads,
            "vocab_size": VOCABULARY,
            "n_positions": LENGTH,
            # As the paper's kernels: scores of attention in memory, with dropout, and one kernel for GeLU.
            "attn_implementation": "eager",
            "activation_function": "gelu_pytorch_tanh",
        }
        subject = of_configuration(config, row.batch, LENGTH)
        found = list(_estimates(row, subject, Estimator(subject, machine, 8)))
        room = memory_per_rank(machine, 8)
        best = min((each for each in found if not why_not(each, room)), key=lambda each: each.seconds)
        planned = row.flops / best.seconds / row.gpus / 1e12
        ratio = planned / row.achieved
        within += abs(ratio - 1) <= 0.2
        yield (
            f"| {row.name} | {row.gpus} | {row.tensor} | {row.pipeline} | {row.achieved:.0f} | {planned:.0f} | {ratio:.2f} | "
            f"micro {best.layout.micro}, {best.layout.schedule} {best.layout.chunks} |"
        )
    yield ""
    yield f"{within} of {len(MEGATRON)} within 20 %"


def _estimates(row: MegatronRow, subject: Subject, estimator: Estimator) -> Iterator[Estimate]:
    data = row.gpus // (row.tensor * row.pipeline)
    for micro in _MICROS:
        if row.batch % (micro * data):
            continue
        accumulation = row.batch // (micro * data)
        for chunks in (1, 2, 4) if row.pipeline > 1 else (1,):
            layout = Layout(
                pipeline=row.pipeline,
                shard=data,
                tensor=row.tensor,
                stage=1,
                micro=micro,
                accumulation=accumulation,
                recompute="block",
                schedule="interleaved" if chunks > 1 else "1f1b",
                chunks=chunks,
            )
            try:
                yield estimator.estimate(layout)
            except LayoutError:  # Fewer blocks than chunks.
                continue


LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
_EIGHT = (
    Layout(shard=8, stage=0),
    Layout(tensor=4, pipeline=2),
    Layout(tensor=8),
    Layout(tensor=2, pipeline=4),
    Layout(pipeline=8),
    Layout(pipeline=4, shard=2),
)
"""Plain data parallelism, and ways to divide a model among 8."""
_SAMPLES = (4, 8)
_HOST = TierChoice(tier="host")


def llama_table() -> Iterator[str]:
    """Markdown: a Llama of 70 billion parameters on one host of 8 A100, in steps of 4 and of 8 sequences of 4,096 tokens, its
    optimizer's states on the host, where alone they have room. The fewer microbatches, the more a pipeline's stages wait."""
    yield f"| mesh | GiB a rank | fits | {' | '.join(f's of {samples} sequences' for samples in _SAMPLES)} |"
    yield "|---|---|---|---|---|"
    machine = find_machine("a100")
    room = memory_per_rank(machine, 8)
    estimators = {samples: Estimator(of_configuration(LLAMA_70B, samples, 4096), machine, 8) for samples in _SAMPLES}
    for shape in _EIGHT:
        found = []
        for samples, estimator in estimators.items():
            layout = replace(
                shape,
                stage=0 if shape.data == 8 else 1,
                accumulation=max(1, samples // shape.data),
                recompute="block",
                optimizer=_HOST,
            )
            found.append(estimator.estimate(layout))
        seconds = [
            f"{each.seconds - each.phases.get(StepPhase.OFFLOAD_WAIT, 0.0) - each.phases.get(StepPhase.OPTIMIZER, 0.0):.2f}"
            for each in found
        ]
        fits = "no" if any(why_not(each, room) for each in found) else "yes"
        mesh = str(shape).partition(",")[0]
        most = max(each.device_bytes for each in found) / 2**30
        yield f"| {mesh} | {most:.1f} | {fits} | {' | '.join(seconds)} |"
    yield ""
    yield "Seconds of forward and backward; the update of states on the host, which is the same for all, comes on top."
