"""`StreamedDataset`, which serves a sequential stream, the same on every rank, by sample index and resumes it after a stop.

[Note: the very next sample] A stream's own state (`datasets.IterableDataset.state_dict`) need not lead to the very next sample: the
samples in a shuffle buffer are not saved. So a checkpoint also has the stream's state some thousand samples earlier, and digests of
all samples up to both positions. A resumed run starts from the earlier state and reads on to the later position; if the digests
agree, the buffer was refilled correctly. Else the stream is read again from its beginning."""

import json
import logging
import mmap
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Literal, cast
from zlib import crc32

import torch
from torch.utils.weak import WeakIdKeyDictionary

from zeromesh.errors import CheckpointError, DataError, counted, summary
from zeromesh.offload import tensor_bytes
from zeromesh.rng import kept_generators, seed_all, seed_of

_LOG = logging.getLogger(__name__)
_ADDRESS = re.compile(rb" at 0x[0-9a-fA-F]+>")
_REASONS = (
    "",
    "the stream is read again from its beginning",
    "the stream goes on from its own state, which is tried on the samples before",
    "the stream's own state does not lead to its very next sample (what a buffer holds is not in it), so it is read again from its "
    "beginning; data.resume: state would go on from the state, with other samples",
    "the stream goes on from its own state (data.resume: state); samples may be missing, or come twice",
)
_beginnings: MutableMapping[Any, Any] = WeakIdKeyDictionary()
"""The states of the sources of this process before it read any sample of them: where they stand later is in mid-stream."""
_REREAD, _STATE_TRIED, _STATE_INEXACT, _STATE_TRUSTED = range(1, len(_REASONS))


class StreamedDataset:
    """A stream whose samples are indexed from the start of training, across epochs. `source` is iterated once per epoch, after its
    `set_epoch(n)` if it has one. Each block of `block` samples has its own random seed, and before it the source's state is saved;
    the latest `block` samples stay indexable. `restore` goes on with exactly the next sample (`resume` "exact"; the source's state
    is used if it reproduces `proof` earlier samples, else the stream is re-read), or trusts the source's state ("state")."""

    def __init__(
        self, source: Any, *, block: int, seed: int = 0, resume: Literal["exact", "state"] = "exact", proof: int = 4096
    ) -> None:
        self._source = source
        self.block = block
        self.reading = memoryview(mmap.mmap(-1, 24)).cast("q")
        """Progress of re-reading, shared with forked processes: an index of `_REASONS`, samples read, and samples to read."""
        self.waiting: Callable[[], None] = lambda: None  # called after each block that is re-read, to show progress
        self._shown = 0
        self._seed, self._resume, self._proof = seed, resume, proof
        self._iterator: Iterator[Any] | None = None
        self._next = self._crc = self._epoch = self._epoch_start = 0
        """The index of the next sample, the CRC-32 of all samples before it, the epoch, and the index of its first sample."""
        self._digested = True  # False once a sample had a value without a digest: an object whose repr is an address.
        self._recent: dict[int, Any] = {}
        self._saved_states: dict[int, dict[str, Any]] = {}
        """States of the source by the index of the next sample: those of the latest blocks, and some that are older."""
        self._beginning = self._source_state()
        if self._beginning is not None and hasattr(source, "__weakref__"):
            self._beginning = _beginnings.setdefault(source, self._beginning)

    def __getitem__(self, index: int) -> Any:
        """Return sample `index`. Raises `DataError` for a stream without any sample."""
        if index < self._next and index not in self._recent:
            self._restart()
        while self._next <= index:
            self._read(index + self.block)
        return self._recent[index]

    def state(self, position: int) -> dict[str, Any]:
        """Return JSON values from which sample `position` can be resumed."""
        start = position // self.block * self.block
        if start < self._next and start not in self._saved_states:
            self._restart()
        while self._next < start:
            self._read(start)
        if self._next == start:
            self._save_state()
        proved = [place for at, place in self._saved_states.items() if self._digested and at <= start - self._proof]
        return {**self._saved_states[start], "earlier": proved[-1] if proved else None}

    def restore(self, state: Mapping[str, Any], where: str) -> None:
        """Resume from `state`. Raises `CheckpointError` for other values, and `DataError` if earlier samples have changed."""
        earlier = state.get("earlier")
        for place in (state, state if earlier is None else earlier):
            numbers = [place.get(name) for name in _COUNTERS] if isinstance(place, Mapping) else [None]
            if not all(type(each) is int and each >= 0 for each in numbers):
                raise CheckpointError(f"{where}: the state of the training stream is not one that this version writes")
        first, line = (state, _STATE_TRUSTED) if self._resume == "state" else (earlier, _STATE_TRIED)
        if first is not None and first.get("stream") is not None:
            try:
                self._restart(first)
                if self._read_up_to(state, line):
                    return
            except Exception as error:  # noqa: BLE001 - the user's code, and the stream can be read without its state
                _LOG.debug("a state of the training stream: %s", summary(error))
            self._iterator, line = None, _STATE_INEXACT
        self.begin_again()
        if not self._read_up_to(state, line if line == _STATE_INEXACT else _REREAD):
            why = f"train_dataset: the samples before sample {state['position']} of the stream are not what they were when the"
            raise DataError(f"{why} checkpoint was written; a run that goes on needs the same data in the same order")

    def begin_again(self) -> None:
        """Go back to the first sample with an iterator of this process, since a parent's may hold connections or threads. A source
        that is its own iterator continues instead, as it has no other beginning."""
        if self._iterator is not self._source:
            self._restart()

    def _read_up_to(self, state: Mapping[str, Any], line: int) -> bool:
        """Read up to the position in `state`; return True if the digest of all samples before it matches."""
        start, position = self._next, state["position"]
        self.reading[0], self.reading[1], self.reading[2] = line, 0, max(0, position - start)
        self.waiting()
        while self._next < position:
            self._read(position)
            self.reading[1] = self._next - start
            self.waiting()
        return bool(self._crc == state["chain"])

    def show(self, note: Callable[[str], None], status: Callable[[str], None]) -> None:
        """Pass the reason for re-reading the stream to `note` once, and the progress to `status`."""
        line, done, total = self.reading
        if line != self._shown:
            self._shown = line
            note(f"data: {_REASONS[line]} ({counted(total, 'sample', ',')} to read, without collating)")
        if done < total:
            status(f"reading the stream [{'=' * (20 * done // total):20}] {done:,} of {total:,} samples")

    def _restart(self, place: Mapping[str, Any] | None = None) -> None:
        self._recent.clear()
        self._saved_states.clear()
        place = place or {**dict.fromkeys(_COUNTERS, 0), "stream": self._beginning}
        self._next, self._crc, self._epoch, self._epoch_start = (place[name] for name in _COUNTERS)
        self._open(place["stream"])

    def _open(self, state: Any = None) -> None:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(self._epoch)
        if state is not None:
            self._source.load_state_dict(state)
        self._iterator = iter(self._source)

    def _read(self, until: int) -> None:
        start = self._next // self.block * self.block
        with kept_generators():
            # The seed is that of the block, not of a microbatch, so that all ranks read the same samples.
            seed_all(seed_of(f"{self._seed}/stream/{start}"))
            if self._next == start:
                self._save_state()
            while self._next < min(start + self.block, until):
                try:
                    sample = next(cast("Iterator[Any]", self._iterator))
                except StopIteration:
                    if self._next == self._epoch_start:
                        none = "train_dataset has no samples, or is a generator, which is read but once"
                        raise DataError(f"{none}; give at least one sample, or a list of them") from None
                    self._epoch, self._epoch_start = self._epoch + 1, self._next
                    self._open()
                    continue
                for name, content in _contents(sample):
                    self._digested &= content is not None
                    self._crc = crc32(content or b"", crc32(name, self._crc))
                self._recent[self._next] = sample
                self._recent.pop(self._next - 2 * self.block, None)
                self._next += 1

    def _save_state(self) -> None:
        if self._iterator is None:
            self._open(self._beginning)
        numbers = dict(zip(_COUNTERS, (self._next, self._crc, self._epoch, self._epoch_start), strict=True))
        self._saved_states[self._next] = {**numbers, "stream": self._source_state()}
        recent, apart = self._next - 3 * self.block, -(-self._proof // 4 // self.block) * self.block
        for at in [each for each in self._saved_states if each <= recent]:
            if at % apart or at < recent - self._proof - apart:
                del self._saved_states[at]

    def _source_state(self) -> Any:
        """Return the source's state dict; None without one or if JSON cannot hold it."""
        if not hasattr(self._source, "load_state_dict"):
            return None
        try:
            return json.loads(json.dumps(self._source.state_dict()))
        except Exception:  # noqa: BLE001 - the user's code; a stream can be read without its state
            return None


_COUNTERS = ("position", "chain", "epoch", "begun")  # in a saved state, beside the state of the source


def is_stream(dataset: Any) -> bool:
    """Return True for a dataset whose samples can only be iterated over: not for a `DataLoader`, which gives batches."""
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return hasattr(dataset, "__iter__") and not indexed and getattr(dataset, "batch_sampler", None) is None


def is_read_once(dataset: Any) -> bool:
    """Return True for a stream that no reader in the same process can read again from its beginning."""
    return hasattr(dataset, "__next__") and not hasattr(dataset, "load_state_dict")


def digest(sample: Any, limit: int | None = None) -> int:
    """Return the CRC-32 of a sample or a batch without objects whose repr is an address, up to `limit` elements of a tensor."""
    found = 0
    for name, content in _contents(sample, limit):
        found = found if content is None else crc32(content, crc32(name, found))
    return found


def _contents(sample: Any, limit: int | None = None) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield the name and content of each part of a sample as bytes; None for an object whose repr has a memory address."""
    if not isinstance(sample, Mapping):
        sample = dict(enumerate(sample if isinstance(sample, list | tuple) else [sample]))
    for name, value in sample.items():
        content: bytes | None = None
        if isinstance(value, torch.Tensor):
            content = tensor_bytes(value.reshape(-1)[:limit]).numpy().tobytes()
        elif hasattr(value, "tobytes") and not getattr(getattr(value, "dtype", None), "hasobject", False):
            content = value.tobytes()  # The repr of a NumPy array or PIL picture is abridged.
        elif isinstance(value, str) or not _ADDRESS.search(repr(value).encode()):
            content = repr(value).encode()
        yield str(name).encode(), content
