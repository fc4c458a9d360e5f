"""The first hours of a person who is new: names of runs, running a thing again, evaluating what was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from workers import Workers

from zeromesh.trainer.config_file import load_config
from zeromesh.trainer.run_name import name_of_file


def test_evaluate_gives_the_values_of_the_run(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(2, "first_hour_cases:evaluated", folder=str(tmp_path))[0]
    for name, said in found["said"].items():
        assert said["code"] == 0, (name, said)
    own = found["own"][-1]["eval_loss"]
    run, checkpoint, config, whole = found["lines"]
    assert (run["step"], checkpoint["step"], config["step"]) == (4, 2, 4)
    assert run["eval_loss"] == config["eval_loss"] == own
    assert checkpoint["eval_loss"] != own
    assert whole["eval_loss"] != own
    assert found["hf"][0]["eval_loss"] == pytest.approx(own, rel=1e-9)
    assert f"step 4: evaluation loss {own:.4f} over 75 targets" in found["said"]["run"]["out"]
    assert "evaluation: 5 of " in found["said"]["train"]["out"]


def test_a_run_is_called_after_its_file_or_script(workers: Workers, tmp_path: Path) -> None:
    script, same, package, _, one, two = workers.run(1, "first_hour_cases:names")[0]
    assert (script, same, package) == ("my-train", "my-train", "pkg")
    assert one.startswith("interactive-2")
    assert one != two
    for name, wanted in {"small.yaml": "small", "a b.json": "a-b", ".yaml": "yaml", "_.yaml": "run"}.items():
        assert name_of_file(name) == wanted
    (tmp_path / "mine.yaml").write_text("run: {max_steps: 3}")
    assert load_config(tmp_path / "mine.yaml").run.name == "mine"
    assert load_config(tmp_path / "mine.yaml", ["run.name=other"]).run.name == "other"


def test_a_cell_can_be_run_again(workers: Workers, tmp_path: Path) -> None:
    first, second, third = workers.run(1, "first_hour_cases:again", folder=str(tmp_path))[0]
    assert first["losses"] == 2
    assert second["losses"] == 0
    said = "nothing was trained: run 'cell' is complete at step 2 of 2; raise run.max_steps, or choose another run.name"
    assert said in second["said"]
    assert "done:" not in second["said"]
    assert third["losses"] == -1
    assert "model.config.num_hidden_layers: 2 then, 1 now" in third["said"]
    assert "give this run another run.name" in third["said"]
