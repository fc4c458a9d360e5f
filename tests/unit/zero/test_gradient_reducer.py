"""Reductions on a device, whose host is ahead of what is computed: what is launched, and when, follows from the program alone."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zeromesh.comm.transport import BufferRequest, GatherBuffer, Reducer, Reduction
from zeromesh.flat.layout import ParameterSpec, build_layout
from zeromesh.intervals import Interval
from zeromesh.offload import SparePages, TieredTensor
from zeromesh.optim.gradients import GradientReducer
from zeromesh.options import Precision, ZeroOptions
from zeromesh.telemetry.step_recorder import Collective, CommAccount, StepRecorder
from zeromesh.units.unit import Bucket

UNITS, SHAPES, SLOTS = 32, ((4, 3), (5,)), 2


def bucket_of(number: int, ranks: int = 2) -> Bucket:
    specs = [
        ParameterSpec(fqn=f"{number}.{place}", shape=shape, dtype=torch.bfloat16, requires_grad=True)
        for place, shape in enumerate(SHAPES)
    ]
    layout = build_layout(f"bucket {number}", specs, ranks)
    request = BufferRequest(name=layout.name, padded=layout.padded, dtype=torch.bfloat16, persistent=True)
    buffer = GatherBuffer(request, torch.device("cpu"), SparePages())
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in SHAPES]
    master = TieredTensor.of(torch.zeros(layout.shard_length))
    return Bucket(layout, parameters, buffer, Interval(start=0, end=layout.shard_length), master, None)


class StreamReducer(Reducer):
    """Reductions of two equal ranks, seen from the first. No host may ask whether they have come."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.on_stream = True
        self.slots = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(SLOTS)]
        self.finished = 0
        self.events: list[tuple[str, int]] = []
        self.dtypes: set[torch.dtype] = set()

    def acquire(self, sequence: int, *, block: bool = False) -> torch.Tensor | None:
        assert not block
        return self.slots[sequence % SLOTS] if sequence < self.finished + SLOTS else None

    def launch(self, sequence: int, filled: torch.Tensor, out: torch.Tensor, *, add: bool) -> Reduction:
        self.events.append(("launch", sequence))
        self.dtypes.add(filled.dtype)

        def free() -> None:
            self.events.append(("finish", sequence))
            self.finished += 1

        def arrived() -> bool:
            pytest.fail("the host has asked whether a reduction on a stream is over")

        half = filled[: out.numel()].clone()
        account = CommAccount(StepRecorder(), "shard", 2)
        return Reduction(
            traffic=account,
            kind=Collective.REDUCE_SCATTER,
            parts=lambda: [half, half],
            sums=out,
            add=add,
            arrived=arrived,
            wait=lambda: None,
            free=free,
        )


class Shards:
    first = True

    def order_offloads(self) -> None:
        """Have nothing offloaded."""

    def allocate(self, bucket: Bucket) -> None:
        if bucket.grad is None:
            bucket.grad = torch.full((bucket.length,), float("nan"))


def reducer_of(ring: Any, options: ZeroOptions, ranks: int) -> tuple[GradientReducer, list[str]]:
    """A reducer whose peers compare nothing, and the names of the buckets that it has summed."""
    shard, data = SimpleNamespace(size=ranks), SimpleNamespace(size=1)
    mesh: Any = SimpleNamespace(shard=shard, data=data, recorder=StepRecorder())
    shards: Any = Shards()
    reduced: list[str] = []
    replicas: Any = SimpleNamespace(all_reduce_async=lambda bucket, gradient: reduced.append(bucket.name))
    return GradientReducer(ring, shards, replicas, mesh, options), reduced


def arrive(reducer: GradientReducer, bucket: Bucket, value: float, places: Sequence[int] = (1, 0)) -> None:
    for place in places:
        bucket.parameters[place].grad = torch.full(SHAPES[place], value, dtype=torch.bfloat16)
        reducer.take(bucket, place)


def summed(bucket: Bucket, number: int = 0) -> list[float]:
    """The gradients of a parameter in the bucket's shard."""
    assert bucket.grad is not None
    where = bucket.layout.slots[number].where
    return bucket.grad[where.start : where.end].tolist()


def started(buckets: Sequence[Bucket]) -> tuple[StreamReducer, list[str], GradientReducer]:
    ring = StreamReducer(4 * buckets[0].layout.padded)
    reducer, reduced = reducer_of(ring, ZeroOptions(stage=2, precision=Precision(compute=torch.bfloat16)), ranks=2)
    reducer.begin(buckets, reduce=True, first=True, last=True, known_order=False)
    return ring, reduced, reducer


class TestAHostThatIsAhead:
    def test_each_reduction_is_launched_as_its_bucket_completes(self) -> None:
        buckets = [bucket_of(number) for number in range(UNITS)]
        ring, reduced, reducer = started(buckets)
        for number, bucket in enumerate(buckets):
            arrive(reducer, bucket, number + 1.0)
            assert ring.events[-1] == ("launch", number)
            assert not any(parameter.grad is not None for each in buckets for parameter in each.parameters)
        assert reduced == [f"bucket {number}" for number in range(UNITS - SLOTS)]
        reducer.flush()
        assert reduced == [f"bucket {number}" for number in range(UNITS)]
        # A slot is filled again behind the reduction that had it, and no earlier one waits for longer.
        expected = [("launch", 0), ("launch", 1)]
        for number in range(2, UNITS):
            expected += [("finish", number - 2), ("launch", number)]
        assert ring.events == [*expected, ("finish", UNITS - 2), ("finish", UNITS - 1)]
        for number, bucket in enumerate(buckets):
            assert summed(bucket) == [2 * (number + 1.0)] * 12
        assert ring.dtypes == {torch.float32}

    def test_a_bucket_that_is_early_waits_for_its_turn(self) -> None:
        buckets = [bucket_of(number) for number in range(3)]
        ring, _, reducer = started(buckets)
        arrive(reducer, buckets[1], 1.0)
        arrive(reducer, buckets[2], 2.0)
        assert ring.events == []
        arrive(reducer, buckets[0], 3.0)
        assert ring.events == [("launch", 0), ("launch", 1), ("finish", 0), ("launch", 2)]

    def test_what_is_missing_counts_as_zeros(self) -> None:
        (bucket,) = buckets = [bucket_of(0)]
        ring, _, reducer = started(buckets)
        for slot in ring.slots:
            slot.fill_(0xFF)
        arrive(reducer, bucket, 1.0, places=[1])
        assert ring.events == []
        reducer.flush()
        assert summed(bucket) == [0.0] * 12

    def test_a_parameter_that_gets_two_gradients_sends_their_sum(self) -> None:
        (bucket,) = buckets = [bucket_of(0)]
        _, _, reducer = started(buckets)
        first = bucket.parameters[0]
        first.grad = torch.full(SHAPES[0], 1.0, dtype=torch.bfloat16)
        reducer.take(bucket, 0)
        assert first.grad is not None
        first.grad += 2.0
        reducer.take(bucket, 0)
        arrive(reducer, bucket, 1.0, places=[1])
        reducer.flush()
        assert summed(bucket) == [6.0] * 12

    def test_sums_of_microbatches_are_made_bucket_by_bucket(self) -> None:
        (bucket,) = buckets = [bucket_of(0, ranks=1)]
        options = ZeroOptions(stage=2, accumulation=2, precision=Precision(compute=torch.bfloat16))
        alone = Reducer()
        alone.on_stream = True
        reducer, reduced = reducer_of(alone, options, ranks=1)
        for number, places in enumerate(([1], [1, 0])):
            reducer.begin(buckets, reduce=True, first=number == 0, last=True, known_order=False)
            arrive(reducer, bucket, 1.0, places)
            reducer.flush()
        assert reduced == ["bucket 0"] * 2
        assert (summed(bucket, 0), summed(bucket, 1)) == ([1.0] * 12, [2.0] * 5)
