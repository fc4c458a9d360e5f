"""PyTorch's own tensor and pipeline parallelism on the workload, each set up as its documentation does it.

dtensor          parallelize_module: column and row layers, the input of each pair made a DTensor once, `loss_parallel`
dtensor-simple   the same without `PrepareModuleInput`, as in the tutorial: every column layer sums the gradient of its input
schedule1f1b     two `PipelineStage`s of the same blocks as zeromesh's, `Schedule1F1B`

All update by fused AdamW on the tensors that a rank holds. In bf16 parameters and moments are bf16, without master weights.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

from bench.peers import initialise
from bench.workload import Workload

Step = Callable[[Tensor], Tensor]
"""A training step on `[microbatches x micro, sequence]` token ids; gives the mean loss."""


def make_peer(system: str, workload: Workload, blocks: tuple[int, ...]) -> Step:
    """Build the model and the system around it; `blocks` of each stage of a pipeline."""
    model: Any = workload.build_model()
    initialise(model, workload)
    model.to(workload.compute).train()
    if system == "schedule1f1b":
        return _pipeline(model, workload, blocks)
    return _tensor(model, workload, once=system == "dtensor")


def _tensor(model: Any, workload: Workload, *, once: bool) -> Step:
    mesh = init_device_mesh("cpu", (workload.ranks,))
    for block in model.model.layers:
        plan: dict[str, Any] = {
            **{f"self_attn.{name}_proj": ColwiseParallel() for name in ("q", "k", "v")},
            "self_attn.o_proj": RowwiseParallel(),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        if once:
            named = {"hidden_states": Replicate()}
            plan["self_attn"] = PrepareModuleInput(input_kwarg_layouts=named, desired_input_kwarg_layouts=named)
            plan["mlp"] = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
        parallelize_module(block, mesh, plan)
    ends: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    update = _Update(model.parameters(), workload)

    def step(tokens: Tensor) -> Tensor:
        with loss_parallel():
            logits = model(input_ids=tokens).logits
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), _targets(tokens).flatten())
            loss.backward()
        update()
        return _local(loss.detach())

    return step


def _pipeline(model: Any, workload: Workload, blocks: tuple[int, ...]) -> Step:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = _Stage(model, sum(blocks[:rank]), blocks[rank], first=rank == 0, last=rank == ranks - 1)
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, workload.microbatches, loss_fn=_loss)
    update = _Update(part.parameters(), workload)

    def step(tokens: Tensor) -> Tensor:
        loss = torch.zeros(())
        if rank == 0:
            schedule.step(tokens)
        else:
            losses: list[Tensor] = []
            schedule.step(target=_targets(tokens), losses=losses)
            loss = torch.stack([each.detach() for each in losses]).mean()
        update()
        dist.all_reduce(loss)
        return loss

    return step


class _Stage(nn.Module):
    """Blocks that follow one another, with the embedding before the first and the head after the last."""

    def __init__(self, model: Any, start: int, count: int, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = model.model.embed_tokens if first else None
        self.blocks = nn.ModuleList(model.model.layers[start : start + count])
        self.rotary = model.model.rotary_emb
        self.head = nn.Sequential(model.model.norm, model.lm_head) if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Token ids or hidden states `[micro, sequence, ...]` to hidden states or logits."""
        hidden = x if self.embedding is None else self.embedding(x)
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        embeddings = self.rotary(hidden, position_ids=positions)
        for block in self.blocks:
            hidden = block(hidden, attention_mask=None, position_ids=positions, position_embeddings=embeddings)
        return hidden if self.head is None else self.head(hidden)


class _Update:
    """Fused AdamW, which takes no DTensors, on what this rank holds of each parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter], workload: Workload) -> None:
        self._whole = list(parameters)
        self._local = [nn.Parameter(_local(each.detach())) for each in self._whole]
        self._optimizer = torch.optim.AdamW(
            self._local, lr=workload.learning_rate, betas=workload.betas, weight_decay=workload.weight_decay, fused=True
        )

    def __call__(self) -> None:
        for whole, local in zip(self._whole, self._local, strict=True):
            local.grad = None if whole.grad is None else _local(_placed_as(whole, whole.grad))
            whole.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def _placed_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A gradient that DTensor leaves elsewhere (that of the embedding is whole on every rank), where its parameter is."""
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _targets(tokens: Tensor) -> Tensor:
    """The next token at each position; the last one has none."""
    return functional.pad(tokens[:, 1:], (0, 1), value=-100)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
