"""Systems that train the same model on the device: zeromesh, FSDP2, DeepSpeed where it is installed, and none.

Weights are drawn on the device, by the same seed for all. Each system is set up as its own documentation does it.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeromesh
from bench import peers
from bench.device.place import Place, SkippedError
from bench.device.sizes import title
from bench.peers import Step
from bench.workload import Workload
from zeromesh.offload import accelerator
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.trainer import Trainer
from zeromesh.trainer.callbacks.callback import Callback

_WARMUP = 2


@dataclass(kw_only=True, slots=True)
class Turn:
    """One system, built once, and what some steps of it took. Bytes of the device: the most while it trained (`peak`), and what is
    not given back once nobody refers to it (`left`)."""

    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    left: int = 0
    losses: list[float] = field(default_factory=list)


@contextmanager
def drawing(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Inside the block models are built on the device, in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def built(workload: Workload, place: Place, dtype: torch.dtype) -> Any:
    """The model with random weights, equal on all ranks."""
    torch.manual_seed(workload.seed)
    with drawing(place.device, dtype):
        model: Any = workload.build_model()
    if workload.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def optimizer_of(model: nn.Module, workload: Workload) -> torch.optim.Optimizer:
    """torch's fused AdamW."""
    rates: Any = {"lr": workload.learning_rate, "betas": workload.betas, "weight_decay": workload.weight_decay}
    return torch.optim.AdamW(model.parameters(), **rates, fused=True)


def zeromesh_step(workload: Workload, place: Place, *, dtype: torch.dtype = torch.float32, **options: Any) -> Step:
    """zeromesh's engine under a plain loop, in bf16 with fp32 master weights."""
    return loop_of(*sharded(workload, place, dtype=dtype, **options))


def sharded(workload: Workload, place: Place, *, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """The model and the optimizer that zeromesh has divided."""
    model = built(workload, place, dtype)
    chosen = {"stage": 3, "precision": {"compute": str(workload.compute).removeprefix("torch.")}, **options}
    return zeromesh.shard(model, optimizer_of(model, workload), **chosen)


def loop_of(net: Any, optimizer: Any) -> Step:
    """A plain loop's step."""

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = net(input_ids=tokens, labels=tokens).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fsdp2_step(workload: Workload, place: Place) -> Step:
    """FSDP2 with mixed precision, resharded after forward."""
    place.join()
    return peers.plain_step(peers.sharded(built(workload, place, torch.float32), workload, keep=False), workload)


def fsdp2_offload_step(workload: Workload, place: Place) -> Step:
    """FSDP2 whose states rest in pinned memory of the host, and are updated there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    place.join()
    model = built(workload, place, workload.compute)
    mesh = init_device_mesh(place.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=workload.compute, reduce_dtype=torch.float32)
    options: Any = {"mesh": mesh, "mp_policy": policy, "offload_policy": CPUOffloadPolicy(pin_memory=is_accelerator(place.device))}
    for block in model.model.layers:  # One block in float32 on the device at a time.
        fully_shard(block.float(), **options)
    fully_shard(model.float(), **options)
    return peers.plain_step(model, workload)


def deepspeed_step(workload: Workload, place: Place) -> Step:
    """DeepSpeed's stage 3 with states and parameters on the host."""
    if importlib.util.find_spec("deepspeed") is None:
        raise SkippedError("DeepSpeed is not installed")
    import deepspeed

    deepspeed.init_distributed()
    return peers.make_peer("deepspeed-3", workload, place.device)


def plain_step(workload: Workload, place: Place) -> Step:
    """No system, and no master weights: what forward, backward and an update in bf16 take by themselves."""
    return peers.plain_step(built(workload, place, workload.compute), workload)


def ddp_step(workload: Workload, place: Place) -> Step:
    """DistributedDataParallel in bf16, without master weights."""
    if place.simulated:
        raise SkippedError("it asks collectives for futures, which those of the simulated device do not have")
    place.join()
    index = [place.device.index] if place.device.type == "cuda" else None
    model = nn.parallel.DistributedDataParallel(
        built(workload, place, workload.compute), device_ids=index, gradient_as_bucket_view=True
    )
    return peers.plain_step(model, workload)


Build = Callable[[Workload, Place], Step]


def turn(build: Build, workload: Workload, place: Place, steps: int) -> Turn:
    """Build a system, train, and forget it."""
    place.clean()
    held = place.held()
    found = _trained(build(workload, place), data(workload, place, _WARMUP + steps), place)
    found.peak -= held
    place.clean()
    found.left = place.held() - held
    return found


def _trained(step: Step, batches: Sequence[Tensor], place: Place) -> Turn:
    found = Turn()
    place.watch_peak()
    for number, batch in enumerate(batches):
        losses: list[Tensor] = []
        seconds = place.seconds(lambda batch=batch, losses=losses: losses.append(step(batch)))  # type: ignore[misc]
        found.losses.append(float(losses[0]))
        if number >= _WARMUP:
            found.seconds.append(seconds)
    found.peak = place.peak()
    return found


class Clock(Callback):
    """How long each step takes on this rank, whose device is waited for."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: list[float] = []
        self._device, self._began = device, 0.0

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        accelerator.synchronize(self._device)
        self._began = time.perf_counter()

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        accelerator.synchronize(self._device)
        self.seconds.append(time.perf_counter() - self._began)


class Tokens:
    """Random samples."""

    def __init__(self, workload: Workload, count: int) -> None:
        self._workload, self._count = workload, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, self._workload.vocabulary, (self._workload.sequence,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def fitted(
    model: nn.Module, workload: Workload, place: Place, steps: int, sections: Mapping[str, Any], *, size: int, micro: int
) -> Turn:
    """Train by zeromesh's Trainer, with `sections` of a configuration, steps of `size` samples in microbatches of `micro`."""
    run = {"name": "fitted", "output_dir": str(place.folder), "max_steps": _WARMUP + steps, "clip_norm": 0.0}
    settings: dict[str, Any] = {
        "data": {"shuffle": False},
        "model": {"loss": "native"},
        "precision": {"compute": str(workload.compute).removeprefix("torch.")},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "batch": {"global_size": size, "micro_size": micro},
        "checkpoint": {"every_steps": 0},
        **sections,
        "run": {**run, **sections.get("run", {})},
    }
    clock, found = Clock(place.device), Turn()
    with Trainer(model, settings, Tokens(workload, size * (_WARMUP + steps)), callbacks=[clock]) as trainer:
        place.watch_peak()
        found.losses += trainer.fit().losses
    found.seconds, found.peak = clock.seconds[_WARMUP:], place.peak()
    return found


def data(workload: Workload, place: Place, steps: int) -> list[Tensor]:
    """This rank's tokens of each step, `[micro, sequence]`, on the device; all ranks have the same where they divide the model."""
    generator = torch.Generator().manual_seed(1234 + (0 if workload.divided else place.rank))
    shape = (workload.micro, workload.sequence)
    return [torch.randint(0, workload.vocabulary, shape, generator=generator).to(place.device) for _ in range(steps)]


def rounds(
    systems: Mapping[str, Build],
    workload: Workload,
    place: Place,
    *,
    steps: int,
    most: int,
    each: float,
    report: Callable[[Place, Workload, Mapping[str, Sequence[Turn]]], None],
) -> dict[str, list[Turn]]:
    """Turns of all systems one after the other, each round begun with another one, while there is time for a round. One that fails
    has no further turn. `each`: seconds that a first turn may take. After every turn `report` says what all have come to so far."""
    found: dict[str, list[Turn]] = {name: [] for name in systems}
    broken: set[str] = set()
    longest = each
    for number in range(most):
        names = list(systems)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name in broken:
                continue
            if number == 0 and not place.enough(name, longest):
                broken.add(name)
                continue
            what = f"{name}: {title(workload)}"
            broken.add(name)
            left = place.seconds_left
            with place.trying(what, own=name.startswith("zeromesh")):
                found[name].append(turn(systems[name], workload, place, steps))
                broken.discard(name)
            report(place, workload, {name: turns for name, turns in found.items() if turns})
            longest = max(left - place.seconds_left, 0.0 if number else longest)
        alive = len(systems) - len(broken)
        if not alive or not place.has(1.2 * longest * alive):
            break
    return {name: turns for name, turns in found.items() if turns}
