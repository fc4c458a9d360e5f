"""Finds all damage of a checkpoint on disk: every byte is read, and every damaged file is named."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zeromesh.checkpoint.format.manifest import ChecksumPiece
from zeromesh.checkpoint.format.safetensors_layout import read_header
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.errors import ZeromeshError


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A damaged file: its first reasons, and the tensors that have a byte in its damaged pieces."""

    path: str
    reasons: tuple[str, ...]
    tensors: tuple[str, ...] = ()


def find_damage(reader: CheckpointReader, on_progress: Callable[[int], None]) -> Iterator[Damage]:
    """Verify every piece of every file, with a reader made unchecked; `on_progress` receives the bytes of each verified piece.
    Damage in the files is yielded, never raised."""
    problems = dict(reader.problems())
    for path, record in reader.manifest.files.items():
        bad: list[ChecksumPiece] = []
        reasons: list[str] = []

        def failed(
            piece: ChecksumPiece, error: ZeromeshError, bad: list[ChecksumPiece] = bad, reasons: list[str] = reasons
        ) -> None:
            bad.append(piece)
            reasons.append(str(error))
            on_progress(piece.end - piece.begin)

        try:
            reader.stream(record.pieces, lambda piece, data: on_progress(data.numel()), failed)
        except ZeromeshError as error:
            bad, reasons = list(record.pieces), [str(error)]
        if len(bad) > 1 and len(reasons) > 1:
            reasons = [reasons[0], f"so are {len(bad) - 1:,} more of its {len(record.pieces):,} pieces"]
        if path in problems:
            reasons = [problems.pop(path), *reasons]
        elif not reasons and not reader.manifest.is_elsewhere(path) and path.endswith(".safetensors"):
            # The header of a source has its own names, and parts have no whole files.
            reasons = _disagreement(reader, path) if reader.manifest.part[1] == 1 else []
        if reasons:
            yield Damage(path=path, reasons=tuple(reasons), tensors=tuple(reader.tensors_in(bad)) if bad else ())
    yield from (Damage(path=path, reasons=(problem,)) for path, problem in problems.items())


def _disagreement(reader: CheckpointReader, name: str) -> list[str]:
    """Return the differences between a sound file's header, which other programs read, and the manifest."""
    path, tensors = reader.directory / name, [each for each in reader.manifest.tensors if each.path == name]
    try:
        found = {name: (each.spec.dtype, each.spec.shape, each.begin) for name, each in read_header(path).items()}
    except (ZeromeshError, OSError) as error:
        return [str(error)]
    wanted = {tensor.spec.name: (tensor.spec.dtype, tensor.spec.shape, tensor.begin) for tensor in tensors}
    if not wanted:
        return []  # A document, such as adapters for other programs, whose tensors the manifest does not list.
    names = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    return [f"{path}: its header and the manifest do not agree about {', '.join(names[:3])}"] if names else []
