"""`StateMemory`: host memory for a rank's states that its launcher has made and holds too, so that it outlives the process.

    head      word: steps complete, and how far the update of the next one is | key of the layout
    records   two, in turn: what is needed to finish an update
    undo      the elements that are being updated, as they were
    states    tensors, in the order in which the engine allocates them

A process that takes a lost rank's place, or goes on itself, allocates the same states in the same order, and so finds them."""

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch

from zeromesh.offload.io.durable_tier import HEAD, sealed, unsealed
from zeromesh.offload.io.transfer import PAGE, register_state_pages

UNDO_BYTES = 8 << 20
_RECORD_BYTES = 1 << 26  # Only what is written takes memory.
_UNDO_AT = PAGE + 2 * _RECORD_BYTES
_STATES_AT = _UNDO_AT + UNDO_BYTES
_POSITION_BITS = 24  # of the word: 2 x the chunks that are complete, plus 1 while the next one changes


class StateMemory:
    """The memory behind `descriptor`, an anonymous file. Nothing in it counts before `begin`."""

    in_use: "ClassVar[StateMemory | None]" = None  # where lasting memory of the host is allocated now

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._end = descriptor, _STATES_AT
        if os.fstat(descriptor).st_size < _STATES_AT:
            os.ftruncate(descriptor, _STATES_AT)
        self._head = mmap.mmap(descriptor, _STATES_AT)
        self._words = memoryview(self._head)[:PAGE].cast("q")
        self.undo = torch.frombuffer(self._head, dtype=torch.uint8, count=UNDO_BYTES, offset=_UNDO_AT)
        self._pages: WeakKeyDictionary[mmap.mmap, int] = WeakKeyDictionary()  # with their addresses
        self.warm = False
        """True if the states that are allocated next keep the values that they have here."""

    def position(self, key: int) -> tuple[int, int] | None:
        """Return the number of steps that are complete, and how far the next update is; None without states of the layout `key`."""
        word, found = self._words[0], self._words[1]
        return divmod(word, 1 << _POSITION_BITS) if found == key else None

    def mark(self, step: int, position: int = 0) -> None:
        """Set the position, in one word: two would be a race with a kill."""
        self._words[0] = step << _POSITION_BITS | position

    def begin(self, step: int, key: int) -> None:
        """Let the states count, which are whole after `step` steps of the layout `key`."""
        self.mark(step)
        self._words[1] = key

    def forget(self) -> None:
        """Let the states not count any more."""
        self._words[1] = 0

    def write_record(self, step: int, record: Mapping[str, Any]) -> None:
        """Write what is needed to finish the update of `step`, from 1. Without room for it the states do not count any more."""
        data, at = sealed({**record, "step": step}), self._record_at(step)
        if len(data) > _RECORD_BYTES:
            self.forget()
            return
        self._head[at : at + len(data)] = data

    def record(self, step: int) -> dict[str, Any] | None:
        """Return the record of `step`; None if it is not there, or not whole."""
        at = self._record_at(step)
        found = unsealed(memoryview(self._head)[at : at + _RECORD_BYTES])
        return found if found is not None and found["step"] == step else None

    def _record_at(self, step: int) -> int:
        return PAGE + step % 2 * _RECORD_BYTES

    @property
    def nbytes(self) -> int:
        """The bytes of states that are here, which an earlier process may have left."""
        return os.fstat(self._descriptor).st_size - _STATES_AT

    @property
    def free(self) -> bool:
        """True if no tensor is there any more that this process has allocated here."""
        return not self._pages

    def clear(self) -> None:
        """Give all memory back, when nothing is allocated here any more."""
        self.forget()
        self.drop_records()
        os.ftruncate(self._descriptor, _STATES_AT)

    def drop_records(self) -> None:
        """Let no update be known any more."""
        for step in range(2):
            at = self._record_at(step)
            self._head[at : at + HEAD.size] = bytes(HEAD.size)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Inside the block lasting memory of the host is allocated here, from the start on; without `warm` it is zero."""
        if not self.warm:
            self.clear()
        self._end, StateMemory.in_use = _STATES_AT, self
        try:
            yield
        finally:
            StateMemory.in_use = None

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate `[nbytes]`, uint8, on pages of their own. Raises `OSError` where there is no memory."""
        start, length = self._end, -(-nbytes // PAGE) * PAGE
        self._end = start + length
        os.posix_fallocate(self._descriptor, start, length)  # A lack of memory is an error now, and not a signal later.
        pages = register_state_pages(mmap.mmap(self._descriptor, length, offset=start))
        found = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)
        self._pages[pages] = found.data_ptr()
        return found

    def keeps(self, memory: torch.Tensor) -> bool:
        """Return True if a tensor that was just allocated lies here, and has the values that were left in it."""
        return self.warm and memory.untyped_storage().data_ptr() in self._pages.values()
