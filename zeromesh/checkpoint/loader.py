"""Collective loading of a checkpoint: all ranks choose alike, each verifies what it reads, and any layout is possible."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zeromesh.checkpoint.format import manifest as manifests
from zeromesh.checkpoint.format.safetensors_layout import TensorSpec
from zeromesh.checkpoint.io.file_slices import PlacedValues, TensorShard
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.checkpoint.parts import PartsReader, check_parts
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import CheckpointError, LayoutError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.telemetry.event_ring import Activity

_FALLBACKS = {"master": "model", "ema": "model"}
"""The kind to read in place of an absent kind: master weights equal to the model's, and averages of never-trained parameters."""
_NAMED = 5


class Loader:
    """Opens and reads checkpoints; all ranks call its methods alike, and get the same answers and errors."""

    def __init__(self, mesh: Mesh, source: Path | None = None) -> None:
        """`source` is the directory of frozen weights that a checkpoint refers to, if they have moved."""
        self._mesh = mesh
        self._source = source

    def candidates(self, store: CheckpointStore) -> list[int]:
        """List the steps of the checkpoints that any rank sees, newest first: a newly joined host may see none."""
        rows = self._mesh.world.all_or_raise(f"looking into {store.root}", store.steps, CheckpointError)
        return sorted(set().union(*rows), reverse=True)

    def open(self, directory: Path) -> CheckpointReader:
        """Open the checkpoint in a directory that all ranks see, or of which each host's directory has a part. Raises
        `CheckpointError` when the checkpoint is incomplete, or ranks see different checkpoints."""
        world, rank = self._mesh.world, self._mesh.rank
        reader: CheckpointReader | None = None

        def look() -> str:
            nonlocal reader
            reader = CheckpointReader(directory, parts=True) if directory.is_dir() else None
            if reader is not None and self._source is not None and not reader.source.is_dir():
                reader.source = self._source
            return "" if reader is None else f"{reader.manifest.part[1]} {reader.digest}"

        identities = world.all_or_raise(f"opening {directory}", look, CheckpointError, kept=LayoutError)
        holders: dict[str, list[int]] = {}
        for other, text in enumerate(identities):
            holders.setdefault(text, []).append(other)
        blind = holders.pop("", [])
        in_parts = bool(holders) and all(not text.startswith("1 ") for text in holders)
        if blind and not in_parts:
            raise CheckpointError(f"rank {blind[0]} sees no {directory}; give all hosts the same directory")
        if reader is not None and len(holders) == 1 and not in_parts:
            return reader
        leads = reader is not None and holders[identities[rank]][0] == rank
        texts = world.gather_bytes(reader.manifest.to_json() if reader and leads else b"", "manifests of the parts")
        # Leaders are in rank order here and in `holders`, so each manifest is paired with the ranks that see it.
        parts = [manifests.parse(directory / manifests.NAME, text) for text in texts if text]
        first_ranks = [ranks[0] for ranks in holders.values()]
        if not in_parts or len({part.part[0] for part in parts}) < len(parts):
            raise CheckpointError(
                f"{directory} is another checkpoint on rank {first_ranks[1]} than on rank {first_ranks[0]}; "
                "give all hosts the same directory"
            )
        check_parts([(f"{directory} on rank {first}", part) for first, part in zip(first_ranks, parts, strict=True)])
        ordered = sorted(zip(parts, holders.values(), strict=True), key=lambda pair: pair[0].part[0])
        return PartsReader(directory, reader, [part for part, _ in ordered], [ranks for _, ranks in ordered], world)

    def document(self, opened: CheckpointReader, path: str) -> dict[str, Any]:
        """Read a JSON object of the checkpoint. Raises `CheckpointError` on all ranks if one rank cannot read it."""
        found: list[dict[str, Any]] = []
        what = f"reading {opened.directory / path}"
        self._mesh.world.all_or_raise(what, lambda: found.append(opened.document(path)), CheckpointError)
        return found[0]

    def fill(self, reader: CheckpointReader, tensors: Sequence[TensorSpec], shards: Sequence[TensorShard]) -> None:
        """Fill the ranks' shards of `tensors` with the checkpoint's values; each rank verifies what it reads. Raises `LayoutError`
        when the checkpoint's tensors are not those of the model and the optimizer; nothing is changed then; `CheckpointError` when
        some rank found damage; part of the shards has the checkpoint's values then."""
        targets: list[PlacedValues] = []

        def compare() -> None:
            _compare(reader, tensors)
            targets.extend(places_of(reader, shards))

        world = self._mesh.world
        world.all_or_raise("comparison with the checkpoint", compare, CheckpointError, kept=LayoutError)
        read = partial(reader.read, targets, lambda: self._mesh.post(Activity.LOAD))
        world.all_or_raise(f"reading {reader.directory}", read, CheckpointError, kept=LayoutError)


def _compare(reader: CheckpointReader, tensors: Sequence[TensorSpec]) -> None:
    """Raise `LayoutError` that names the missing parameters, those of another shape, and those that are too many."""
    problems: list[str] = []
    for spec in tensors:
        stored = _stored(reader, spec.kind, spec.name)
        if stored is None:
            problems.append(f"{spec.name} has no {spec.kind} in it")
        elif stored.shape != spec.shape:
            problems.append(f"{spec.name} is {list(stored.shape)} in it and {list(spec.shape)} here ({spec.kind})")
    names = {spec.name for spec in tensors}
    extra = {tensor.name for tensor in reader.manifest.tensors} - names - set(reader.manifest.aliases)
    problems += [f"{name} is in it and not in the model" for name in sorted(extra)]
    if problems:
        more = [f"and {len(problems) - _NAMED} more"] if len(problems) > _NAMED else []
        shown = "; ".join([*problems[:_NAMED], *more])
        raise LayoutError(f"{reader.directory} does not fit this model and optimizer: {shown}")


def places_of(reader: CheckpointReader, shards: Sequence[TensorShard]) -> Iterator[PlacedValues]:
    """Yield the file places of shards' elements: one per selection of columns, else one per contiguous run."""
    for shard in shards:
        stored = _stored(reader, shard.spec.kind, shard.spec.name)
        if stored is None:
            raise LayoutError(f"{reader.directory} has no {shard.spec.kind} of {shard.spec.name}")
        rows = shard.region.rows()
        if rows is not None:
            yield PlacedValues(tensor=stored, rows=rows, values=shard.values, first=shard.interval.start)
        else:
            yield from PlacedValues.runs(stored, shard)


def _stored(reader: CheckpointReader, kind: str, name: str) -> TensorSpec | None:
    found = reader.tensor(kind, name)
    return found if found is not None or kind not in _FALLBACKS else reader.tensor(_FALLBACKS[kind], name)
