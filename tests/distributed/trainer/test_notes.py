"""What a run says about a model that a person may take for something else."""

from pathlib import Path

import pytest
from workers import Workers


def said(workers: Workers, folder: Path, name: str) -> str:
    """All lines of rank 0; the others print nothing."""
    first, *others = workers.run(2, "note_cases:said", folder=str(folder), name=name)
    assert others == [[]]
    assert any(line.startswith("done: 4 steps") for line in first), first
    return "\n".join(first)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("built", ""),
        ("callable", "built whole on CPU by every rank, because it initialises second.weight otherwise"),
        ("meta", "passed on the meta device: weights of first, second are drawn by `reset_parameters`"),
        ("library on meta", ""),
    ],
)
def test_what_becomes_of_weights_that_init_has_drawn(workers: Workers, tmp_path: Path, name: str, wanted: str) -> None:
    text = said(workers, tmp_path, name)
    assert wanted in text
    assert ("reset_parameters" in text) == bool(wanted)


def test_statistics_of_microbatches(workers: Workers, tmp_path: Path) -> None:
    lines = [line for line in said(workers, tmp_path, "normed").splitlines() if "BatchNorm" in line]
    assert len(lines) == 1
    assert lines[0].startswith("BatchNorm (layers.1): means and variances are those of each rank's own microbatch")
    assert "BatchNorm" not in said(workers, tmp_path, "built")
