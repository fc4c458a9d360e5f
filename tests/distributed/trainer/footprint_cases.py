"""Cases on memory: what the engine allocates and what was predicted before."""

import time
from collections import Counter
from typing import Any

import torch

from tests.conformance import reference
from tests.conformance.cases import Run
from tests.conformance.models import VOCABULARY, stack
from tests.conformance.recipe import Layout, Problem
from tests.distributed.mesh.test_transports import resident
from zeromesh.comm.transport import choose_transport
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Purpose
from zeromesh.offload.accelerator import on_accelerator
from zeromesh.optim.fused_optimizer import GroupRules
from zeromesh.options import ZeroOptions
from zeromesh.pipeline.pipeline import MicrobatchWork, StepDriver
from zeromesh.units.build import plan_layouts
from zeromesh.units.plan import plan_model
from zeromesh.units.unit import Bucket
from zeromesh.weight_init.weight_sources import BuiltSource
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.memory_model import MemoryModel


def account(mesh: Mesh, problem: dict[str, Any], layout: dict[str, Any], paced: bool = False) -> None:
    """Predict, then train three steps: bytes by purpose in the ledger before the first step and after the last, and of the tensors
    themselves, are as predicted. `paced`: how many gradients are there at once depends on how ranks keep pace with each other."""
    task, how = Problem(**problem), Layout(**layout)
    options = how.options(task)
    plan = plan_model(reference.build(task), options.precision.compute, GroupRules(options.optimizer).group_of)
    transport = choose_transport(options.transport, mesh.shard, mesh.device)
    dividers = options.dividing(mesh.replicate.size)
    layouts = plan_layouts(plan, mesh.shard.size, options.alignment, dividers=dividers)
    predicted = MemoryModel(layouts, options, mesh.shard.size, transport, mesh.device)
    run = Run.start(mesh, task, how)
    ledger = run.engine.ledger
    built = _named(ledger.by_purpose())
    for step in range(3):
        run.step(step)
    if run.engine.groups[0].transport.name != "shared":
        for unit in run.engine.units:
            unit.buckets[0].buffer.wait()
    terms, found, peak, tensors = _named(predicted.terms), _named(ledger.by_purpose()), ledger.peak(), _tensors(run)
    run.close()
    total, stay = sum(terms.values()), options.gradients_keep_memory(mesh.device)
    if paced or not stay:
        terms.pop(Purpose.GRADIENTS.name, None)
    assert found == terms
    if paced:
        assert sum(terms.values()) < peak <= predicted.total
        return
    # All gradient shards are there before the update, but perhaps not while most is gathered, or received from replicas.
    assert (predicted.total if stay and dividers == 1 else total) <= peak <= predicted.total
    assert built == terms
    for passing in (Purpose.GRADIENT_BUCKETS, Purpose.STAGING):
        terms.pop(passing.name, None)
    assert tensors == terms


def lead(mesh: Mesh) -> None:
    """A rank whose peer begins backward late waits instead of keeping gradients where autograd has put them.

    It may have those of a unit that backward is in beside those of one that waits for a slot.
    """
    for transport in ("shared", "gloo", "inside"):
        torch.manual_seed(0)
        model = stack(layers=12, size=64)
        name: Any = transport
        inside = transport == "inside"
        options = ZeroOptions(
            stage=3,
            transport="shared" if inside else name,
            optimizer_in_backward=inside,
            on_nonfinite="stop" if inside else "skip",
            clip_norm=0.0 if inside else 1.0,
        )
        engine = ZeroEngine.build(model, mesh, options, BuiltSource(model))
        gradients, most = engine._passes.gradients, 0
        begin, take = gradients.begin, gradients.take

        def late(*arguments: Any, begin: Any = begin, **named: Any) -> None:
            begin(*arguments, **named)
            if mesh.rank == 1:
                time.sleep(0.5)

        def watched(*arguments: Any, take: Any = take, model: Any = model) -> None:
            nonlocal most
            take(*arguments)
            most = max(most, sum(_bytes(p.grad) for p in model.parameters() if p.grad is not None))

        gradients.begin, gradients.take = late, watched
        tokens = torch.arange(8).view(1, 8) % VOCABULARY
        engine.begin_step(0)
        work = [MicrobatchWork(batch={"tokens": tokens})]
        StepDriver(mesh).train(engine, work, lambda batch, _, model=model: model(batch["tokens"]).square().sum())
        engine.finish_step()
        sizes = [sum(bucket.layout.padded * 4 for bucket in unit.trainable) for unit in engine.units]
        engine.close()
        assert most <= 2 * max(sizes)
        assert sum(sizes) > 8 * max(sizes)


def _named(terms: Any) -> dict[str, int]:
    return {purpose.name: nbytes for purpose, nbytes in terms.items()}


def _tensors(run: Run) -> dict[str, int]:
    """Bytes of what buckets and optimizers hold between steps."""
    found: Counter[Purpose] = Counter()
    for unit in run.engine.units:
        for bucket in unit.buckets:
            buffer = bucket.buffer
            resting = bucket.copy is not None and not buffer.persistent
            found[Purpose.PARAMETERS] += bucket.copy.nbytes if resting and bucket.copy is not None else 0
            inside = buffer.persistent and bucket.master.load(buffer.full.device).data_ptr() == buffer.own().data_ptr()
            found[Purpose.PARAMETERS] += _gathered_bytes(bucket, shared=run.engine.groups[0].transport.name == "shared")
            purpose = Purpose.MASTER if bucket.spec.requires_grad else Purpose.PARAMETERS
            found[purpose] += 0 if inside else bucket.master.nbytes
            found[Purpose.GRADIENTS] += 0 if bucket.grad is None else _bytes(bucket.grad)
            found[Purpose.PARTIAL_GRADIENTS] += 0 if bucket.partial is None else _bytes(bucket.partial)
            optimizer = run.engine.optimizer_step.optimizer_of(bucket) if bucket.trainable else None
            found[Purpose.MOMENTS] += sum(moment.nbytes for moment in optimizer.moments.values()) if optimizer is not None else 0
    return _named({purpose: nbytes for purpose, nbytes in found.items() if nbytes})


def _gathered_bytes(bucket: Bucket, *, shared: bool) -> int:
    """Of shared pages, this rank's own part."""
    if shared:
        return _bytes(bucket.buffer.own()) if bucket.buffer.persistent else 0
    full = bucket.buffer.full
    on_device = on_accelerator(full)
    return full.untyped_storage().nbytes() if bucket.buffer.persistent or on_device else resident(full)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
