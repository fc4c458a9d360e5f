"""Ranks that share sequences compute what one process does, and say who fails."""

from pathlib import Path

import pytest

from tests.support.tables import row, tried
from tests.support.workers import PoolOptions, Workers

FULL = pytest.mark.full
MODELS = ("llama", "sinks", "windows", "capped", "latent", "lora")
TWO, HEADS, THREE = {"context": 2}, {"context": 2, "context_method": "heads"}, {"context": 3}
WIDE = {"tensor 2": {"context": 2, "tensor": 2}, "pipeline 2": {"context": 2, "pipeline": 2}, "four": {"context": 4}}
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
test_loops_bytes_and_refusals = tried(
    "context_cases",
    [
        *(row(2, "loop", kind=kind) for kind in ("llama", "lora")),
        *(row(2, "bytes_told", method=method) for method in ("gather", "heads")),
        row(4, "bytes_told", FULL, method="gather"),
        row(2, "refused"),
        row(2, "stages_alike"),
        row(2, "exact", kind="keywords", axes=TWO),
        row(2, "exact", kind="asides", axes=TWO),  # The ranks whose gradients are complete wait for none that do not come.
    ],
)


def test_a_run_goes_on_over_other_axes(workers: Workers, tmp_path: Path) -> None:
    """Context 4, 2 and 1, then tensor 2: as if nothing had happened."""
    folder, found = str(tmp_path / "moved"), list[float]()
    for number, (size, axes) in enumerate(((4, {"context": 4}), (2, TWO), (1, {}), (2, {"tensor": 2}))):
        arguments = {"folder": folder, "axes": axes, "steps": 2 * number + 2}
        found += workers.run(size, "context_cases:resumed", timeout=120, **arguments)[0][-2:]
    (wanted,) = workers.run(1, "context_cases:resumed", folder=str(tmp_path / "one"), axes={}, steps=8)
    assert found == pytest.approx(wanted, rel=1e-9)


def test_what_is_collected_is_of_whole_sequences(workers: Workers, tmp_path: Path) -> None:
    (one,) = workers.run(1, "context_cases:evaluated", folder=str(tmp_path / "one"), axes={})
    for found in workers.run(2, "context_cases:evaluated", folder=str(tmp_path / "two"), axes=TWO):
        assert found["loss"] == pytest.approx(one["loss"], rel=1e-9)
        assert found["predictions"] == pytest.approx(one["predictions"], rel=1e-9)


@pytest.mark.parametrize(
    ("how", "words"),
    [("killed", "rank 1 is gone"), ("stopped", "parallel.timeout_seconds"), ("memory", "the machine has no memory left")],
)
def test_a_lost_rank_is_named(workers: Workers, tmp_path: Path, how: str, words: str) -> None:
    with workers.fresh(PoolOptions(size=2, timeout_seconds=3)) as pool:
        outcomes = pool.outcomes(
            "context_cases:lost", timeout=30, stuck=[1] if how == "stopped" else [], folder=str(tmp_path), how=how
        )
    assert words in str(outcomes[0]), outcomes[0]
