"""Memory for what lives as long as a run."""

import errno
import gc
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.offload.file_cases import CPU
from zeromesh import environment
from zeromesh.errors import StorageError
from zeromesh.offload import ReleasableBuffer, SparePages, accelerator, allocate_lasting
from zeromesh.offload.io.transfer import StagingPool, states_hidden_from_children
from zeromesh.offload.memory import allocation
from zeromesh.offload.memory.allocation import PAGE, SharedSegment


@pytest.mark.parametrize("shape", [0, 1, 5, 100_000, (3, 1000, 77)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_zeros_that_can_be_written(shape: int | tuple[int, ...], dtype: torch.dtype) -> None:
    found = allocate_lasting(shape, dtype, CPU)
    assert torch.equal(found, torch.zeros(shape, dtype=dtype))
    found.fill_(1)
    assert int(found.sum(dtype=torch.float64)) == found.numel()


def test_large_ones_are_not_on_the_heap_and_go_with_their_tensor() -> None:
    found = allocate_lasting(1 << 20, torch.float32, CPU)
    heap = next(line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]"))
    start, end = (int(part, 16) for part in heap.split()[0].split("-"))
    assert not start <= found.data_ptr() < end
    address = f"{found.data_ptr():x}-"
    part = found[5:]
    del found
    gc.collect()
    assert any(line.startswith(address) for line in Path("/proc/self/maps").read_text().splitlines())
    del part
    gc.collect()
    assert not any(line.startswith(address) for line in Path("/proc/self/maps").read_text().splitlines())


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping at an address."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        start, _, end = line.split()[0].partition("-")
        if end and int(start, 16) <= address < int(end, 16):
            return next(line for line in lines if line.startswith("VmFlags")).split()
    return []


def test_children_inherit_no_states_while_these_are_hidden() -> None:
    states = [allocate_lasting(1 << 16, torch.float32, CPU), _buffer(1 << 16, SparePages()).full]
    inherited = lambda: ["dc" not in flags_of(each.data_ptr()) for each in states]  # noqa: E731
    assert inherited() == [True, True]
    with suppress(KeyError), states_hidden_from_children():
        assert inherited() == [False, False]
        raise KeyError
    assert inherited() == [True, True]


def test_memory_is_refused_where_it_is_known_to_be_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "available_bytes", lambda: 1000)
    allocation.require_memory("parameters", 1000)
    with pytest.raises(StorageError, match="for parameters: 1,001 bytes cannot be reserved, 1,000 are available"):
        allocation.require_memory("parameters", 1001)
    monkeypatch.setattr(allocation, "available_bytes", lambda: 0)
    allocation.require_memory("parameters", 1 << 40)


@pytest.mark.parametrize(("count", "nbytes", "fits"), [(0, PAGE, 1), (2, 3 * PAGE, 1), (-1, PAGE, 0), (1, 0, 0), (1, 6000, 0)])
def test_a_pool_has_buffers_of_whole_pages(count: int, nbytes: int, fits: int) -> None:
    if not fits:
        with pytest.raises(ValueError, match=f"{count} buffers of {nbytes} bytes; give 0 or more, of a multiple of {PAGE}"):
            StagingPool(count, nbytes)
        return
    pool = StagingPool(count, nbytes)
    taken = [pool.get() for _ in range(count)]
    assert pool.qsize() == 0
    assert {each.numel() for each in taken} <= {nbytes}
    for each in taken:
        pool.put(each)
    assert pool.qsize() == count


def test_a_range_of_a_segment_gets_the_pages_that_it_touches() -> None:
    segment = SharedSegment.create("test", 8 * PAGE - 5, reserve=False)
    assert segment.nbytes == 8 * PAGE
    for offset, nbytes, pages in ((PAGE + 100, PAGE - 100, 1), (4 * PAGE - 1, 2, 3), (6 * PAGE, 1, 4)):
        segment.reserve(offset, nbytes)
        assert os.fstat(segment.descriptor).st_blocks * 512 == pages * PAGE
    segment.give_back(4 * PAGE - 1, PAGE + 1)
    assert os.fstat(segment.descriptor).st_blocks * 512 == 3 * PAGE
    segment.close()


def test_the_allocator_of_a_gpu_gets_growing_segments_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for kind, variables, expected in (
        (None, {}, None),
        ("cuda", {}, "expandable_segments:True"),
        ("xpu", {}, None),
        ("cuda", {names[0]: "backend:native"}, "backend:native"),
        ("cuda", {names[1]: "backend:native"}, None),
    ):
        device = None if kind is None else torch.device(kind)
        monkeypatch.setattr(accelerator, "current_accelerator", lambda device=device: device)
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        environment.set_default(names[0], accelerator.allocator_settings(), names[1])
        assert environment.setting(names[0]) == expected
    monkeypatch.delenv(names[0], raising=False)


def test_blocks_of_a_device_are_written_where_torch_knows_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device, path = torch.device("cuda", 0), tmp_path / "blocks.pickle"
    said: list[object] = []
    memory = SimpleNamespace(
        _record_memory_history=lambda max_entries: said.append(max_entries), _dump_snapshot=lambda name: said.append(name)
    )
    monkeypatch.setattr(accelerator, "_module", lambda device: SimpleNamespace(memory=memory))
    assert accelerator.record_allocations(device)
    assert accelerator.write_allocations(device, path)
    assert said == [100_000, str(path)]
    assert not accelerator.write_allocations(CPU, path)
    monkeypatch.setattr(accelerator, "_module", lambda device: SimpleNamespace())
    assert not accelerator.record_allocations(device)
    assert not accelerator.write_allocations(device, path)


HUGE = 2 << 20


@pytest.fixture(params=["moved", "not moved"])
def moving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the system moves pages, as Linux does since 5.7."""
    if request.param == "not moved":
        monkeypatch.setattr(allocation, "_can_move_pages", lambda: False)
        return False
    return tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (5, 7)


def _buffer(count: int, spare: SparePages, lead: int = 0) -> ReleasableBuffer:
    return ReleasableBuffer(count, torch.uint8, CPU, spare=spare, lead=lead)


def _resident() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def test_pages_go_from_one_buffer_to_the_next_and_no_further(moving: bool) -> None:
    spare = SparePages()
    first, second, third = (_buffer(4 * HUGE + 100, spare, lead) for lead in (0, 24, 4080))
    for lead, each in zip((0, 24, 4080), (first, second, third), strict=True):
        assert each.full.data_ptr() % HUGE == lead
    first.take()
    first.full.fill_(1)
    first.give_back()
    second.take()
    assert int(second.full[: 4 * HUGE - 24].sum()) == moving * (4 * HUGE - 24)
    assert not first.full.any(), "the buffer that has given its pages back still sees them"
    second.full.fill_(2)
    second.give_back()
    second.take()
    assert bool(second.full[: 4 * HUGE - 24].any()) is moving, "pages were not kept where they were"
    spare.give_back()
    third.take()
    assert not third.full.any()
    second.give_back()
    spare.give_back()
    second.take()
    assert not second.full.any(), "pages were not given back to the system"


def test_pages_that_nobody_takes_are_given_back_with_the_next_ones() -> None:
    spare = SparePages()
    buffers = [_buffer(count * HUGE, spare) for count in (32, 8, 8, 8)]
    before = _resident()
    for number, each in enumerate(buffers):
        each.take()
        each.full.fill_(number)
        if number:
            assert int(each.full[-1]) == number
        each.give_back()
    # All that is left is what the last one has given.
    assert _resident() - before < 9 * HUGE
    spare.give_back()
    assert _resident() - before < 4 * HUGE


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5 * HUGE), min_size=2, max_size=4),
    leads=st.lists(st.sampled_from([0, 8, 4088]), min_size=4, max_size=4),
    moves=st.lists(st.integers(0, 4), max_size=30),
)
def test_whatever_comes_and_goes_buffers_share_no_page(sizes: list[int], leads: list[int], moves: list[int]) -> None:
    spare = SparePages()
    buffers = [_buffer(size, spare, lead) for size, lead in zip(sizes, leads, strict=False)]
    views = [each.make_views([(0, each.full.numel())])[0] for each in buffers]
    live: dict[int, int] = {}
    for turn, number in enumerate(moves, 1):
        if number >= len(buffers):
            spare.give_back()
        elif number in live:
            buffers[number].give_back()
            del live[number]
        else:
            buffers[number].take()
            buffers[number].full.fill_(turn)
            live[number] = turn
        for each, value in live.items():
            assert bool((views[each] == value).all())


def test_pages_that_the_system_does_not_move_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        allocation.ctypes.set_errno(errno.ENOMEM)
        return -1

    spare = SparePages()
    buffers = [_buffer(HUGE, spare) for _ in range(2)]
    buffers[0].take()
    buffers[0].give_back()
    monkeypatch.setattr(allocation, "_libc", SimpleNamespace(mremap=refused, madvise=allocation._libc.madvise))
    said = "2,097,152 bytes of memory for gathered parameters cannot be moved: Cannot allocate"
    with pytest.raises(StorageError, match=said):
        buffers[1].take()
