"""Frozen experts that rest as codes, on the host or in files, and are brought for the tokens that chose them."""

from pathlib import Path

import pytest

from tests.support.tables import row, tried
from tests.support.workers import Workers

FULL = pytest.mark.full
PARTLY = {"parameters": {"tier": "file", "fraction": 0.5}}
HOST, FILE = ({"parameters": tier} for tier in ("host", "file"))
test_losses_are_those_of_the_decoded_experts = tried(
    "fetch_cases",
    [
        row(1, "trained", stage=0),
        row(2, "trained", stage=3),
        row(2, "trained", stage=2, parallel={"expert": 2}),
        row(2, "trained", stage=3, parallel={"expert": 2}, kind="biased"),
        row(2, "trained", stage=3, parallel={"tensor": 2}, targets="attention"),
        row(1, "trained", stage=3, offload=FILE, weights=None, targets="attention"),
        row(1, "trained", stage=3, offload=FILE),
        row(1, "trained", kept="block", most=1),
        row(1, "trained", kept="selective", offload=FILE),
        row(2, "trained", stage=3, kind="latent", parallel={"expert": 2}, offload=FILE),
        row(2, "trained", FULL, stage=3, parallel={"pipeline": 2}, targets="attention", offload=FILE),
        row(2, "trained", FULL, stage=3, offload=HOST, parallel={"replicate": 2}, weights="int8", kind="mixtral"),
        row(
            2,
            "trained",
            FULL,
            stage=3,
            parallel={"replicate": 2},
            weights="fp8",
            offload={"parameters": {"tier": "file", "fraction": 0.5}},
            kind="biased",
        ),
    ],
)
test_only_chosen_experts_are_read = tried(
    "fetch_cases",
    [
        row(1, "brought", kept="none", most=1 << 20, times=2),
        row(1, "brought", kept="block", most=1 << 20, times=2),
        row(1, "brought", kept="none", most=1, times=4),
    ],
)
test_experts_that_are_thawed_are_trained = tried("fetch_cases", [row(1, "thawed")])
test_generation_reads_what_a_token_chose = tried(
    "fetch_cases", [row(1, "generated", zero={"stage": 3}, offload=FILE), row(1, "generated", FULL)]
)


def test_runs_go_on_in_other_layouts(workers: Workers, tmp_path: Path) -> None:
    def losses(ranks: int, folder: str, **given: object) -> list[float]:
        return workers.run(ranks, "fetch_cases:moved", folder=str(tmp_path / folder), **given)[0]

    whole = losses(1, "whole", steps=6)
    found = losses(1, "parts", steps=2, zero={"stage": 3}, offload=FILE)
    found += losses(2, "parts", steps=4, zero={"stage": 3}, parallel={"expert": 2}, offload=FILE)
    found += losses(2, "parts", steps=6, zero={"stage": 3})
    assert found == pytest.approx(whole, rel=1e-9)


test_memory_is_what_was_predicted = tried(
    "fetch_cases",
    [
        row(1, "counted", most=1 << 20, zero={"stage": 3, "gathered_budget": 0}, offload=FILE),
        row(1, "counted", FULL, most=30_000, zero={"stage": 0}),
        row(2, "counted", most=20_000, zero={"stage": 3}, parallel={"expert": 2}, offload=FILE),
    ],
)
