"""All that is wrong with a checkpoint on disk: every byte is read, and every damaged file is named."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zeromesh.checkpoint.format.manifest import ChecksumPiece
from zeromesh.checkpoint.format.safetensors_layout import StoredTensor, read_header
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.errors import ZeromeshError


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A file that is not what was written, why (the first reasons), and the tensors that have a byte in what is lost of it."""

    path: str
    reasons: tuple[str, ...]
    tensors: tuple[str, ...] = ()


def find_damage(reader: CheckpointReader, on_progress: Callable[[int], None]) -> Iterator[Damage]:
    """Verify every piece of every file; `on_progress` gets the bytes of each piece that is done.

    The reader is one that was made unchecked. Raises nothing for what is wrong in the files.
    """
    problems = dict(reader.problems())
    by_file: dict[str, list[StoredTensor]] = {}
    for tensor in reader.manifest.tensors:
        by_file.setdefault(tensor.path, []).append(tensor)
    for path, record in reader.manifest.files.items():
        members = by_file.get(path, [])
        bad, reasons = _bad_pieces(reader, record.pieces, on_progress)
        if path in problems:
            reasons = [problems.pop(path), *reasons]
        elif reasons or reader.manifest.is_elsewhere(path):
            pass  # The header of a source has names of its own.
        elif path.endswith(".safetensors") and reader.manifest.part[1] == 1:
            reasons = _disagreement(reader.directory / path, members)
        if reasons:
            yield Damage(path=path, reasons=tuple(reasons), tensors=_named(members, bad))
    yield from (Damage(path=path, reasons=(problem,)) for path, problem in problems.items())


def _bad_pieces(
    reader: CheckpointReader, pieces: tuple[ChecksumPiece, ...], on_progress: Callable[[int], None]
) -> tuple[list[ChecksumPiece], list[str]]:
    """The pieces of one file that are not what was written, and the reason of the first."""
    bad: list[ChecksumPiece] = []
    reasons: list[str] = []

    def failed(piece: ChecksumPiece, error: ZeromeshError) -> None:
        bad.append(piece)
        reasons.append(str(error))
        on_progress(piece.end - piece.begin)

    try:
        reader.stream(pieces, lambda piece, data: on_progress(data.numel()), failed)
    except ZeromeshError as error:
        return list(pieces), [str(error)]
    more = [f"so are {len(bad) - 1:,} more of its {len(pieces):,} pieces"] if len(bad) > 1 else []
    return bad, [*reasons[:1], *more]


def _disagreement(path: Path, tensors: list[StoredTensor]) -> list[str]:
    """Return the errors of a file that is as it was written, but whose header, which other programs read, is not its manifest's."""
    try:
        found = {name: (each.dtype, each.shape, each.begin) for name, each in read_header(path).items()}
    except (ZeromeshError, OSError) as error:
        return [str(error)]
    wanted = {tensor.spec.name: (tensor.spec.dtype, tensor.spec.shape, tensor.begin) for tensor in tensors}
    if not wanted:
        return []  # A document, such as adapters for other programs: the manifest says nothing of its tensors.
    names = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    return [f"{path}: its header and the manifest do not agree about {', '.join(names[:3])}"] if names else []


def _named(tensors: list[StoredTensor], pieces: tuple[ChecksumPiece, ...] | list[ChecksumPiece]) -> tuple[str, ...]:
    return tuple(
        tensor.spec.name
        for tensor in sorted(tensors, key=lambda each: each.begin)
        if any(tensor.begin < piece.end and piece.begin < tensor.end for piece in pieces)
    )
