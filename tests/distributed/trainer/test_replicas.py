"""Replicas that divide states compute what one process does."""

import pytest

from tests.support.tables import row, tried

FULL = pytest.mark.full
PAIRS = {"replicate": 2, "shard": 2}
test_states_are_divided_over_replicas = tried(
    "replica_cases",
    [
        row(4, "exact", axes=PAIRS),
        *(row(2, "exact", axes={"replicate": 2}, stage=stage) for stage in (1, 2, 3)),
        *(row(4, "exact", axes=PAIRS, stage=stage) for stage in (1, 2)),
    ],
    timeout=120,
)
