"""The first hours of a person who is new: names of runs, running a thing again, evaluating what was trained."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.step_lines import metrics
from tests.support.tables import row, tried
from tests.support.trainer_cases import LLAMA, sentences
from tests.support.workers import Workers
from zeromesh import Trainer
from zeromesh.errors import ConfigError
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.config.sections.outputs import name_of_file
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.monitoring.run_directory import RunDirectory

test_evaluations_and_a_cell_that_is_run_again = tried(
    "first_hour_cases", [row(2, "evaluated"), row(1, "again"), row(1, "complete")]
)


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


def test_the_time_left_has_the_evaluation_after_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("zeromesh.trainer.monitoring.console.time.monotonic", lambda: now[0])
    out = io.StringIO()
    console = Console(out)
    console.start(total_steps=4, after=3.0)
    for step in (1, 4):
        now[0] = step * 10.0
        console.step(metrics(step))
    assert [line.rpartition("  ")[2] for line in out.getvalue().splitlines()] == ["1:00 left", "30 s left"]


# What is wrong is said before data is read


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading text fails the test."""

    def read(*_: object, **__: object) -> None:
        raise AssertionError("the data was read")

    monkeypatch.setattr("zeromesh.trainer.setup.build.load_datasets", read)


def _settings(folder: Path, **model: object) -> dict[str, Any]:
    return {
        "model": {"config": {"model_type": "llama", **LLAMA, "vocab_size": 256, **model}},
        "data": {"sequence_length": 16},
        "run": {"name": "a", "output_dir": str(folder), "max_steps": 2},
        "batch": {"global_size": 4},
        "checkpoint": {"every_steps": 1},
    }


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hiden_size": 8}, "hiden_size is not a field of LlamaConfig; nearest: hidden_size"),
        ({"model_type": "lama"}, "'lama' is not known to transformers"),
        ({"num_attention_heads": 5}, "not a multiple of the number of attention"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
    ],
)
def test_mistakes_in_the_model_come_before_the_data(
    tmp_path: Path, change: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=message), Trainer(config=_settings(tmp_path, **change)) as trainer:
        trainer.fit()
    (tmp_path / "a.json").write_text(json.dumps(_settings(tmp_path, **change)))
    assert main(["config", str(tmp_path / "a.json")]) == 2
    assert message in capsys.readouterr().err


def test_other_settings_and_a_lock_come_before_the_data(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    data = sentences()
    config = {**_settings(tmp_path), "precision": {"compute": "float32"}}
    with Trainer(config=config, train_dataset=data) as trainer:
        trainer.fit()
    request.getfixturevalue("unread")
    with (
        pytest.raises(ConfigError, match=r"batch\.global_size: 4 then, 8 now"),
        Trainer(config={**config, "batch": {"global_size": 8}}) as trainer,
    ):
        trainer.fit()
    with (
        RunDirectory(tmp_path / "a", 0).locked(),
        pytest.raises(ConfigError, match="belongs to a run that is going on"),
        Trainer(config=config) as trainer,
    ):
        trainer.fit()


def test_a_path_to_go_on_from_that_is_not_there_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.resume: 'gone/step-1' does not exist in .*; give auto, never, or"):
        load_config({"checkpoint": {"resume": "gone/step-1"}})
