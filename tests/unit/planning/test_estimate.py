"""An estimate's seconds and bytes, term by term, beside the formulas of the machine's figures."""

from contextlib import closing
from typing import Any

import pytest

from tests.unit.planning.test_machine import MACHINE
from tests.unit.planning.test_planner import _card, _config, _on_card
from zeromesh.offload import Purpose, TierChoice
from zeromesh.telemetry.step_recorder import StepPhase
from zeromesh.trainer.planning.auto import subject_of
from zeromesh.trainer.planning.estimate import ACTIVATIONS, GATHERED, LIBRARY, Estimate, Estimator
from zeromesh.trainer.planning.layouts import Layout
from zeromesh.trainer.planning.subject import Subject

HOST, FILE = TierChoice(tier="host"), TierChoice(tier="file")
HALF_FILE, HALF_HOST = TierChoice(tier="file", fraction=0.5), TierChoice(tier="host", fraction=0.5)
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all-reduce", "reduce-scatter", "all-gather"


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of(_config())


@pytest.fixture(scope="module")
def on_card() -> Subject:
    return _on_card("recovery.memory=off")


@pytest.mark.parametrize(
    ("layout", "passes", "collectives"),
    [
        # Bytes of memory for each element, in all, and (collective, its bytes an element, ranks, hosts, how often).
        (Layout(shard=2, stage=0, accumulation=4), 4 * 12, [(ALL_REDUCE, 4, 2, 1, 1)]),
        (Layout(shard=2, stage=0), 8 + 2, [(ALL_REDUCE, 4, 2, 1, 1)]),
        (Layout(shard=2, stage=1, accumulation=4), 4 * 12, [(REDUCE_SCATTER, 4, 2, 1, 1)]),
        (Layout(shard=2, stage=2, accumulation=4), 4 * (8 + 4), [(REDUCE_SCATTER, 4, 2, 1, 4)]),
        (Layout(shard=4, stage=2), 8 + 1, [(REDUCE_SCATTER, 4, 4, 2, 1), (ALL_GATHER, 4, 4, 2, 1)]),
        (Layout(shard=4, stage=3, accumulation=4), 4 * (8 + 2), [(REDUCE_SCATTER, 4, 4, 2, 4), (ALL_GATHER, 4, 4, 2, 8)]),
        (Layout(replicate=2, stage=1, accumulation=4), 4 * 12, [(ALL_REDUCE, 4, 2, 1, 1)]),
        (
            Layout(replicate=2, shard=2, stage=2, accumulation=4),
            4 * (8 + 4),
            [(REDUCE_SCATTER, 4, 2, 1, 4), (ALL_REDUCE, 2, 2, 2, 1)],
        ),
        (
            Layout(replicate=2, shard=2, stage=2, replicas="divided", accumulation=4),
            4 * (8 + 4),
            [(REDUCE_SCATTER, 4, 2, 1, 4), (REDUCE_SCATTER, 2, 2, 2, 1), (ALL_GATHER, 2, 2, 2, 1)],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_and_parameters_travel_as_often_as_a_stage_needs(
    subject: Subject, layout: Layout, passes: int, collectives: list[Any]
) -> None:
    found, busy = Estimator(subject, MACHINE, 2).estimate(layout), min(2, layout.ranks)
    number, units = subject.parameters, len(subject.units(1))
    wanted = MACHINE.moved_seconds(passes * number, ranks_on_host=busy)
    for kind, width, ranks, hosts, times in collectives:
        nbytes = width * number / units
        wanted += times * units * MACHINE.collective_seconds(kind, nbytes, ranks=ranks, hosts=hosts, ranks_on_host=busy)
    assert found.phases[StepPhase.COMMUNICATION] == pytest.approx(wanted, rel=0.02)


def _phases(subject: Subject, layout: Layout, machine: Any) -> tuple[float, float]:
    found = Estimator(subject, machine, 2).estimate(layout)
    return found.phases[StepPhase.OPTIMIZER], found.phases.get(StepPhase.OFFLOAD_WAIT, 0.0)


@pytest.mark.parametrize("choice", [TierChoice(), HOST, HALF_HOST, FILE, HALF_FILE], ids=str)
@pytest.mark.parametrize("stage", [0, 2])
def test_an_update_on_an_accelerator_waits_for_states_elsewhere(on_card: Subject, choice: Any, stage: int) -> None:
    card = _card()
    own = on_card.parameters / (2 if stage else 1)
    away = choice.fraction * own if choice.uses_tier else 0.0
    optimizer, wait = _phases(on_card, Layout(shard=2, stage=stage, optimizer=choice), card)
    here = card.update_seconds(own - away, ranks_on_host=2)
    assert optimizer == pytest.approx(here + card.moved_seconds(4 * own), rel=0.02)
    if not away:
        assert wait == 0.0
        return
    on_host, on_device = (card.update_seconds(away, on=on, ranks_on_host=2) for on in ("host", "device"))
    through = card.copy_seconds(4 * away) + card.copy_seconds(2 * away, to="device") + on_host
    moved = min(through, card.copy_seconds(24 * away) + on_device)
    if choice.tier == "file":
        moved = max(moved, card.disk_seconds(12 * away, 12 * away, ranks_on_host=2))
    assert wait == pytest.approx(moved, rel=0.02)


def test_an_update_on_a_cpu_waits_for_the_rest_of_its_files(subject: Subject) -> None:
    own = subject.parameters / 2
    plain, none = _phases(subject, Layout(shard=2, stage=2), MACHINE)
    on_host = MACHINE.update_seconds(own, on="host", ranks_on_host=2)
    norm = MACHINE.moved_seconds(4 * own, ranks_on_host=2)
    streamed = MACHINE.disk_seconds(12 * own, 12 * own, ranks_on_host=2)
    assert none == 0.0
    assert _phases(subject, Layout(shard=2, stage=2, optimizer=HOST), MACHINE) == (plain, 0.0)
    found = _phases(subject, Layout(shard=2, stage=2, optimizer=FILE), MACHINE)
    assert list(found) == [pytest.approx(norm + on_host, rel=0.02), pytest.approx(streamed - on_host, rel=0.02)]


def test_parameters_away_come_twice_and_go_once_unless_masters_make_them(on_card: Subject) -> None:
    card, resting = _card(), 2 * on_card.parameters / 2

    def waited(**changes: Any) -> float:
        layout = Layout(shard=2, accumulation=3, prefetch=0, **changes)
        return _phases(on_card, layout, card)[1]

    alone = waited(optimizer=HOST)
    copies = card.copy_seconds(6 * resting, to="device") + card.copy_seconds(resting)
    assert waited(optimizer=HOST, parameters=HOST) - alone == pytest.approx(copies, rel=0.02)
    # Only what comes is a part of its own: what is written after an update is written whole.
    halves = card.copy_seconds(3 * resting, to="device") + card.copy_seconds(resting)
    assert waited(optimizer=HOST, parameters=HALF_HOST) - alone == pytest.approx(halves, rel=0.02)
    disk = card.disk_seconds(6 * resting, resting, ranks_on_host=2)
    assert waited(optimizer=HOST, parameters=FILE) - alone == pytest.approx(disk, rel=0.02)
    assert waited(parameters=HOST) == 0.0
    ahead = _phases(on_card, Layout(shard=2, accumulation=3, optimizer=HOST, parameters=HOST), card)[1]
    assert ahead < waited(optimizer=HOST, parameters=HOST)


def _estimate(subject: Subject, **changes: Any) -> Estimate:
    return Estimator(subject, _card(), 2).estimate(Layout(accumulation=2, recompute="block", **changes))


def test_inputs_of_recomputed_blocks_count_where_they_rest(on_card: Subject) -> None:
    stay, host, file, half = (_estimate(on_card, activations=choice) for choice in (TierChoice(), HOST, FILE, HALF_HOST))
    assert stay.host == {LIBRARY: _card().library.host}
    away = host.host[Purpose.ACTIVATIONS.value]
    assert away > 0
    assert half.host[Purpose.ACTIVATIONS.value] == pytest.approx(away / 2, abs=1)
    assert (stay.disk, host.disk, file.disk) == (0, 0, away)
    assert Purpose.ACTIVATIONS.value not in file.host
    waits = [each.phases.get(StepPhase.OFFLOAD_WAIT, 0.0) for each in (stay, half, host)]
    assert waits[0] == 0.0 < waits[1] < waits[2]


def test_as_many_microbatches_rest_elsewhere_as_there_are_stages_or_microbatches(on_card: Subject) -> None:
    def found(accumulation: int) -> Estimate:
        layout = Layout(pipeline=2, accumulation=accumulation, recompute="block", activations=HOST)
        return Estimator(on_card, _card(), 2).estimate(layout)

    one, two, four = (found(accumulation) for accumulation in (1, 2, 4))
    assert two.host[Purpose.ACTIVATIONS.value] == 2 * one.host[Purpose.ACTIVATIONS.value]
    assert four.host[Purpose.ACTIVATIONS.value] == two.host[Purpose.ACTIVATIONS.value]


def test_libraries_and_gathered_parameters_are_counted_on_each_kind_of_machine(subject: Subject, on_card: Subject) -> None:
    library = MACHINE.library.model_copy(update={"host": 1000, "shared": 600, "device": 77})
    machine = MACHINE.model_copy(update={"library": library})
    for ranks, wanted in ((1, 1600), (2, 1300), (4, 1300)):
        found = Estimator(subject, machine, 2).estimate(Layout(shard=ranks))
        assert (found.device[LIBRARY], found.host) == (wanted, {})
    assert found.device[GATHERED] > 0
    card = _card()
    card = card.model_copy(update={"library": library})
    there = Estimator(on_card, card, 2).estimate(Layout(shard=2))
    assert (there.device[LIBRARY], there.host) == (77, {LIBRARY: 1000})
    assert (there.device_bytes, there.host_bytes) == (sum(there.device.values()), 1000)
    assert there.seconds == sum(there.phases.values())


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "interleaved"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_lower_bound_is_one_and_a_pipeline_has_a_bubble(subject: Subject, schedule: Any, accumulation: int) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    layout = Layout(pipeline=2, schedule=schedule, chunks=chunks, stage=1, accumulation=accumulation)
    estimator = Estimator(subject, MACHINE, 2)
    exact, bound = (estimator.estimate(layout, exact=each) for each in (True, False))
    assert bound.device == exact.device
    assert 0.5 * exact.seconds < bound.seconds <= exact.seconds
    assert 0 < exact.bubble < 0.7
    alone = estimator.estimate(Layout(stage=1, accumulation=accumulation))
    assert alone.bubble == 0.0
    if accumulation == 4:
        shorter = estimator.estimate(Layout(pipeline=2, schedule=schedule, chunks=chunks, stage=1, accumulation=2))
        assert exact.bubble < shorter.bubble


def test_what_a_run_compares_has_the_ledgers_names(on_card: Subject) -> None:
    found = Estimator(on_card, _card(), 2).estimate(Layout(shard=2, optimizer=HOST))
    check = found.check()
    assert (check.layout, check.peak) == (str(found.layout), found.device_bytes)
    assert set(check.phases) == set(map(str, StepPhase))
    assert check.memory["host"] == {name: found.host[Purpose[name.upper()].value] for name in ("master", "moments", "gradients")}
    assert "libraries" not in check.memory["device"]
    assert set(Estimator(on_card, _card(), 2).estimate(Layout()).check().memory) == {"device"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("keys", "hosts", "copies"),
    [
        ((), 1, 2),
        (("recovery.copies=1",), 1, 2),
        (("recovery.copies=1",), 2, 4),
        (("recovery.memory=off", "recovery.copies=1"), 2, 4),
        (("recovery.survivors=end",), 1, 0),
    ],
)
def test_snapshots_are_counted_in_the_memory_of_the_host(keys: tuple[str, ...], hosts: int, copies: int) -> None:
    """Master weights and two moments in float32, two copies or four; none where they take more than half of what is left."""
    with closing(_on_card(*keys)) as subject:
        card, layout = _card(), Layout(shard=2 * hosts, optimizer=HOST)
        found = Estimator(subject, card, 2).estimate(layout)
        states = sum(found.host[each.value] for each in (Purpose.MASTER, Purpose.MOMENTS))
        assert found.host.get(Purpose.SNAPSHOTS.value, 0) == copies * states
        host = card.host.model_copy(update={"memory_bytes": 2 * (found.host_bytes + copies * states - 1)})
        small = Estimator(subject, card.model_copy(update={"host": host}), 2).estimate(layout)
        assert Purpose.SNAPSHOTS.value not in small.host


def test_the_largest_share_of_samples_counts() -> None:
    found = []
    for keys in ((), ("batch.balance=[1,3]",), ("batch.balance=speed",)):
        with closing(subject_of(_config("batch.micro_size=2", "batch.global_size=8", *keys))) as subject:
            found.append(Estimator(subject, MACHINE, 2).estimate(Layout(shard=2, micro=2, accumulation=1)))
            if keys == ():
                large = Estimator(subject, MACHINE, 2).estimate(Layout(shard=2, micro=3))
    usual, shares, speed = (each.device for each in found)
    assert shares[ACTIVATIONS] == large.device[ACTIVATIONS] > usual[ACTIVATIONS]
    assert speed[ACTIVATIONS] > shares[ACTIVATIONS]
    assert found[1].seconds == found[0].seconds
