"""Cases with a story of their own: precision, randomness, phases. Each returns what its test looks at."""

import copy
import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeromesh.errors import LayoutError, PhaseError, ZeromeshError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import resident_bytes
from zeromesh.pipeline.pipeline import MicrobatchWork, StepDriver
from zeromesh.units.unit import Phase
from zeromesh.zero.engine import ZeroEngine

from . import reference
from .cases import Run, digest
from .models import SUBJECTS, VOCABULARY, Stack, stack, text_batch
from .recipe import Extra, Layout, Problem

SMALL = Problem(model="llama", steps=3, samples=12)


class WideNorm(nn.Module):
    """A block in bf16 whose norm is kept in fp32, as its model wants it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.linear = nn.Linear(size, size).bfloat16()
        self.out = nn.Linear(size, 3 * size).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.linear(self.norm(x.float()).bfloat16()))
        return x + self.out(inner)[..., : x.shape[-1]]


def mixed_dtypes(mesh: Mesh) -> dict[str, Any]:
    """The engine, two microbatches a step, against a loop with fp32 master weights in one process."""
    torch.manual_seed(5)
    model = Stack([WideNorm(40) for _ in range(2)], [0, 1], 40)
    for part in (model.embedding, model.head, model.norm):
        part.bfloat16()
    plain = copy.deepcopy(model)
    problem = Problem(model="stack", decay=False, precision="bfloat16", steps=4, samples=8)
    engine = ZeroEngine.build(model, mesh, Layout(stage=3).options(problem))
    run = Run(mesh=mesh, problem=problem, layout=Layout(stage=3), model=model, engine=engine)
    for step in range(problem.steps):
        run.step(step)
    wanted = _with_master_weights(plain, problem, mesh.data.size)
    found = run.parameters()
    dtypes = {str(bucket.dtype) for unit in engine.units for bucket in unit.buckets}
    engine.close()
    worst = max(float((found[name] - value).abs().max()) for name, value in wanted.items())
    return {"dtypes": sorted(dtypes), "worst": worst, "moved": float((wanted["norm.weight"] - 1).abs().max())}


def _with_master_weights(model: nn.Module, problem: Problem, microbatches: int) -> dict[str, torch.Tensor]:
    """Mixed precision as it is written by hand: gradients of microbatches are added to fp32 in turn."""
    subject = SUBJECTS[problem.model]
    masters = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    settings = problem.settings()
    optimizer = torch.optim.AdamW(
        list(masters.values()),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    for step in range(problem.steps):
        batch = reference.batch_of(problem, step)
        micro = problem.samples // microbatches
        for start in range(0, problem.samples, micro):
            loss = subject.loss_sum(model, reference.part(batch, start, start + micro))
            loss.backward(torch.full_like(loss, 1.0 / subject.count(batch)))
            for name, parameter in model.named_parameters():
                gradient, master = parameter.grad, masters[name]
                assert gradient is not None
                master.grad = gradient.float() if start == 0 else master.grad + gradient  # type: ignore[operator]
                parameter.grad = None
        optimizer.step()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(masters[name].data)
    return {name: master.detach() for name, master in masters.items()}


def dropout_masks(mesh: Mesh) -> dict[str, Any]:
    """Hashes of what every dropout layer of GPT-2 sets to zero, over two steps of two microbatches."""
    problem = Problem(model="gpt2", dropout=0.5, steps=2, samples=4)
    run = Run.start(mesh, problem, Layout(accumulation=2))
    masks: list[str] = []
    for module in run.model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _module, _args, output: masks.append(digest([(output == 0).cpu()])))
    for step in range(problem.steps):
        run.step(step)
    run.close()
    return {"masks": masks}


def recomputed_dropout(mesh: Mesh, budget: int | None, kind: str) -> dict[str, str]:
    """Parameters after three steps with dropout, activations kept or recomputed."""
    found = {}
    for name in ("plain", "recomputed"):
        torch.manual_seed(3)
        model = stack()
        for block in model.blocks:
            block.dropout.p = 0.3
        if name == "recomputed" and kind == "call":
            model.recompute = True
        elif name == "recomputed":
            for block in model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        found[name] = _train_stack(mesh, model, Layout(budget=budget))
    return found


def _train_stack(mesh: Mesh, model: nn.Module, layout: Layout) -> str:
    problem = Problem(model="stack", decay=False, steps=3, samples=12)
    engine = ZeroEngine.build(model, mesh, layout.options(problem))
    run = Run(mesh=mesh, problem=problem, layout=layout, model=model, engine=engine)
    for step in range(problem.steps):
        run.step(step)
    found = digest(run.parameters().values())
    run.close()
    return found


def stop_on_infinity(
    mesh: Mesh, problem: dict[str, Any], layout: dict[str, Any], extra: dict[str, Any]
) -> dict[str, Any]:
    """Train until an error; what was it, and are this rank's states those before the step?"""
    more = Extra(**extra)
    run = Run.start(mesh, Problem(**problem), Layout(**layout))
    for step in range(run.problem.steps):
        before = run.digest()
        bad = (mesh.rank, step) == (more.infinite["rank"], more.infinite["step"])
        try:
            run.step(step, factor=float("inf") if bad else 1.0)
        except ZeromeshError as error:
            unchanged = before == run.digest()
            return {"step": step, "error": type(error).__name__, "message": str(error), "unchanged": unchanged}
    return {"step": -1}


def _refusal(call: Callable[[], object], kind: type[Exception] = PhaseError) -> str:
    """The message of the error that a call raises; empty when it raises none."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def resting_parameters(mesh: Mesh, transport: str, budget: int | None) -> dict[str, Any]:
    """What a user finds out about parameters between steps at stage 3; each names itself when it is read or written."""
    run = Run.start(mesh, SMALL, Layout(transport=transport, budget=budget))
    shapes = {name: list(p.shape) for name, p in reference.build(SMALL).named_parameters()}
    states = []
    for step in range(2):
        parameters = dict(run.model.named_parameters())
        uses = [torch.sum, lambda p: p.data.add_(1), lambda p: torch.stack([p]), copy.deepcopy, lambda p: p.clamp_(0)]
        states.append(
            {
                "shapes": {name: list(p.shape) for name, p in parameters.items()} == shapes,
                "silent": [
                    name for name, p in parameters.items() for use in uses if name not in _refusal(partial(use, p))
                ],
                "model": "trainer.state_dict()" in _refusal(lambda: copy.deepcopy(run.model)),
                "saved": "trainer.state_dict()" in _refusal(lambda: torch.save(run.model.state_dict(), os.devnull)),
                "gradients": [name for name, p in parameters.items() if p.grad is not None],
            }
        )
        run.step(step)
        run.evaluate()
    run.close()
    return {"states": states}


def phases(mesh: Mesh, stage: int, transport: str) -> dict[str, Any]:
    """Everything that is not allowed, and that training goes on afterwards."""
    run = Run.start(mesh, SMALL, Layout(stage=stage, transport=transport))
    engine, model = run.engine, run.model
    ids = run.batch_of(0)["input_ids"][:2]
    unit = engine.units[1]
    wrong = Phase.LIVE if unit.phase is Phase.RESTING else Phase.GATHERING
    found = {"transition": _refusal(lambda: unit.enter(wrong)), "unit": unit.name}
    found["outside"] = _refusal(lambda: model(input_ids=ids))
    found["unknown"] = _refusal(lambda: engine.state.parameter("no.such"), LayoutError)
    run.step(0)
    found["outside later"] = _refusal(lambda: model.model(input_ids=ids))
    with engine.evaluation():
        found["nested"] = _refusal(lambda: _train(engine, lambda: model(ids)))
        model(input_ids=ids)
    found["norm"] = run.step(1).grad_norm
    run.close()
    return found


def _train(engine: ZeroEngine, loss_of: Callable[[], torch.Tensor]) -> None:
    StepDriver(engine.mesh).train(engine, [MicrobatchWork(batch={})], lambda _batch, _seed: loss_of())


def looking(mesh: Mesh, stage: int, transport: str, budget: int | None) -> dict[str, Any]:
    """Evaluation, generation and `gathered` against a plain model that holds the same parameters."""
    run = Run.start(mesh, SMALL, Layout(stage=stage, transport=transport, budget=budget))
    run.step(0)
    plain = reference.build(SMALL).to(mesh.device)
    reference.convert(plain, torch.float64)
    names = run.engine.state.names()
    for name, tensor in run.parameters().items():
        plain.get_parameter(name).data.copy_(tensor)
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]], device=mesh.device)
    settings = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    subject, batch = SUBJECTS["llama"], run.batch_of(0)
    with torch.no_grad():
        wanted_loss = float(subject.loss_sum(plain, batch)) / subject.count(batch)
        wanted_tokens = plain.generate(prompt, **settings).tolist()
        tokens = run.model.generate(prompt, **settings).tolist()
        hidden = torch.equal(run.model.model(prompt).last_hidden_state, plain.model(prompt).last_hidden_state)
    with run.engine.gathered(names[:2]):
        equal = [torch.equal(run.model.get_parameter(n), plain.get_parameter(n)) for n in names[:2]]
    outcome = {
        "loss": run.evaluate() == wanted_loss,
        "tokens": tokens == wanted_tokens,
        "hidden": hidden,
        "gathered": equal,
        "norm": run.step(1).grad_norm,
    }
    run.close()
    return outcome


def misuse_of_backward(mesh: Mesh) -> dict[str, str]:
    """One rank. Backward called by the user's own loss, and reentrant checkpointing; each spoils its engine."""
    ids = text_batch(torch.Generator().manual_seed(0), 2)["input_ids"].to(mesh.device)
    found = {}

    def start(model: Stack) -> ZeroEngine:
        options = Layout().options(Problem(model="stack", decay=False))
        return ZeroEngine.build(model, mesh, options)

    own = stack()
    engine = start(own)

    def calls_backward() -> torch.Tensor:
        loss = own(ids).sum()
        loss.backward()
        return loss

    engine.begin_step(0)
    found["own"] = _refusal(lambda: _train(engine, calls_backward))
    engine.close()
    old = stack(2)
    block = old.blocks[0]

    def twice(x: torch.Tensor) -> torch.Tensor:
        """Two reentrant checkpoints of one block: its parameters get two gradients one after the other."""
        x = checkpoint(block, x, use_reentrant=True)
        return checkpoint(block, x, use_reentrant=True)

    engine = start(old)
    engine.begin_step(0)
    found["reentrant"] = _refusal(
        lambda: _train(engine, lambda: old.head(twice(old.embedding(ids))).logsumexp(-1).sum())
    )
    engine.close()
    return found


def interrupted_call(mesh: Mesh) -> dict[str, Any]:
    """The user's own call of the model fails inside a block; what then?"""
    run = Run.start(mesh, SMALL, Layout())
    run.step(0)
    bad = torch.full((1, 4), VOCABULARY + 5, device=mesh.device)
    with torch.no_grad():
        error = _refusal(lambda: run.model(input_ids=bad), Exception)
        again = (
            run.model(input_ids=torch.ones(1, 4, dtype=torch.long, device=mesh.device)).logits.isfinite().all().item()
        )
        _refusal(lambda: run.model(input_ids=bad), Exception)
    norm = run.step(1).grad_norm
    run.close()
    return {"error": bool(error), "again": again, "norm": norm}


def made_whole(mesh: Mesh) -> dict[str, Any]:
    """After `make_whole` the model is an ordinary one."""
    run = Run.start(mesh, SMALL, Layout())
    run.step(0)
    wanted = run.parameters()
    run.engine.state.make_whole(lambda: None)
    run.close()
    parameters = dict(run.model.named_parameters())
    equal = all(torch.equal(parameters[name].cpu(), value) for name, value in wanted.items())
    run.model(input_ids=torch.ones(1, 4, dtype=torch.long, device=mesh.device)).logits.sum().backward()
    gradients = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in parameters.values())
    return {"equal": equal, "gradients": gradients}


def without_targets(mesh: Mesh, stage: int, transport: str, kind: str) -> str:
    """The last rank's loss is 0 in the first and third step: a constant, or computed and multiplied by 0."""
    problem = Problem(model="lora", steps=4, samples=8)
    layout = Layout(stage=stage, transport=transport, budget=0, accumulation=2)
    run = Run.start(mesh, problem, layout)
    computed = run.loss_of

    def loss_of(micro: Any, factor: float) -> torch.Tensor:
        loss = computed(micro, factor)
        return loss if factor else loss.new_zeros(()) if kind == "constant" else loss * 0

    run.loss_of = loss_of  # type: ignore[method-assign]
    for step in range(problem.steps):
        empty = step in (0, 2) and mesh.rank == mesh.world_size - 1
        run.step(step, factor=0.0 if empty else 1.0)
    found = digest(tensor for _, tensor in sorted(run.parameters().items()))
    run.close()
    return found


def leaks(mesh: Mesh, stage: int, transport: str, runs: int) -> dict[str, list[int]]:
    """Open files, mappings of shared memory and resident bytes after each of several engines."""
    files, mappings, resident = [], [], []
    layout = Layout(stage=stage, transport=transport)
    for _ in range(runs):
        run = Run.start(mesh, SMALL, layout)
        run.step(0)
        run.close()
        del run
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")))
        mappings.append(Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:"))
        resident.append(resident_bytes())
    return {"files": files, "mappings": mappings, "resident": resident}
