"""Sums, slots, headers and buffers of transports, as one rank sees them, and which transport a group gets."""

import platform
import time
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeromesh.comm import activation_collectives, transport
from zeromesh.comm.activation_collectives import Exchange, _row, open_exchange, sum_in_ranks
from zeromesh.comm.point_to_point import HEADER_BYTES, Channels, MessageSpec, read_header, write_header
from zeromesh.comm.shm_transport import ABOUT_WORDS, LINE, Counters, SharedRing, open_transport
from zeromesh.comm.transport import BufferRequest, GatherBuffer, Reducer, choose_transport, sum_in_order
from zeromesh.errors import CollectiveError, ConfigError, LayoutError
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import SparePages, TieredTensor
from zeromesh.offload.memory.allocation import PAGE
from zeromesh.telemetry.status_board import StatusBoard, new_row
from zeromesh.telemetry.step_recorder import Collective, StepRecorder
from zeromesh.telemetry.watchdog import Watchdog

CPU = torch.device("cpu")
WATCH = Watchdog(StatusBoard({0: new_row()}, 0), 0, 1.0, compare_events=True)
ALONE = ProcessSet(name="shard", ranks=(0,), index=0, watch=WATCH, groups=None, one_host=True, works=None)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("add", [False, True])
def test_sums_are_made_in_order_in_the_dtype_of_the_result(count: int, dtype: torch.dtype, add: bool) -> None:
    parts = [torch.tensor(values[:2], dtype=dtype) for values in ([1.0, 2**8], [2**-8, 1.0], [2**-8, 1.0])][:count]
    out, total = torch.full((2,), 3.0), torch.full((2,), 3.0 if add else 0.0)
    sum_in_order(out, parts, add=add)
    for part in parts:
        total = total + part.float()
    assert out.tolist() == total.tolist()


@pytest.mark.parametrize("turned", [False, True])
def test_summands_of_16_bits_are_rounded_once(monkeypatch: pytest.MonkeyPatch, turned: bool) -> None:
    """One and two halves of its last bit are the next number, of which each alone would be lost."""
    monkeypatch.setattr(activation_collectives, "_CHUNK_ELEMENTS", 4)
    values = [torch.full((3, 5), each, dtype=torch.bfloat16) for each in (1.0, 2**-8, 2**-8)]
    values[0].view(-1).copy_(torch.arange(15) % 2 + 1.0)
    parts = [each.t() for each in values] if turned else values
    found = sum_in_ranks(parts)
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous()
    assert torch.equal(found, sum(each.float() for each in parts).bfloat16())  # type: ignore[union-attr]
    assert bool((found[parts[0] == 1.0] == 1 + 2**-7).all())
    numbers = [each.long() for each in parts]
    assert torch.equal(sum_in_ranks(numbers), numbers[0])
    assert sum_in_ranks(numbers[:1]).data_ptr() != numbers[0].data_ptr()


def fake_group(size: int = 2, index: int = 0, **more: Any) -> Any:
    return SimpleNamespace(size=size, index=index, require_member=lambda: None, **more)


def test_a_slot_is_free_once_its_reduction_is_finished() -> None:
    reducer = Reducer(CPU, fake_group(), slots=2, nbytes=8)

    def places(*numbers: int) -> list[int | None]:
        found = [reducer.acquire(number) for number in numbers]
        return [None if each is None else each.data_ptr() for each in found]

    first, second, *others = places(0, 1, 2, 3)
    assert None not in (first, second)
    assert first != second
    assert others == [None, None]
    reducer.finished = 1
    assert places(1, 2, 3) == [second, first, None]
    with pytest.raises(LayoutError, match="a group of one rank has nothing to reduce"):
        Reducer().launch(0, torch.zeros(2), torch.zeros(2), add=False)


def test_the_seconds_of_a_reduction_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both those of the wait and those of the sum, after which the slot is free."""
    clock, arrived, account = [0.0], [False], StepRecorder().account("shard", 2)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def wait() -> None:
        with account.timed(Collective.REDUCE_SCATTER):
            clock[0] += 2.0

    def sum_slowly(out: torch.Tensor, parts: Sequence[torch.Tensor], *, add: bool) -> None:
        clock[0] += 0.5
        sum_in_order(out, parts, add=add)

    monkeypatch.setattr(transport, "sum_in_order", sum_slowly)
    flight = SimpleNamespace(done=lambda: arrived[0], wait=wait)
    group = fake_group(on_stream=False, traffic=account, start=lambda row, call: flight)
    reducer = Reducer(CPU, group, slots=1, nbytes=16)
    reducer._receive[0].view(torch.float32).fill_(2.0)
    sums = torch.ones(2)
    reduction = reducer.launch(0, torch.zeros(4), sums, add=True)
    assert (reduction.ready(), reducer.acquire(1)) == (False, None)
    arrived[0] = True
    assert reduction.ready()
    reduction.finish()
    assert sums.tolist() == [5.0, 5.0]
    assert reducer.acquire(1) is not None
    assert account.take()["reduce-scatter"]["seconds"] == 2.5


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_of_one_rank_is_filled_again_once_it_was_released(persistent: bool) -> None:
    request = BufferRequest(name="b", padded=64, dtype=torch.float32, persistent=persistent)
    buffer = GatherBuffer(request, CPU, SparePages())
    (view,) = buffer.make_views([SimpleNamespace(start=2, end=4)])  # type: ignore[list-item]
    shard = TieredTensor.of(torch.ones(64))
    if persistent:
        buffer.own().copy_(shard.load(CPU))
    for value in (1.0, 2.0):
        shard.write(0, torch.full((64,), value)).wait()
        buffer.gather(shard)
        buffer.wait()
        wanted = 1.0 if persistent else value
        assert view.tolist() == [wanted] * 2
        shard.write(0, torch.full((64,), 9.0)).wait()
        buffer.end_write()
        buffer.gather(shard)  # It is there already.
        buffer.wait()
        assert view.tolist() == [wanted] * 2
        buffer.release()


def test_a_persistent_buffer_begins_with_zeros() -> None:
    request = BufferRequest(name="b", padded=64, dtype=torch.float32, persistent=True)
    assert not open_transport("local", ALONE, CPU, [request], 2, 8).buffers[0].full.any()


@pytest.mark.parametrize(
    ("kind", "device", "size", "one_host", "machine", "found"),
    [
        ("auto", "cpu", 1, True, "x86_64", "local"),
        ("shared", "cpu", 1, False, "aarch64", "local"),
        ("auto", "cuda", 1, True, "x86_64", "local"),
        ("auto", "cuda", 2, True, "x86_64", "nccl"),
        ("auto", "cpu", 2, True, "x86_64", "shared"),
        ("auto", "cpu", 2, True, "AMD64", "shared"),
        ("gloo", "cpu", 2, True, "x86_64", "gloo"),
        ("auto", "cpu", 2, False, "x86_64", "gloo"),
        ("auto", "cpu", 2, True, "aarch64", "gloo"),
        ("shared", "cpu", 2, False, "x86_64", "do not share one host"),
        ("shared", "cpu", 2, True, "aarch64", "aarch64 orders memory more weakly"),
        ("nccl", "cpu", 1, True, "x86_64", "no accelerator is here"),
        ("gloo", "cuda", 1, True, "x86_64", "ranks compute on CUDA"),
    ],
)
def test_a_group_has_the_fastest_transport_that_serves_it(
    monkeypatch: pytest.MonkeyPatch, kind: Any, device: str, size: int, one_host: bool, machine: str, found: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    group = fake_group(size, one_host=one_host)
    if " " not in found:
        assert choose_transport(kind, group, torch.device(device)) == found
        return
    with pytest.raises(ConfigError, match=found):
        choose_transport(kind, group, torch.device(device))


def test_a_header_tells_shapes_dtypes_and_which_gradients_come_back() -> None:
    tensors = [torch.zeros(2, 3, requires_grad=True), torch.zeros((), dtype=torch.int64), torch.zeros(0, 4).bfloat16()]
    specs = [MessageSpec.of(each) for each in tensors]
    assert specs[0] == MessageSpec(shape=(2, 3), dtype=torch.float32, differentiable=True)
    assert not specs[1].differentiable
    header = write_header(specs)
    assert (header.shape, header.dtype) == ((HEADER_BYTES,), torch.uint8)
    assert read_header(header) == specs
    for spec, tensor in zip(specs, tensors, strict=True):
        made = spec.empty(CPU)
        assert (made.shape, made.dtype) == (tensor.shape, tensor.dtype)
    with pytest.raises(CollectiveError, match="cannot be described in 2048 bytes; send fewer tensors"):
        write_header(specs * 100)


class Direction:
    """One direction to a neighbour, which keeps what is sent."""

    def __init__(self) -> None:
        self.sent_specs: dict[Any, Sequence[MessageSpec]] = {}
        self.sent: list[tuple[tuple[int, ...], str]] = []
        self.sending: list[Any] = []

    def send(self, tensor: torch.Tensor, what: str) -> None:
        assert not tensor.requires_grad
        assert tensor.is_contiguous()
        self.sent.append((tuple(tensor.shape), what))


def test_shapes_are_sent_once_for_each_kind_of_message(monkeypatch: pytest.MonkeyPatch) -> None:
    channels, direction = Channels(ALONE, CPU), Direction()
    monkeypatch.setattr(channels, "_out", {1: direction})
    values = torch.zeros(3, 2).t().requires_grad_()
    header = (HEADER_BYTES,)
    for kind, specs in (("a", None), ("a", None), ("b", None), ("c", [MessageSpec.of(values)])):
        channels.send(1, kind, [values], f"values {kind}", specs)
    assert direction.sent == [
        (header, "values a"), ((2, 3), "values a"), ((2, 3), "values a"),
        (header, "values b"), ((2, 3), "values b"), ((2, 3), "values c"),
    ]  # fmt: skip
    for other in ([values[:1]], [values.double()], [values, values]):
        with pytest.raises(CollectiveError, match=r"values are .* for inputs of the same shapes they were torch\.float32"):
            channels.send(1, "a", other, "values")
    channels.send(1, "a", [values.detach()], "values")  # What is not sent back does not change a shape.
    monkeypatch.setattr("zeromesh.comm.point_to_point._MOST_KINDS", 1)
    channels.wait_for_sends()
    assert not direction.sent_specs


def test_shares_that_do_not_fit_are_refused() -> None:
    exchange = Exchange(fake_group(2, 1))
    assert (exchange.size, exchange.index) == (2, 1)
    tensor = torch.zeros(4, 3)
    calls: list[Any] = [
        lambda: exchange.all_gather_async(tensor, 0, sizes=[4]),
        lambda: exchange.all_gather_async(tensor, 0, sizes=[4, 3]),
        lambda: exchange.all_gather_async(tensor, 0, sizes=[-1, 4]),
        lambda: exchange.reduce_scatter_async(tensor, 0, sizes=[5, -1]),
        lambda: exchange.reduce_scatter_async(tensor, 0, sizes=[1, 2]),
        lambda: exchange.reduce_scatter_async(tensor, 0, sizes=[4]),
        lambda: exchange.reduce_scatter_async(tensor, 1),
        lambda: exchange.reduce_scatter_async(tensor, -3),
        lambda: exchange.all_gather_async(tensor, 2),
    ]
    for call in calls:
        with pytest.raises(LayoutError, match=r"\[4, 3\]"):
            call()
    assert type(open_exchange(ALONE, CPU)) is Exchange


def test_what_ranks_ask_of_an_exchange_is_compared_word_by_word() -> None:
    def words(kind: Any = Collective.ALL_REDUCE, **given: Any) -> list[int]:
        return _row(kind, **{"dtype": torch.float32, "shape": (2, 3), "dim": -1, "lengths": (), **given})

    found = [
        words(), words(Collective.REDUCE_SCATTER), words(dtype=torch.int64), words(shape=(3, 2)), words(dim=0),
        words(dim=0, lengths=(1, 1)), words(dim=0, lengths=(2, 0)), words(shape=tuple(range(100))),
        words(shape=(*range(99), 7)),
    ]  # fmt: skip
    assert {len(each) for each in found} == {ABOUT_WORDS}
    assert len(set(map(tuple, found))) == len(found)
    text = array("q", words(dim=0)[1:]).tobytes().decode().rstrip()
    assert text == "sum along dim 0 of float32 [2, 3]"


def test_counters_tell_the_slowest_rank() -> None:
    words = memoryview(bytearray(8 * 4 * LINE)).cast("q")
    mine, other = (Counters(words, LINE, fake_group(2, index, watch=None)) for index in (1, 0))
    assert (mine.lowest(), mine.reached(0), mine.reached(1)) == (0, True, False)
    mine.set(3)
    assert (mine.own(), other.own(), mine.lowest(), mine.reached(1)) == (3, 0, 0, False)
    other.set(2)
    assert (mine.lowest(), other.lowest()) == (2, 2)
    assert [mine.reached(value) for value in (1, 2, 3)] == [True, True, False]
    assert [place for place, word in enumerate(words) if word] == [LINE, 2 * LINE]


def test_a_ring_takes_the_smallest_free_slot_that_is_large_enough() -> None:
    ring = SharedRing(ALONE, "test", slots=1, nbytes=PAGE)
    least = 16 * PAGE

    def sizes() -> list[int]:
        return [slot.segment.nbytes // PAGE for slot in ring.own]

    assert (ring.free_slot(PAGE), sizes()) == (0, [1])
    ring.publish(0, range(ABOUT_WORDS))
    slot, about = ring.read(0, 0)
    assert (slot, about) == (ring.own[0], list(range(ABOUT_WORDS)))
    assert (ring.free_slot(1), sizes()) == (1, [1, 16])  # The first is not consumed.
    ring.publish(1)
    assert (ring.free_slot(least + 1), sizes()) == (2, [1, 16, 17])
    ring.publish(2)
    ring.consume(1)
    assert ring.consumed.own() == 0  # In order alone.
    ring.consume(0)
    assert ring.consumed.own() == 2
    assert [ring.free_slot(nbytes) for nbytes in (PAGE, PAGE + 1)] == [0, 1]
    assert (ring.free_slot(18 * PAGE), sizes()) == (1, [1, 18, 17])  # In place of the larger free one.
    ring.consume(2)
    assert ring.free_slot(17 * PAGE) == 2
    first = ring.own[0].view((2, 3), torch.int64)
    assert (first.shape, first.dtype, first.data_ptr()) == ((2, 3), torch.int64, ring.own[0].raw.data_ptr())
    ring.close()


@pytest.mark.parametrize("persistent", [True, False])
def test_shared_buffers_follow_each_other_on_pages_of_their_own(persistent: bool) -> None:
    requests = [
        BufferRequest(name="a", padded=64, dtype=torch.float32, persistent=persistent, lead=64),
        BufferRequest(name="b", padded=PAGE // 4, dtype=torch.float32, persistent=persistent),
        BufferRequest(name="c", padded=64, dtype=torch.float32, persistent=persistent),
    ]
    shared = open_transport("shared", ALONE, CPU, requests, 2, PAGE)
    assert (shared.name, shared.share) == ("shared", 1.0)
    first, second, third = shared.buffers
    places = [each.full.data_ptr() for each in (first, second, third)]
    assert [(place - places[0] + 64) / PAGE for place in places[1:]] == [1.0, 2.0]
    assert places[0] % PAGE == 64
    count = second.full.numel()
    shard = TieredTensor.of(torch.zeros(count))
    for value in (3.0, 4.0):
        second.begin_write()
        if persistent:
            second.own().fill_(value)
        shard.write(0, torch.full((count,), value)).wait()
        second.end_write()
        second.gather(shard)
        second.wait()
        assert second.full.tolist() == [value] * count
        second.end_read()
        second.release()
        shared.poll()
        # What nobody reads any more has no pages.
        assert second.full.tolist() == [value if persistent else 0.0] * count
    shared.close()
