"""`Journal`: makes a kill at any instant of an update harmless, by the record of the update and an undo copy of what it changes.

An update is a fixed order of chunks, and so is an exchange of weights with their averages and back. Before a chunk changes, its
elements are copied, and then a word of the state memory says that it changes. Who takes the memory over undoes that chunk, and
does it and those after it again, with the gradients in the memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from zeromesh.offload.memory.allocation import tensor_bytes
from zeromesh.offload.memory.state_memory import UNDO_BYTES, StateMemory
from zeromesh.offload.tiers import GRAIN
from zeromesh.offload.update_stream import Access, StreamRow

COMPLETE = 1 << 24  # the position of an update of which nothing is left to do
CHUNK_ELEMENTS = 1 << 19  # at most, and as many as there is room for: each chunk costs some time of its own


class Journal:
    """The journal of a rank's updates in `memory`; `key` identifies the layout, and `watched` the present digests of what the
    memory has not, such as buffers: once a pass changes that, the memory does not have all states."""

    def __init__(self, memory: StateMemory, key: int, watched: Callable[[], list[Any]] = list) -> None:
        self.memory, self._key, self._watched = memory, key, watched
        self._seen = watched()
        self._step = 0  # the number of steps that are complete
        self._chunk = 0  # the number of the next chunk of the update
        self._done, self._interrupted = 0, False  # of an update that another process has begun

    def begin(self, step: int | None = None) -> None:
        """Let the states count, which are whole after `step` steps (None: as many as before)."""
        self._step = self._step if step is None else step
        self._chunk, self._done, self._interrupted, self._seen = 0, 0, False, self._watched()
        self.memory.begin(self._step, self._key)

    @property
    def has_all(self) -> bool:
        """False if a pass has changed what is watched since the latest step."""
        return self._seen == self._watched()

    def commit(self, step: int, record: dict[str, Any]) -> None:
        """Record an update before it changes anything: that of `step`, from 1."""
        self._step, self._chunk = step - 1, 0
        self.memory.write_record(step, record)

    def end(self) -> None:
        """Mark the update as complete."""
        self.begin(self._step + 1)

    def take_over(self, step: int, position: int) -> None:
        """Run the changes after `step - 1` steps again, of which the memory has `position`."""
        self._step, self._chunk = step - 1, 0
        self._done, self._interrupted = position // 2, bool(position % 2)

    def rows(self, row: StreamRow) -> Iterator[StreamRow]:
        """Cut a row into chunks, for each of which there is room for undo."""
        width = sum(each.tensor.dtype.itemsize for each in row.operands if each.mode is Access.UPDATE)
        longest = min(CHUNK_ELEMENTS, UNDO_BYTES // max(1, width) // GRAIN * GRAIN)
        for start in range(row.start, row.end, longest):
            yield replace(row, start=start, end=min(start + longest, row.end))

    @contextmanager
    def chunk(self, tensors: Sequence[torch.Tensor]) -> Iterator[bool]:
        """Guard a change of `tensors` in the block; yields False where it has been made already."""
        number, self._chunk = self._chunk, self._chunk + 1
        if number < self._done:
            yield False
            return
        states, sizes = [tensor_bytes(each) for each in tensors], [each.nbytes for each in tensors]
        undo = number == self._done and self._interrupted
        if sum(sizes) > UNDO_BYTES:
            raise ValueError(f"a chunk of {len(states)} tensors has no room for undo")
        for each, kept in zip(states, torch.split(self.memory.undo[: sum(sizes)], sizes), strict=True):
            each.copy_(kept) if undo else kept.copy_(each)
        self.memory.mark(self._step, 2 * number + 1)
        yield True
        self.memory.mark(self._step, 2 * number + 2)
