"""`StreamedDataset`: data that can only be read from front to back, dealt by index like any other, and found again after a stop.

Every rank reads the same stream and takes its own samples from it, so the number of ranks decides nothing. What is read lies in
blocks, each in an order of its own where the data is shuffled, and read with random numbers of its own.

[Note: the very next sample] A stream's own state (`datasets.IterableDataset.state_dict`) need not lead to the very next sample:
what lies in a shuffle buffer is not in it, and may come late. So a checkpoint has the state of a place some thousand samples
earlier, too, and digests of all samples up to either. A run that goes on starts at the earlier place and reads up to its own; where
the digests agree, what was held back there has come out right. Else the stream is read again from its beginning.
"""

import json
import logging
import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, cast
from zlib import crc32

import torch

from zeromesh.errors import CheckpointError, DataError, counted, summary
from zeromesh.offload import tensor_bytes
from zeromesh.rng import number_of, own_randomness, seed_all

_LOG = logging.getLogger(__name__)
_ADDRESS = re.compile(rb"<[^<>]+ at 0x[0-9a-fA-F]+>")
_LINES = (
    "",
    "the stream is read again from its beginning",
    "the stream goes on from its own state, which is tried on the samples before",
    "the stream's own state does not lead to its very next sample (what a buffer holds is not in it), so it is read again from its "
    "beginning; data.resume: state would go on from the state, with other samples",
    "the stream goes on from its own state (data.resume: state); samples may be missing, or come twice",
)
_AGAIN, _TRIED, _INEXACT, _TAKEN = range(1, len(_LINES))


class StreamedDataset:
    """Samples by their number since the start of training, over as many epochs as it takes.

    Args:
        source: what is iterated over, again and again; `set_epoch(n)` is called before each epoch if it has that.
        block: samples between two states, and the number of latest samples that can be asked for again.
        seed: of the random numbers with which samples are read.
        resume: exact: the very next sample comes after `restore`, whatever has to be read; state: the source's own state is taken.
        proof: samples to which a state of the source has to lead before it is trusted.
    """

    def __init__(
        self, source: Any, *, block: int, seed: int = 0, resume: Literal["exact", "state"] = "exact", proof: int = 4096
    ) -> None:
        self._source = source
        self.block = block
        self.reading = memoryview(mmap.mmap(-1, 24)).cast("q")
        """A number of `_LINES`, samples that were read again, and samples to read; shared with processes that are forked."""
        self.waiting: Callable[[], None] = lambda: None
        """Called while the stream is read again, in the process that shows how far that is."""
        self._shown = 0
        self._seed, self._resume, self._proof = seed, resume, proof
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._next = 0
        """The number of the sample that comes next."""
        self._begun = 0
        """The number of the first sample of the epoch that is being read."""
        self._chain = 0
        """The digest of all samples before the next one."""
        self._told = True
        """False once a sample had a part that no digest tells of."""
        self._recent: dict[int, Any] = {}
        self._places: dict[int, dict[str, Any]] = {}
        """By the number of the sample that comes after it: those of the latest blocks, and some further back."""
        self._beginning = self._source_state()

    def __getitem__(self, index: int) -> Any:
        """Return sample `index`. Raises `DataError` for a stream without any sample."""
        if index < self._next and index not in self._recent:
            self._restart()
        while self._next <= index:
            self._read(index + self.block)
        return self._recent[index]

    def state(self, position: int) -> dict[str, Any]:
        """Return JSON values by which sample `position` is found again."""
        start = position // self.block * self.block
        if start < self._next and start not in self._places:
            self._restart()
        while self._next < start:
            self._read(start)
        if self._next == start:
            self._note_place()
        proved = [place for at, place in self._places.items() if self._told and at <= start - self._proof]
        return {**self._places[start], "earlier": proved[-1] if proved else None}

    def restore(self, state: Mapping[str, Any], where: str) -> None:
        """Go to where `state` was taken.

        Raises:
            CheckpointError: for what `state` has not made.
            DataError: when the stream has other samples before that place than it had then.
        """
        earlier = state.get("earlier")
        for place in (state, state if earlier is None else earlier):
            numbers = [place.get(name) for name in _NUMBERS] if isinstance(place, Mapping) else [None]
            if not all(type(each) is int and each >= 0 for each in numbers):
                raise CheckpointError(f"{where}: the state of the training stream is not one that this version writes")
        first, line = (state, _TAKEN) if self._resume == "state" else (earlier, _TRIED)
        if first is not None and first.get("stream") is not None:
            try:
                self._restart(first)
                if self._leads_to(state, line):
                    return
            except Exception as error:  # noqa: BLE001 - the user's code, and the stream can be read without its state
                _LOG.debug("a state of the training stream: %s", summary(error))
            self._iterator, line = None, _INEXACT
        self.begin_again()
        if not self._leads_to(state, line if line == _INEXACT else _AGAIN):
            raise DataError(
                f"train_dataset: the samples before sample {state['position']} of the stream are not what they were when the "
                "checkpoint was written; a run that goes on needs the same data in the same order"
            )

    def begin_again(self) -> None:
        """Read from the beginning, in a process that was forked from one that has read: what an iterator needs, such as connections
        and threads, may have stayed behind. A source that is its own iterator goes on instead: it has no other beginning."""
        if self._iterator is not self._source:
            self._restart()

    def _leads_to(self, state: Mapping[str, Any], line: int) -> bool:
        """Read up to the place of `state`; return True if the samples before it are those that came before."""
        start, position = self._next, state["position"]
        self.reading[0], self.reading[1], self.reading[2] = line, 0, max(0, position - start)
        self.waiting()
        while self._next < position:
            self._read(position)
            self.reading[1] = self._next - start
            self.waiting()
        return bool(self._chain == state["chain"])

    def show(self, note: Callable[[str], None], status: Callable[[str], None]) -> None:
        """Show once by `note` why the stream is read again, if it is, and how far by `status`."""
        line, done, total = self.reading
        if line != self._shown:
            self._shown = line
            note(f"data: {_LINES[line]} ({counted(total, 'sample', ',')} to read, without collating)")
        if done < total:
            status(f"reading the stream [{'=' * (20 * done // total):20}] {done:,} of {total:,} samples")

    def _restart(self, place: Mapping[str, Any] | None = None) -> None:
        """Read from a place with a state of the source, or from the beginning."""
        self._recent.clear()
        self._places.clear()
        place = place or {**dict.fromkeys(_NUMBERS, 0), "stream": self._beginning}
        self._next, self._chain, self._epoch, self._begun = (place[name] for name in _NUMBERS)
        self._open(place["stream"])

    def _open(self, state: Any = None) -> None:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(self._epoch)
        if state is not None:
            self._source.load_state_dict(state)
        self._iterator = iter(self._source)

    def _read(self, until: int) -> None:
        """Read the samples of a block, but none from `until` on."""
        start = self._next // self.block * self.block
        with own_randomness():
            # Not the numbers of a microbatch: ranks that read for other microbatches should read the same.
            seed_all(number_of(f"{self._seed}/stream/{start}"))
            if self._next == start:
                self._note_place()
            while self._next < min(start + self.block, until):
                sample = self._sample()
                for name, content in _contents(sample):
                    self._told &= content is not None
                    self._chain = crc32(content or b"", crc32(name, self._chain))
                self._recent[self._next] = sample
                self._recent.pop(self._next - 2 * self.block, None)
                self._next += 1

    def _sample(self) -> Any:
        """The next sample; at the end of an epoch the next one begins."""
        while True:
            try:
                return next(cast("Iterator[Any]", self._iterator))
            except StopIteration:
                if self._next == self._begun:
                    none = "train_dataset has no samples, or is a generator, which is read but once"
                    raise DataError(f"{none}; give at least one sample, or a list of them") from None
                self._epoch, self._begun = self._epoch + 1, self._next
                self._open()

    def _note_place(self) -> None:
        """Note the state before the next sample, and forget those that nobody asks for again."""
        if self._iterator is None:
            self._open()
        numbers = dict(zip(_NUMBERS, (self._next, self._chain, self._epoch, self._begun), strict=True))
        self._places[self._next] = {**numbers, "stream": self._source_state()}
        recent, apart = self._next - 3 * self.block, -(-self._proof // 4 // self.block) * self.block
        for at in [each for each in self._places if each <= recent]:
            if at % apart or at < recent - self._proof - apart:
                del self._places[at]

    def _source_state(self) -> Any:
        """The source's own state; None where it has none that JSON can hold."""
        if not hasattr(self._source, "load_state_dict"):
            return None
        try:
            return json.loads(json.dumps(self._source.state_dict()))
        except Exception:  # noqa: BLE001 - the user's code; a stream can be read without its state
            return None


_NUMBERS = ("position", "chain", "epoch", "begun")
"""The numbers that a place holds besides the state of the source."""


def is_stream(dataset: Any) -> bool:
    """Return True if a dataset can be iterated over and nothing else."""
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))


def digest(sample: Any, limit: int | None = None) -> int:
    """Return 32 bits of what a sample or a batch holds, of a tensor no more than its first `limit` elements.

    Objects that are represented by their address say nothing of what they hold, and are left out.
    """
    found = 0
    for name, content in _contents(sample, limit):
        found = found if content is None else crc32(content, crc32(name, found))
    return found


def _contents(sample: Any, limit: int | None = None) -> Iterator[tuple[bytes, bytes | None]]:
    """Each part of a sample by its name, as bytes; None for an object that is represented by its address."""
    if not isinstance(sample, Mapping):
        sample = dict(enumerate(sample if isinstance(sample, list | tuple) else [sample]))
    for name, value in sample.items():
        content: bytes | None = None
        if isinstance(value, torch.Tensor):
            content = tensor_bytes(value.reshape(-1)[:limit]).numpy().tobytes()
        elif hasattr(value, "tobytes") and not getattr(getattr(value, "dtype", None), "hasobject", False):
            content = value.tobytes()  # Of an array of NumPy or a picture of PIL a text shows the ends or nothing.
        elif isinstance(value, str) or not _ADDRESS.search(repr(value).encode()):
            content = repr(value).encode()
        yield str(name).encode(), content
