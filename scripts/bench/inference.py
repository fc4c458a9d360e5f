"""One rank that generates (`python -m bench.inference memory JSON`, or `start`), and `model`, which makes what it generates with.

Prints one line that begins with `RESULT` and holds what the rank has measured as JSON. A tiny model comes first, so that all is
imported by then.

Memory is the highest resident set of the process (VmHWM, which the kernel keeps to the page) above that before the call: private
and shared pages and mapped files, but no page cache. The plain readers of files are `plain_read` and `plain_direct_read`.
"""

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from bench.probe import memory_now
from bench.worker import RESULT
from zeromesh import Generator
from zeromesh.checkpoint.io.reader import TensorFiles
from zeromesh.offload import allocate_lasting, peak_bytes, resident_bytes
from zeromesh.offload.io.direct_io import PositionalFile
from zeromesh.offload.io.transfer import allocate_pages
from zeromesh.offload.memory.allocation import SharedSegment
from zeromesh.trainer.generation.requests import Inbox, Progress
from zeromesh.zero import engine as engine_module

VOCABULARY = 32000
_LONGEST = 2048
_TINY = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 512}
_LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "vocab_size": VOCABULARY}
_CPU = torch.device("cpu")
_UNTIL_TOLD = 2.5
"""Seconds after which Linux has told a host what memory is free: it does so two seconds after some was freed."""
_WEIGHT_FILE = 400 << 20
"""Bytes after which the next tensor goes into the next file of weights."""
_REQUEST = 16 << 20
"""Bytes that a plain reader asks for at once, if it reads through the page cache."""
_READERS, _PIECE = 2, 4 << 20
"""Threads of a plain reader past the page cache, and bytes of their buffers: eight threads, and 1 MiB, were not faster."""


def make_model(folder: Path, layers: int, **sizes: int) -> None:
    """Write the model, and the tiny one, with random weights in bfloat16: hidden 2048, of 18 layers 1.06 billion parameters, or
    what `sizes` say. A file of weights is in memory at a time."""
    for name, fields in {
        "tiny": {**_TINY, "num_hidden_layers": 1},
        "large": {**_LARGE, "num_hidden_layers": layers, **sizes},
    }.items():
        path = folder / name
        config = tf.LlamaConfig(**fields, max_position_embeddings=_LONGEST, pad_token_id=0, eos_token_id=None, dtype=torch.bfloat16)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(path)
        with torch.device("meta"):
            shapes = [(key, each.shape) for key, each in tf.LlamaForCausalLM(config).named_parameters()]
        index = dict[str, str]()
        while shapes:
            values, file = dict[str, torch.Tensor](), f"model-{len(set(index.values())):05d}.safetensors"
            while shapes and sum(each.nbytes for each in values.values()) < _WEIGHT_FILE:
                key, shape = shapes.pop(0)
                values[key] = torch.ones(shape) if len(shape) == 1 else torch.randn(shape).mul_(config.initializer_range)
                values[key] = values[key].bfloat16()
            save_file(values, path / file, metadata={"format": "pt"})
            with (path / file).open("rb") as written:
                os.fsync(written.fileno())
            index |= dict.fromkeys(values, file)
        (path / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8")


def weight_files(folder: Path) -> list[Path]:
    """The files of the model's weights."""
    return sorted({folder / "large" / entry.path for entry in TensorFiles(folder / "large").entries.values()})


def plain_read(paths: list[Path], index: int = 0, ranks: int = 1, *, shared: bool = False) -> tuple[float, int]:
    """Read the part of one of some ranks into new memory, in one thread, through the page cache; returns seconds and bytes.

    `shared`: into memory that processes can share, as ranks of one host do.
    """
    nbytes = {path: path.stat().st_size // ranks for path in paths}
    whole = sum(nbytes.values())
    began = time.perf_counter()
    if shared:
        segment = SharedSegment.create("bench", whole)
        kept = segment.tensor(0, whole, torch.uint8)
    else:
        kept = allocate_lasting(whole, torch.uint8, _CPU)
    done = 0
    for path in paths:
        with PositionalFile(path, direct=False) as file:
            for at in range(0, nbytes[path], _REQUEST):
                length = min(_REQUEST, nbytes[path] - at)
                file.read(kept[done : done + length], index * nbytes[path] + at)
                done += length
    return time.perf_counter() - began, whole


def plain_direct_read(paths: list[Path]) -> float:
    """Read files once past the page cache into buffers of huge pages; returns seconds."""
    buffers = allocate_pages(_READERS * _PIECE).split(_PIECE)
    numbers, local = itertools.count(), threading.local()

    def piece(file: PositionalFile, at: int, length: int) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = buffers[next(numbers)]
        file.read(local.buffer[:length], at)

    began = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as threads:
        files = [PositionalFile(path) for path in paths]
        works = [
            threads.submit(piece, file, at, min(_PIECE, file.size() - at)) for file in files for at in range(0, file.size(), _PIECE)
        ]
        for work in works:
            work.result()
    for file in files:
        file.close()
    return time.perf_counter() - began


def forget(paths: list[Path]) -> None:
    """Let the page cache go of files."""
    for path in paths:
        with PositionalFile(path, direct=False) as file:
            file.drop_from_cache(0, 0)


class Peak:
    """The highest memory since it was made or asked."""

    def __init__(self) -> None:
        self._base = resident_bytes()
        self.begin()

    def begin(self) -> None:
        """Begin anew, above the same base."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def above(self) -> int:
        """Bytes above the base, of pages that ranks share now this rank's part."""
        now = memory_now(1)
        mapped = int(Path("/proc/self/status").read_text(encoding="ascii").partition("RssShmem:")[2].split()[0]) * 1024
        return peak_bytes() - self._base - (mapped - now.shared)


@contextmanager
def _timed_reading(seconds: list[float], before: Callable[[], None]) -> Iterator[None]:
    """Note how long the engine takes to allocate and fill what it holds, and call `before` before that."""
    build = engine_module.build_units

    def timed(*args: Any, **named: Any) -> Any:
        before()
        began = time.perf_counter()
        built = build(*args, **named)
        seconds.append(time.perf_counter() - began)
        return built

    engine_module.build_units = timed
    try:
        yield
    finally:
        engine_module.build_units = build


def _open(folder: Path, name: str, sections: dict[str, Any]) -> Generator:
    return Generator(folder / name, run={"output_dir": str(folder / "runs")}, **sections)


def measure_memory(folder: Path, sections: dict[str, Any], steps: int) -> dict[str, Any]:
    """Peaks of starting and of generating for 16 prompts, and seconds of decode steps beside those of reading the weights once.

    The weights are read after each step, as the speed of a shared disk changes within seconds.
    """
    paths = weight_files(folder)
    _open(folder, "tiny", sections).close()
    peak = Peak()
    with _open(folder, "large", sections) as generator:
        found: dict[str, Any] = {"start_bytes": peak.above(), "step_seconds": [], "read_seconds": []}
        prompts = [[(7 * row + 13 * at) % VOCABULARY for at in range(16 + row)] for row in range(16)]
        peak.begin()
        generator.generate(prompts, batch=len(prompts), max_new_tokens=2, min_new_tokens=2)
        found["peak_bytes"] = peak.above()
        began = 0.0

        def on_token(_progress: Progress) -> None:
            nonlocal began
            if began:
                found["step_seconds"].append(time.perf_counter() - began)
                found["read_seconds"].append(plain_direct_read(paths))
            began = time.perf_counter()

        inbox = Inbox()
        for prompt in prompts:
            # The last prompt begins when all others have begun.
            inbox.submit(prompt, on_token if prompt is prompts[-1] else lambda progress: None)
        inbox.stop()
        generator.serve(inbox, batch=len(prompts), max_new_tokens=1 + steps, min_new_tokens=1 + steps)
    return found


def measure_start(folder: Path, sections: dict[str, Any], rounds: int, *, cold: bool) -> dict[str, Any]:
    """Seconds from the call to a ready generator, those of them that it fills its part, and of a plain reader; and the peak.

    Both are timed in turn. As a virtual machine gives memory that is free back to its host, and is slow to get it again, ranks take
    as much as they will fill before each of both, and as the page cache will, wait until the host knows what else is free, and give
    it back, which is not timed.
    """
    paths = weight_files(folder)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    found: dict[str, Any] = {"seconds": [], "reading": [], "plain": []}
    with _open(folder, "tiny", sections) as tiny:
        engine, barrier = tiny.engine, partial(tiny.mesh.world.barrier, "the measurement")
        parts = 1 if tiny.config.zero.stage == 0 else ranks
        shared = engine.groups[0].transport.name == "shared" and not engine.options.offload.parameters.leaves_device(_CPU)

        part = sum(path.stat().st_size // parts for path in paths)
        cached = sum(path.stat().st_size // ranks for path in paths) if cold else 0

        def begin() -> float:
            began = time.perf_counter()
            barrier()
            if cold:
                forget(paths)
            memory = allocate_lasting(part + cached, torch.uint8, _CPU).fill_(1)
            time.sleep(_UNTIL_TOLD)
            barrier()
            del memory
            barrier()
            return time.perf_counter() - began

        def pause() -> None:
            """Begin again between building the model and filling it."""
            nonlocal waited, highest
            highest = max(highest, peak.above())
            waited = begin()
            peak.begin()

        highest, waited = 0, 0.0
        for _ in range(rounds):
            begin()
            plain, found["part_bytes"] = plain_read(paths, rank % parts, parts, shared=shared)
            found["plain"].append(plain)
            begin()
            peak, began = Peak(), time.perf_counter()
            with _timed_reading(found["reading"], pause), _open(folder, "large", sections):
                found["seconds"].append(time.perf_counter() - began - waited)
                barrier()
                highest = max(highest, peak.above())
                barrier()
    return found | {"peak_bytes": highest}


def main() -> None:
    """Do what the arguments say."""
    what, arguments = sys.argv[1], json.loads(sys.argv[2])
    folder = Path(arguments.pop("folder"))
    if what == "model":
        make_model(folder, **arguments)
        return
    found = measure_memory(folder, **arguments) if what == "memory" else measure_start(folder, **arguments)
    print(RESULT + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
