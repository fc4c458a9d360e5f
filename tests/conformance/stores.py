"""Cases that save and load: what a layout has stored is what any other layout gets, on every rank that holds it."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from zeromesh.checkpoint.io.file_slices import TensorShard
from zeromesh.checkpoint.io.writer import columns_to_rows
from zeromesh.checkpoint.loader import fill_shards, open_checkpoint
from zeromesh.checkpoint.saver import SaveContent, Saved, Saver
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import CheckpointError, StorageError
from zeromesh.flat.layout import Region
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import Ledger, Tier, TieredTensor, Transfer
from zeromesh.trainer.models.save_pretrained import save_configuration

from .cases import Run
from .recipe import DTYPES, Layout, Problem

Tensors = dict[tuple[str, str], torch.Tensor]
"""Whole tensors by kind and name."""


def stored(checkpoint: Path) -> Tensors:
    """Every tensor of a checkpoint, as the safetensors library reads it."""
    found: Tensors = {}
    for path in sorted(checkpoint.rglob("*.safetensors")):
        kind = path.name.partition("-0")[0]
        found |= {(kind, name): tensor for name, tensor in load_file(path).items()}
    return found


def relay(
    mesh: Mesh,
    problem: dict[str, Any],
    layout: dict[str, Any],
    folder: str,
    first: int,
    steps: int,
    disks: Sequence[int] = (),
    whole: str = "",
) -> dict[str, Any]:
    """Go on from the checkpoint of step `first` in `folder`, if that is not 0, for so many steps, and save.

    What was loaded is compared with the files by every rank, and saved again at once under `mirror`. `disks` has for each rank the
    disk that its host has; the folder is then another on each disk, and `whole` is the checkpoint that its parts make.
    """
    task = Problem(**problem)
    run = Run.start(mesh, task, Layout(**layout))
    here = Path(folder) / f"disk-{disks[mesh.rank]}" if disks else Path(folder)
    wrong: list[str] = []
    if first:
        source = CheckpointStore(here).path(first)
        _load(run, source)
        wrong = _differences(run, stored(Path(whole) if whole else source))
        _save(run, here / "mirror", first)
    exchanged: list[TensorShard] = []

    def noted(shards: list[TensorShard], axis: ProcessSet, device: torch.device) -> list[TensorShard]:
        found = columns_to_rows(shards, axis, device)
        exchanged.extend(each for each in found if each.owner is None and each.values.numel and each not in shards)
        return found

    for step in range(first, first + steps):
        run.step(step)
    with patch("zeromesh.checkpoint.io.writer.columns_to_rows", noted):
        _save(run, here, first + steps)
    aliases = run.engine.checkpoint_state.aliases()
    run.close()
    return {"wrong": wrong, "exchanged": bool(exchanged), "aliases": aliases}


def unread(mesh: Mesh, folder: str) -> dict[str, Any]:
    """Rank 1 of two cannot read what it is to exchange: how the save ends, what is left, how the next one ends."""
    run = Run.start(mesh, Problem(samples=8), Layout(stage=1))
    run.step(0)

    def lost(tensor: TieredTensor, start: int, out: torch.Tensor) -> Transfer:
        raise StorageError("the disk is gone")

    away = patch.multiple(TieredTensor, read=lost, whole=lambda tensor, device: None)
    with away if mesh.rank == 1 else nullcontext():
        try:
            failure = _saved(run, Path(folder), 1).failure
        except CheckpointError as error:
            failure = str(error)
    mesh.world.barrier("end of the save")
    left = os.listdir(folder)
    mesh.world.barrier("look at the directory")
    again = _saved(run, Path(folder), 1).failure
    run.close()
    return {"failure": failure, "left": left, "again": again}


def opened(mesh: Mesh, checkpoint: str) -> list[str]:
    """Names of parameters that transformers does not get as they are stored, those of tied ones among them."""
    found, wanted = AutoModelForCausalLM.from_pretrained(checkpoint), stored(Path(checkpoint))
    names = {name for kind, name in wanted if kind == "model"}
    state, seen, wrong = found.state_dict(), set(), []
    for name, parameter in found.named_parameters():
        if name not in names or not torch.equal(parameter, wanted["model", name]):
            wrong.append(name)
        seen.add(name)
    return [*wrong, *sorted(names - seen - state.keys())]


def _save(run: Run, folder: Path, step: int) -> None:
    saved = _saved(run, folder, step)
    assert not saved.failure, saved


def _saved(run: Run, folder: Path, step: int) -> Saved:
    store, holdings = CheckpointStore(folder), run.engine.checkpoint_state
    ledger = Ledger()
    saver = Saver(store, run.mesh, ledger)
    content = SaveContent(
        tensors=holdings.tensors(),
        shards=holdings.shards_to_write(),
        order=holdings.update_order(),
        documents=lambda directory: save_configuration(run.model, DTYPES[run.problem.precision][0], None, directory),
        keep=lambda: set(range(100)),
        aliases=holdings.aliases(),
    )
    saver.begin(step, content)
    held = ledger.total(Tier.HOST)
    saved = saver.finish()
    assert saved is not None
    # Tensor ranks hold rows as copies until the save has ended.
    assert not held or run.mesh.tensor.size > 1
    assert ledger.total(Tier.HOST) == 0
    assert store.trash.wait(seconds=30)
    return saved


def _load(run: Run, checkpoint: Path) -> None:
    holdings = run.engine.checkpoint_state
    with run.engine.loading():
        reader = open_checkpoint(run.mesh, checkpoint)
        fill_shards(run.mesh, reader, holdings.tensors(reading=True), holdings.shards_to_read())
    progress = run.engine.progress() | {"updates": _step_of(checkpoint)}
    run.engine.load_progress(**{name: progress[name] for name in progress.keys() - {"averages"}})


def _step_of(checkpoint: Path) -> int:
    step = CheckpointStore.step_of(checkpoint)
    assert step is not None
    return step


def _differences(run: Run, wanted: Tensors) -> list[str]:
    """What this rank holds and is not what is stored, bit by bit; that is nothing, and not for lack of things to compare."""
    holdings = run.engine.checkpoint_state.shards_to_read()
    assert len(holdings) > 10
    assert any(holding.spec.kind == "exp_avg_sq" and holding.values.numel for holding in holdings)
    return [f"{each.spec.kind} {each.spec.name}" for each in holdings if not _is(each, wanted)]


def _is(holding: TensorShard, wanted: Tensors) -> bool:
    name = holding.spec.name
    whole = wanted.get((holding.spec.kind, name), wanted.get(("model", name)))
    assert whole is not None, name
    local = _taken(whole, holding.region).reshape(-1)[holding.interval.start : holding.interval.end]
    found = torch.empty_like(local, dtype=holding.values.dtype)
    holding.values.copy_to(found)
    return torch.equal(found, local.to(found.dtype))


def _taken(whole: torch.Tensor, region: Region) -> torch.Tensor:
    for dim, intervals in enumerate(region.dims):
        whole = whole.index_select(dim, torch.tensor([i for each in intervals for i in range(each.start, each.end)]))
    return whole
