"""Ranks that share sequences compute what one process does, and say who fails."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.tables import row, tried
from tests.support.workers import PoolOptions, Workers

FULL = pytest.mark.full
MODELS = ("llama", "sinks", "windows", "capped", "latent", "lora")
TWO, HEADS, THREE = {"context": 2}, {"context": 2, "context_method": "heads"}, {"context": 3}
WIDE = {"tensor 2": {"context": 2, "tensor": 2}, "pipeline 2": {"context": 2, "pipeline": 2}, "four": {"context": 4}}
SECTIONS: dict[str, dict[str, Any]] = {
    "recomputed on files": {
        "model": {"activation_checkpointing": "block"},
        "offload": {"activations": {"tier": "file"}, "optimizer": {"tier": "host"}},
    },
    "recomputed in part": {"model": {"activation_checkpointing": "selective"}},
    "smoothed": {"run": {"label_smoothing": 0.1}},
    "native": {"model": {"loss": "native"}},
}

test_a_model_trains_on_shares_as_on_whole_sequences = pytest.mark.sampled(3)(
    tried(
        "context_cases",
        [
            *(row(2, "exact", kind=kind, axes=TWO) for kind in MODELS),
            *(row(2, "exact", FULL, kind=kind, axes=HEADS) for kind in MODELS),
            *(row(3, "exact", FULL, kind=kind, axes=THREE, stage=1) for kind in MODELS),
            *(row(4, "exact", FULL, kind=kind, axes=axes) for kind in MODELS for axes in WIDE.values()),
        ],
        timeout=120,
    )
)
