"""How long a run is and how often it evaluates, where several keys have a say in it."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_cases import llama, seeded, sentences, settings
from zeromesh import Trainer


def fit(folder: Path, run: dict[str, Any], samples: int = 24) -> tuple[list[float], int]:
    """The losses of a run, and how often it has evaluated."""
    config = settings(str(folder), run={"max_steps": None, **run}, checkpoint={"every_steps": 0})
    with Trainer(seeded(llama), config, sentences(samples), sentences(5, seed=4)) as trainer:
        losses = trainer.fit().losses
        lines = trainer.state.log_history
    return list(losses), sum("eval_loss" in line for line in lines)


@pytest.mark.parametrize(
    ("run", "steps", "said"),
    [
        (
            {"epochs": 2, "max_steps": 4},
            4,
            "run.epochs 2 are 6 steps, and run.max_steps is 4: run.max_steps ends the run",
        ),
        ({"epochs": 1, "max_steps": 4}, 3, "run.epochs 1 are 3 steps, and run.max_steps is 4: run.epochs end the run"),
        ({"epochs": 1}, 3, ""),
    ],
)
def test_the_smaller_of_epochs_and_steps_ends_a_run(
    tmp_path: Path, run: dict[str, Any], steps: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    losses, _ = fit(tmp_path, run)
    assert len(losses) == steps
    output = capfd.readouterr().out
    assert said in output if said else "run.max_steps" not in output


@pytest.mark.parametrize(
    ("run", "count"),
    [
        ({"max_steps": 2, "eval_every": 75, "eval_at_end": False}, 0),
        ({"max_steps": 2, "eval_every": "epoch", "eval_at_end": False}, 0),
        ({"max_steps": 3, "eval_every": "epoch", "eval_at_end": False}, 1),
        ({"max_steps": 3, "eval_every": 2, "eval_at_end": False}, 1),
        ({"max_steps": 3, "eval_every": 2}, 2),
        ({"max_steps": 2, "eval_every": 75}, 1),
    ],
)
def test_no_evaluation_comes_that_nobody_asked_for(tmp_path: Path, run: dict[str, Any], count: int) -> None:
    assert fit(tmp_path, run)[1] == count
    # The complete run, started again, owes nothing.
    assert fit(tmp_path, run)[1] == count


def test_evaluations_of_text_have_a_bound(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("word " * 6000)
    data = {"train": str(tmp_path / "text.txt"), "eval": str(tmp_path / "text.txt"), "sequence_length": 16}
    data["cache"] = str(tmp_path)
    model = {"config": {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}}
    model["config"] |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = settings(str(tmp_path), run={"max_steps": 1}, data=data, model=model, checkpoint={"every_steps": 0})
    with Trainer(None, config) as trainer:
        trainer.fit()
    assert "evaluation: 256 of 1,875 samples (data.eval_samples)" in capfd.readouterr().out
