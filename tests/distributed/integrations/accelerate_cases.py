"""Loops of accelerate over the engine, beside the same loops over accelerate alone."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings

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

from tests.support.plain import error_of, like, plain_loop
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


def distilled(model: Any, teacher: Any, batch: Any) -> torch.Tensor:
    """The mean loss of a batch, and how far its logits are from a teacher's."""
    with torch.no_grad():
        wanted = teacher(**batch).logits
    out = model(**batch)
    return out.loss + nn.functional.mse_loss(out.logits, wanted)


def batches(count: int = 23) -> Any:
    """Of 23 sentences the last batch and the last accumulation are short."""
    return DataLoader(sentences(count), batch_size=2)


class Loop:
    """A loop of accelerate, with accumulation, a teacher, a scheduler, clipping and metrics."""

    def __init__(self, accelerator: Any, wide: bool = True) -> None:
        self.accelerator = accelerator
        self.model, self.teacher = pair() if wide else (each.float() for each in pair())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        schedule = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.teacher = accelerator.prepare_model(self.teacher, evaluation_mode=True)
        self.schedule, self.training, self.optimizer, self.model, self.metrics = accelerator.prepare(
            schedule, batches(), self.optimizer, self.model, batches(7)
        )

    def train(self, epochs: range, after: Callable[[int], None] = lambda epoch: None) -> list[list[float]]:
        """Losses, rate, size and mean of an evaluation, and the last norm of each epoch."""
        found: list[list[float]] = []
        for epoch in epochs:
            losses = []
            for batch in self.training:
                with self.accelerator.accumulate(self.model):
                    loss = distilled(self.model, self.teacher, batch)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                losses.append(self.accelerator.gather(loss.detach()).mean().item())
            self.model.eval()
            with torch.no_grad():
                logits = [self.accelerator.gather_for_metrics(self.model(**batch).logits) for batch in self.metrics]
            self.model.train()
            found.append([*losses, self.schedule.get_last_lr()[0], *measured(logits), norm.item()])
            after(epoch)
        return found


def pair() -> tuple[Any, Any]:
    """A model and its teacher, in float64."""
    return seeded(llama).double(), seeded(lambda: llama(num_hidden_layers=1)).double()


def measured(logits: list[torch.Tensor]) -> list[float]:
    return [float(len(torch.cat(logits))), torch.cat(logits).abs().mean().item()]


def as_accelerate(mesh: Mesh, folder: str, stage: int) -> None:
    """The same loop over DDP and over the engine, a run that goes on from a saved state, and what is saved."""
    root = Path(folder)
    with fresh_state():
        loop = Loop(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2))
        wanted, weights = loop.train(range(EPOCHS)), loop.accelerator.get_state_dict(loop.model)
    with fresh_state():
        loop = Loop(Accelerator(gradient_accumulation_steps=2, zeromesh={"zero": {"stage": stage}}))
        assert engine_of(loop.model).options.stage == stage
        save = loop.accelerator.save_state
        # Norms are rounded to float32; a state that was not restored is off by 1e-3.
        like(loop.train(range(EPOCHS), lambda epoch: None if epoch else save(root / "state")), wanted, abs_=1e-6)
        mine = loop.accelerator.get_state_dict(loop.model)
        loop.accelerator.save_model(loop.model, root / "model")
        loop.accelerator.unwrap_model(loop.model).save_pretrained(
            save_directory=root / "hub", is_main_process=loop.accelerator.is_main_process, save_function=loop.accelerator.save
        )
    with fresh_state():
        loop = Loop(Accelerator(gradient_accumulation_steps=2, zeromesh={"zero": {"stage": 3 - stage}}))
        loop.accelerator.load_state(root / "state")
        like(loop.train(range(1, EPOCHS)), wanted[1:], abs_=1e-6)
    if mesh.rank == 0:
        hub = AutoModelForCausalLM.from_pretrained(root / "hub", dtype=torch.float64).state_dict()
        for found in (mine, hub):
            like({name: found[name] for name in weights}, dict(weights), rel=0, abs_=1e-9)
        states = ["random_states_0.pkl", "random_states_1.pkl", "scheduler.bin", "zeromesh", "zeromesh_1"]
        assert sorted(path.name for path in (root / "state").iterdir()) == states
        assert (root / "model/model.safetensors").is_file()


def any_backwards(mesh: Mesh, folder: str, stage: int) -> None:
    """Two backwards in every microbatch, and then other numbers of microbatches in a step, over DDP and over the engine."""
    found = []
    for make in (partial(accelerate.Accelerator, cpu=True), partial(Accelerator, zeromesh={"zero": {"stage": stage}})):
        with fresh_state():
            accelerator = make(gradient_accumulation_steps=2)
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
            inputs = DataLoader(torch.randn(20, 4, dtype=torch.float64), batch_size=2)
            model, optimizer, inputs = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), inputs)
            for steps in (2, 3, 1):
                accelerator.gradient_accumulation_steps = steps
                for batch in inputs:
                    with accelerator.accumulate(model):
                        accelerator.backward(model(batch).square().mean())
                        accelerator.backward((model(batch) - 1).abs().mean())
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(model.parameters(), 0.5)
                        optimizer.step()
                        optimizer.zero_grad()
            found.append(accelerator.get_state_dict(model))
    if mesh.rank == 0:
        like(found[1], dict(found[0]), rel=0, abs_=1e-7)


def over_tensor(mesh: Mesh, folder: str) -> None:
    """Two ranks that divide every layer see the batches of one process; against a loop without accelerate."""
    with fresh_state():
        loop = Loop(Accelerator(gradient_accumulation_steps=2, zeromesh={"parallel": {"tensor": 2}}))
        found = loop.train(range(EPOCHS))
    model, teacher = pair()
    optimizer, seen, wanted = torch.optim.AdamW(model.parameters(), lr=1e-2), list[float](), list[list[float]]()
    schedule, all_batches = LambdaLR(optimizer, lambda step: 1 / (1 + step)), list(batches())
    steps = [all_batches[first : first + 2] for first in range(0, len(all_batches), 2)]

    def mean(model: Any, group: Any) -> torch.Tensor:
        losses = torch.stack([distilled(model, teacher, batch) for batch in group])
        seen.extend(losses.tolist())
        return losses.sum() / 2

    def evaluate(model: Any, step: int) -> None:
        if step % len(steps) == 0:
            with torch.no_grad():
                figures = measured([model(**batch).logits for batch in batches(7)])
            wanted.append([*seen, schedule.get_last_lr()[0], *figures])
            seen.clear()

    plain = plain_loop(model, steps * EPOCHS, mean, optimizer, clip_norm=0.5, schedule=schedule, after_step=evaluate)
    norms = plain.norms[len(steps) - 1 :: len(steps)]
    like(found, [[*row, norm] for row, norm in zip(wanted, norms, strict=True)], abs_=1e-6)


def in_low_precision(mesh: Mesh, folder: str, asked: dict[str, Any], dtype: str) -> None:
    """`mixed_precision`, or `precision.compute`: parameters of forward in the dtype, results in float32, losses near those."""
    found: list[list[list[float]]] = []
    for compute, options in (("torch.float32", {}), (dtype, asked)):
        with fresh_state():
            loop = Loop(Accelerator(gradient_accumulation_steps=2, **options), wide=False)
            found.append(loop.train(range(EPOCHS)))
            state, precision = loop.accelerator.get_state_dict(loop.model), engine_of(loop.model).options.precision
            with torch.no_grad():
                out = loop.model(**next(iter(loop.metrics))).logits.dtype
            assert (str(precision.compute), precision.master, out) == (compute, torch.float32, torch.float32)
            assert {each.dtype for each in state.values()} <= {torch.float32}
            assert state or mesh.rank
    like(found[1], found[0], rel=0, abs_=0.05)
    assert found[1] != found[0]


class Timed(nn.Module):
    """A model with a norm before all else, exact times, its own targets, and classes whose loss it computes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.embed, self.head = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, times: torch.Tensor, future_values: torch.Tensor) -> torch.Tensor:
        waves = torch.sin(times[:, None] * torch.arange(1, 9))
        logits = self.head(self.norm(x) + self.embed(waves))
        loss = nn.functional.cross_entropy(logits, torch.arange(2))
        self.seen = [times, future_values, loss.detach()]
        return loss + (logits - future_values).square().mean()

    def save_pretrained(self, path: Any) -> None:
        """Save it as libraries do whose models are no models of transformers."""
        torch.save([type(self), self.state_dict()], path)


def timed() -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(2, 8),
        "times": torch.tensor([997.0, 501.0]),
        "future_values": torch.tensor([1001.0, 1003.0, 1005.0, 1007.0]) / 512,
    }


def as_autocast(mesh: Mesh, folder: str, stage: int) -> None:
    """Floating-point arguments reach a model as under autocast, its cross entropies are in float32, and so are copies of it."""
    found = []
    for make in (partial(accelerate.Accelerator, cpu=True), partial(Accelerator, zeromesh={"zero": {"stage": stage}})):
        with fresh_state():
            accelerator, model = make(mixed_precision="bf16"), seeded(Timed)
            torch.manual_seed(0)
            given = timed()
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            losses = []
            for _ in range(3):
                losses.append(model(**given))
                accelerator.backward(losses[-1])
                optimizer.step()
                optimizer.zero_grad()
            whole = accelerator.unwrap_model(model)
            for one, other in zip(whole.seen, given.values(), strict=False):
                assert one.dtype is torch.float32 or one is other
            assert torch.equal(whole.seen[0], given["times"])
            assert torch.equal(whole.seen[1], given["future_values"])
            assert whole.seen[2].dtype is torch.float32
            found.append([each.item() for each in losses])
            with catch_warnings(record=True, action="always") as said:
                copied = copy.deepcopy(whole)
            assert {each.dtype for each in copied.parameters()} == {torch.float32}
            assert bool(torch.isfinite(copied(**given)))
    assert "section `ema`" in str(said[0].message)
    like(found[1], found[0], rel=0, abs_=0.02)


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
        Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)])

    def scaler(self) -> None:
        Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])

    def values(self) -> None:
        self.accelerator.clip_grad_value_(self.model.parameters(), 1.0)


def refused(mesh: Mesh, folder: str, name: str) -> str:
    with fresh_state():
        return error_of(lambda: getattr(Refused(), name)(), (ConfigError, PhaseError))
