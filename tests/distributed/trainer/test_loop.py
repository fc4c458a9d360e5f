"""The loop: epochs, evaluations with metrics, what callbacks ask for, streams, schedulers, and how long a run is."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.plain import fitted
from tests.support.tables import row, tried
from tests.support.trainer_cases import llama, seeded, sentences, settings
from tests.support.workers import Workers
from zeromesh import Callback, Trainer
from zeromesh.trainer.callbacks.dispatcher import CallbackDispatcher

FULL = pytest.mark.full
CASES = "loop_cases"


test_who_is_at_work_in_a_step_is_late_sooner = tried(CASES, [(2, "late_at_work", {})])

STATES = ("optimizer", "parameters")
UPDATES = {"run": {"clip_norm": 0.0, "on_nonfinite": "stop"}, "optimizer": {"in_backward": True}}


test_a_run_does_what_a_plain_loop_does = pytest.mark.sampled(4)(
    tried(
        CASES,
        [
            (1, "epochs", {"last": "partial"}),
            pytest.param(2, "epochs", {"last": "partial"}, marks=FULL),
            (2, "epochs", {"last": "drop"}),
            (2, "epochs", {"last": "carry"}),
            (2, "epochs", {"last": "partial", "smoothing": 0.2}),
            (2, "by_samples", {}),
            pytest.param(1, "towers", {}, marks=FULL),
            (2, "towers", {}),
            (2, "scheduled", {}),
            (2, "halving", {}),
            (1, "ordered", {}),
            # Memory is given back when a trainer is closed.
            (1, "left_when_closed", {"sections": {}}),
            row(2, "left_when_closed", sections={"zero": {"stage": 3}, "offload": dict.fromkeys(STATES, "file")}),
            (2, "left_when_closed", {"sections": UPDATES}),
            (2, "left_when_closed", {"sections": {"parallel": {"pipeline": 2}}}),
            pytest.param(2, "left_when_closed", {"sections": {"parallel": {"tensor": 2}}}, marks=FULL),
            (1, "left_after_an_error", {}),
            # Metrics are exact over uneven data.
            (1, "metrics", {"samples": 7, "micro": 3, "sections": {}}),
            (3, "metrics", {"samples": 11, "micro": 2, "sections": {}}),
            (2, "metrics", {"samples": 5, "micro": 4, "sections": {"parallel": {"tensor": 2}}}),
            (2, "metrics", {"samples": 9, "micro": 2, "sections": {"parallel": {"pipeline": 2}}}),
            # A run without progress ends with its best weights.
            *(row(1, "spent", offload=offload) for offload in ({}, {"optimizer": "file"})),
            (2, "patience", {"kind": "ours"}),
            (2, "patience", {"kind": "theirs"}),
        ],
    )
)


test_a_budget_of_tokens_is_kept_and_changes_no_loss = tried(
    CASES,
    [
        (1, "tokens", {}),
        row(2, "tokens", zero={"stage": 3}, data={"workers": 1}),
        row(4, "tokens", pytest.mark.full, zero={"stage": 1}),
        row(2, "tokens", parallel={"pipeline": 2}),
        row(2, "metrics", samples=11, micro=None, sections={}),
        row(2, "by_samples", tokens=12),
    ],
)


def test_a_budget_of_tokens_goes_on_with_other_ranks(workers: Workers, tmp_path: Path) -> None:
    for ranks, resumes in ((2, False), (1, True)):
        workers.run(ranks, f"{CASES}:tokens", folder=str(tmp_path), resumes=resumes)
    said = workers.run(2, f"{CASES}:unequal_lengths", folder=str(tmp_path / "unequal"))
    assert all("microbatches of batch.tokens" in each for each in said), said


ASKED = {"on_step_end 1": "should_evaluate", "on_step_end 2": "should_save", "on_step_end 5": "should_training_stop"}


@pytest.mark.parametrize("alone", [pytest.param(False, marks=FULL), True])
def test_flags_of_transformers_callbacks_are_requests_of_all_ranks(workers: Workers, tmp_path: Path, alone: bool) -> None:
    said = workers.run(2, f"{CASES}:theirs", folder=str(tmp_path), flags=ASKED, alone=alone)
    for found in said:
        assert (found["steps"], found["saved"]) == ([5], [2, 4, 5])
        names = [each for each in found["events"] if each.split()[0] in ("on_evaluate", "on_save")]
        assert names == ["on_evaluate 1", "on_save 2", "on_save 4", "on_evaluate 5", "on_save 5"]
    first = said[1]["events"]
    assert first[:2] == ["on_train_begin 0", "on_epoch_begin 0"]
    begun = first.index("on_step_begin 2")
    assert first[begun : begun + 2] == ["on_step_begin 2", "on_substep_end 2"]
    assert first[-1] == "on_train_end 5"
    lines = [log for log in said[0]["logs"] if "loss" in log]
    assert [log["loss"] for log in lines] == pytest.approx(said[0]["losses"])


def test_flags_can_be_taken_back_and_end_an_epoch_early(workers: Workers, tmp_path: Path) -> None:
    """Of two epochs of three steps, the first ends after one: what was left of it is passed over."""
    flags: dict[str, str] = {"on_step_end 4": "-should_save"}
    assert workers.run(1, f"{CASES}:theirs", folder=str(tmp_path), flags=flags, alone=False)[0]["saved"] == [6]
    flags = {"on_step_end 1": "should_epoch_stop"}
    given: dict[str, Any] = {"folder": str(tmp_path / "early"), "flags": flags, "alone": False, "epochs": 2}
    for found in workers.run(2, f"{CASES}:theirs", **given):
        assert found["steps"] == [4]
        ends = [each for each in found["events"] if each.startswith(("on_epoch_begin", "on_epoch_end"))]
        assert ends == ["on_epoch_begin 0", "on_epoch_end 1", "on_epoch_begin 1", "on_epoch_end 4"]


@pytest.mark.parametrize("shuffle", [pytest.param(False, marks=FULL), True])
def test_a_stream_goes_on_with_another_number_of_ranks(workers: Workers, tmp_path: Path, shuffle: bool) -> None:
    whole = workers.run(1, f"{CASES}:streamed", folder=str(tmp_path / "a"), steps=8, shuffle=shuffle)[0]
    losses: list[float] = []
    for ranks, steps in ((2, 3), (3, 6), (1, 8)):
        found = workers.run(ranks, f"{CASES}:streamed", folder=str(tmp_path / "b"), steps=steps, shuffle=shuffle)[0]
        losses += found["losses"]
    assert losses == pytest.approx(whole["losses"], rel=1e-9)
    assert found["parameters"] == pytest.approx(whole["parameters"], rel=1e-9)


@pytest.mark.parametrize("theirs", [False, True])
def test_a_callback_that_raises_is_named(workers: Workers, tmp_path: Path, theirs: bool) -> None:
    said = workers.run(2, f"{CASES}:raising", folder=str(tmp_path), theirs=theirs)
    name = "Other" if theirs else "Ours"
    assert said[1] == ["ValueError", "no more", f"raised by callback {name}.on_step_end"]
    assert "no more" in said[0][1]


def test_a_callback_that_cannot_say_what_to_keep_is_named() -> None:
    class Careless(Callback):
        def __init__(self) -> None:
            self.state_dict = "a name that is taken"  # type: ignore[assignment, method-assign]

    events = CallbackDispatcher(None, [Careless()])  # type: ignore[arg-type]
    with pytest.raises(TypeError) as caught:
        events.states()
    assert caught.value.__notes__ == ["raised by callback Careless.state_dict"]


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
        ({"epochs": 2, "max_steps": 4}, 4, "run.epochs 2 are 6 steps, and run.max_steps is 4: run.max_steps ends the run"),
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
    fitted(None, config)
    assert "evaluation: 256 of 1,875 samples (data.eval_samples)" in capfd.readouterr().out
