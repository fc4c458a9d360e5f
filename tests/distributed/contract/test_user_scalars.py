"""Scalars of the user's own reach the lines of a run, as means over microbatches, steps and ranks."""

from pathlib import Path

import pytest

from tests.support.workers import Workers
from zeromesh.trainer.monitoring.tracking import step_row


def test_scalars_are_means_since_the_last_line(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(2, "scalar_cases:logged", folder=str(tmp_path))[0]
    first, second = found["loss"]
    x = found["x"]
    assert first["mean_x"] == second["mean_x"] == pytest.approx(sum(x) / len(x))
    assert (first["reward/total"], first["rank"], first["only_one"]) == (2, 0.5, 7)
    assert (first["of_a_step"], second["of_a_step"]) == (15, 35)
    assert (first["added"], second["added"]) == (1, 2.5)  # What is added at the end of a step comes with the next line.
    assert "trainer.log: loss is a field" in found["taken"]
    line = found["outputs"][0]
    assert line["half"] == 0.5
    assert line["auxiliary"] == pytest.approx(sum(x) / len(x) * 80 * 2)
    assert "outputs" not in line
    assert step_row(first).values["train/reward/total"] == 2
