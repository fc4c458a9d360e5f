"""Cases on pipelines: stages of one model on several ranks, against the same model on one."""

import copy
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import transformers as tf
from bench.without_zero import PlainRunner, cut_model

from tests.support.architectures import TINY_VOCABULARY, tiny
from tests.support.plain import apart, distance
from zeromesh.comm import point_to_point
from zeromesh.comm.point_to_point import Channels
from zeromesh.errors import CollectiveError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.pipeline.deferred_weight_grad import WeightQueue, defer_weights
from zeromesh.pipeline.executor import Executor
from zeromesh.pipeline.generation import StagedForward
from zeromesh.pipeline.schedule import make_schedule
from zeromesh.pipeline.stages.build import Stages

Batch = Mapping[str, torch.Tensor]


def build(name: str, layers: int) -> Any:
    """A tiny model in float64, the same on every rank. In "shared" the last block has the first one's MLP."""
    torch.manual_seed(0)
    if name == "shared":
        model = build("llama", layers)
        model.model.layers[-1].mlp = model.model.layers[0].mlp
        return model
    changes: dict[str, Any] = {"n_layer" if name == "gpt2" else "num_hidden_layers": layers}
    if name == "gemma3":
        changes["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    return tiny(name, use_cache=False, **changes).double()


def batches(count: int, *, seed: int = 1, device: str | torch.device = "cpu") -> list[dict[str, torch.Tensor]]:
    """Microbatches of different lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        samples, length = 1 + number % 2, 4 + 3 * (number % 3)
        ids = torch.randint(1, TINY_VOCABULARY, (samples, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, length - 1 - number % 2 :] = 0
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        made.append({name: value.to(device) for name, value in batch.items()})
    return made


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """The model's own loss, as a sum."""
    return model(**batch).loss * int((batch["labels"][:, 1:] != -100).sum())


def alone(model: Any, data: Sequence[Batch], seed: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses and gradients of one process."""
    model.zero_grad()
    losses = []
    for batch in data:
        loss = loss_of(model, batch)
        loss.backward(torch.full_like(loss, seed))
        losses.append(loss.detach())
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return torch.stack(losses), found


def cut(mesh: Mesh, model: Any, chunks: int) -> Stages:
    return cut_model(model, ranks=mesh.world.size, index=mesh.world.index, chunks=chunks)


def trains(mesh: Mesh, model: str, schedule: Any, microbatches: int, chunks: int, recompute: bool = False) -> dict[str, Any]:
    """Two steps in stages and in one process. Largest relative difference, and what else there is to see."""
    whole = build(model, 4).to(mesh.device)
    staged = copy.deepcopy(whole)
    if recompute:
        staged.train().gradient_checkpointing_enable({"use_reentrant": False})
    stages = cut(mesh, staged, chunks)
    data = batches(microbatches, device=mesh.device)
    queue = WeightQueue()
    if schedule == "zero_bubble":
        defer_weights(staged, [staged], queue)
    calls = Counter[str]()
    for name, parameter in staged.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _p, name=name: calls.update([name]))
    channels = Channels(mesh.world, mesh.device)
    executor = Executor(channels)
    plan = make_schedule(schedule, ranks=mesh.world.size, microbatches=microbatches, chunks=chunks)
    differences: list[float] = []
    for step in range(2):
        staged.zero_grad()
        runner = PlainRunner(stages, data, loss_of, seed=0.5 + step, queue=queue)
        marks = executor.run(plan, runner)
        losses = mesh.world.all_reduce(runner.losses.cpu(), "losses")
        wanted_losses, wanted = alone(whole, data, 0.5 + step)
        found = _gradients(mesh, stages, staged)
        differences.append(apart(losses.tolist(), wanted_losses.tolist()))
        differences.append(distance(found, {name: wanted[name] for name in found}))
    timelines = executor.timelines(plan, marks)
    channels.close()
    ties = [[list(names), {str(stage): name for stage, name in held.items()}] for names, held in stages.ties.items()]
    return {
        "difference": max(differences),
        "names": sorted(name for name, _ in staged.named_parameters()),
        "ties": ties,
        "calls": sorted(set(calls.values())),
        "called": len(calls),
        "bubble": [each.bubble for each in timelines],
        "spans": len(marks) // 2,
    }


def _gradients(mesh: Mesh, stages: Stages, model: Any) -> dict[str, torch.Tensor]:
    """Of this rank's parameters, under their names in checkpoints, those of tied ones summed over stages."""
    held = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for names, by_stage in stages.ties.items():
        copies = [name for stage, name in by_stage.items() if stage in stages.own]
        grads = [held.pop(name) for name in dict.fromkeys(copies) if name in held]
        shape = stages.model.get_parameter(copies[0]).shape if copies else (0,)
        largest = max(int(row[0]) for row in mesh.world.gather_integers([torch.Size(shape).numel()]))
        total = torch.stack(grads).sum(0).flatten().cpu() if grads else torch.zeros(largest, dtype=torch.float64)
        mesh.world.all_reduce(total, "gradients of tied parameters")
        if grads:
            held[names[0]] = total.view(shape).to(grads[0].device)
    return held


def evaluates(mesh: Mesh, model: str, microbatches: int, chunks: int) -> float:
    """Losses without gradients, by the same stages."""
    whole = build(model, 4).to(mesh.device)
    stages = cut(mesh, copy.deepcopy(whole), chunks)
    data = batches(microbatches, device=mesh.device)
    channels = Channels(mesh.world, mesh.device)
    executor = Executor(channels)
    runner = PlainRunner(stages, data, loss_of)
    with torch.no_grad():
        plan = make_schedule("forward", ranks=mesh.world.size, microbatches=microbatches, chunks=chunks)
        executor.run(plan, runner)
        wanted = torch.stack([loss_of(whole, batch) for batch in data])
    channels.close()
    return apart(mesh.world.all_reduce(runner.losses.cpu(), "losses").tolist(), wanted.tolist())


def generates(mesh: Mesh, model: str, chunks: int, microbatches: int, cached: bool) -> None:
    """Tokens of a pipeline, and those of one process by the library's own loop."""
    whole = build(model, 4).to(mesh.device).eval()
    stages = cut(mesh, copy.deepcopy(whole), chunks)
    prompts = torch.randint(1, TINY_VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(3)).to(mesh.device)
    mask = torch.ones_like(prompts)
    mask[1, :2] = 0
    whole.config.output_router_logits = False
    wanted = whole.generate(prompts, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=True)
    world = mesh.world_of_tensors()
    channels = Channels(world, mesh.device)
    schedule = make_schedule("forward", ranks=world.size, microbatches=microbatches, chunks=chunks)
    forward = StagedForward(Executor(channels), stages, schedule, stages.model)
    cache = {"past_key_values": tf.DynamicCache(config=whole.config)} if cached else {}
    tokens = prompts
    for _ in range(6):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        new = slice(-1 if cached and tokens is not prompts else 0, None)
        inputs = {"input_ids": tokens[:, new], "position_ids": positions[:, new], "attention_mask": mask}
        logits = forward({**inputs, **cache, "use_cache": cached})
        tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    channels.close()
    assert tokens.tolist() == wanted.tolist()
    assert logits.shape == (3, 1, TINY_VOCABULARY)
    assert logits.dtype is torch.float64, "as the model computes"


def disagrees(mesh: Mesh) -> None:
    """Ranks that have other microbatches."""
    stages = cut(mesh, build("llama", 4), 1)
    channels = Channels(mesh.world, mesh.device)
    runner = PlainRunner(stages, batches(3)[mesh.rank :][:2], loss_of)
    with pytest.raises(CollectiveError, match="ranks were given different things: shapes of microbatches is"):
        Executor(channels).run(make_schedule("1f1b", ranks=mesh.world.size, microbatches=2), runner)
    channels.close()


def loses_a_rank(mesh: Mesh) -> None:
    """The last rank ends amid a step."""
    stages = cut(mesh, build("llama", 4), 1)
    executor = Executor(Channels(mesh.world, mesh.device))

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        if batch["input_ids"].shape == data[2]["input_ids"].shape:
            os._exit(3)
        return loss_of(model, batch)

    data = batches(4)
    runner = PlainRunner(stages, data, loss)
    executor.run(make_schedule("1f1b", ranks=mesh.world.size, microbatches=4), runner)


def channels_carry(mesh: Mesh) -> None:
    """Tensors of many kinds both ways around a ring, some of them again in another shape."""
    world = mesh.world
    channels = Channels(world, mesh.device)
    following, before = (world.index + 1) % world.size, (world.index - 1) % world.size
    torch.manual_seed(0)
    sent: list[list[torch.Tensor]] = [
        [torch.randn(2, 3, dtype=torch.float64), torch.tensor(7)],
        [torch.randn(3, 4).to(torch.bfloat16).t()],
        [torch.zeros(0, 5), torch.tensor([True, False])],
        [torch.randn(300_000)],
        [],
    ]
    for _turn in range(2):
        incoming = [channels.receive(before, number, f"message {number}") for number in range(len(sent))]
        for number, tensors in enumerate(sent):
            channels.send(following, number, tensors, f"message {number}")
        # The last one first: those before it begin, too.
        for tensors, message in zip(reversed(sent), reversed(incoming), strict=True):
            received, specs = message.wait()
            assert len(received) == len(tensors) == len(specs)
            for found, wanted in zip(received, tensors, strict=True):
                assert found.dtype == wanted.dtype
                assert torch.equal(found, wanted)
        channels.wait_for_sends()
    said = r"float32 \[2\], but for inputs of the same shapes they were torch.float32 \[300000\]"
    with pytest.raises(CollectiveError, match=said):
        channels.send(following, 3, [torch.ones(2)], "message 3")
    channels.close()


def channels_forget(mesh: Mesh) -> None:
    """More kinds than are remembered: the next message of each kind has its shapes in front again, which may be others."""
    channels, peer = Channels(mesh.world, mesh.device), 1 - mesh.world.index
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(point_to_point, "_MOST_KINDS", 2)
        for length in (3, 5):
            for kind in range(3):
                incoming = channels.receive(peer, kind, f"message {kind}")
                channels.send(peer, kind, [torch.full((length,), float(kind))], f"message {kind}")
                (found,), _ = incoming.wait()
                assert found.tolist() == [float(kind)] * length
            channels.wait_for_sends()
    channels.close()
