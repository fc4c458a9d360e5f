"""Replicas that divide states compute what one process does."""

import pytest

from tests.distributed.trainer.replica_cases import NARROW
from tests.support.tables import row, tried

FULL = pytest.mark.full
TWO, PAIRS = {"replicate": 2}, {"replicate": 2, "shard": 2}
MANY = {"batch": {"global_size": 10, "micro_size": 1}}
FILES = {"optimizer": "file", "parameters": "file"}
test_states_are_divided_over_replicas = pytest.mark.sampled(4)(
    tried(
        "replica_cases",
        [
            *(row(4, "exact", axes=PAIRS, stage=stage) for stage in (1, 3)),
            row(4, "exact", FULL, axes=PAIRS, stage=2),
            row(4, "exact", FULL, axes={"replicate": 4}, **MANY),
            *(row(2, "exact", FULL, axes=TWO, stage=stage, **MANY) for stage in (1, 2, 3)),
            row(2, "exact", axes=TWO, ema={"decay": 0.9}, offload=FILES, **MANY),
            row(2, "exact", FULL, axes=TWO, stage=1, offload={"optimizer": "file"}, **MANY),
            row(4, "exact", FULL, axes=PAIRS, offload=FILES, **MANY),
            row(2, "exact", FULL, axes=TWO, offload={"optimizer": {"tier": "file", "fraction": 0.5}, "parameters": "host"}),
            row(4, "exact", FULL, axes=PAIRS, zero={"reduce_once": True}, **MANY),
            row(4, "exact", FULL, axes={**PAIRS, "transport": "gloo"}, zero={"gathered_budget": 0}, **MANY),
            row(2, "exact", FULL, axes={**TWO, "transport": "gloo"}, zero={"overlap": False}),
            row(4, "exact", axes={**TWO, "tensor": 2, "sequence": True}, stage=2),
            row(4, "exact", FULL, axes={**TWO, "tensor": 2}),
            row(4, "exact", FULL, axes={**TWO, "pipeline": 2}, **MANY),
            row(4, "exact", FULL, axes={**TWO, "context": 2}, **MANY),
            row(4, "exact", FULL, axes={**PAIRS, "expert": 2}, kind="mixtral"),
            row(2, "exact", FULL, axes=TWO, kind="lora"),
            row(2, "alike"),
            row(4, "alike", FULL),
            row(2, "alike", FULL, precision=NARROW),
            row(4, "counted"),
        ],
        timeout=120,
    )
)
SENT = "int8 encodes what replicas on several hosts send each other"
HERE = "replicas share a host, inside which nothing is sent"
test_what_replicas_send_is_encoded = pytest.mark.sampled(2)(
    tried(
        "replica_cases",
        [
            row(2, "encoded", wire="int8", bound=0.5 / 127),
            row(4, "encoded", FULL, wire="int4", bound=0.5 / 7),
            row(2, "encoded", FULL, wire="bfloat16", bound=2.0**-8),
            row(2, "encoded", FULL, wire="int8", bound=0.5 / 127, offload=FILES),
            row(2, "encoded", wire="int8", bound=0.5 / 127, offload={"parameters": {"tier": "file", "fraction": 0.7}}),
            row(4, "held_alike", axes={"tensor": 2, "sequence": True, "transport": "gloo", "wire": "int8"}),
            row(4, "held_alike", axes={"pipeline": 2}, precision={**NARROW, "reduce": "bfloat16"}),
            row(2, "held_alike", axes={"replicate": 1, "transport": "gloo"}, replicas="whole", gathered_budget=20_000),
            row(2, "refused", wire="int8", said=f"parallel.wire: {SENT}, and {HERE}", zero={"replicas": "divided"}),
            row(2, "automatic"),
            row(2, "left_alone"),
            row(2, "untrained"),
            row(3, "own_part"),
        ],
        timeout=120,
    )
)
