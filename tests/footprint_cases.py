"""Cases on memory: what the engine allocates and what was predicted before."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from conformance import reference
from conformance.cases import Run
from conformance.recipe import Layout, Problem
from mesh_cases import resident

from zeromesh.mesh.groups import Mesh
from zeromesh.mesh.select import choose_transport
from zeromesh.offload import Purpose
from zeromesh.optim.sharded import GroupRules
from zeromesh.zero.footprint import predict_memory
from zeromesh.zero.plan import plan_model
from zeromesh.zero.unit import Bucket

CPU = torch.device("cpu")


def account(mesh: Mesh, problem: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    """Predict, then train three steps: bytes by purpose as predicted, in the ledger before the first step and after the last, and
    of the tensors themselves."""
    task, how = Problem(**problem), Layout(**layout)
    options = how.options(task)
    plan = plan_model(reference.build(task), options.precision.compute, GroupRules(options.optimizer).group_of)
    transport = choose_transport(options.transport, mesh.shard, mesh.device)
    predicted = predict_memory(plan, options, parts=mesh.shard.size, transport=transport, budget=how.budget)
    run = Run.start(mesh, task, how)
    ledger = run.engine.ledger
    built = _named(ledger.by_purpose())
    for step in range(3):
        run.step(step)
    if run.engine.transport.name != "shared":
        for unit in run.engine.units:
            unit.buckets[0].buffer.wait()
    result = {
        "predicted": _named(predicted.terms),
        "predicted_peak": predicted.total,
        "built": built,
        "ledger": _named(ledger.by_purpose()),
        "ledger_peak": ledger.peak(),
        "tensors": _tensors(run),
    }
    run.close()
    return result


def _named(terms: Any) -> dict[str, int]:
    return {purpose.name: nbytes for purpose, nbytes in terms.items()}


def _tensors(run: Run) -> dict[str, int]:
    """Bytes of what buckets and optimizers hold between steps."""
    found: Counter[Purpose] = Counter()
    for unit in run.engine.units:
        for bucket in unit.buckets:
            buffer = bucket.buffer
            inside = buffer.persistent and bucket.master.load(CPU).data_ptr() == buffer.own().data_ptr()
            found[Purpose.PARAMETERS] += _gathered_bytes(bucket, shared=run.engine.transport.name == "shared")
            found[Purpose.MASTER] += 0 if inside else bucket.master.nbytes
            found[Purpose.GRADIENTS] += 0 if bucket.grad is None else _bytes(bucket.grad)
            found[Purpose.PARTIAL_GRADIENTS] += 0 if bucket.partial is None else _bytes(bucket.partial)
            optimizer = run.engine.updater.optimizer_of(bucket) if bucket.trainable else None
            found[Purpose.MOMENTS] += (
                sum(moment.nbytes for moment in optimizer.moments.values()) if optimizer is not None else 0
            )
    return _named({purpose: nbytes for purpose, nbytes in found.items() if nbytes})


def _gathered_bytes(bucket: Bucket, *, shared: bool) -> int:
    """Of shared pages, this rank's own part."""
    if shared:
        return _bytes(bucket.buffer.own()) if bucket.buffer.persistent else 0
    full = bucket.buffer.full
    return full.untyped_storage().nbytes() if bucket.buffer.persistent else resident(full)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
