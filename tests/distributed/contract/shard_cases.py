"""Cases of loops of a user's own over a model that `shard` has partitioned, each beside the same loop in plain PyTorch."""

import copy
import gc
import io
import os
import pickle
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import peft
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import zeromesh
from tests.support.plain import error_of
from tests.support.trainer_cases import VOCABULARY, gpt2, llama
from zeromesh.errors import ZeromeshError
from zeromesh.mesh.process_mesh import Mesh

WIDTH, LABELS, STEPS = 48, 4, 4
EXACT = 1e-9
Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Backbone(nn.Module):
    """`recompute`: `use_reentrant` of checkpointed blocks; None: none is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.recompute: bool | None = None
        self.used = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks[: self.used]:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(WIDTH, LABELS)
        self.scale = nn.Parameter(torch.ones(LABELS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x)) * self.scale


def adam(model: nn.Module) -> torch.optim.Optimizer:
    groups = [[p for n, p in model.named_parameters() if ("bias" in n) == biases] for biases in (True, False)]
    return torch.optim.AdamW([{"params": groups[0], "weight_decay": 0.0}, {"params": groups[1]}], lr=1e-2)


def mse(model: Any, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Side:
    """One of the two: a model and its optimizer, and batches of this rank, or those of all ranks, which count a share each."""

    def __init__(self, model: Any, optimizer: Any, place: int, ranks: int) -> None:
        self.model, self.optimizer, self.ours = model, optimizer, hasattr(optimizer, "engine")
        self._places = [place] if self.ours else range(ranks)
        self._ranks = ranks
        self.kept: list[torch.Tensor] = []
        self.share = 1.0 if self.ours else 1.0 / ranks

    def batches(self, step: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(step)
        draws = torch.randn(self._ranks, 3, WIDTH + LABELS, generator=generator, dtype=torch.float64)
        for place in self._places:
            yield draws[place, :, :WIDTH].clone(), draws[place, :, WIDTH:]

    def backward(self, step: int, loss: Callable[[Any, Batch], torch.Tensor] = mse) -> None:
        for batch in self.batches(step):
            (self.share * loss(self.model, batch)).backward()

    def clip(self, norm: float) -> float:
        if self.ours:
            return float(self.optimizer.clip_grad_norm_(norm))
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), norm))

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def sides(mesh: Mesh, stage: int, frozen: str = "", **options: Any) -> tuple[Side, Side]:
    """A partitioned model, and the same model as it is. `frozen`: a module that is not trained at first."""
    torch.manual_seed(0)
    model = Net().double()
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)
    reference = copy.deepcopy(model)
    plain = adam(reference)
    options = {"config": {"parallel": {"timeout_seconds": 10}}, **options}
    sharded, optimizer = zeromesh.shard(model, adam(model), stage=stage, **options)
    ranks, place = optimizer.engine.mesh.data.size, optimizer.engine.mesh.data_index  # type: ignore[union-attr]
    return Side(sharded, optimizer, place, ranks), Side(reference, plain, place, ranks)


def apart(ours: Side, plain: Side) -> float:
    wanted = dict(plain.model.named_parameters())
    return max(float((value - wanted[name]).abs().max()) for name, value in zeromesh.state_dict(ours.model))


# Losses, each of which is a loop with clipping.


def penalty(model: Any, batch: Batch) -> torch.Tensor:
    x = batch[0].requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, batch[1]) + gradient.pow(2).mean()


def penalty_alone(model: Any, batch: Batch) -> torch.Tensor:
    """Of layers in the root alone, the result of which is not in the graph of the loss."""
    model.backbone.used, x = 0, batch[0].requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.pow(2).mean()


def of_parameters(model: Any, batch: Batch) -> torch.Tensor:
    loss = mse(model, batch)
    wanted = [model.head.weight, model.backbone.blocks[1].up.weight]
    return loss + sum(each.pow(2).sum() for each in torch.autograd.grad(loss, wanted, create_graph=True))


def adversarial(model: Any, batch: Batch) -> torch.Tensor:
    x = batch[0].requires_grad_()
    F.mse_loss(model(x), batch[1]).backward(inputs=[x])
    assert x.grad is not None
    return mse(model, (x.detach() + 0.1 * x.grad.sign(), batch[1]))


def _features(model: Any, modules: Sequence[nn.Module], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    found: list[torch.Tensor] = []
    handles = [module.register_forward_hook(lambda _m, _a, output: found.append(output)) for module in modules]
    loss = mse(model, batch)
    for handle in handles:
        handle.remove()
    return loss, torch.stack([each.pow(2).mean() for each in found]).sum()


def features(model: Any, batch: Batch) -> torch.Tensor:
    return sum(_features(model, model.backbone.blocks, batch), torch.zeros(()))


def inner_features(model: Any, batch: Batch) -> torch.Tensor:
    return _features(model, [model.backbone.embed, *(each.up for each in model.backbone.blocks)], batch)[1]


def part(model: Any, batch: Batch) -> torch.Tensor:
    hidden = model.backbone(batch[0])
    with torch.no_grad():
        model(batch[0])
    return F.mse_loss(hidden[:, :LABELS], batch[1])


def fused_head(model: Any, batch: Batch) -> torch.Tensor:
    return F.mse_loss(F.linear(model.backbone(batch[0]), model.head.weight, model.head.bias), batch[1])


def decayed(model: Any, batch: Batch) -> torch.Tensor:
    return mse(model, batch) + 0.1 * weights(model, batch)


def weights(model: Any, batch: Batch) -> torch.Tensor:
    return torch.stack([each.pow(2).sum() for each in model.parameters()]).sum()


def others_between(model: Any, batch: Batch) -> torch.Tensor:
    model(3 * batch[0])  # Nobody keeps this.
    loss = mse(model, batch) + mse(model, (2 * batch[0], batch[1]))
    with torch.inference_mode():
        model.eval()(batch[0])
    model.train()(batch[0])
    return loss


LOSSES = {
    each.__name__: each
    for each in (
        penalty,
        penalty_alone,
        of_parameters,
        adversarial,
        features,
        inner_features,
        part,
        fused_head,
        decayed,
        others_between,
    )
}


# Loops that have more to them.


def zero_between(side: Side, step: int) -> None:
    losses = [side.share * mse(side.model, batch) for batch in side.batches(step)]
    side.optimizer.zero_grad()
    for loss in losses:
        loss.backward()
    side.optimizer.step()


def retained(side: Side, step: int) -> None:
    for batch in side.batches(step):
        loss, hidden = (side.share * each for each in _features(side.model, [side.model.backbone.embed], batch))
        loss.backward(retain_graph=True)
        (2 * loss).backward(retain_graph=True)
        hidden.backward()
    side.finish()


def unused(side: Side, step: int) -> None:
    side.model.backbone.used = 3 - step % 2
    side.optimizer.zero_grad(set_to_none=step < 2)
    side.backward(step)
    side.optimizer.step()


def unused_by_others(side: Side, step: int) -> None:
    for place, batch in zip(side._places, side.batches(step), strict=True):
        side.model.backbone.used = 3 if place == 0 else 2
        (side.share * mse(side.model, batch)).backward()
    side.finish()


def toggled(side: Side, step: int) -> None:
    side.model.backbone.blocks[1].requires_grad_(step % 2 == 1)
    side.backward(step)
    side.finish()


def by_turns(side: Side, step: int) -> None:
    """Backwards of a step in which other parts are frozen: none is trained in the first, as of a critic that a generator asks."""
    blocks = side.model.backbone.blocks
    side.model.requires_grad_(False)
    for x, y in side.batches(step):
        (side.share * mse(side.model, (x.requires_grad_(), y))).backward()
    side.model.requires_grad_(True)
    for turn in range(2):
        blocks[turn].requires_grad_(False)
        blocks[1 - turn].requires_grad_(True)
        side.backward(step + turn)
    side.finish()


def recomputed(side: Side, step: int) -> None:
    side.model.backbone.recompute = [False, True, None, False][step % 4]
    side.backward(step)
    side.finish()


def hooked(side: Side, step: int) -> None:
    """Hooks of the user's on gradients, which run before the engine takes them."""
    if not step:
        side.model.scale.register_hook(lambda grad: -2 * grad)
        side.model.head.weight.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", -3 * each.grad))
    (side.share * torch.stack([mse(side.model, batch) for batch in side.batches(step)]).sum()).backward()
    side.finish()


def by_closure(side: Side, step: int) -> None:
    def closure() -> float:
        side.model.zero_grad()
        side.backward(step)
        return side.clip(0.05)

    assert side.optimizer.step(closure) > 0.05
    if step:
        StepLR(side.optimizer, 1, 0.5).step()


def fallible(side: Side, step: int) -> None:
    """Exceptions that the user catches: in forward, in an evaluation, and in backward where there is a single rank."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    block = side.model.backbone.blocks[1]
    for grad in (False, True) if side.ours else ():
        handle = block.register_forward_hook(fail)
        with torch.set_grad_enabled(grad):
            assert error_of(partial(side.backward, step), ZeroDivisionError)
        handle.remove()
    if side.ours and side.optimizer.engine.mesh.world_size == 1:
        handle = block.register_forward_hook(lambda _m, _a, output: output.register_hook(fail) and None)
        assert error_of(partial(side.backward, step), ZeroDivisionError)
        handle.remove()
        side.optimizer.zero_grad()
    side.kept = [side.share * mse(side.model, batch) for batch in side.batches(step)]
    for loss in side.kept:
        loss.backward()
    side.finish()


def compiled(side: Side, step: int) -> None:
    """Blocks are compiled once more between a backward and its update, for an evaluation."""
    if not step and side.ours:
        for block in side.model.backbone.blocks:
            block.compile(backend="eager")
    side.backward(step)
    with torch.no_grad():
        side.model(next(side.batches(step))[0])
    side.finish()


LOOPS = {
    each.__name__: each
    for each in (
        zero_between,
        retained,
        unused,
        unused_by_others,
        toggled,
        by_turns,
        recomputed,
        hooked,
        by_closure,
        fallible,
        compiled,
    )
}


def follows(mesh: Mesh, stage: int, name: str, **options: Any) -> float:
    """How far some steps of a loop come from the same in plain PyTorch."""
    both, norms = sides(mesh, stage, **options), []
    for step in range(STEPS):
        for side in both:
            if name in LOOPS:
                LOOPS[name](side, step)
                continue
            side.backward(step, weights if name == "weights" else LOSSES.get(name, mse))
            norms.append(side.clip(0.05))
            side.finish()
    differences = [abs(one - other) for one, other in zip(norms[::2], norms[1::2], strict=True)]
    return max(apart(*both), *differences, 0.0)


def adversaries(mesh: Mesh, stage: int) -> None:
    """A generator against a critic, with a frozen network of which features in the middle of blocks count."""
    pairs = [sides(mesh, stage) for _ in range(2)]
    for place, judge in enumerate(each.model for each in sides(mesh, stage)):
        judge.requires_grad_(False)
        maker, critic = (pair[place] for pair in pairs)

        def criticised(model: Any, batch: Batch, maker: Side = maker) -> torch.Tensor:
            return (model(_wide(maker.model(batch[0]).detach())) - model(batch[0])).mean()

        def made(model: Any, batch: Batch, critic: Side = critic, judge: Any = judge) -> torch.Tensor:
            fake = _wide(model(batch[0]))
            return inner_features(judge, (fake, batch[1])) - critic.model(fake).mean()

        for step in range(STEPS):
            critic.optimizer.zero_grad()
            critic.backward(step, criticised)
            critic.optimizer.step()
            maker.optimizer.zero_grad()
            maker.backward(step, made)
            maker.optimizer.step()
    assert max(apart(*pair) for pair in pairs) < EXACT


def _wide(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, WIDTH - LABELS))


def averages(mesh: Mesh, stage: int) -> None:
    ours, plain = sides(mesh, stage, ema={"decay": 0.9})
    averaged = AveragedModel(plain.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(STEPS):
        for side in (ours, plain):
            side.backward(step)
            side.finish()
        averaged.update_parameters(plain.model)
    (x, _) = next(iter(ours.batches(9)))
    with zeromesh.averaged(ours.model), torch.no_grad():
        assert float((ours.model(x) - averaged(x)).abs().max()) < EXACT
        wanted = dict(averaged.module.named_parameters())
        found = {name: each for name, each in zeromesh.state_dict(ours.model) if name in wanted}
        assert max(float((found[name] - each).abs().max()) for name, each in wanted.items()) < EXACT
        with zeromesh.gathered(ours.model, [name := min(wanted)]):
            assert float((ours.model.get_parameter(name) - wanted[name]).abs().max()) < EXACT
        with zeromesh.averaged(ours.model):
            assert float((ours.model(x) - averaged(x)).abs().max()) < EXACT
        assert float((ours.model(x) - averaged(x)).abs().max()) < EXACT
        inside = "is of trained weights, and the model has averaged ones: leave the block averaged() first"
        _says(f"a checkpoint {inside}", lambda: zeromesh.save("nowhere", ours.model, ours.optimizer))
        _says(f"a load {inside}", lambda: zeromesh.load("nowhere", ours.model, ours.optimizer))
        _says(f"a load {inside}", lambda: ours.model.load_state_dict(plain.model.state_dict()))
        _says(f"an update {inside}", ours.optimizer.step)
    assert apart(ours, plain) < EXACT
    best = dict(zeromesh.state_dict(ours.model))
    kept = {name: each.clone() for name, each in best.items()}
    ours.backward(STEPS)
    ours.finish()
    assert all(torch.equal(each, kept[name]) for name, each in best.items()), "they are copies"
    with zeromesh.averaged(ours.model):
        kept = dict(zeromesh.state_dict(ours.model))
        zeromesh.unshard(ours.model)
    assert all(torch.equal(each, kept[name]) for name, each in ours.model.named_parameters())


def _says(words: str, call: Callable[[], object]) -> None:
    """Assert that a call is refused in these words."""
    said = error_of(call, ZeromeshError)
    assert words in said, (words, said)


def refused(mesh: Mesh, stage: int) -> None:
    """What is said of loops that cannot be computed right; the model trains on after all of them."""
    ours, plain = sides(mesh, stage, accumulation=2)
    model, optimizer = ours.model, ours.optimizer
    _says("call loss.backward() before", optimizer.step)
    (batch,) = ours.batches(0)
    kept = mse(model, batch)
    kept.backward(retain_graph=True)
    _says("optimizer.gradient(name)", lambda: model.head.weight.grad)
    _says("optimizer.gradient(name)", lambda: setattr(model.head.weight, "grad", torch.ones(LABELS, WIDTH).double()))
    _says("optimizer.clip_grad_norm_(max_norm)", lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    _says("in place of a GradScaler", lambda: scaler.step(optimizer))
    kept.backward(retain_graph=True)
    _says("the step has had its 2 backwards (accumulation=2)", lambda: kept.backward(retain_graph=True))
    optimizer.zero_grad()
    for side in (ours, plain):
        side.backward(0)
    optimizer.step()
    plain.optimizer.step()
    _says("call optimizer.zero_grad() after it", optimizer.step)
    optimizer.zero_grad()
    plain.optimizer.zero_grad()
    _says("run forward again", kept.backward)
    _says("is partitioned already", lambda: zeromesh.shard(model, stage=stage))
    _says("is partitioned already", lambda: zeromesh.shard(nn.Sequential(model, nn.Linear(4, 4)), stage=stage))
    _says("that the model has not", lambda: zeromesh.shard(nn.Linear(2, 2), adam(nn.Linear(3, 3)), stage=stage))
    _says("zeromesh.save(directory, model, optimizer)", lambda: optimizer.state_dict()["state"])
    _says("zeromesh.save(directory, model, optimizer)", lambda: optimizer.state[model.head.weight])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.safetensors").touch()
        _says("load them into the model before shard()", lambda: zeromesh.load(folder, model, optimizer))
    _says("cannot be copied or pickled", lambda: copy.deepcopy(optimizer))
    _says("cannot be copied or pickled", lambda: pickle.dumps(optimizer))
    if stage < 3:
        _says("leave it out", model.share_memory)
    offload = {"optimizer": "file"}
    _says("'directory': ", lambda: zeromesh.shard(nn.Linear(2, 2), stage=stage, offload=offload))
    block, model.backbone.blocks[1] = model.backbone.blocks[1], Block().double()
    said = "was added, removed, replaced or moved after shard()"
    _says(f"backbone.blocks.1.norm.weight {said}", lambda: dict(zeromesh.state_dict(model)))
    model.backbone.blocks[1] = model.backbone.blocks[0]
    model.backbone.blocks[0] = block
    _says(f"backbone.blocks.0.norm.weight {said}", lambda: dict(zeromesh.state_dict(model)))
    model.backbone.blocks[0], model.backbone.blocks[1] = model.backbone.blocks[1], block
    _says("add groups to the torch optimizer before shard()", lambda: optimizer.add_param_group({"params": []}))
    if stage == 3 and mesh.world_size > 1:
        _says("zeromesh.state_dict(model)", lambda: torch.save(model.state_dict(), io.BytesIO()))
        _says("zeromesh.gathered(model, [", lambda: copy.deepcopy(model))
        _says("zeromesh.gathered(model, [", lambda: pickle.dumps(model))
        _says("zeromesh.gathered(model, ['scale'])", lambda: model.scale + 1)
    for side in (ours, plain):
        side.backward(1)
        side.finish()
    assert apart(ours, plain) < EXACT


def read_between(mesh: Mesh, stage: int, counts: bool = True, **options: Any) -> None:
    """Gradients that are read between two backwards of a step count once, or the second backward is refused."""
    ours, plain = sides(mesh, stage, accumulation=2, **options)
    ours.backward(0)
    ours.optimizer.gradient("head.weight")
    if not counts:
        _says("have been summed over all ranks to be read", lambda: ours.backward(0))
        ours.optimizer.zero_grad()
        ours.backward(0)
    for side in (ours, plain, plain):
        side.backward(0)
    for side in (ours, plain):
        side.finish()
    assert apart(ours, plain) < 1e-12


def deferred(mesh: Mesh, stage: int) -> None:
    with torch.device("meta"):
        model = llama()
    model, _ = zeromesh.shard(model, stage=stage)
    whole = llama()
    whole.load_state_dict(dict(zeromesh.state_dict(model)), strict=False)
    ids = torch.arange(16)[None] % VOCABULARY
    with torch.no_grad():
        assert float((model.eval()(ids).logits - whole.eval()(ids).logits).abs().max()) < 1e-6


def copies(mesh: Mesh) -> None:
    ours, plain = sides(mesh, 3)
    names = [name for name, _ in ours.model.named_parameters()]
    ours.backward(0)
    with zeromesh.gathered(ours.model, names):
        made = [copy.deepcopy(ours.model), pickle.loads(pickle.dumps(ours.model))]  # noqa: S301 - made here
    plain.backward(0)
    (x, _) = next(iter(ours.batches(1)))
    for each in made:
        out = each(x)
        assert torch.equal(out, plain.model(x))
        out.sum().backward()
        each.zero_grad()
        assert each.scale.grad is None
    for side in (ours, plain):
        side.finish()
    assert apart(ours, plain) < EXACT
    zeromesh.unshard(ours.model)
    assert type(ours.model.scale) is nn.Parameter
    assert bool(torch.isfinite(ours.model(x)).all())


def evaluated(mesh: Mesh) -> None:
    """A model without an optimizer has flags as the user sets them, also afterwards, and no gradients but of its inputs."""
    model = llama().double()
    reference = copy.deepcopy(model)
    zeromesh.shard(model, stage=3, parallel={"tensor": mesh.world_size})
    assert all(each.requires_grad for each in model.parameters())
    for each in (model, reference):
        each.model.layers[0].requires_grad_(False)
        each.lm_head.weight.requires_grad = False
    x, y = (torch.ones(1, 3, reference.config.hidden_size, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for given, each in ((x, model), (y, reference)):
        each(inputs_embeds=given).logits.sum().backward()
    assert float((x.grad - y.grad).abs().max()) < EXACT  # type: ignore[operator]
    assert not any(each._grad is not None for each in model.parameters())
    zeromesh.unshard(model)
    for (name, each), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert each.requires_grad == other.requires_grad == (not name.startswith(("model.layers.0.", "lm_head"))), name
    try:
        zeromesh.shard(model, parallel={"tensor": 7})
    except ZeromeshError:
        assert [each.requires_grad for each in model.parameters()] == [p.requires_grad for p in reference.parameters()]


def forgotten(mesh: Mesh, stage: int) -> None:
    """What is left of a model that nobody holds any more, and of its engine; how many threads and descriptors it has left."""
    threads, kept, files = threading.active_count(), [], []
    for _ in range(3):
        ours, _ = sides(mesh, stage)
        ours.backward(0)
        ours.optimizer.step()
        kept += [weakref.ref(ours.model), weakref.ref(ours.optimizer.engine)]
        mesh.world.barrier("all have trained")
        del ours
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")))
    more = threading.active_count() - threads, files[-1] - files[-2]
    assert [each() for each in kept if each() is not None] == []
    assert more == (0, 0)


def saved(mesh: Mesh, folder: str) -> list[float]:
    """Trains for two steps and saves, trains on for two, saves again; the latter is damaged."""
    ours, plain = sides(mesh, 3)
    scheduler, other = StepLR(ours.optimizer, 1, 0.5), StepLR(plain.optimizer, 1, 0.5)
    # What only the loop has is not saved.
    ours.optimizer.param_groups[0].update(
        called=len, calls=[{"first": len}], floor=numpy.float32(0.25), pair=torch.tensor([0.1, 2.0])
    )
    for step in range(4):
        for side, each in ((ours, scheduler), (plain, other)):
            side.backward(step)
            side.finish()
            each.step()
        if step % 2:
            path = zeromesh.save(folder, ours.model, ours.optimizer, state={"step": step, **scheduler.state_dict()})
    if mesh.rank == 0:
        largest = max((each for each in path.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 255
        largest.write_bytes(content)
        torch.save(plain.model.state_dict(), Path(folder, "plain.pt"))
    mesh.world.barrier("damage")
    return [apart(ours, plain)]


def loaded(mesh: Mesh, folder: str, stage: int) -> tuple[int, float]:
    """Goes on from there on other ranks, with the batches of two ranks; loads twice. The step, and how far it gets from `saved`."""
    ours, plain = sides(mesh, stage)
    plain.model.load_state_dict(torch.load(Path(folder, "plain.pt")))
    scheduler, group = StepLR(ours.optimizer, 1, 0.5), ours.optimizer.param_groups[0]
    group["pair"] = torch.zeros(2)
    for _ in range(2):
        state = zeromesh.load(folder, ours.model, ours.optimizer) or {}
    assert (group["floor"], *group["pair"].tolist()) == (0.25, *torch.tensor([0.1, 2.0]).tolist())
    assert not group.keys() & {"called", "calls"}
    scheduler.load_state_dict({name: value for name, value in state.items() if name != "step"})
    for step in range(state["step"] + 1, 4):
        pair = Side(plain.model, plain.optimizer, 0, 2)
        torch.stack([mse(ours.model, batch) for batch in pair.batches(step)]).mean().backward()
        ours.finish()
        scheduler.step()
    return state["step"], apart(ours, plain)


def generated(mesh: Mesh, adapted: bool) -> None:
    """Ranks with other prompts and lengths, over collectives; between forward and backward too."""
    torch.manual_seed(0)
    model: Any = llama() if adapted else gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    if adapted:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    reference = copy.deepcopy(model).eval()
    trained = [each for each in model.parameters() if each.requires_grad]
    model, optimizer = zeromesh.shard(model, torch.optim.AdamW(trained), stage=3, parallel={"transport": "gloo"})
    ids = torch.randint(1, VOCABULARY, (1, 4 + mesh.rank), generator=torch.Generator().manual_seed(mesh.rank))
    loss = model(input_ids=ids, labels=ids).loss
    arguments = {"input_ids": ids, "max_new_tokens": 6 - 3 * mesh.rank, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.eval().generate(**arguments), reference.generate(**arguments))
    loss.backward()
    optimizer.step()  # type: ignore[union-attr]
