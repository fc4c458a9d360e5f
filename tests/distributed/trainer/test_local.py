"""Replicas that take steps of their own between syncs are as plain models that are brought together."""

import pytest

from tests.support.tables import row, tried

FULL = pytest.mark.full
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.5}
DILOCO = {"lr": 0.7, "momentum": 0.9}
FILES = {"optimizer": "file", "gradients": "host"}

test_replicas_are_plain_models_that_are_brought_together = pytest.mark.sampled(4)(
    tried(
        "local_cases",
        [
            row(2, "exact"),
            row(2, "exact", inner=SGD, outer=DILOCO, offload=FILES),
            row(4, "exact", every=3, outer=DILOCO),
            row(2, "exact", FULL, inner=SGD),
            row(2, "exact", FULL, outer=DILOCO),
            row(3, "exact", FULL, replicas=3, outer={"lr": 0.9}),
            *(row(4, "exact", FULL, stage=stage, every=3, outer=DILOCO) for stage in (0, 1, 2)),
            *(row(4, "exact", FULL, axes={axis: 2}, outer=DILOCO) for axis in ("tensor", "pipeline", "context")),
            row(4, "experts", FULL),
            row(2, "together"),
            row(2, "equal"),
        ],
        timeout=120.0,
    )
)

test_replicas_go_apart_and_come_together = pytest.mark.sampled(4)(
    tried(
        "local_cases",
        [
            row(2, "traffic", device="cpu"),
            row(4, "traffic", FULL, outer=DILOCO, device="cpu"),
            row(2, "faulty", outer=DILOCO),
            row(2, "lacking"),
            row(2, "asked"),
            row(2, "late"),
            row(2, "refused"),
            row(2, "resumed", before=2, after=2, outer=DILOCO),
            row(4, "resumed", before=2, after=4),
            row(4, "resumed", FULL, before=4, after=2, outer=DILOCO),
        ],
        timeout=120.0,
    )
)
