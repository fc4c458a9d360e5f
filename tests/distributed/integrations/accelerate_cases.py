"""Loops of accelerate over the engine, beside the same loops over accelerate alone."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
)
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from tests.support.trainer_cases import llama, seeded, sentences
from zeromesh.accelerate import Accelerator
from zeromesh.errors import ConfigError, PhaseError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.shard import engine_of

EPOCHS = 3


@contextmanager
def fresh_state() -> Iterator[None]:
    """Inside the block accelerate knows of nothing that was before."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


class Loop:
    """A loop of accelerate, with accumulation, a teacher, a scheduler, clipping and metrics."""

    def __init__(self, accelerator: Any, wide: bool = True) -> None:
        self.accelerator = accelerator
        self.model = seeded(llama)
        self.teacher = seeded(lambda: llama(num_hidden_layers=1))
        if wide:
            self.model, self.teacher = self.model.double(), self.teacher.double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        schedule = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        # 23 sentences: the last batch and the last accumulation are short.
        training, self.metrics = DataLoader(sentences(), batch_size=2), DataLoader(sentences(7), batch_size=2)
        self.teacher = accelerator.prepare_model(self.teacher, evaluation_mode=True)
        self.schedule, self.training, self.optimizer, self.model, self.metrics = accelerator.prepare(
            schedule, training, self.optimizer, self.model, self.metrics
        )

    def train(self, epochs: range, after: Callable[[int], None] = lambda epoch: None) -> list[Any]:
        found: list[Any] = []
        for epoch in epochs:
            for batch in self.training:
                with self.accelerator.accumulate(self.model):
                    with torch.no_grad():
                        wanted = self.teacher(**batch).logits
                    out = self.model(**batch)
                    loss = out.loss + nn.functional.mse_loss(out.logits, wanted)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                found.append(self.accelerator.gather(loss.detach()).mean().item())
            found += [norm.item(), self.schedule.get_last_lr()[0], *self._evaluate()]
            after(epoch)
        return found

    def _evaluate(self) -> list[float]:
        self.model.eval()
        with torch.no_grad():
            logits = [self.accelerator.gather_for_metrics(self.model(**batch).logits) for batch in self.metrics]
        self.model.train()
        return [float(len(torch.cat(logits))), torch.cat(logits).abs().mean().item()]


def as_accelerate(mesh: Mesh, folder: str, stage: int) -> dict[str, Any]:
    """The same loop over DDP and over the engine, a run that goes on from a saved state, and what is saved."""
    root = Path(folder)
    with fresh_state():
        loop = Loop(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2))
        wanted = loop.train(range(EPOCHS))
        weights = loop.accelerator.get_state_dict(loop.model)
    with fresh_state():
        loop = Loop(Accelerator(gradient_accumulation_steps=2, zeromesh={"zero": {"stage": stage}}))
        divided = engine_of(loop.model).options.stage
        found = loop.train(
            range(EPOCHS), lambda epoch: loop.accelerator.save_state(root / "state") if not epoch else None
        )
        mine = loop.accelerator.get_state_dict(loop.model)
        loop.accelerator.save_model(loop.model, root / "model")
        loop.accelerator.unwrap_model(loop.model).save_pretrained(
            save_directory=root / "hub",
            is_main_process=loop.accelerator.is_main_process,
            save_function=loop.accelerator.save,
        )
    with fresh_state():
        loop = Loop(Accelerator(gradient_accumulation_steps=2, zeromesh={"zero": {"stage": 3 - stage}}))
        loop.accelerator.load_state(root / "state")
        again = loop.train(range(1, EPOCHS))
    apart = 0.0
    if mesh.rank == 0:
        hub = AutoModelForCausalLM.from_pretrained(root / "hub", dtype=torch.float64).state_dict()
        pairs = [(mine[name], weights[name]) for name in weights] + [(hub[name], weights[name]) for name in weights]
        apart = max(float((a - b).abs().max()) for a, b in pairs)
    return {
        "stage": divided,
        "losses": max(abs(a - b) for a, b in zip(found, wanted, strict=True)),
        "resumed": max(abs(a - b) for a, b in zip(again, wanted[-len(again) :], strict=True)),
        "weights": apart,
        "saved": sorted(path.name for path in (root / "state").iterdir()),
        "whole": (root / "model/model.safetensors").is_file(),
    }


def over_tensor(mesh: Mesh) -> dict[str, Any]:
    """Two ranks that divide every layer see the batches of one process; against a loop without accelerate."""
    with fresh_state():
        loop = Loop(Accelerator(gradient_accumulation_steps=2, zeromesh={"parallel": {"tensor": 2}}))
        found = loop.train(range(EPOCHS))
    wanted = []
    model, teacher = seeded(llama).double(), seeded(lambda: llama(num_hidden_layers=1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(EPOCHS):
        batches = list(DataLoader(sentences(), batch_size=2))
        for number, batch in enumerate(batches):
            out = model(**batch)
            loss = out.loss + nn.functional.mse_loss(out.logits, teacher(**batch).logits.detach())
            (loss / 2).backward()
            if number % 2 or number + 1 == len(batches):
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            wanted.append(loss.item())
        with torch.no_grad():
            logits = torch.cat([model(**batch).logits for batch in DataLoader(sentences(7), batch_size=2)])
        wanted += [norm.item(), schedule.get_last_lr()[0], float(len(logits)), logits.abs().mean().item()]
    return {"losses": max(abs(a - b) for a, b in zip(found, wanted, strict=True))}


def in_low_precision(mesh: Mesh, dtype: str) -> dict[str, Any]:
    """`mixed_precision`, or `precision.compute`: parameters of forward in the dtype, results in float32, losses near those."""
    found: dict[str, Any] = {}
    asked = {"bf16": {"mixed_precision": "bf16"}, "fp16": {"zeromesh": {"precision": {"compute": "float16"}}}}
    for precision in ("no", dtype):
        with fresh_state():
            loop = Loop(Accelerator(gradient_accumulation_steps=2, **asked.get(precision, {})), wide=False)
            found[precision] = loop.train(range(EPOCHS))
            state = loop.accelerator.get_state_dict(loop.model)
            engine = engine_of(loop.model)
            with torch.no_grad():
                out = loop.model(**next(iter(loop.metrics))).logits.dtype
            dtypes = {str(each.dtype) for each in state.values()} or {"torch.float32"}
            kinds = [str(engine.options.precision.compute), str(engine.options.precision.master), str(out), *dtypes]
            found[f"{precision} dtypes"] = kinds
    return found


class Refused:
    """Calls that cannot be right, by name."""

    def __init__(self) -> None:
        self.accelerator = Accelerator()
        self.model, self.optimizer = seeded(llama), None

    def optimizer_alone(self) -> None:
        self.accelerator.prepare(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def two_optimizers(self) -> None:
        halves = list(self.model.parameters())
        self.accelerator.prepare(self.model, *(torch.optim.SGD(each, lr=0.1) for each in (halves[:3], halves[3:])))

    def some_parameters(self) -> None:
        model, _ = self.accelerator.prepare(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.accelerator.clip_grad_norm_(list(model.parameters())[:2], 1.0)

    def other_norm(self) -> None:
        model, _ = self.accelerator.prepare(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)

    def _backwards(self, count: int) -> Any:
        batch = next(iter(DataLoader(sentences(2), batch_size=2)))
        model, optimizer = self.accelerator.prepare(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1))
        for number in range(count):
            if number:
                self.accelerator.clip_grad_norm_(model.parameters(), 1.0)
            self.accelerator.backward(model(**batch).loss)
        return model, optimizer

    def clipped_before_a_backward(self) -> None:
        self._backwards(2)

    def clipped_while_accumulating(self) -> None:
        model, _ = self._backwards(1)
        self.accelerator.sync_gradients = False
        self.accelerator.clip_grad_norm_(model.parameters(), 1.0)

    def step_of_one_rank(self) -> None:
        model, optimizer = self._backwards(1)
        with model.no_sync():
            optimizer.step()

    def saved_by_one_rank(self) -> None:
        model, _ = self._backwards(0)
        self.accelerator.state.num_processes = 2
        model.save_pretrained("model")

    def uneven_batches(self) -> None:
        self.accelerator.state.num_processes = 2
        with self.accelerator.join_uneven_inputs([self.model], even_batches=False):
            pass

    def two_precisions(self) -> None:
        with fresh_state():
            Accelerator(mixed_precision="bf16", zeromesh={"precision": {"compute": "float32"}})

    def other_plugin(self) -> None:
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())

    def other_configuration(self) -> None:
        with patch.dict(os.environ, ACCELERATE_USE_DEEPSPEED="true"):
            Accelerator()

    def compressed_gradients(self) -> None:
        hook = DDPCommunicationHookType.BF16
        Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=hook)])

    def scaler(self) -> None:
        Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])

    def values(self) -> None:
        self.accelerator.clip_grad_value_(self.model.parameters(), 1.0)


def refused(mesh: Mesh, name: str) -> str:
    """What is said to a call."""
    with fresh_state():
        try:
            getattr(Refused(), name)()
        except (ConfigError, PhaseError) as error:
            return str(error)
    return ""
