"""Replicas that divide the states of their shards, beside one process that has all of them."""

import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.distributed.trainer.context_cases import KINDS as CONTEXT_KINDS
from tests.distributed.trainer.expert_cases import KINDS as EXPERT_KINDS
from tests.support.architecture_cases import differences
from tests.support.plain import calling, error_of, fitted
from tests.support.trainer_cases import digest, gpt2, lines_of, llama, seeded, sentences, settings
from zeromesh import Trainer
from zeromesh.comm.wire import WireCodec, sum_parts
from zeromesh.errors import ConfigError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.rank_order import ProcessLocation
from zeromesh.optim.replicas import ReplicaGroups
from zeromesh.units.unit import all_buckets
from zeromesh.zero.full_state import MASTER, MODEL

KINDS = CONTEXT_KINDS | EXPERT_KINDS
SINGLE = {"compute": "float32", "master": "float32", "reduce": "float32"}
NARROW = {**SINGLE, "compute": "bfloat16"}


def exact(mesh: Mesh, folder: str, axes: Mapping[str, Any], stage: int = 3, kind: str = "llama", **sections: Any) -> None:
    """A model trains with divided states as in one process."""
    pair = seeded(KINDS[kind]), seeded(KINDS[kind])
    zero = {"stage": stage, "replicas": "divided", **sections.pop("zero", {})}
    found = differences(folder, kind, pair, sentences(), zero=zero, parallel=dict(axes), **sections)
    assert all(value <= 1e-9 for value in found.values()), found


def alike(mesh: Mesh, folder: str, precision: Mapping[str, str] = SINGLE) -> None:
    """Without replicas of shards that are themselves divided, the bits are those of stage 1 over all ranks; with two replicas, of
    which the sum has one order alone, also those of replicas that have all states."""
    found = {}
    ways: dict[str, dict[str, Any]] = {
        "sharded": {"zero": {"stage": 1}},
        "divided": {"parallel": {"replicate": mesh.world_size}, "zero": {"replicas": "divided"}},
        "files": {
            "parallel": {"replicate": mesh.world_size},
            "zero": {"replicas": "divided"},
            "offload": {"optimizer": "file", "parameters": "file"},
        },
    }
    if mesh.world_size == 2:
        ways["whole"] = {"parallel": {"replicate": 2}}
    for name, sections in ways.items():
        config = settings(folder, precision=precision, **sections)
        config["run"] |= {"name": name, "clip_norm": 0.0}
        found[name] = digest(fitted(seeded(llama), config, sentences()))
    assert len({*found.values()}) == 1, found


def counted(mesh: Mesh, folder: str) -> None:
    """Bytes between replicas are those of one reduce-scatter of the sums and one all-gather of the parameters for each step,
    whatever the number of microbatches, and each rank has its part of the states."""
    config = settings(
        folder,
        precision=NARROW,
        batch={"global_size": 16, "micro_size": 1},
        parallel={"replicate": 2, "transport": "gloo"},
        zero={"replicas": "divided"},
    )
    elements: list[int] = []

    def look(trainer: Trainer, step: int, metrics: Any) -> None:
        assert trainer.engine is not None
        buckets = all_buckets(trainer.engine.units)
        elements[:] = [sum(bucket.held.length for bucket in buckets)]
        assert all(2 * bucket.length == 2 * bucket.master.numel == bucket.held.length for bucket in buckets)

    fitted(seeded(llama), config, sentences(), callbacks=[calling(on_step_end=look)])
    for line in lines_of(Path(folder, "run")):
        found = line["communication"]["replicate"]
        assert found["reduce-scatter"]["bytes"] == 4 * elements[0] // 2
        assert found["all-gather"]["bytes"] == 2 * elements[0] // 2
        assert "all-reduce" not in found


def encoded(mesh: Mesh, folder: str, wire: str, bound: float, offload: Mapping[str, Any] | None = None) -> None:
    """With a codec all replicas hold the same parameters, which differ from master weights by what the codec left out of the last
    difference alone; bytes are those of the codec, and losses are near the exact ones."""
    losses, sizes, apart = {}, list[int](), list[float]()

    def look(trainer: Trainer, step: int, metrics: Any) -> None:
        assert trainer.engine is not None
        buckets = all_buckets(trainer.engine.units)
        sizes[:] = [bucket.length for bucket in buckets]
        for bucket in buckets:
            assert bucket.copy is not None
            assert bucket.own_copy is not None
            copy, own = bucket.copy.load(mesh.device), bucket.own_copy.load(mesh.device)
            assert len({*mesh.replicate.gather_json(digest({"copy": copy}), "copies")}) == 1
            apart.append(float((own - bucket.master.load(mesh.device)).abs().max()))
        state = trainer.engine.checkpoint_state
        written = {each.spec.name: each.values.load(mesh.device) for each in state.shards_to_write() if each.spec.kind == MODEL}
        held = {each.spec.name: each.values.load(mesh.device) for each in state.shards_to_read() if each.spec.kind == MASTER}
        assert digest(written) == digest(held)  # A checkpoint has master weights, not what others were told.

    for name in ("exact", wire):
        config = settings(
            folder,
            precision=SINGLE,
            parallel={"replicate": 2, "transport": "gloo", "wire": name},
            zero={"replicas": "divided"},
            offload=offload or {},
        )
        config["run"] |= {"name": name, "max_steps": 8}
        with Trainer(seeded(llama), config, sentences(), callbacks=[calling(on_step_end=look)]) as trainer:
            losses[name] = trainer.fit().losses
        assert bool(max(apart)) == (name != "exact")
    # AdamW moves a weight by about the rate, at most 1e-2; a rest of earlier steps would add up.
    assert max(apart) <= bound * 2e-2
    assert max(abs(a - b) / b for a, b in zip(losses[wire], losses["exact"], strict=True)) <= bound
    codec = WireCodec(name=wire)
    for line in lines_of(Path(folder, wire)):
        found = line["communication"]["replicate"]
        assert found["reduce-scatter"]["bytes"] == found["all-gather"]["bytes"] == sum(map(codec.nbytes, sizes))


def held_alike(mesh: Mesh, folder: str, axes: Mapping[str, Any], precision: Mapping[str, str] = SINGLE, **zero: Any) -> None:
    """What tensor ranks or stages have a copy of each stays the same on all, though each rank adds another gradient to its sum. Of
    parameters that stay gathered, those that are out of date are not compared."""
    config = settings(folder, precision=precision, parallel={"replicate": 2, **axes}, zero={"replicas": "divided", **zero})
    compare = calling(on_step_end=lambda trainer, *_: trainer.check_weights())
    fitted(seeded(gpt2 if "pipeline" in axes else llama), config, sentences(), callbacks=[compare])


def own_part(mesh: Mesh, folder: str) -> None:
    """A sum has what its rank adds as it is, and of the others what the codec leaves of it, added in rank order."""
    ranks, numel, codec = mesh.world, 640, WireCodec(name="int4")
    given = [torch.randn(ranks.size * numel, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks.size)]
    expected = torch.zeros(numel)
    for rank, each in enumerate(given):
        part = each[numel * ranks.index :][:numel]
        if rank == ranks.index:
            expected += part
        else:
            codec.add(codec.encode(part), expected)
    gradient = given[ranks.index]
    sum_parts(ranks, gradient, range(ranks.size), gradient[:numel], codec).finish()
    assert torch.equal(gradient[:numel], expected)


def refused(mesh: Mesh, folder: str, wire: str, said: str, **sections: Any) -> None:
    config = settings(folder, precision=SINGLE, **sections)
    config["parallel"] |= {"replicate": 2, "wire": wire}
    assert said in error_of(partial(fitted, seeded(llama), config, sentences()), ConfigError)


def left_alone(mesh: Mesh, folder: str) -> None:
    """A later start, whose replicas are on the one host that is left, goes on without the codec that the first start was given."""
    sections = {"parallel": {"replicate": 2, "wire": "int8"}, "zero": {"replicas": "divided"}}
    config = settings(folder, precision=SINGLE, **sections)
    with patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": "1"}), redirect_stdout(StringIO()) as printed:
        found = fitted(seeded(llama), config, sentences())
    assert mesh.rank or "exact between replicas, since replicas share a host" in printed.getvalue()
    assert found is not None


def untrained(mesh: Mesh, folder: str) -> None:
    """Replicas on two hosts that train nothing, as those of a pipeline's stage may, try codecs all the same."""
    notes = []

    def look(trainer: Trainer, *_: Any) -> None:
        assert trainer.engine is not None
        ranks, options = trainer.engine.mesh, replace(trainer.engine.options, wire="auto")
        with patch.object(ranks, "locations", [ProcessLocation(host=str(rank)) for rank in range(2)]):
            notes.append(ReplicaGroups(ranks, (), options, ranks.replicate).note)

    config = settings(folder, precision=SINGLE, parallel={"replicate": 2}, zero={"replicas": "divided"})
    fitted(seeded(llama), config, sentences(), callbacks=[calling(on_train_begin=look)])
    assert "a part of 1 elements took exact" in str(notes[0])


def automatic(mesh: Mesh, folder: str) -> None:
    """Replicas of one host need no codec, and the log says so."""
    config = settings(folder, precision=SINGLE, parallel={"replicate": 2, "wire": "auto"}, zero={"replicas": "divided"})
    with redirect_stdout(StringIO()) as printed:
        fitted(seeded(llama), config, sentences())
    assert mesh.rank or "exact between replicas, since replicas share a host" in printed.getvalue()
