"""Trackers whose packages may be missing here: each holds every step once, also of a run that goes on, and no secret."""

from pathlib import Path

import pytest

from tests.distributed.integrations.tracker_rows import NAMES, contents, kept, places
from tests.support.tracking_cases import ENVIRONMENT, IN_ARGUMENTS, IN_CONFIG
from tests.support.workers import PoolOptions, Workers
from zeromesh.trainer.monitoring.step_metrics import read_metrics


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_holds_every_step_once_and_no_secret(workers: Workers, tmp_path: Path, name: str) -> None:
    """Offline, of two processes, of which the second goes on; they end in time, and leave nothing beside the run."""
    pytest.importorskip(name)
    arguments = {"folder": str(tmp_path), "backends": [name], "places": places(tmp_path), "timeout": 120}
    for steps in (6, 9):
        with workers.fresh(PoolOptions(size=2)) as pool:
            found = pool.run("tracking_cases:planted", steps=steps, **arguments)
        assert "WARNING: tracking" not in found[0]["said"]
    rows, settings = kept(name, tmp_path, "train/loss")
    losses = {line["step"]: line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")}
    assert [step for step, _ in rows] == list(range(1, 10))
    assert [value for _, value in rows] == pytest.approx([losses[step] for step in range(1, 10)])
    assert set(settings) == {0.01}
    assert [step for step, _ in kept(name, tmp_path, "eval/loss")[0]] == [3, 6, 9]
    beside = {path.name for path in tmp_path.iterdir()} - {"run", "mlflow.db", *("clearml", "trackio")}
    assert not beside
    secrets = [*ENVIRONMENT.values(), IN_CONFIG, IN_ARGUMENTS, "planted"]
    for path, content in contents(tmp_path):
        assert [secret for secret in secrets if secret.encode() in content] == [], path
