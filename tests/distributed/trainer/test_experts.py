"""Ranks over which experts are spread compute what one process does."""

import pytest

from tests.support.tables import row, tried

FULL = pytest.mark.full
MODELS = ("mixtral", "qwen", "biased", "latent", "skewed")
TWO = {"expert": 2}
test_a_model_trains_with_spread_experts = tried(
    "expert_cases",
    [
        *(row(2, "exact", kind=kind, axes=TWO) for kind in MODELS),
        *(row(2, "exact", FULL, kind=kind, axes=TWO, stage=stage) for kind in MODELS for stage in (0, 1, 2)),
        *(row(4, "exact", FULL, kind=kind, axes=TWO) for kind in MODELS),
        *(row(4, "exact", FULL, kind=kind, axes={"expert": 4}) for kind in MODELS),
        row(4, "exact", FULL, kind="mixtral", axes={"expert": 2, "tensor": 2}),
        row(4, "exact", FULL, kind="mixtral", axes={"expert": 2, "pipeline": 2}),
        row(4, "exact", FULL, kind="mixtral", axes={"expert": 2, "replicate": 2}),
        row(4, "exact", FULL, kind="mixtral", axes={"expert": 2, "context": 2}),
        row(4, "exact", FULL, kind="mixtral", axes={"expert": 4, "context": 2}),
    ],
    timeout=120,
)
test_loops_and_ways_to_compute = tried(
    "expert_cases",
    [
        row(2, "loop", kind="mixtral"),
        row(2, "adapters", stage=3, axes=TWO),
        row(4, "adapters", FULL, stage=2, axes=TWO),
        row(2, "loop", FULL, kind="latent"),
        *(row(2, "implementations", kind=kind) for kind in ("qwen", "skewed")),
    ],
)
