"""Units of one rank: what their buckets keep and show, which changes in place are noticed, and what ranks compare of them."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.state_groups import state_group
from zeromesh.comm.transport import BufferRequest, GatherBuffer
from zeromesh.errors import LayoutError, PhaseError
from zeromesh.flat.layout import ParameterSpec, build_layout
from zeromesh.intervals import Interval
from zeromesh.offload import FileSettings, Ledger, Purpose, SparePages, Tier, TierChoice, TieredPart, TieredTensor, Tiers
from zeromesh.offload.io.direct_io import BLOCK
from zeromesh.options import OffloadOptions, OptimizerSettings, Precision, ZeroOptions
from zeromesh.units.build import _page_offset, kept_buckets, make_trainable, require_equal_plans, ring_bytes, slot_bytes
from zeromesh.units.plan import ModelCuts, block_modules, plan_model
from zeromesh.units.unit import Bucket, InplaceWrites, Phase, Unit
from zeromesh.zero.hooks import UnitCalls, on_gradient_of, tensors_in, watch_outputs

CPU = torch.device("cpu")
BF16 = Precision(compute=torch.bfloat16)


def spec(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, trained: bool = True) -> ParameterSpec:
    return ParameterSpec(fqn=name, shape=shape, dtype=dtype, requires_grad=trained)


def bucket_of(*specs: ParameterSpec, persistent: bool = True) -> Bucket:
    layout = build_layout("bucket", specs, 1)
    parameters = [nn.Parameter(torch.zeros(each.shape, dtype=each.dtype), each.requires_grad) for each in specs]
    request = BufferRequest(name="bucket", padded=layout.padded, dtype=layout.first.dtype, persistent=persistent)
    master = TieredTensor.of(torch.zeros(layout.padded, dtype=layout.first.dtype))
    buffer = GatherBuffer(request, CPU, SparePages())
    return Bucket(layout, state_group(), parameters, buffer, Interval(start=0, end=layout.padded), master, None)


def unit_of(index: int = 0, *, persistent: bool = True) -> Unit:
    bucket = bucket_of(spec("a", (3,)), spec("b", (2, 2)), persistent=persistent)
    return Unit(index, f"unit {index}", nn.Linear(1, 1), [bucket], Ledger())


def live(index: int = 0, *, persistent: bool = True) -> Unit:
    unit = unit_of(index, persistent=persistent)
    unit.gather()
    unit.wait()
    return unit


def test_slots_are_as_large_as_the_largest_bucket_travels() -> None:
    assert [ring_bytes(name, 3, 10) for name in ("local", "gloo", "shared", "nccl")] == [0, 60, 30, 30]
    layouts = [build_layout("l", [spec("p", (size,), torch.bfloat16)], 2) for size in (100, 300)]
    options = ZeroOptions(precision=BF16)
    assert slot_bytes(layouts, options, CPU) == 384 * 2
    assert slot_bytes(layouts, options, torch.device("cuda")) == 384 * 4
    assert slot_bytes([], options, CPU) == 0


@pytest.mark.parametrize(
    ("stage", "kind", "budget", "tier", "kept"),
    [
        (2, "gloo", "auto", "none", [[True, True], [True]]),
        (2, "shared", 0, "none", [[True, True], [True]]),
        (3, "local", "auto", "none", [[True, True], [True]]),
        (3, "local", "auto", "file", [[False, False], [False]]),
        (3, "local", 0, "none", [[False, True], [False]]),
        (3, "local", 0, "file", [[False, False], [False]]),
        (3, "shared", "auto", "none", [[True, True], [False]]),
        (3, "shared", "auto", "file", [[False, False], [False]]),
        (3, "shared", 128, "none", [[False, False], [True]]),
        # Of the root, one bucket is kept anyway, and only the other one counts.
        (3, "local", 256, "none", [[True, True], [True]]),
        (3, "gloo", "auto", "none", [[False, False], [False]]),
    ],
)
def test_what_stays_gathered(stage: int, kind: str, budget: Any, tier: Any, kept: list[list[bool]]) -> None:
    """The root has a bucket in bfloat16 and one in fp32, as masters are; the other unit one in bfloat16. Each has 128 bytes."""
    root = [build_layout("r", [spec("p", (64,), torch.bfloat16)], 1), build_layout("r", [spec("q", (32,))], 1)]
    other = [build_layout("o", [spec("s", (64,), torch.bfloat16)], 1)]
    offload = OffloadOptions(parameters=TierChoice(tier=tier))
    options = ZeroOptions(stage=stage, precision=BF16, gathered_budget=budget, offload=offload)
    assert kept_buckets([root, other], options, CPU, kind) == kept


def test_ranks_compare_options_and_parameters_but_not_the_paths_of_their_files() -> None:
    asked: list[dict[str, object]] = []
    group: Any = SimpleNamespace(require_same=lambda values, error, advice: asked.append(values))
    layout = build_layout("u/0", [spec("a", (2, 3)), spec("b", (4,), trained=False)], 1)
    options = ZeroOptions(prefetch=3)
    elsewhere = replace(options, offload=OffloadOptions(files=FileSettings(label="other")))
    for each in (options, elsewhere, replace(options, prefetch=4)):
        require_equal_plans(group, [layout], each)
    first, second, third = asked
    assert first == second
    assert {name for name in first if first[name] != third[name]} == {"option prefetch"}
    assert first["parameter a"] == "[2, 3] torch.float32 trained, number 0 of bucket u/0"
    assert first["parameter b"] == "[4] torch.float32 frozen, number 1 of bucket u/0"
    assert first["option prefetch"] == "3"


def test_ranks_compare_groups_by_key_and_without_addresses() -> None:
    def asked(lr: float) -> dict[str, str]:
        rows: list[dict[str, str]] = []
        group: Any = SimpleNamespace(require_same=lambda values, error, advice: rows.append(values))
        made = {"lr": torch.tensor(lr), "each": lambda x: x, "marked": object()}
        require_equal_plans(group, [], ZeroOptions(optimizer=OptimizerSettings(groups=(made,))))
        return rows[0]

    kept = [asked(each) for each in (0.5, 0.5, 0.25)]
    assert kept[0] == kept[1]
    assert {name for name in kept[0] if kept[0][name] != kept[2][name]} == {"lr of parameter group 0"}


def test_memory_begins_in_its_page_as_most_of_it_does_in_files() -> None:
    def run(start: int, end: int, first: int) -> TieredPart:
        return TieredPart(start=start, end=end, tier=Tier.FILE, slot=0, first=first)

    assert _page_offset(torch.float32, None) == 0
    assert _page_offset(torch.float32, [run(0, 10, 3), run(10, 40, 15), run(40, 50, 43)]) == 5 * 4
    assert _page_offset(torch.float32, [run(0, 10, 3), run(10, 19, 15)]) == 3 * 4
    assert _page_offset(torch.float32, [run(0, 10, BLOCK // 4 + 2)]) == 2 * 4
    assert _page_offset(torch.float32, [run(8, 10, 0)]) == BLOCK - 32


def test_chunks_keep_small_blocks_apart_as_only_one_has_the_root() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert [each.name for each in plan_model(model, torch.float32)] == ["root"]
    assert [each.name for each in plan_model(model, torch.float32, cuts=ModelCuts(chunks=2))] == ["root", "0", "1"]
    assert block_modules(model) == [*model]
    assert block_modules(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU())) == []


def test_a_frozen_bucket_gets_masters_of_its_values_when_it_is_trained() -> None:
    tiers = Tiers(device=CPU, ledger=Ledger())
    bucket = bucket_of(spec("a", (64,), torch.bfloat16, trained=False))
    frozen = bucket.master
    frozen.write(0, torch.arange(64.0).bfloat16()).wait()
    assert not bucket.trainable
    assert bucket.ever_trained == set()
    make_trainable(bucket, ZeroOptions(precision=BF16, accumulation=2), tiers)
    assert bucket.trainable
    assert bucket.copy is frozen
    assert (bucket.master.dtype, bucket.master.load(CPU).tolist()) == (torch.float32, list(range(64)))
    assert bucket.grad is not None
    assert tiers.ledger.by_purpose(Tier.DEVICE) == {Purpose.MASTER: 256, Purpose.GRADIENTS: 256}
    bucket = bucket_of(spec("a", (64,), trained=False))
    frozen = bucket.master
    make_trainable(bucket, ZeroOptions(), tiers)
    assert bucket.master is frozen
    assert bucket.copy is None
    wide = bucket_of(spec("a", (64,), torch.float64, trained=False))
    with pytest.raises(LayoutError, match=r"a is torch\.float64, wider than precision\.master torch\.float32"):
        make_trainable(wide, ZeroOptions(), tiers)


def test_a_unit_counts_the_memory_that_it_has_for_a_while() -> None:
    bucket = bucket_of(spec("a", (64,)), persistent=False)
    ledger = Ledger()
    bucket.group = state_group(share=0.5)
    unit = Unit(1, "unit", nn.Linear(1, 1), [bucket], ledger)
    assert bucket.unit_index == 1
    counts = []
    for move in (unit.gather, unit.wait, unit.rest, unit.gather, unit.leave, unit.leave):
        move()
        counts.append(ledger.total(Tier.DEVICE))
    assert counts == [128, 128, 0, 128, 0, 0]
    assert unit.phase is Phase.RESTING
    assert bool(bucket._placeholders[0].isnan().all())
    with pytest.raises(PhaseError, match="unit unit is resting and cannot become live; it can become gathering"):
        unit.enter(Phase.LIVE)
    whole = live()
    assert not whole._ledger.total(Tier.DEVICE)
    assert whole.writes_persist
    assert not unit.writes_persist


def test_names_and_memory_of_a_unit() -> None:
    unit, other = live(), live()
    (bucket,) = unit.buckets
    assert unit.names() == ["a", "b"]
    assert [unit.name_of(each) for each in (*bucket.parameters, nn.Parameter(torch.zeros(1)))] == [
        "a", "b", "a parameter of unit 0",
    ]  # fmt: skip
    full = bucket.buffer.full
    found = [unit.has_memory_of(each) for each in (bucket.parameters[0].data, full[-1:], torch.zeros(3))]
    assert found == [True, True, False]
    assert not unit.has_memory_of(other.buckets[0].parameters[0].data)


def test_changes_in_place_are_noticed_once() -> None:
    (bucket,) = live().buckets
    first, second = bucket.parameters
    assert bucket.changed_parameter() is None
    with torch.no_grad():
        second.add_(1)
    assert [bucket.changed_parameter() for _ in range(2)] == ["b", None]
    # A write through `.data` is seen by the values alone.
    first.data.add_(1)
    assert bucket.changed_parameter() is None
    bucket.record_digests()
    first.data.add_(1)
    assert [bucket.changed_parameter() for _ in range(2)] == ["a", None]
    with torch.no_grad():
        second.add_(1)
        first.add_(1)
    assert bucket.changed_parameter() == "a"
    # Other memory is taken over into the buffer.
    first.data = torch.full((3,), 7.0)
    assert bucket.changed_parameter() == "a"
    assert bucket.buffer.full[:3].tolist() == [7.0] * 3
    assert first.data_ptr() == bucket.buffer.full.data_ptr()
    bucket.record_digests()
    with torch.no_grad():
        second.add_(0)  # Its counter rises without a change: from now on values are compared.
    assert bucket.changed_parameter() is None
    second.data.add_(1)
    assert bucket.changed_parameter() == "b"


def test_a_cast_of_a_live_parameter_is_undone() -> None:
    (bucket,) = live().buckets
    first, second = bucket.parameters
    first.data = first.data.double()
    assert bucket.changed_parameter() is None
    bucket.drop_casts()
    assert first.dtype == torch.float32
    assert [each.data_ptr() for each in (first, second)] == [view.data_ptr() for view in bucket._views]


def test_flags_of_parameters_are_compared_with_those_of_the_step() -> None:
    (bucket,) = unit_of().buckets
    assert bucket.changed_flags() == []
    bucket.parameters[1].requires_grad_(False)
    assert bucket.changed_flags() == [1]
    bucket.adopt_requires_grad()
    assert (bucket.changed_flags(), bucket.training, bucket.ever_trained) == ([], [True, False], {"a", "b"})


def test_a_write_is_refused_where_it_would_be_lost() -> None:
    def changed(unit: Unit) -> Unit:
        with torch.no_grad():
            unit.buckets[0].parameters[0].add_(1)
        return unit

    InplaceWrites(alone=True).require_unchanged_in_pass([changed(live())])
    for alone, persistent in ((False, True), (True, False)):
        with pytest.raises(PhaseError, match="parameter a of unit unit 0 was changed in place during a pass"):
            InplaceWrites(alone=alone).require_unchanged_in_pass([changed(live(persistent=persistent))])
    writes = InplaceWrites(alone=True)
    writes.refuse_between_passes([changed(live())])
    writes.refuse_between_passes([unit_of(persistent=False)])
    with pytest.raises(PhaseError, match="parameter a was changed in place between steps"):
        writes.refuse_between_passes([changed(live(persistent=False))])


def test_values_are_noted_in_the_first_forwards_and_then_in_turn() -> None:
    writes = InplaceWrites(alone=False)
    units = [live(index) for index in range(3)]
    noted = []
    for forward in range(8):
        writes.training_forwards = forward
        for unit in units:
            writes.record(unit, len(units))
        noted.append([bool(unit.buckets[0]._digests) for unit in units])
        writes.require_unchanged_in_pass(units)
    assert noted == [[True] * 3] * 2 + [[each == forward % 3 for each in range(3)] for forward in range(2, 8)]


def test_what_a_device_has_compared_is_read_later() -> None:
    writes, unit = InplaceWrites(alone=False), live()
    (bucket,) = unit.buckets
    assert writes.unread_comparisons([unit]) == []
    for first, name in ((2, ""), (1, "b"), (0, "a")):
        bucket.first_changed = torch.tensor(float(first))
        ((found, where, value),) = writes.unread_comparisons([unit])
        assert (found, where, int(value)) == (unit, bucket, first)
        if not name:
            writes.require_unchanged(unit, bucket, first)
        else:
            with pytest.raises(PhaseError, match=f"parameter {name} of unit unit 0"):
                writes.require_unchanged(unit, bucket, first)
        assert bucket.first_changed is None


@dataclass
class Output:
    value: Any
    other: Any = None


def test_tensors_are_found_in_what_a_module_returns() -> None:
    a, b, c, d = (torch.full((1,), float(number)) for number in range(4))
    kept = SimpleNamespace(c=c, deeper=SimpleNamespace(module=nn.Linear(1, 1), kind=torch.Tensor, call=tensors_in))
    found = list(tensors_in({"a": [a], "rest": (Output(b, Output(d)), kept, 3, None, Output)}))
    assert [float(each) for each in found] == [0.0, 1.0, 3.0, 2.0]
    nested: Any = a
    for depth in range(1, 7):
        nested = Output(nested) if depth % 2 else SimpleNamespace(value=nested)
        assert len(list(tensors_in(nested))) == (depth <= 4)


def test_only_computed_tensors_say_when_their_gradient_comes() -> None:
    leaf = torch.ones(2, requires_grad=True)
    computed, reached = leaf * 2, []
    assert on_gradient_of([leaf, computed, torch.ones(1)], lambda: reached.append(1)) == [computed]
    computed.sum().backward()
    assert reached == [1]


def test_outputs_are_watched_until_the_watch_ends() -> None:
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []
    end = watch_outputs([*model.named_children()], lambda name, output: seen.append((name, output.shape)))
    for _ in range(2):
        model(torch.zeros(1, 2))
        end()
    assert seen == [("0", (1, 2)), ("1", (1, 2))]


def test_calls_of_a_known_kind_are_not_looked_at_again() -> None:
    calls, weight = UnitCalls(), torch.ones(2, requires_grad=True)

    def called(nodes: int, hooked: int = 1, unit: int = 0) -> bool:
        calls.begin(unit)
        calls.begin(9)  # An inner call that an exception has ended.
        outputs = [weight * 2 for _ in range(nodes)]
        return calls.end(unit, outputs[:hooked])

    assert [called(1), called(1), called(2), called(2, 2), called(2, 2), called(1, unit=1), called(0, 0)] == [
        True, False, True, True, False, True, False,
    ]  # fmt: skip
    assert not calls._open_calls
    assert [each.unit_index for each in calls._new_calls] == [0, 0, 0, 1]
    assert calls.unhooked_entries([]) == []
    assert [called(nodes) for nodes in range(3, 20)] == [True] * 13 + [False] * 4  # Sixteen kinds of each unit.
