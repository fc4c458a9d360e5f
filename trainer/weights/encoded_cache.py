"""The on-disk cache of encoded weights: one file of bitsandbytes' form for each matrix, which the ranks of a host encode in shares.

<cache>/<key>/<parameter>.safetensors    the key is a digest of the source's files, the codec and the compute dtype
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save

from zeromesh.checkpoint.format.manifest import FileRecord, Manifest
from zeromesh.checkpoint.format.safetensors_layout import read_header
from zeromesh.environment import setting
from zeromesh.errors import CheckpointError, ConfigError, StorageError, errors_as
from zeromesh.files import refusals, write_whole
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.options import ZeroOptions
from zeromesh.telemetry.status_board import Activity
from zeromesh.trainer.config.sections.model import WeightsSection
from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.weights.quantized_files import QuantizedFiles, stored_form
from zeromesh.trainer.weights.safetensors_source import SafetensorsSource
from zeromesh.units.plan import encoded_names
from zeromesh.weight_init.weight_sources import BuiltModel

_VERSION = 1  # of what is written: files of other versions are ignored


def keep_encoded(
    built: BuiltModel, options: ZeroOptions, section: WeightsSection | None, mesh: Mesh, say: Callable[[str], object]
) -> list[str]:
    """Encode the frozen matrices of an undivided model whose source is files, unless the cache has them, and let the source read
    them there; all ranks call it. `say` gets progress. Returns notes. Raises `StorageError` if the cache cannot be written."""
    if options.weights is None or section is None:
        return []
    codec, dtype = options.weights.codec, options.precision.compute
    origins = [built.source.origin(name) for name in sorted(encoded_names(built.model, options.weights))]
    sources = {id(source): source for source, _ in origins if isinstance(source, SafetensorsSource)}
    if not sources:
        return []
    (source,) = sources.values()
    names = [name for origin, name in origins if origin is source and source.encoded_in(name, codec, dtype) is None]
    top = Path(section.cache or Path(setting("XDG_CACHE_HOME") or "~/.cache") / "zeromesh" / "weights").expanduser()
    parts = (_VERSION, codec, dtype, *source.identity())
    folder = top / xxhash.xxh3_128_hexdigest("\n".join(map(repr, parts)).encode())
    environment, encoded = mesh.environment, 0
    # Shares do not depend on the files that are there, which other ranks write meanwhile.
    share = names[environment.local_rank :: environment.local_world_size]
    with refusals(folder, "filled with encoded weights", "; set model.weights.cache"):
        for number, name in enumerate(share):
            if _is_whole(folder / _file(name)):
                continue
            say(f"encoding the weights: {number} of {len(share)} matrices")
            shape, read = source.shapes[name], partial(_read, source, name, dtype)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            form = stored_form(name, shape, dtype, codec, codec.encode(read, shape.numel()), checked=True)
            write_whole(folder / _file(name), save(form))
            encoded += 1
            mesh.post(Activity.IDLE)
    mesh.wait_for_all_ranks("encoding of weights")
    if not names:
        return []
    headers = {_file(name): read_header(folder / _file(name)) for name in names}
    records = {file: FileRecord(nbytes=(folder / file).stat().st_size, pieces=()) for file in headers}
    tensors = tuple(spec for header in headers.values() for spec in header.values())
    damaged = f"{str(folder)!r} is damaged; remove it, and the weights are encoded anew: "
    with errors_as(StorageError, damaged, ConfigError):
        source.kept = QuantizedFiles(folder, Manifest(step=0, files=records, tensors=tensors))
    size, what = human_bytes(sum(each.nbytes for each in records.values())), f"{len(names)} matrices in {codec.name}"
    return [f"{what}, {size}: {'encoded now and kept' if encoded else 'read'} in {folder}"]


def _read(source: SafetensorsSource, name: str, dtype: torch.dtype, start: int, end: int) -> torch.Tensor:
    return source.read(name, start, end).to("cpu", dtype)


def _file(name: str) -> str:
    return f"{name if len(name) < 200 else xxhash.xxh3_128_hexdigest(name.encode())}.safetensors"


def _is_whole(path: Path) -> bool:
    try:
        return bool(read_header(path))
    except (OSError, CheckpointError):
        return False
