"""The ledger: bytes by tier and purpose, their highest sum, and limits."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeromesh.errors import StorageError
from zeromesh.offload import Ledger, Purpose, Tier

MEMORY = (Tier.DEVICE, Tier.HOST)
steps = st.lists(st.tuples(st.sampled_from(Tier), st.sampled_from(Purpose), st.integers(-80, 100)), max_size=40)


@given(steps=steps, limits=st.dictionaries(st.sampled_from(Tier), st.integers(0, 300)))
@settings(max_examples=150)
def test_sums_and_the_highest_of_them(steps: list[tuple[Tier, Purpose, int]], limits: dict[Tier, int]) -> None:
    ledger, model, peak = Ledger(limits), Counter[tuple[Tier, Purpose]](), 0
    for tier, purpose, nbytes in steps:
        used = sum(count for (where, _), count in model.items() if where is tier)
        if model[tier, purpose] + nbytes < 0:
            with pytest.raises(ValueError, match=rf"{purpose.value} in {tier.value}: .* given back"):
                ledger.add(tier, purpose, nbytes)
        elif nbytes > 0 and tier in limits and used + nbytes > limits[tier]:
            room = rf"into the {tier.value} tier, which has {limits[tier]} and of these {used} in use"
            said = rf"{purpose.value}: {nbytes} bytes more do not fit {room}"
            with pytest.raises(StorageError, match=said):
                ledger.add(tier, purpose, nbytes)
        else:
            ledger.add(tier, purpose, nbytes)
            model[tier, purpose] += nbytes
        peak = max(peak, sum(count for (where, _), count in model.items() if where in MEMORY))
        assert ledger.peak() == peak
        for tiers in ((), (Tier.FILE,), (Tier.DEVICE,), (Tier.HOST, Tier.FILE), tuple(Tier)):
            sums = Counter[Purpose]()
            for (where, what), count in model.items():
                sums[what] += count if where in (tiers or MEMORY) else 0
            assert ledger.by_purpose(*tiers) == {what: count for what, count in sums.items() if count}
            assert ledger.total(*tiers) == sum(sums.values())


def test_what_was_refused_can_be_had_elsewhere_and_later() -> None:
    ledger = Ledger({Tier.DEVICE: 100})
    ledger.add(Tier.DEVICE, Purpose.MASTER, 60)
    with pytest.raises(
        StorageError, match=r"optimizer moments: 41 bytes more .*, which has 100 and of these 60 in use"
    ):
        ledger.add(Tier.DEVICE, Purpose.MOMENTS, 41)
    assert ledger.peak() == ledger.total() == 60
    ledger.add(Tier.HOST, Purpose.MOMENTS, 41)
    ledger.add(Tier.DEVICE, Purpose.MASTER, -60)
    ledger.add(Tier.DEVICE, Purpose.MOMENTS, 100)
    assert ledger.total(Tier.DEVICE) == 100
    assert ledger.peak() == 141


@given(steps=steps)
@settings(max_examples=100)
def test_the_most_of_each_purpose_since_it_was_last_asked_for(steps: list[tuple[Tier, Purpose, int]]) -> None:
    ledger, now, most = Ledger(), Counter[tuple[Tier, Purpose]](), Counter[tuple[Tier, Purpose]]()
    for number, (tier, purpose, nbytes) in enumerate(steps):
        nbytes = max(nbytes, -now[tier, purpose])
        ledger.add(tier, purpose, nbytes)
        now[tier, purpose] += nbytes
        most[tier, purpose] = max(most[tier, purpose], now[tier, purpose])
        if number % 5 == 4:
            wanted: dict[Tier, dict[Purpose, int]] = {}
            for (where, what), count in most.items():
                if count:
                    wanted.setdefault(where, {})[what] = count
            assert ledger.take_highest() == wanted
            most = Counter(now)
