"""Flat tensors that rest on tiers hold what a plain one holds, wherever their elements are; the ledger has each of their bytes."""

import os
import time
from collections import Counter
from collections.abc import Sized
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.simulated.device import compiler
from tests.support.workers import Workers
from tests.unit.offload.file_cases import CPU, made_tiers, small_tiers, values
from zeromesh.errors import ConfigError, StorageError
from zeromesh.offload import Ledger, Purpose, Tier, TierChoice, TieredTensor, Tiers
from zeromesh.offload.io import file_tier
from zeromesh.offload.io.direct_io import BLOCK
from zeromesh.offload.memory import allocation
from zeromesh.offload.memory import ledger as ledgers
from zeromesh.offload.memory.allocation import PinnedBudget, pinnable_bytes
from zeromesh.offload.tiers import GRAIN, TieredPart

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
choices = st.builds(
    lambda tier, fraction: TierChoice(tier=tier, fraction=fraction),
    st.sampled_from(["none", "host", "file"]),
    st.sampled_from([0.0, 0.01, 0.5, 0.9, 1.0]),
)
dtypes = st.sampled_from(DTYPES)
lengths = st.one_of(st.integers(0, 3 * GRAIN), st.sampled_from([GRAIN - 1, GRAIN, GRAIN + 1, 4 * GRAIN]))


def on(tiers: Tiers, tier: Any, fraction: float = 1.0, numel: int = 5 * GRAIN) -> TieredTensor:
    choice = TierChoice(tier=tier, fraction=fraction)
    return tiers.allocate(numel, torch.float32, choice, Purpose.MOMENTS, "exp_avg of layer 3")


# What is written is read


@given(data=st.data(), numel=lengths, dtype=dtypes, choice=choices, stripes=st.integers(1, 3), checksums=st.booleans())
@settings(max_examples=60)
def test_a_tensor_and_its_slices_are_those_of_a_plain_one(
    data: st.DataObject, numel: int, dtype: torch.dtype, choice: TierChoice, stripes: int, checksums: bool
) -> None:
    """What is written is read, in any dtype, and what is in memory can be looked at."""
    with small_tiers(stripes, checksums=checksums) as tiers:
        tensor = tiers.allocate(numel, dtype, choice, Purpose.MASTER, "some")
        model, cut = torch.zeros(numel, dtype=dtype), choice.offloaded_numel(numel)
        assert [part.end for part in tensor.parts] == sorted({cut, numel} - {0})
        assert (tensor.whole(CPU) is not None) == choice.is_whole_on(numel, CPU)
        for number in range(data.draw(st.integers(1, 8))):
            part, plain, first = tensor, model, 0
            for _ in range(data.draw(st.integers(0, 3))):
                start, end = data.draw(intervals(part.numel, cut - first))
                part, plain, first = part.slice(start, end), plain[start:end], first + start
                assert part.numel == plain.numel()
            start, end = data.draw(intervals(part.numel, cut - first))
            given_ = values(end - start, data.draw(dtypes), number)
            out = torch.full((end - start,), 7, dtype=given_.dtype)
            match data.draw(st.sampled_from(["write", "copy from", "read", "copy to", "view"])):
                case "write":
                    transfer = part.write(start, given_)
                    plain[start:end] = given_
                    if data.draw(st.booleans()):
                        transfer.wait()
                case "copy from":
                    part.slice(start, end).copy_from(given_)
                    plain[start:end] = given_
                case "read" | "copy to" as how:
                    if how == "read":
                        part.read(start, out).wait()
                    else:
                        part.slice(start, end).copy_to(out)
                    assert torch.equal(out, plain[start:end].to(out.dtype))
                case _:
                    found, begin, last = part.view(start, end, CPU), first + start, first + end
                    in_file = choice.tier == "file" and begin < cut
                    assert (found is None) == (start < end and (in_file or begin < cut < last))
                    assert part.view(start, end, torch.device("meta")) is None or start == end
                    if found is not None:
                        assert torch.equal(found, plain[start:end])
                        found.fill_(number)
                        plain[start:end] = number
        tensor.wait_for_writes()
        assert torch.equal(tensor.load(CPU), model)
        copy = tiers.allocate(numel, data.draw(dtypes), data.draw(choices), Purpose.PARAMETERS, "copy")
        copy.copy_from(tensor)
        assert torch.equal(copy.load(CPU), model.to(copy.dtype))


def intervals(numel: int, cut: int) -> st.SearchStrategy[tuple[int, int]]:
    """Begin and end, often at the place of `cut`."""
    cut = min(max(cut, 0), numel)
    inside = st.one_of(st.integers(0, cut), st.integers(cut, numel), st.just(cut))
    return st.tuples(inside, inside).map(lambda pair: (min(pair), max(pair)))


VIEWS = {
    "of no dimension": (torch.zeros(()), lambda base: base, 1),
    "empty": (torch.zeros(0, 3), lambda base: base.t(), 0),
    "whole": (torch.zeros(2, 3), lambda base: base, 1),
    "transposed": (torch.zeros(2, 3), lambda base: base.t(), 3),
    "columns": (torch.zeros(4, 2, 3), lambda base: base[..., ::2], 8),
    "one column": (torch.zeros(4, 3), lambda base: base[:, 1], 1),
    "rows again": (torch.zeros(3), lambda base: base.expand(4, 3), 4),
    "an element again": (torch.zeros(2, 1), lambda base: base.expand(2, 3), 6),
}


@pytest.mark.parametrize("view", VIEWS)
def test_any_view_is_written_in_order_into_the_memory_that_it_shows(view: str) -> None:
    base, shown, parts = VIEWS[view]
    target = shown(base)
    expected = torch.arange(1.0, 1 + target.numel()).view(target.shape)
    if "again" in view:
        expected = expected[:1].expand_as(target) if view.startswith("rows") else expected[:, :1].expand_as(target)
    tensor, out = TieredTensor.of(target), torch.zeros(target.numel())
    assert (tensor.numel, len(tensor.parts)) == (target.numel(), parts)
    tensor.copy_from(expected.reshape(-1))
    tensor.copy_to(out)
    assert torch.equal(shown(base), expected)
    assert torch.equal(out, expected.reshape(-1))
    assert all(part.memory.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() for part in tensor.parts)


@given(numel=st.integers(0, 10**9), choice=choices)
def test_a_fraction_is_kept_within_one_grain(numel: int, choice: TierChoice) -> None:
    cut = choice.offloaded_numel(numel)
    assert 0 <= cut <= numel
    assert cut == numel or cut % GRAIN == 0
    away = choice.fraction * numel if choice.tier != "none" else 0
    assert away - 1 <= cut < away + GRAIN
    assert sum(choice.numel_on(tier, numel) for tier in Tier) == numel
    assert choice.numel_on(Tier.DEVICE, numel) == numel - cut


CARD_ZERO = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("tier", "fraction", "device", "leaves", "whole"),
    [
        ("none", 1.0, CARD_ZERO, False, [True, True]),
        ("host", 1.0, CPU, False, [True, True]),
        ("host", 0.5, CPU, False, [True, False]),
        ("host", 1.0, CARD_ZERO, True, [False, False]),
        ("host", 0.5, CARD_ZERO, True, [False, False]),
        ("host", 0.0, CARD_ZERO, False, [True, True]),
        ("file", 1.0, CPU, True, [False, False]),
        ("file", 0.0, CPU, False, [True, True]),
    ],
)
def test_what_rests_on_the_host_has_left_a_device_and_not_a_cpu(
    tier: Any, fraction: float, device: torch.device, leaves: bool, whole: list[bool]
) -> None:
    choice = TierChoice(tier=tier, fraction=fraction)
    assert choice.leaves_device(device) is leaves
    assert [choice.is_whole_on(numel, device) for numel in (GRAIN, 4 * GRAIN)] == whole
    assert choice.is_whole_on(0, device)


def test_every_byte_is_in_the_ledger(tiers: Tiers) -> None:
    half = on(tiers, "file", 0.5, 6 * GRAIN)
    other = tiers.allocate(5 * GRAIN, torch.bfloat16, TierChoice(tier="host", fraction=0.3), Purpose.PARAMETERS, "copy")
    counted = {tier: tiers.ledger.by_purpose(tier) for tier in Tier}
    assert [sum(each.end - each.start for each in half.parts if each.tier is tier) for tier in Tier] == [3 * GRAIN, 0, 3 * GRAIN]
    assert [sum(each.end - each.start for each in other.parts if each.tier is tier) for tier in Tier] == [3 * GRAIN, 2 * GRAIN, 0]
    assert counted[Tier.FILE] == {Purpose.MOMENTS: 12 * GRAIN}
    assert counted[Tier.HOST] == {Purpose.PARAMETERS: 4 * GRAIN, Purpose.STAGING: file_tier.THREAD_BYTES}
    assert counted[Tier.DEVICE] == {Purpose.MOMENTS: 12 * GRAIN, Purpose.PARAMETERS: 6 * GRAIN}
    assert (half.nbytes, other.nbytes) == (24 * GRAIN, 10 * GRAIN)


def test_what_lies_in_files_is_read_from_there(tiers: Tiers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_tier, "PIECE", 2 * BLOCK)
    stored = values(9 * GRAIN + 5, torch.bfloat16, 3)
    paths = [tmp_path / "one", tmp_path / "two"]
    for path, header in zip(paths, (2 * BLOCK, 38), strict=True):  # In whole blocks, and beside them.
        path.write_bytes(b"h" * header + stored.view(torch.uint8).numpy().tobytes())
    one, other = map(tiers.file().open_stored, paths)
    runs = [
        TieredPart(start=64, end=64 + 4 * GRAIN, tier=Tier.FILE, slot=one, first=BLOCK),
        TieredPart(start=64 + 4 * GRAIN, end=69 + 4 * GRAIN, tier=Tier.FILE, slot=other, first=19 + 9 * GRAIN),
        TieredPart(start=5 * GRAIN, end=8 * GRAIN, tier=Tier.FILE, slot=other, first=19 + 7),
    ]
    wanted = torch.zeros(8 * GRAIN + 9, dtype=torch.bfloat16)
    for run, first in zip(runs, (0, 9 * GRAIN, 7), strict=True):
        wanted[run.start : run.end] = stored[first : first + run.end - run.start]
    found = tiers.stored(wanted.numel(), wanted.dtype, runs, Purpose.PARAMETERS)
    assert torch.equal(found.load(CPU), wanted)
    assert torch.equal(found.slice(70, 6 * GRAIN + 1).load(CPU), wanted[70 : 6 * GRAIN + 1])
    assert tiers.ledger.total(Tier.FILE) == 2 * sum(run.end - run.start for run in runs)
    assert tiers.file().nbytes == 0, "something was copied"
    with pytest.raises(ValueError, match="one, which is only read"):
        found.write(100, wanted[:5])
    os.truncate(paths[1], 100)
    with pytest.raises(StorageError, match=r"two.* ends after"):
        found.load(CPU)


# What is refused


@pytest.mark.parametrize("tier", ["none", "host", "file"])
def test_others_elements_are_not_touched(tiers: Tiers, tier: str) -> None:
    tensor = on(tiers, tier)
    model = values(tensor.numel, torch.float32, 1)
    tensor.write(0, model).wait()
    part = tensor.slice(10, 20)
    for count, copy in product((9, 11), (part.copy_from, part.copy_to)):
        with pytest.raises(ValueError, match=f"{count} elements to copy, for a tensor of 10"):
            copy(torch.ones(count))
    for start, end in ((-1, 5), (5, 11), (6, 5)):
        with pytest.raises(ValueError, match="do not lie in 10"):
            part.slice(start, end)
    for start, count in ((-1, 5), (tensor.numel - 4, 5), (1, tensor.numel)):
        for move in (tensor.read, tensor.write):
            with pytest.raises(ValueError, match=f"do not lie in {tensor.numel}"):
                move(start, torch.ones(count))
    with pytest.raises(ValueError, match="elements to copy, for a tensor of"):
        tensor.copy_from(TieredTensor.of(torch.ones(5)))
    assert torch.equal(tensor.load(CPU), model)
    if tier == "file":
        with pytest.raises(ValueError, match="not in memory"):
            _ = part.memory
    else:
        assert torch.equal(part.memory, model[10:20])
    assert torch.equal(TieredTensor.of(model).memory, model)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        *(({"tier": "file", "fraction": part}, "fraction of tier file is") for part in (-0.1, 1.1, float("nan"))),
        ({"tier": "disk"}, "tier is 'disk'; allowed are none, host, file"),
    ],
)
def test_a_choice_that_is_none_is_refused(choice: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        TierChoice(**choice)
    assert "fraction" not in choice or "it must be from 0 to 1" in str(caught.value)


@pytest.mark.parametrize(("tier", "said"), [("none", "device"), ("host", "host")])
def test_memory_that_there_is_not_is_named(tiers: Tiers, tier: str, said: str) -> None:
    with pytest.raises(StorageError, match=rf"{said} tier, exp_avg of layer 3: [\d,]{{17,}} bytes cannot be allocated"):
        on(tiers, tier, numel=1 << 55)
    assert tiers.ledger.total() == 0


def test_files_need_a_directory_only_when_something_rests_there(tmp_path: Path) -> None:
    tiers = Tiers(device=CPU, ledger=Ledger())
    on(tiers, "host")
    assert tiers.waited() == {}
    with pytest.raises(StorageError, match="no directory for them is known"):
        on(tiers, "file")
    (tmp_path / "taken").write_bytes(b"")
    tiers = made_tiers(tmp_path / "taken")
    with pytest.raises(StorageError, match="file tier: cannot make swap files in"):
        on(tiers, "file")
    tiers.close()


def test_errors_come_through_all_ways(tiers: Tiers) -> None:
    """Whether elements are read as they are or converted, copied or loaded: each is an error that says what it is of."""
    tensor = on(tiers, "file", 0.5, 8 * GRAIN)
    tensor.write(0, values(8 * GRAIN, torch.float32, 1)).wait()
    os.ftruncate(tiers.file()._files[0]._buffered, 5)
    said = r"file tier, exp_avg of layer 3: .* ends after 5 bytes"
    reading = tensor.read(0, torch.empty(8 * GRAIN))
    for call in (
        reading.wait,
        lambda: tensor.load(CPU),
        lambda: tensor.slice(0, 10).copy_to(torch.empty(10, dtype=torch.float64)),
        lambda: on(tiers, "host", numel=8 * GRAIN).copy_from(tensor),
    ):
        with pytest.raises(StorageError, match=said):
            call()
    rest = torch.empty(4 * GRAIN)
    tensor.read(4 * GRAIN, rest).wait()
    assert torch.equal(rest, values(8 * GRAIN, torch.float32, 1)[4 * GRAIN :])


def test_the_end_takes_the_files(tmp_path: Path) -> None:
    tiers = made_tiers(tmp_path, label="mine")
    tensor = on(tiers, "file")
    tensor.write(0, torch.ones(tensor.numel))
    assert [Path(path).name.startswith("zeromesh-mine-") for path in tiers.file().paths] == [True]
    assert tiers.waits is tiers.file().waits
    assert list(tiers.waited()) == [Tier.FILE]
    tiers.close()
    tiers.close()
    with pytest.raises(StorageError, match=r"file tier, exp_avg of layer 3: .*the tier is closed"):
        tensor.load(CPU)


def test_no_more_is_pinned_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    refused: list[int] = []

    def noted(pages: Sized, device: torch.device) -> bool:
        if len(pages) in refused:
            return False
        pinned.append(len(pages))
        return True

    monkeypatch.setattr(allocation._PinnedPages, "pin", noted)
    budget = PinnedBudget(limit=10_000)
    device = torch.device("cuda")
    for count, expected in ((1000, [4000]), (2000, [4000]), (1500, [4000, 6000]), (1, [4000, 6000])):
        found = budget.allocate(count, torch.float32, device)
        assert torch.equal(found, torch.zeros(count))
        assert pinned == expected
    assert (budget.used, budget.pageable) == (10_000, 8004)
    budget.allocate(5, torch.float32, CPU)
    assert (budget.used, budget.pageable) == (10_000, 8004)
    budget.release(6000)
    assert budget.reserve(6000, device)
    assert not budget.reserve(1, device)
    budget.release(6000)
    refused.append(2000)
    assert torch.equal(budget.allocate(500, torch.float32, device), torch.zeros(500))
    assert (budget.used, budget.pageable) == (4000, 10_004), "what the driver does not pin counts as ordinary memory"
    assert budget.limit == 4000, "a driver that has refused is not asked again"


def test_what_may_be_pinned_is_what_is_free_and_not_what_may_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [8000]
    monkeypatch.setattr(allocation, "available_bytes", lambda: free[0])
    device, budget = torch.device("cuda"), PinnedBudget()
    assert pinnable_bytes() == 7000
    assert budget.reserve(6000, device)
    free[0] = 2000
    assert not budget.reserve(2000, device)
    assert budget.reserve(1500, device)
    free[0] = 0
    budget.release(1500)
    assert budget.reserve(1500, device), "torch keeps what was pinned"


def test_available_memory_is_that_of_the_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ledgers, "_CGROUP", tmp_path)
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 100\nactive_file 50\nfile 900\n")
    (tmp_path / "memory.max").write_text("1000\n")
    for used, available in (("700", 450), ("1151", 0)):
        (tmp_path / "memory.current").write_text(f"{used}\n")
        assert ledgers.available_bytes() == available
    (tmp_path / "memory.max").write_text(f"{1 << 60}\n")
    assert ledgers.available_bytes() <= ledgers.machine_bytes(), "a group is allowed no more than there is"
    (tmp_path / "memory.max").write_text("max\n")
    assert ledgers.machine_bytes() / 1000 < ledgers.available_bytes() <= ledgers.machine_bytes()
    assert ledgers.machine_bytes() == pytest.approx(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), rel=0.01)


@pytest.mark.skipif(compiler() is None, reason="the simulated device needs a C++ compiler")
@pytest.mark.parametrize(
    "case",
    [
        "the_gather_of_a_shard_in_two_memories_comes_after_both",
        "copies_in_do_not_wait_for_copies_out",
        "gradients_leave_and_come_back_without_the_host",
        "a_save_waits_for_nothing_but_its_own_copies_into_pinned_memory",
        "helper_threads_sleep_and_know_their_device",
        "what_the_driver_does_not_pin_is_ordinary_memory",
    ],
)
def test_a_rule_of_offload_and_saving_on_the_simulated_device(workers: Workers, tmp_path: Path, case: str) -> None:
    workers.run(1, f"device_memory_cases:{case}", device="sim", folder=str(tmp_path))


MEMORY = (Tier.DEVICE, Tier.HOST)
CARD, MASTER, MOMENTS = Tier.DEVICE, Purpose.MASTER, Purpose.MOMENTS
steps = st.lists(st.tuples(st.sampled_from(Tier), st.sampled_from(Purpose), st.integers(-80, 100)), max_size=40)


@given(steps=steps, limits=st.dictionaries(st.sampled_from(Tier), st.integers(0, 300)))
@example(steps=[(CARD, MASTER, 60), (CARD, MOMENTS, 41), (CARD, MASTER, -60), (CARD, MOMENTS, 100)], limits={CARD: 100})
@settings(max_examples=150)
def test_sums_and_the_highest_of_them(steps: list[tuple[Tier, Purpose, int]], limits: dict[Tier, int]) -> None:
    ledger, model, peak = Ledger(limits), Counter[tuple[Tier, Purpose]](), 0
    for tier, purpose, nbytes in steps:
        used = sum(count for (where, _), count in model.items() if where is tier)
        if (held := model[tier, purpose]) + nbytes < 0:
            with pytest.raises(ValueError, match=rf"in {tier.value}: {-nbytes} bytes given back, {held} counted"):
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


def test_changes_are_recorded_from_the_state_at_the_start_up_to_a_bound() -> None:
    ledger = Ledger()
    ledger.add(CARD, MASTER, 10)
    ledger.add(Tier.HOST, MOMENTS, 5)
    ledger.add(Tier.HOST, MOMENTS, -5)
    began = time.perf_counter()
    with ledger.recording(3) as changes:
        for nbytes in (7, -2, 20):
            ledger.add(CARD, MASTER, nbytes)
        found = [(each.tier, each.purpose, each.nbytes) for each in changes]
    assert found == [(CARD, MASTER, 10), (CARD, MASTER, 17), (CARD, MASTER, 15)]
    assert began <= changes[0].at <= changes[1].at <= changes[2].at <= time.perf_counter()
    ledger.add(CARD, MASTER, 1)
    assert len(changes) == 3
    with ledger.recording(9) as changes:
        ledger.add(CARD, MASTER, 1)
    ledger.add(CARD, MASTER, 1)
    assert [each.nbytes for each in changes] == [36, 37], "each recording begins anew, and ends"


def test_figures_of_the_process_are_those_of_the_system() -> None:
    lines = Path("/proc/self/status").read_text().splitlines()
    status = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest}
    assert ledgers.mapped_file_bytes() == pytest.approx(status["RssFile"], rel=0.05)
    assert ledgers.peak_bytes() == pytest.approx(status["VmHWM"], rel=0.05)
    assert ledgers.resident_bytes() == pytest.approx(status["VmRSS"], rel=0.05)
    models = [line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    assert ledgers.cpu_name() == (models[0].strip() if models else os.uname().machine)


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
