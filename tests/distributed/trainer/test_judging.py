"""Steps are judged before their update: data are passed over, and a rank that computes something else is named."""

import pytest

from tests.support.tables import row, tried

FULL = pytest.mark.full
NAN_BITS, HIGH, LOW = 64, 62, 3  # as in the cases
WHOLE = {"global_size": 8, "micro_size": 4}  # One microbatch a step on two ranks.
AUDIT = {"spike_factor": 0.0, "audit_steps": 7}

test_data_are_passed_over = pytest.mark.sampled(2)(
    tried(
        "judging_cases",
        [
            row(1, "passed_over", computed_again=False),
            row(2, "passed_over", zero={"stage": 3}),
            row(2, "passed_over", token=62, zero={"stage": 0}),
            row(3, "passed_over", zero={"stage": 2}),
            row(2, "passed_over", batch={"global_size": 8, "micro_size": 2, "balance": [3, 1]}),
            row(2, "passed_over", FULL, zero={"stage": 1}),
            row(4, "passed_over", parallel={"tensor": 2}),
            row(2, "passed_over", zero={"stage": 3, "replicas": "divided"}, parallel={"replicate": 2}, batch=WHOLE),
            row(2, "passed_over", FULL, zero={"stage": 3}, offload={"optimizer": "host", "gradients": "host"}),
            row(2, "passed_over", FULL, zero={"stage": 2}, offload={"optimizer": "file", "gradients": "file"}),
            row(2, "passed_over", FULL, zero={"stage": 3}, parallel={"transport": "gloo"}),
            row(2, "passed_over", FULL, model={"activation_checkpointing": "block"}),
            row(2, "passed_over", FULL, data={"workers": 1}),
            row(4, "passed_over", FULL, parallel={"pipeline": 2, "schedule": "zero_bubble"}),
            row(2, "passed_over", FULL, batch={"micro_size": 1, "tokens": 24}),
            row(4, "passed_over", FULL, parallel={"replicate": 2}, zero={"stage": 3}),
            row(2, "passed_over", parallel={"pipeline": 2}, computed_again=False),
            row(4, "passed_over", FULL, parallel={"pipeline": 2}),
        ],
    )
)

test_a_wrong_rank_is_named = pytest.mark.sampled(4)(
    tried(
        "judging_cases",
        [
            row(3, "named", odd=1, bit=HIGH, why="the"),
            row(3, "named", odd=0, bit=NAN_BITS, why="the loss is nan"),
            row(3, "named", odd=2, bit=LOW, why="an audit found other bits", recovery=AUDIT),
            row(2, "named", odd=1, bit=HIGH, why="the", times=1),
            row(6, "named", FULL, odd=1, bit=LOW, why="an audit", group="ranks 0, 1", recovery=AUDIT, parallel={"tensor": 2}),
            row(2, "unclear"),
            row(2, "equal_with_random_numbers", FULL),
            row(4, "equal_with_random_numbers", parallel={"context": 2}),
        ],
    )
)

test_what_is_done_about_a_spike = pytest.mark.sampled(2)(
    tried(
        "judging_cases",
        [
            *(row(2, "acts", act=each) for each in ("accept", "stop", "max_nonfinite", "on_nonfinite")),
            row(2, "resumed"),
            row(1, "rewound"),
            row(2, "rewound", zero={"stage": 3}, optimizer={"name": "adamw", "lr": 1e-2}),
            row(2, "rewound", interrupted=True, zero={"stage": 2}, checkpoint={"every_steps": 2, "asynchronous": False}),
            row(2, "not_rewound"),
            row(1, "rewound", stream=True, data={"shuffle": False}),
            row(4, "rewound", FULL, zero={"stage": 3}, parallel={"tensor": 2}),
            row(2, "rewound", FULL, zero={"stage": 1}, offload={"optimizer": "file", "gradients": "file", "durable": True}),
            row(2, "rewound", FULL, zero={"stage": 3}, offload={"optimizer": "host", "parameters": "host"}),
            row(2, "rewound", FULL, zero={"stage": 0}, batch={"micro_size": 2, "balance": "speed"}),
            row(2, "rewound", FULL, zero={"stage": 3}, ema={"decay": 0.9}, parallel={"transport": "gloo"}),
            row(4, "rewound", FULL, parallel={"pipeline": 2}),
            row(1, "refused"),
            row(2, "refused"),
        ],
    )
)
