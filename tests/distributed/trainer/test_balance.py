"""Unequal shares of data ranks, by a list and by speed, compute what one process does."""

import pytest

from tests.support.tables import row, tried

FULL = pytest.mark.full
# Of 16 samples in rounds of 6 the third has 4: data rank 2 runs two again, without weight.
THREE = {"given": [3, 1, 2], "sizes": [[3, 3, 3], [1, 1, 1], [2, 2, 2]]}
TWO = {"given": [3.5, 1], "sizes": [[3, 3, 3, 3], [1, 1, 1, 1]]}
FILES = {"optimizer": "file", "parameters": "host"}

test_shares_compute_what_one_process_does = pytest.mark.sampled(2)(
    tried(
        "balance_cases",
        [
            row(3, "shares", stage=3, **THREE),
            row(3, "shares", stage=0, batch={"last": "partial"}, **THREE),
            *(row(3, "shares", FULL, stage=stage, **THREE) for stage in (1, 2)),
            row(2, "shares", offload=FILES, batch={"last": "partial"}, data={"workers": 2}, **TWO),
            *(row(4, "shares", FULL, parallel={axis: 2}, **TWO) for axis in ("tensor", "pipeline", "context")),
            row(4, "shares", FULL, stage=3, parallel={"replicate": 2}, given=[3, 1, 1, 3], sizes=[[3, 3], [1, 1], [1, 1], [3, 3]]),
            row(2, "by_samples"),
            row(2, "left"),
            row(2, "by_speed", slow=1, workers=1, device="cpu"),
            row(4, "by_speed", FULL, slow=2, workers=0, device="cpu"),
        ],
        timeout=120.0,
    )
)

SPEED = {"balance": "speed"}
test_what_cannot_be_exact_or_cut_is_refused = tried(
    "balance_cases",
    [
        row(2, "refused", wanted="batch.balance: has 3 numbers for 2 data ranks", batch={"balance": [1, 2, 3]}),
        row(2, "refused", wanted="batch.balance: speed cannot be taken, as train_dataset is a stream", kind="stream", batch=SPEED),
        row(2, "refused", wanted="batch.balance: the loss has terms", kind="normed", batch=SPEED),
        row(2, "refused", wanted="batch.balance: the loss has terms", kind="experts", batch={"balance": [1, 2]}),
    ],
)
