"""`StreamedDataset`: data that can only be read from front to back, dealt by index like any other, and found again after a stop.

Every rank reads the same stream and takes its own samples from it, so the number of ranks decides nothing. What is read lies in
blocks, each in an order of its own where the data is shuffled. Where a block begins the stream's own state is kept, if it has one
(`datasets.IterableDataset.state_dict`); a checkpoint has that of the block that comes next, and a digest of its first sample, by
which a state that does not lead back there is found out. Then, and without a state, the stream is read again from its beginning.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast
from zlib import crc32

import torch

from zeromesh.errors import CheckpointError, DataError

_ADDRESS = re.compile(rb"<[^<>]+ at 0x[0-9a-fA-F]+>")


class StreamedDataset:
    """Samples by their number since the start of training, over as many epochs as it takes.

    Args:
        source: what is iterated over, again and again; `set_epoch(n)` is called before each epoch if it has that.
        block: samples between two states, and the number of latest samples that can be asked for again.
    """

    def __init__(self, source: Any, *, block: int) -> None:
        self._source = source
        self.block = block
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._next = 0
        """The number of the sample that comes next."""
        self._begun = 0
        """The number of the first sample of the epoch that is being read."""
        self._recent: dict[int, Any] = {}
        self._states: dict[int, dict[str, Any]] = {}
        """By the number of the sample that comes after it."""

    def __getitem__(self, index: int) -> Any:
        """Return sample `index`. Raises `DataError` for a stream without any sample."""
        if index < self._next and index not in self._recent:
            self._restart()
        while self._next <= index:
            self._read()
        return self._recent[index]

    def state(self, position: int) -> dict[str, Any]:
        """Return JSON values by which sample `position` is found again."""
        start = position // self.block * self.block
        self[start]
        return {"position": start, "digest": digest(self._recent[start]), **self._states[start]}

    def restore(self, state: Mapping[str, Any], where: str) -> None:
        """Go to where `state` was taken.

        Raises:
            CheckpointError: for what `state` has not made.
            DataError: when the stream has another sample there than it had then.
        """
        position, epoch, begun = (state.get(name) for name in ("position", "epoch", "begun"))
        if not all(type(each) is int and each >= 0 for each in (position, epoch, begun)):
            raise CheckpointError(f"{where}: the state of the training stream is not one that this version writes")
        if state.get("stream") is not None:
            self._restart(cast(int, epoch), cast(int, begun), cast(int, position), state["stream"])
            if digest(self[cast(int, position)]) == state.get("digest"):
                return
        self._restart()
        if digest(self[cast(int, position)]) != state.get("digest"):
            raise DataError(
                f"train_dataset: sample {position} of the stream is not what it was when the checkpoint was written; a run that "
                "goes on needs the same data in the same order"
            )

    def begin_again(self) -> None:
        """Read from the beginning, in a process that was forked from one that has read: what an iterator needs, such as connections
        and threads, may have stayed behind. A source that is its own iterator goes on instead: it has no other beginning.
        """
        if self._iterator is not self._source:
            self._restart()

    def _restart(self, epoch: int = 0, begun: int = 0, position: int = 0, state: Any = None) -> None:
        """Read from the beginning, or from a state of the source."""
        self._recent.clear()
        self._states.clear()
        self._epoch, self._begun, self._next = epoch, begun, position
        self._open()
        if state is not None:
            self._source.load_state_dict(state)
            self._iterator = iter(self._source)

    def _open(self) -> None:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(self._epoch)
        self._iterator = iter(self._source)

    def _read(self) -> None:
        """Read one more sample; at the end of an epoch the next one begins."""
        if self._iterator is None:
            self._open()
        if self._next % self.block == 0:
            self._states[self._next] = {"epoch": self._epoch, "begun": self._begun, "stream": self._source_state()}
            self._states.pop(self._next - 3 * self.block, None)
        try:
            sample = next(cast("Iterator[Any]", self._iterator))
        except StopIteration:
            if self._next == self._begun:
                raise DataError("train_dataset has no samples; give at least one") from None
            self._epoch, self._begun = self._epoch + 1, self._next
            self._open()
            self._read()
            return
        self._recent[self._next] = sample
        self._recent.pop(self._next - 2 * self.block, None)
        self._next += 1

    def _source_state(self) -> Any:
        """The source's own state; None where it has none, or where a buffer of it would be lost."""
        if not hasattr(self._source, "state_dict") or getattr(self._source, "_shuffling", None) is not None:
            return None
        state = self._source.state_dict()
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError):
            return None


def is_stream(dataset: Any) -> bool:
    """Return True if a dataset can be iterated over and nothing else."""
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))


def digest(sample: Any, limit: int | None = None) -> int:
    """Return 32 bits of what a sample or a batch holds, of a tensor no more than its first `limit` elements.

    Objects that are represented by their address say nothing of what they hold, and are left out.
    """
    found = 0
    if not isinstance(sample, Mapping):
        sample = dict(enumerate(sample if isinstance(sample, list | tuple) else [sample]))
    for name, value in sample.items():
        if isinstance(value, torch.Tensor):
            content = value.detach().reshape(-1)[:limit].cpu().contiguous().view(torch.uint8).numpy().tobytes()
        else:
            content = repr(value).encode()
            if not isinstance(value, str) and _ADDRESS.search(content):
                continue
        found = crc32(content, crc32(str(name).encode(), found))
    return found
