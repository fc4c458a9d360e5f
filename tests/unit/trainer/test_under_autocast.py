"""Modules that know nothing of 16-bit weights compute as under autocast, in the trainer and in accelerate's loops."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from accelerate.state import AcceleratorState, GradientState
from model_zoo.small_models import heads_of_types, small_model
from torch import Tensor, nn

from tests.support.trainer_cases import settings
from zeromesh import Trainer
from zeromesh.accelerate import Accelerator
from zeromesh.trainer.config.sections.model import AUTO_CLASSES

NARROW = {"compute": "bfloat16", "master": "float32", "reduce": "float32"}


class Tutorial(nn.Module):
    """Token ids, positions in a buffer of float32, an encoder of torch with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        angles = torch.arange(64)[:, None] * torch.exp(torch.arange(0, 16, 2) * (-math.log(10000.0) / 16))
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * 4 + self.positions[: ids.shape[1]]
        x = self.head(self.encoder(x, nn.Transformer.generate_square_subsequent_mask(ids.shape[1])))
        return F.cross_entropy(x[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Graph(nn.Module):
    """A weight of a module's own, multiplied by what its second argument gave (Kipf and Welling)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3) * 0.1)

    def forward(self, values: Tensor, target: Tensor) -> Tensor:
        near = (values @ values.T).softmax(1)
        return F.mse_loss(torch.mm(near, torch.mm(values, self.weight)).float(), target[:, :3])


class Keywords(nn.Module):
    """Layers that are called by names of arguments, on features that are made inside, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(32, 2, batch_first=True), nn.Linear(32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.one_hot(ids, 32).float()
        return self.head(input=self.attention(query=x, key=x, value=x)[0]).square().mean()


class Targets(nn.Module):
    """Targets that bfloat16 would round, statistics in buffers, initial states that are made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((8,), 0.3))
        self.rnn, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 8)

    def forward(self, values: Tensor, target: Tensor) -> Tensor:
        start = torch.zeros(1, len(values), 16)
        states, _ = self.rnn((values - self.mean)[:, None], (start, start))
        return F.l1_loss(self.head(states[:, -1]), target)


def samples(kind: type[nn.Module]) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    if kind in (Tutorial, Keywords):
        return [{"ids": torch.randint(0, 32, (8,), generator=random)} for _ in range(4)]
    rows = [torch.randn(2, 8, generator=random) for _ in range(4)]
    return [{"values": each[0], "target": 1000 + each[1]} for each in rows]


def build(kind: type[nn.Module]) -> nn.Module:
    """With weights that are the same in bfloat16."""
    torch.manual_seed(0)
    return kind().to(torch.bfloat16).float()


def in_trainer(kind: type[nn.Module], batch: dict[str, Tensor], folder: Path, *, stage: int) -> float:
    config = settings(
        str(folder), precision=NARROW, zero={"stage": stage}, batch={"global_size": 4, "micro_size": 4}, run={"max_steps": 1}
    )
    with Trainer(build(kind), config, samples(kind)) as trainer:
        return trainer.fit().final_loss or 0.0


def in_accelerate(kind: type[nn.Module], batch: dict[str, Tensor], folder: Path, *, stage: int) -> float:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", zeromesh={"zero": {"stage": stage}})
    model = build(kind)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(**batch)
    accelerator.backward(loss)
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("call", [in_trainer, in_accelerate])
@pytest.mark.parametrize("kind", [Tutorial, Graph, Keywords, Targets])
def test_modules_compute_as_under_autocast(kind: type[nn.Module], call: Callable[..., float], stage: int, tmp_path: Path) -> None:
    batch = {name: torch.stack([each[name] for each in samples(kind)]) for name in samples(kind)[0]}
    with torch.autocast("cpu", torch.bfloat16):
        wanted = float(build(kind)(**batch).detach())
    # A norm computes in the dtype of its weights, which autocast leaves in float32.
    assert call(kind, batch, tmp_path, stage=stage) == pytest.approx(wanted, rel=5e-3 if kind is Tutorial else 1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["m2m_100", "speech_to_text", "openai-gpt", "minimax", "mra", "xlstm", "deepseek_v4", "fnet"])
def test_types_of_the_library_train_in_the_default_precision(kind: str, tmp_path: Path) -> None:
    """Some have positions in buffers of float32, and some mix dtypes in their code: their loss is that under autocast."""
    small = small_model(kind, heads_of_types()[kind])
    rows = [{name: each.float() if each.is_floating_point() else each for name, each in row.items()} for row in small.samples]
    torch.manual_seed(0)
    model = getattr(tf, AUTO_CLASSES[small.head]).from_config(small.config, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        wanted = float(model(**{name: torch.stack([row[name] for row in rows[:4]]) for name in rows[0]}).loss)
    config = settings(str(tmp_path), precision=NARROW, batch={"global_size": 4, "micro_size": 4}, run={"max_steps": 1})
    with Trainer(model, {**config, "data": {"shuffle": False}}, rows) as trainer:
        assert trainer.fit().final_loss == pytest.approx(wanted, rel=1e-2)
