"""Fifteen architectures of transformers, trained on two ranks at every stage as one process does: the model's own loss, in float64.

Batches are cut unevenly (ten samples in microbatches of two over two ranks), and samples have different numbers of targets.
`make test` runs each architecture at one stage, but those that others are like; `make test-all` runs all at all stages.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.architectures import ARCHITECTURES
from tests.support.workers import Workers

STAGES = (1, 2, 3)
ALIKE = {"gpt2", "gemma", "mistral", "qwen3", "phi", "opt"}
"""Decoders whose blocks have the parts of Llama's or GPT-NeoX's, or which the matrix trains too."""
EXACT = 1e-9
"""Relative. Sums are taken in another order; some gradients are zero but for rounding, and count as parts of the largest."""

ROWS = [
    pytest.param(
        *(name, stage),
        marks=[] if stage == STAGES[-1 - number % 3] and name not in ALIKE else pytest.mark.full,
        id=f"{name}-stage{stage}",
    )
    for number, name in enumerate(ARCHITECTURES)
    for stage in STAGES
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "stage"), ROWS)
def test_an_architecture_trains_as_in_one_process(
    workers: Workers, tmp_path: Path, name: str, stage: int, record_property: Callable[[str, object], None]
) -> None:
    """What is recorded goes into the table of docs/conformance.md."""
    found = workers.run(2, "architecture_cases:trained", folder=str(tmp_path), name=name, stage=stage)[0]
    record_property("row", json.dumps({"model": name, "column": f"stage {stage}"}))
    record_property("difference", max(found.values()))
    assert all(value <= EXACT for value in found.values()), found
