"""What is called asynchronous is: a delayed peer shows it."""

import pytest

from tests.support.devices import DEVICE
from tests.support.workers import Workers

from .checks import whole_product

Entries = list[tuple[float, str]]


def place(entries: Entries, text: str) -> int:
    """Where an entry first comes."""
    return [name for _, name in entries].index(text)


def when(entries: Entries, text: str) -> float:
    return entries[place(entries, text)][0]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_reductions_start_and_end_while_backward_goes_on(workers: Workers, transport: str, stage: int) -> None:
    case = "tests.conformance.timeline:reductions"
    for entries in workers.run(2, case, transport=transport, stage=stage, overlap=True):
        assert place(entries, "launch blocks.3") < place(entries, "gradient 2")
        assert place(entries, "finish blocks.3") < place(entries, "gradient 0")


def test_without_overlap_reductions_wait_for_the_end_of_backward(workers: Workers) -> None:
    case = "tests.conformance.timeline:reductions"
    for entries in workers.run(2, case, transport="shared", stage=2, overlap=False):
        names = [name for _, name in entries]
        assert all(not name.startswith("launch") for name in names[: names.index("flush")])


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device waits where the host does not")
@pytest.mark.parametrize(
    ("way", "slots"), whole_product(3, [("shared", 2), ("gloo", 2), ("shared", 3), ("shared", 0)], [1, 2])
)
def test_a_delayed_peer_blocks_backward_when_it_holds_the_slots(
    workers: Workers, way: tuple[str, int], slots: int
) -> None:
    """The gradients of one more unit stay where autograd put them; a rank that went on would end with all of them in memory."""
    case = "tests.conformance.timeline:delayed_peer"
    arguments = {"transport": way[0], "stage": way[1], "slots": slots}
    delayed = workers.run(2, case, **arguments, seconds=0.5)
    undelayed = workers.run(2, case, **arguments, seconds=0.0)
    assert [rank["digest"] for rank in delayed] == [rank["digest"] for rank in undelayed]
    quick, slow = (rank["entries"] for rank in delayed)
    began = when(slow, "gradient 3")
    assert when(quick, f"gradient {3 - slots}") < began
    assert when(quick, f"gradient {2 - slots}") > began
    launched = [name for time, name in quick if name.startswith("launch") and time < began]
    assert len(launched) == slots
    finished = [name for time, name in quick if name.startswith("finish blocks") and time < began]
    # Each finish is written down as it begins: the one that waits for the peer is there.
    assert len(finished) <= 1


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_the_next_unit_is_gathered_before_the_present_one_computes(workers: Workers, transport: str) -> None:
    case = "tests.conformance.timeline:gathers"
    for found in workers.run(2, case, transport=transport, prefetch=1, delay=""):
        entries = found["entries"]
        backward = entries[place(entries, "forward 3") :]
        for number in range(3):
            assert place(entries, f"gather blocks.{number + 1}") < place(entries, f"forward {number}")
        for number in (1, 2):
            assert place(backward, f"gather blocks.{number - 1}") < place(backward, f"gradient {number}")


def test_without_prefetch_a_unit_is_gathered_when_it_is_needed(workers: Workers) -> None:
    case = "tests.conformance.timeline:gathers"
    for found in workers.run(2, case, transport="gloo", prefetch=0, delay=""):
        entries = found["entries"]
        for number in range(3):
            assert place(entries, f"gather blocks.{number + 1}") > place(entries, f"forward {number}")


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_prefetch_does_not_wait_for_a_delayed_peer(workers: Workers, transport: str) -> None:
    case = "tests.conformance.timeline:gathers"
    delayed = workers.run(2, case, transport=transport, prefetch=1, delay="blocks.2")
    undelayed = workers.run(2, case, transport=transport, prefetch=1, delay="")
    assert [rank["digest"] for rank in delayed] == [rank["digest"] for rank in undelayed]
    quick, slow = (rank["entries"] for rank in delayed)
    late = when(slow, "delayed")
    assert when(quick, "gather blocks.2") < when(quick, "forward 1") < late
    assert when(quick, "forward 2") > late


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize(("model", "checkpointing"), [("stack", ""), ("stack", "call"), ("lora", ""), ("lora", "hf")])
def test_at_most_one_unit_and_the_prefetched_are_live(
    workers: Workers, model: str, checkpointing: str, prefetch: int
) -> None:
    case = "tests.conformance.timeline:live_units"
    for found in workers.run(2, case, model=model, prefetch=prefetch, checkpointing=checkpointing):
        assert found["live"] == 1 + prefetch


@pytest.mark.parametrize(
    ("stage", "transport", "budget", "in_backward"),
    [
        (2, "shared", None, True),
        (3, "shared", None, True),
        (3, "shared", 0, True),
        (3, "gloo", 0, True),
        (3, "shared", 0, False),
    ],
)
def test_nobody_writes_what_a_delayed_peer_still_reads(
    workers: Workers, stage: int, transport: str, budget: int | None, in_backward: bool
) -> None:
    """On shared memory an update, or giving pages back, waits until all have read."""
    arguments = {"stage": stage, "transport": transport, "budget": budget, "in_backward": in_backward}
    case = "tests.conformance.timeline:late_reader"
    assert workers.run(2, case, **arguments, seconds=0.05) == workers.run(2, case, **arguments, seconds=0.0)
