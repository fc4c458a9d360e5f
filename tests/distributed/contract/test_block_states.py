"""Optimizers that keep states in blocks of 8 bits or fewer under `shard`: bit by bit those of one process, or refused."""

from pathlib import Path

import pytest

from tests.distributed.contract.block_cases import Rows
from tests.support.workers import Workers

EVERY = [(0, "none"), (1, "host"), (2, "file"), (3, "file")]


def test_weights_are_those_of_one_process_on_any_number_of_ranks(workers: Workers, tmp_path: Path) -> None:
    arguments = {"name": "BlockAdam", "folder": str(tmp_path)}
    both = workers.run(2, "block_cases:trained", kinds=EVERY, **arguments)
    # They go on from what both have saved.
    alone = workers.run(1, "block_cases:trained", kinds=[(0, "file"), (2, "none")], **arguments)
    three = workers.run(3, "block_cases:trained", kinds=[(3, "none")], **arguments)
    for found in (*both, *alone, *three):
        assert all(found["equal"])
    whole = alone[0]["bytes"][0]
    for shares in (*zip(*(found["bytes"] for found in both), strict=True), [found["bytes"][0] for found in three]):
        assert sum(shares) == whole
        assert max(shares) < 0.75 * whole
    assert whole < 0.4 * 8 * sum(each.numel() for each in Rows().parameters())


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_those_of_torchao(workers: Workers, tmp_path: Path, name: str) -> None:
    pytest.importorskip("torchao.optim")
    for ranks in (2, 1):
        arguments = {"name": name, "kinds": [(1, "none"), (3, "file")], "folder": str(tmp_path)}
        for found in workers.run(ranks, "block_cases:trained", **arguments):
            assert all(found["equal"])


def test_states_of_another_optimizer_are_refused(workers: Workers, tmp_path: Path) -> None:
    for first, second in workers.run(2, "block_cases:exchanged", folder=str(tmp_path)):
        assert "has exp_avg.codes, exp_avg.levels, exp_avg.scale" in first
        assert "of its optimizer, which is of another kind than the one here" in first
        assert "does not fit this model and optimizer" in second
        assert "rows.0.weight has no step in it" in second


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ChanceAdam", "depends on others, or on chance"),
        ("ReadingAdam", "keeps tensor subclasses, and which it keeps of rows.1.weight is not known"),
        ("RoundingAdam", "has bf16_stochastic_round=True"),
    ],
)
def test_what_cannot_be_exact_is_refused(workers: Workers, name: str, said: str) -> None:
    assert said in workers.run(1, "block_cases:refused", name=name)[0]
