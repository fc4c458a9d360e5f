"""Process sets: who is in them, what is refused and how it is named, no deadlock where they overlap, nothing left behind."""

import pytest

from tests.support.workers import Workers


@pytest.fixture(autouse=True, scope="module")
def no_sets(workers: Workers) -> None:
    """Workers live on from one file of tests to the next."""
    workers.run(3, "process_set_cases:cleared")


def test_sets_are_declared_split_and_removed(workers: Workers) -> None:
    for rank, found in enumerate(workers.run(3, "process_set_cases:life")):
        edge = rank != 1
        assert found["member"] == [edge, True, rank == 1]
        assert found["same"]
        assert found["turned"] == [2, 0, 1]
        assert found["names"] == ["edges", "one", "turned", "even 7"]
        assert "there is one of that name already (ranks [0, 2])" in found["twice"]
        assert "the name is one of the mesh's own" in found["reserved"]
        assert "'wrong' of ranks [0, 3, -1]: allowed are ranks 0 to 2" in found["wrong"]
        assert "cannot be removed: there is none" in found["gone"]
        assert found["left"] == []
        assert found["unnamed"] == "ranks 1, 2"
        if edge:
            assert (found["edges"], found["exchange"]) == (4, [4.0])
            assert found["split"] == [[2, 0], [[2], [0]]]
            assert "process set edges (ranks 0, 2) was removed" in found["removed"]
        else:
            assert found["split"] is None
            for key in ("outside", "no exchange"):
                assert "CollectiveError: this rank is not in process set edges (ranks 0, 2)" in found[key]


def test_ranks_that_declare_differently_are_named(workers: Workers) -> None:
    for found in workers.run(3, "process_set_cases:disagreements"):
        assert (
            "declare 'some' of ranks [0, 1] on ranks 0, 2, to declare 'some' of ranks [0, 2] on rank 1."
            in found["ranks"]
        )
        assert (
            "declare 'some' of ranks [0, 1] on ranks 0, 2, to declare 'mine' of ranks [0, 1] on rank 1."
            in found["names"]
        )
        assert "the call is to remove 'some' on ranks 0, 2, to split the world as 'half' on rank 1." in found["calls"]
        assert (
            "declare 'a' of ranks [0, 1], 'b' of ranks [1, 2] on ranks 0, 2, to declare nothing on rank 1."
            in found["number"]
        )
        assert all(text.startswith("CollectiveError") for text in (found["ranks"], found["calls"]))
        assert found["there"] == []
        assert found["after"] == [[0], [1]]


def test_what_fails_on_one_rank_is_raised_by_all(workers: Workers) -> None:
    for found in workers.run(3, "process_set_cases:agreements"):
        assert found == {
            "all": [0, 1, 2],
            "first": [0, None, None],
            "one": "StorageError: rank 1: the disk is full",
            "several": "StorageError: rank 1: the disk is full (and 1 more rank)",
            "same": "StorageError: the disk is full",
            "of the system": "StorageError: rank 2: /disk: No space left on device",
            "of others": "StorageError: rank 0: look: KeyError: 'x'",
            "kept": "LayoutError: rank 1: another model (and 1 more rank)",
            "not kept": "StorageError: rank 0: the disk is full (and 1 more rank)",
            "of the first": "StorageError: the disk is full",
            "other things": "LayoutError: ranks were given different things: b is False on ranks 0, 1, True on rank 2. Agree",
        }


def test_overlapping_sets_do_not_wait_for_each_other(workers: Workers) -> None:
    for equal in workers.run(3, "process_set_cases:overlapping", rounds=10):
        assert len(equal) == 4 * (1 + 2 * 10)
        assert all(equal)


@pytest.mark.parametrize("count", [24, pytest.param(1000, marks=pytest.mark.full)])
def test_sets_come_and_go_under_load(workers: Workers, count: int) -> None:
    """Threads and descriptors are those of before; memory may grow by what a store remembers of a set."""
    for found in workers.run(3, "process_set_cases:churn", timeout=600, count=count, kept=4):
        before, after = found["before"], found["after"]
        assert found["rounds"] > count
        assert found["wrong"] == []
        assert found["left"] == []
        assert after["task"] <= before["task"]
        assert after["fd"] <= before["fd"]
        assert after["KiB"] - before["KiB"] < 2048 + 8 * count
