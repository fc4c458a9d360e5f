"""Memory of states that outlives a process, and the journal of an update in it."""

import os
from collections.abc import Iterator

import pytest
import torch

from zeromesh.offload import TieredTensor, allocate_lasting
from zeromesh.offload.memory.state_memory import UNDO_BYTES, StateMemory
from zeromesh.offload.update_stream import Access, StreamOperand, StreamRow
from zeromesh.optim import journal
from zeromesh.optim.journal import COMPLETE, Journal

KEY, CPU = 7, torch.device("cpu")


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.memfd_create("states")
    yield made
    os.close(made)


def allocated(memory: StateMemory) -> list[torch.Tensor]:
    with memory.allocating():
        return [allocate_lasting(count, dtype, CPU) for count, dtype in ((5, torch.float32), (7000, torch.float64))]


def test_another_process_finds_the_states_where_they_are(descriptor: int) -> None:
    memory = StateMemory(descriptor)
    assert memory.position(KEY) is None
    first = allocated(memory)
    assert not memory.free
    for each in first:
        each.copy_(torch.arange(len(each)))
    memory.begin(3, KEY)
    memory.mark(3, 5)
    later = StateMemory(os.dup(descriptor))
    assert (later.position(KEY), later.position(KEY + 1)) == ((3, 5), None)
    later.warm = True
    for mine, theirs in zip(allocated(later), first, strict=True):
        assert torch.equal(mine, theirs)
        mine.zero_()
        assert not theirs.any(), "it is the same memory"


def test_memory_that_is_not_gone_on_with_is_empty(descriptor: int) -> None:
    memory = StateMemory(descriptor)
    for each in allocated(memory):
        each.fill_(1)
    memory.begin(3, KEY)
    memory.write_record(4, {"factor": 1.0})
    del each
    assert memory.free
    assert not any(each.any() for each in allocated(memory))
    assert memory.position(KEY) is None
    assert memory.record(4) is None, "an update of another history"


def test_a_record_is_that_of_its_step_and_whole(descriptor: int) -> None:
    memory = StateMemory(descriptor)
    memory.write_record(4, {"factor": 0.5})
    memory.write_record(5, {"factor": None})
    assert memory.record(4) == {"factor": 0.5, "step": 4}
    assert memory.record(5) == {"factor": None, "step": 5}
    assert memory.record(6) is None
    memory.write_record(6, {"factor": 1.0})
    assert memory.record(4) is None
    at = memory._record_at(6) + 20
    memory._head[at : at + 1] = b"?"
    assert memory.record(6) is None, "it was being written"
    memory.begin(6, KEY)
    memory.write_record(7, {"names": "x" * (1 << 26)})
    assert memory.position(KEY) is None, "training goes on, and a lost rank's successor from a checkpoint"


class ProcessEndsError(Exception):
    """A process ends here."""


def update(kept: Journal, states: list[torch.Tensor], gradient: torch.Tensor, dies_in: int = -1) -> None:
    """An update that is not its own inverse, chunk by chunk; it ends in the midst of chunk `dies_in`."""
    whole = StreamRow(key=(0, 0), start=0, end=len(gradient), operands=())
    for number, row in enumerate(kept.rows(whole)):
        parts = [each[row.start : row.end] for each in states]
        with kept.chunk(parts) as changes:
            if changes:
                parts[1].mul_(0.9).add_(gradient[row.start : row.end])
                if number == dies_in:
                    raise ProcessEndsError
                parts[0].sub_(parts[1])


@pytest.mark.parametrize("dies_in", range(5))
def test_an_update_is_finished_by_who_takes_the_memory_over(descriptor: int, monkeypatch: pytest.MonkeyPatch, dies_in: int) -> None:
    monkeypatch.setattr(journal, "CHUNK_ELEMENTS", 10)
    generator = torch.Generator().manual_seed(0)
    start, gradient = torch.randn(2, 47, generator=generator), torch.randn(47, generator=generator)
    wanted = [each.clone() for each in start]
    memory = StateMemory(descriptor)
    kept = Journal(memory, KEY)
    kept.begin(0)
    kept.commit(1, {})
    update(kept, wanted, gradient)
    kept.end()
    assert memory.position(KEY) == (1, 0)

    states = [each.clone() for each in start]
    kept.begin(0)
    kept.commit(1, {})
    with pytest.raises(ProcessEndsError):
        update(kept, states, gradient, dies_in)
    later = StateMemory(os.dup(descriptor))
    step, position = later.position(KEY) or (0, 0)
    assert (step, position) == (0, 2 * dies_in + 1)
    heir = Journal(later, KEY)
    heir.take_over(1, position)
    update(heir, states, gradient)
    heir.end()
    assert all(torch.equal(*pair) for pair in zip(states, wanted, strict=True))
    heir.take_over(1, COMPLETE)
    update(heir, states, gradient)
    assert all(torch.equal(*pair) for pair in zip(states, wanted, strict=True)), "nothing is done twice"


@pytest.mark.parametrize(("count", "dtype"), [(1, torch.bfloat16), (3, torch.float32), (4, torch.float64), (7, torch.float64)])
def test_chunks_are_as_long_as_there_is_room_for_undo(descriptor: int, count: int, dtype: torch.dtype) -> None:
    length = 3 << 20
    updated = StreamOperand(tensor=TieredTensor.of(torch.empty(length, dtype=dtype)), mode=Access.UPDATE)
    gradient = StreamOperand(tensor=TieredTensor.of(torch.empty(length)), mode=Access.READ)
    whole = StreamRow(key=(0, 0), start=0, end=length, operands=(*[updated] * count, gradient))
    rows = list(Journal(StateMemory(descriptor), KEY).rows(whole))
    assert [row.start for row in rows] == [0, *[row.end for row in rows[:-1]]]
    assert rows[-1].end == length
    longest = max(row.end - row.start for row in rows)
    assert longest * count * dtype.itemsize <= UNDO_BYTES
    assert longest == journal.CHUNK_ELEMENTS or longest * count * dtype.itemsize > 0.95 * UNDO_BYTES
    with Journal(StateMemory(descriptor), KEY).chunk([updated.tensor.memory[:longest]] * count) as changes:
        assert changes
