"""Moments and weights in bfloat16: rounding at random, alike in every layout, and the updates around it."""

import pytest
import torch

from tests.unit.zero.test_updates import bucket_of
from zeromesh.errors import ConfigError
from zeromesh.flat.layout import ParameterPart, ParameterSpec, Region, build_layout
from zeromesh.flat.narrow_states import bits_of_shard, random_bits, round_into
from zeromesh.intervals import Interval
from zeromesh.offload import Ledger, Tiers
from zeromesh.optim.fused_optimizer import BucketOptimizer, fused_update
from zeromesh.options import OptimizerSettings, Precision, ZeroOptions

CPU = torch.device("cpu")
NARROW = {"compute": torch.bfloat16, "reduce": torch.float32}


def test_rounding_is_to_a_neighbour_and_right_on_average() -> None:
    count = 1 << 16
    for value in (1.0 + 2**-9, -3.0 - 2**-8, 1e-30, 2.0**-133):
        values = torch.full((count,), value)
        for lane in range(4):
            found = torch.empty(count, dtype=torch.bfloat16)
            round_into(found, values, random_bits(torch.arange(count), 0, "w", 1), lane)
            low, high = float(found.float().min()), float(found.float().max())
            assert low <= values[0] <= high
            assert high - low <= abs(value) * 2**-7 or abs(value) < 1e-38
            assert float(found.double().mean()) == pytest.approx(float(values[0].double()), abs=0.02 * (high - low))


def test_what_bfloat16_holds_stays() -> None:
    values = torch.tensor([0.0, -0.0, 1.5, float("inf"), -float("inf"), float("nan"), 3.3895e38])
    values[-1] = torch.finfo(torch.bfloat16).max
    found = torch.empty(7, dtype=torch.bfloat16)
    round_into(found, values, torch.full((7,), -1), 0)
    assert torch.equal(found.float().nan_to_num(7.0), values.nan_to_num(7.0))
    assert found[5].isnan()


def test_bits_are_those_of_places_in_the_whole_parameter() -> None:
    """A part of a divided parameter draws what the whole one does, and what lies between parameters draws nothing."""
    whole = torch.arange(24)
    bits = random_bits(whole, 3, "w", 2)
    columns = Region(shape=(4, 6), dims=((Interval(start=0, end=4),), (Interval(start=2, end=5),)))
    for region in (Region.whole((4, 6)), columns):
        part = ParameterPart(region=region, holders=(0,))
        spec = ParameterSpec(fqn="w", shape=region.local_shape, dtype=torch.float32, requires_grad=True, group=0, part=part)
        layout = build_layout("unit", [spec], 1)
        held = bits.view(4, 6)[:, slice(region.dims[1][0].start, region.dims[1][0].end)].flatten()
        for start, end in ((0, 64), (5, 9), (10, 12)):
            found = bits_of_shard(layout, layout.shard(0), Interval(start=start, end=end), [2], 3, CPU)
            expected = torch.zeros(64, dtype=torch.int64).index_copy(0, torch.arange(len(held)), held)
            assert torch.equal(found, expected[start:end])
    others = (random_bits(whole, 4, "w", 2), random_bits(whole, 3, "v", 2), random_bits(whole, 3, "w", 3))
    assert not any((bits == each).any() for each in others)
    counts = torch.stack([(random_bits(torch.arange(4096), 0, "w", 0) >> bit) & 1 for bit in range(64)]).double().mean(1)
    assert (counts - 0.5).abs().max() < 0.05


def updated(states: str, master: torch.dtype, cut: int, *, compensated: bool = False) -> list[torch.Tensor]:
    """The weights and the moments after 3 updates, in two parts at `cut`."""
    precision = Precision(**NARROW, master=master, compensated=compensated)
    settings = OptimizerSettings(states=states)  # type: ignore[arg-type]
    bucket = bucket_of([0, 0, 0], [True] * 3)
    optimizer = BucketOptimizer(bucket, ZeroOptions(optimizer=settings, precision=precision), Tiers(device=CPU, ledger=Ledger()))
    random, numel = torch.Generator().manual_seed(0), bucket.length
    weights = torch.randn(numel, generator=random).bfloat16().to(master)
    moments = [each.load(CPU) for each in optimizer.moments.values()]
    group = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    for _ in range(3):
        gradient = torch.randn(numel, generator=random)
        optimizer.begin()
        for part in (slice(0, cut), slice(cut, numel)):
            optimizer.step(part.start, [each[part] for each in (weights, gradient, *moments)], [group, group])
    return [each.clone() for each in (weights, *moments)]


_BOTH = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("states", "master"), [("bfloat16", _BOTH[0]), ("float32", _BOTH[1]), ("bfloat16", _BOTH[1])])
def test_an_update_is_the_same_in_any_parts_and_near_the_wide_one(states: str, master: torch.dtype) -> None:
    found, again, wide = (updated(states, master, 64), updated(states, master, 100), updated("float32", torch.float32, 64))
    kept = torch.bfloat16 if states == "bfloat16" else torch.float32
    assert [each.dtype for each in found] == [master, kept, kept]
    for one, other, exact in zip(found, again, wide, strict=True):
        assert torch.allclose(one, other, rtol=1e-6 if one.dtype == torch.float32 else 0.0, atol=0.0)
        assert torch.allclose(one.float(), exact, rtol=0.03, atol=0.03)


def test_a_compensation_has_what_weights_in_bfloat16_lack() -> None:
    """The sum of both is near the wide weights, and it is the same in any parts."""
    found, again = (updated("float32", torch.bfloat16, cut, compensated=True) for cut in (64, 128))
    wide = updated("float32", torch.float32, 64)
    weights, *moments, rest = found
    assert [each.dtype for each in found] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    assert all(map(torch.equal, found, again))
    assert all(map(torch.equal, moments, wide[1:]))
    assert torch.allclose(weights.float() + rest.float(), wide[0], rtol=2**-15, atol=0.0)
    assert not torch.allclose(weights.float(), wide[0], rtol=2**-10, atol=0.0)


def test_small_changes_add_up() -> None:
    """Weights of 1 take 400 steps of 1/8 of the distance to the next number, which rounding to the nearest would lose."""
    narrow = torch.ones(64, dtype=torch.bfloat16)
    for step in range(400):
        wide = narrow.float()
        fused_update("sgd", {"lr": 2**-10, "weight_decay": 0.0}, wide, torch.full((64,), -1.0), (), 0)
        round_into(narrow, wide, random_bits(torch.arange(64), 0, "w", step), 0)
    assert float(narrow.float().mean()) == pytest.approx(1 + 400 * 2**-10, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"compute": torch.float32, "master": torch.bfloat16},
            "precision.master none or kahan goes with precision.compute bfloat16",
        ),
        ({**NARROW, "master": torch.bfloat16, "reduce": torch.bfloat16}, "precision.reduce float32, not with"),
    ],
)
def test_weights_alone_are_in_bfloat16(changes: dict[str, torch.dtype], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Precision(**changes)


def test_the_line_of_dtypes_says_what_is_narrow() -> None:
    line = Precision(**NARROW, master=torch.bfloat16).table("adamw", "bfloat16")
    assert "no master weights, adamw moments bfloat16" in line
    assert "master weights float32, adamw moments int8" in Precision(**NARROW).table("adamw", "int8")
