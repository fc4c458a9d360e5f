"""Reductions on a device, whose host is ahead of what is computed: what is launched, and when, follows from the program alone."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.state_groups import state_group
from zeromesh.comm.transport import BufferRequest, GatherBuffer, Reducer, Reduction, sum_in_order
from zeromesh.flat.layout import ParameterSpec, StageCopies, build_layout
from zeromesh.intervals import Interval
from zeromesh.offload import Ledger, Purpose, SparePages, Tier, TieredTensor, Tiers
from zeromesh.optim.gradients import GradientReducer, GradientShards
from zeromesh.optim.replicas import SUMMED, ReplicaGroups
from zeromesh.options import Precision, ZeroOptions
from zeromesh.telemetry.status_board import Activity
from zeromesh.telemetry.step_recorder import StepRecorder
from zeromesh.units.unit import Bucket

UNITS, SHAPES, SLOTS = 32, ((4, 3), (5,)), 2


def bucket_of(number: int, ranks: int = 2, copies: StageCopies | None = None) -> Bucket:
    specs = [
        ParameterSpec(fqn=f"{number}.{place}", shape=shape, dtype=torch.bfloat16, requires_grad=True, copies=copies)
        for place, shape in enumerate(SHAPES)
    ]
    layout = build_layout(f"bucket {number}", specs, ranks)
    request = BufferRequest(name=layout.name, padded=layout.padded, dtype=torch.bfloat16, persistent=True)
    buffer = GatherBuffer(request, torch.device("cpu"), SparePages())
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in SHAPES]
    master = TieredTensor.of(torch.zeros(layout.shard_length))
    whole = Interval(start=0, end=layout.shard_length)
    return Bucket(layout, state_group(ranks), parameters, buffer, whole, master, None)


class StreamReducer(Reducer):
    """Reductions of two equal ranks, seen from the first. No host may ask whether they have come."""

    def __init__(self, nbytes: int, *, on_stream: bool = True) -> None:
        super().__init__()
        self.on_stream = on_stream
        self.slots = [torch.full((nbytes,), 0xFF, dtype=torch.uint8) for _ in range(SLOTS)]
        self.finished = 0
        self.events: list[tuple[str, int]] = []
        self.dtypes: set[torch.dtype] = set()

    def acquire(self, sequence: int, *, block: bool = False) -> torch.Tensor | None:
        assert not block
        return self.slots[sequence % SLOTS] if sequence < self.finished + SLOTS else None

    def launch(self, sequence: int, filled: torch.Tensor, out: torch.Tensor, *, add: bool) -> Reduction:
        self.events.append(("launch", sequence))
        self.dtypes.add(filled.dtype)

        half = filled[: out.numel()].clone()

        def finish() -> None:
            sum_in_order(out, [half, half], add=add)
            self.events.append(("finish", sequence))
            self.finished += 1

        def ready() -> bool:
            assert not self.on_stream, "the host has asked whether a reduction on a stream is over"
            return True

        return Reduction(ready, finish)


class Shards:
    def __init__(self) -> None:
        self.offloads: list[tuple[str, bool]] = []

    def offload(self, bucket: Bucket, *, last: bool) -> None:
        self.offloads.append((bucket.name, last))

    def count_received(self, bucket: Bucket, sign: int) -> None:
        """Count nothing: no replicas divide shards here."""

    def keep_part(self, bucket: Bucket) -> None:
        """Keep all of it."""

    def order_offloads(self) -> None:
        """Have nothing offloaded."""

    def allocate(self, bucket: Bucket) -> None:
        if bucket.grad is None:
            bucket.grad = torch.full((bucket.length,), float("nan"))


def reducer_of(buckets: Sequence[Bucket], ring: Any, options: ZeroOptions, ranks: int) -> tuple[GradientReducer, list[str]]:
    """A reducer with a peer that has a gradient of the second parameter alone, and the names of the buckets that it has summed."""
    posted: list[tuple[Any, ...]] = []
    watch = SimpleNamespace(posted=posted, event=lambda *event, known_order: posted.append((*event, known_order)))
    data = SimpleNamespace(size=ranks, ranks=range(ranks), all_reduce=lambda sums, what: sums[1:2].add_(1.0))
    mesh: Any = SimpleNamespace(peers=data, recorder=StepRecorder(), watch=watch)
    group = state_group(ranks, ring)
    for bucket in buckets:
        bucket.group = group
    shards: Any = Shards()
    reduced: list[str] = []
    replicas: Any = SimpleNamespace(sum_async=lambda bucket, gradient: reduced.append(bucket.name) or SUMMED)
    return GradientReducer(shards, replicas, mesh, options), reduced


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
    reducer, reduced = reducer_of(buckets, ring, ZeroOptions(stage=2, precision=Precision(compute=torch.bfloat16)), ranks=2)
    reducer.begin(buckets, reduce=True, first=True, last=True, known_order=False)
    return ring, reduced, reducer


class TestAHostThatIsAhead:
    def test_each_reduction_is_launched_as_its_bucket_completes(self) -> None:
        buckets = [bucket_of(number) for number in range(UNITS)]
        ring, reduced, reducer = started(buckets)
        shards: Any = reducer.shards
        for number, bucket in enumerate(buckets):
            bucket.grad_rest = bucket.master
            arrive(reducer, bucket, number + 1.0)
            assert ring.events[-1] == ("launch", number)
            assert not any(parameter.grad is not None for each in buckets for parameter in each.parameters)
        assert reduced == [f"bucket {number}" for number in range(UNITS - SLOTS)]
        assert shards.offloads == [(name, True) for name in reduced[:-1]]
        reducer.flush()
        assert shards.offloads == [(name, True) for name in reduced]
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
        options = ZeroOptions(accumulation=2, clip_norm=0, on_nonfinite="stop", optimizer_in_backward=True)
        alone = Reducer()
        alone.on_stream = True
        reducer, reduced = reducer_of(buckets, alone, options, ranks=1)
        for number, places in enumerate(([1], [1, 0])):
            reducer.begin(buckets, reduce=True, first=number == 0, last=number == 1, known_order=False)
            assert reducer.updates_in_backward == number
            arrive(reducer, bucket, 1.0, places)
            reducer.flush()
        assert reduced == ["bucket 0"]
        assert (summed(bucket, 0), summed(bucket, 1)) == ([1.0] * 12, [2.0] * 5)


@pytest.mark.parametrize("once", [False, True])
def test_a_host_sums_microbatches_at_each_or_once(*, once: bool) -> None:
    """Of two equal ranks, 2 x ((1 + 2) + 0) of the first parameter, 2 x (0 + 1) of the second, and zeros in all gaps."""
    (bucket,) = buckets = [bucket_of(0, ranks=1)]
    options = ZeroOptions(stage=1 + (not once), accumulation=2, precision=Precision(compute=torch.bfloat16))
    ring = StreamReducer(4 * bucket.layout.padded, on_stream=False)
    reducer, reduced = reducer_of(buckets, ring, options, ranks=2)
    if once:
        bucket.partial = torch.zeros(bucket.layout.padded)
        bucket.partial[:12] = bucket.partial[64:69] = float("nan")
    for last, places, values in ((False, [0, 0], [1.0, 2.0]), (True, [1], [1.0])):
        reducer.begin(buckets, reduce=last or not once, first=not last, last=last, known_order=last)
        for place, value in zip(places, values, strict=True):
            arrive(reducer, bucket, value, [place])
        reducer.flush()
        assert reducer.without_gradient(bucket) == bucket.missing == ({1} if not last else set())
        assert reduced == ["bucket 0"] * last
    expected = torch.zeros(bucket.length)
    expected[:12], expected[64:69] = 6.0, 2.0
    assert bucket.grad is not None
    assert bucket.grad.tolist() == expected.tolist()
    shards: Any = reducer.shards
    assert shards.offloads == [("bucket 0", False)] * (not once)
    posted = [(Activity.REDUCE, 0, range(2), False)] * (not once) + [(Activity.REDUCE, 0, range(2), True)]
    assert reducer._mesh.watch.posted == posted
    assert ring.dtypes == {torch.float32 if once else torch.bfloat16}


def test_what_no_rank_has_a_gradient_of_is_missing() -> None:
    """This rank has no gradient, its peer one of the second parameter, another stage of the third; the fourth is frozen."""
    _, tied = buckets = [bucket_of(0), bucket_of(1, copies=StageCopies(name="tied", aliases=(), ranks=(0, 1)))]
    _, _, reducer = started(buckets)
    tied.training[1] = False
    assert reducer.without_gradient(tied) == {0}
    other_stage = SimpleNamespace(all_reduce=lambda counts, what: counts[:1].add_(1.0))
    reducer.replicas.sets = {tied.shared_by: other_stage}  # type: ignore[dict-item]
    for keep_zeros, missing in ((False, [{0}, set()]), (True, [set(), set()])):
        reducer.keep_zeros = keep_zeros
        reducer.find_missing(buckets)
        assert [each.missing for each in buckets] == missing


def test_buckets_that_stages_share_are_summed_last_in_the_order_of_names() -> None:
    copies = [StageCopies(name=name, aliases=(), ranks=(0, 1)) for name in ("z", "a")]
    buckets = [bucket_of(0, copies=copies[0]), bucket_of(1, copies=copies[1]), bucket_of(2)]
    ring, reduced, reducer = started(buckets)
    reducer.flush()
    assert reduced == ["bucket 2"]
    reducer.sum_tied()
    assert reduced == ["bucket 2", "bucket 1", "bucket 0"]
    again = StreamReducer(len(ring.slots[0]))
    buckets[0].group = state_group(2, again)
    reducer.begin(buckets[:1], reduce=True, first=True, last=True, known_order=True)
    reducer.flush()
    assert again.events == [("launch", 0), ("finish", 0)]


def test_shards_on_their_way_are_bounded_and_counted() -> None:
    """Three shards of 64 fp32 elements: two at a time leave the device, with the norms of the last sums until the next step."""
    buckets = [bucket_of(number) for number in range(3)]
    tiers = Tiers(device=torch.device("cpu"), ledger=Ledger())
    shards = GradientShards(ZeroOptions(accumulation=1), tiers)
    counted = []
    for number, bucket in enumerate(buckets):
        bucket.grad_rest = TieredTensor.of(torch.zeros(64), Tier.HOST)
        shards.allocate(bucket)
        assert bucket.grad is not None
        bucket.grad.fill_(number + 1.0)
        counted.append(tiers.ledger.by_purpose(Tier.DEVICE)[Purpose.GRADIENTS])
        shards.offload(bucket, last=number > 0)
    assert counted == [256, 512, 512]
    assert [float(shards.norm(each)) for each in buckets] == [0.0, 16.0, 24.0]  # sqrt(64) times the value
    shards.wait()
    assert not tiers.ledger.total(Tier.DEVICE)
    shards.begin_step()
    assert not any(shards.norm(each) for each in buckets)


@pytest.mark.parametrize(("accumulation", "kept"), [(1, 0), (2, 256)])
def test_a_shard_is_kept_for_the_next_step_where_steps_have_microbatches(accumulation: int, kept: int) -> None:
    bucket, tiers = bucket_of(0), Tiers(device=torch.device("cpu"), ledger=Ledger())
    shards = GradientShards(ZeroOptions(accumulation=accumulation), tiers)
    shards.prefetch(bucket)
    assert (bucket.grad is None) == (accumulation > 1)  # Lasting memory is taken at the reduction.
    shards.allocate(bucket)
    shards.drop(bucket)
    assert tiers.ledger.total() == kept
    bucket.grad_rest = TieredTensor.of(torch.zeros(64), Tier.HOST)
    shards.drop(bucket)
    assert tiers.ledger.total() == 0


def test_replicas_sum_and_one_of_all_holders_counts() -> None:
    bucket = bucket_of(0, copies=StageCopies(name="tied", aliases=(), ranks=(0, 1)))
    for size, coordinate in ((1, (0, 1)), (2, (1, 0)), (2, (0, 0))):
        started = SimpleNamespace(done=lambda: False, wait=None)
        ranks = SimpleNamespace(size=size, all_reduce_async=lambda gradient, what, started=started: started)
        at = dict(zip(("tensor", "pipeline"), coordinate, strict=True))
        mesh: Any = SimpleNamespace(coordinate=at, shape=None, replicate=None, model_size=1)
        groups = ReplicaGroups(mesh, (), ZeroOptions(), mesh.replicate)
        groups.sets[bucket.shared_by] = ranks  # type: ignore[assignment]
        assert groups.sum_async(bucket, torch.zeros(64)).ready() == (size == 1)
        assert groups.counts(bucket) == (coordinate == (0, 0))
