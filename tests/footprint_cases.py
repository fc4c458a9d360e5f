"""Cases on memory: what the engine allocates and what was predicted before."""

from __future__ import annotations

from typing import Any

import torch
from conformance import reference
from conformance.cases import Run
from conformance.recipe import Layout, Problem

from zeromesh.mesh.groups import Mesh
from zeromesh.mesh.select import choose_transport
from zeromesh.offload import Purpose
from zeromesh.optim.sharded import GroupRules
from zeromesh.zero.footprint import predict_memory
from zeromesh.zero.plan import plan_model


def account(mesh: Mesh, problem: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    """Predict, then train three steps: bytes by purpose as predicted, in the ledger, and of the tensors themselves."""
    task, how = Problem(**problem), Layout(**layout)
    options = how.options(task)
    plan = plan_model(reference.build(task), options.precision.compute, GroupRules(options.optimizer).group_of)
    transport = choose_transport(options.transport, mesh.shard, mesh.device)
    predicted = predict_memory(plan, options, parts=mesh.shard.size, transport=transport, budget=how.budget)
    run = Run.start(mesh, task, how)
    for step in range(3):
        run.step(step)
    ledger = run.engine.ledger
    if run.engine.transport.name != "shared":
        for unit in run.engine.units:
            unit.buckets[0].buffer.wait()
    result = {
        "predicted": _named(predicted.terms),
        "predicted_peak": predicted.total,
        "ledger": _named(ledger.by_purpose()),
        "ledger_peak": ledger.peak(),
        "tensors": _tensors(run),
    }
    run.close()
    return result


def _named(terms: Any) -> dict[str, int]:
    return {purpose.name: nbytes for purpose, nbytes in terms.items()}


def _tensors(run: Run) -> dict[str, int]:
    """Bytes of what buckets and optimizers hold."""
    found = dict.fromkeys((Purpose.MASTER.name, Purpose.MOMENTS.name, Purpose.PARTIAL_GRADIENTS.name), 0)
    for unit in run.engine.units:
        for bucket in unit.buckets:
            inside = bucket.buffer.persistent and bucket.master.data_ptr() == bucket.buffer.own().data_ptr()
            found[Purpose.MASTER.name] += 0 if inside else _bytes(bucket.master)
            found[Purpose.PARTIAL_GRADIENTS.name] += 0 if bucket.partial is None else _bytes(bucket.partial)
            optimizer = run.engine.updater.optimizer_of(bucket) if bucket.trainable else None
            pieces = optimizer.moments().values() if optimizer is not None else ()
            found[Purpose.MOMENTS.name] += sum(_bytes(value) for group in pieces for _, value in group)
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
