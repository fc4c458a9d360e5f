"""Frozen experts that rest as codes, on the host or in files, and are brought for the tokens that chose them."""

import pytest

from tests.support.tables import row, tried

FULL = pytest.mark.full
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
