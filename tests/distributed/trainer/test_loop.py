"""The loop: epochs, evaluations with metrics, what callbacks ask for, streams, schedulers."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import Workers
from zeromesh import Callback
from zeromesh.trainer.callbacks.dispatcher import CallbackDispatcher

FULL = pytest.mark.full
CASES = "loop_cases"


@pytest.mark.parametrize(
    ("size", "last"), [(1, "partial"), pytest.param(2, "partial", marks=FULL), (3, "drop"), (2, "carry")]
)
def test_epochs_are_those_of_a_plain_loop(workers: Workers, tmp_path: Path, size: int, last: str) -> None:
    found = workers.run(size, f"{CASES}:epochs", folder=str(tmp_path), last=last)[0]
    assert found["losses"] <= 1e-9
    assert found["parameters"] <= 1e-9
    per_epoch = {"partial": 3, "drop": 2}.get(last)
    if per_epoch is None:
        assert found["steps"] == [6, 6, 48 / 23, 2.0]
        return
    substeps = found["events"].count("substep")
    assert substeps == -(-8 // (2 * size)) - 1
    assert [each for each in found["events"] if each != "substep"] == [
        "epoch 0 at 0", f"end 0 after {per_epoch}", f"evaluated {per_epoch}", f"saved {per_epoch}",
        "epoch 1 at 1", f"end 1 after {2 * per_epoch}", f"evaluated {2 * per_epoch}", f"saved {2 * per_epoch}",
    ]  # fmt: skip
    assert found["steps"] == [2 * per_epoch, 2 * per_epoch, 2.0, 2.0]


def test_smoothed_labels_are_transformers_own(workers: Workers, tmp_path: Path) -> None:
    """Which sums over the vocabulary in float32, whatever the model's dtype."""
    found = workers.run(2, f"{CASES}:epochs", folder=str(tmp_path), last="partial", smoothing=0.2)[0]
    assert found["losses"] <= 1e-6
    assert found["parameters"] <= 1e-4


@pytest.mark.parametrize(
    ("size", "sections"),
    [
        (1, {}),
        (2, {"zero": {"stage": 3}, "offload": {"optimizer": "file", "parameters": "file"}}),
        (2, {"run": {"clip_norm": 0.0, "on_nonfinite": "stop"}, "optimizer": {"in_backward": True}}),
        (2, {"parallel": {"pipeline": 2}}),
        (2, {"parallel": {"tensor": 2}}),
    ],
)
def test_memory_is_given_back_when_a_trainer_is_closed(
    workers: Workers, tmp_path: Path, size: int, sections: dict[str, Any]
) -> None:
    assert workers.run(size, f"{CASES}:left_when_closed", folder=str(tmp_path), sections=sections) == [0] * size


def test_a_mean_over_samples(workers: Workers, tmp_path: Path) -> None:
    assert max(workers.run(2, f"{CASES}:by_samples", folder=str(tmp_path))) <= 1e-9


@pytest.mark.parametrize(
    ("ranks", "samples", "micro", "parallel"),
    [(1, 7, 3, {}), (3, 11, 2, {}), (2, 5, 4, {"tensor": 2}), (2, 9, 2, {"pipeline": 2})],
)
def test_metrics_are_exact_over_uneven_data(
    workers: Workers, tmp_path: Path, ranks: int, samples: int, micro: int, parallel: dict[str, int]
) -> None:
    sections = {"parallel": {"timeout_seconds": 10, **parallel}}
    arguments: dict[str, Any] = {"folder": str(tmp_path), "samples": samples, "micro": micro, "sections": sections}
    for found in workers.run(ranks, f"{CASES}:metrics", **arguments, **parallel):
        assert found["loss"] <= 1e-9
        assert found["logits"] <= 1e-9
        assert found["accuracy"]
        assert found["order"]
        assert found["labels"]
        assert found["names"] == sorted(
            [
                "eval_loss",
                *(f"eval_{part}_{name}" for part in "ab" for name in ("loss", "accuracy", "order")),
                "epoch",
            ]
        )
        speed = ["test_runtime", "test_samples_per_second", "test_steps_per_second"]
        assert found["test"] == ["test_accuracy", "test_loss", "test_order", *speed]


@pytest.mark.parametrize("alone", [pytest.param(False, marks=FULL), True])
def test_flags_of_transformers_callbacks_are_requests_of_all_ranks(
    workers: Workers, tmp_path: Path, alone: bool
) -> None:
    flags = {
        "on_step_end 1": "should_evaluate",
        "on_step_end 2": "should_save",
        "on_step_end 5": "should_training_stop",
    }
    said = workers.run(2, f"{CASES}:theirs", folder=str(tmp_path), flags=flags, alone=alone)
    for found in said:
        assert found["steps"] == [5]
        assert found["saved"] == [2, 4, 5]
        names = [each for each in found["events"] if each.split()[0] in ("on_evaluate", "on_save")]
        assert names == ["on_evaluate 1", "on_save 2", "on_save 4", "on_evaluate 5", "on_save 5"]
    first = said[1]["events"]
    assert first[:2] == ["on_train_begin 0", "on_epoch_begin 0"]
    begun = first.index("on_step_begin 2")
    assert first[begun : begun + 7] == [
        "on_step_begin 2", *["on_substep_end 2"] * 1, "on_pre_optimizer_step 2", "on_optimizer_step 3",
    ] or first[begun:begun + 2] == ["on_step_begin 2", "on_substep_end 2"]  # fmt: skip
    assert first[-1] == "on_train_end 5"
    lines = [log for log in said[0]["logs"] if "loss" in log]
    assert [log["loss"] for log in lines] == pytest.approx(said[0]["losses"])


def test_flags_can_be_taken_back(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(
        1, f"{CASES}:theirs", folder=str(tmp_path), flags={"on_step_end 4": "-should_save"}, alone=False
    )[0]
    assert found["saved"] == [6]


def test_an_epoch_can_be_ended_early(workers: Workers, tmp_path: Path) -> None:
    """Of two epochs of three steps, the first ends after one: what was left of it is passed over."""
    for found in workers.run(
        2, f"{CASES}:theirs", folder=str(tmp_path), flags={"on_step_end 1": "should_epoch_stop"}, alone=False, epochs=2
    ):
        assert found["steps"] == [4]
        ends = [each for each in found["events"] if each.startswith(("on_epoch_begin", "on_epoch_end"))]
        assert ends == ["on_epoch_begin 0", "on_epoch_end 1", "on_epoch_begin 1", "on_epoch_end 4"]


@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_a_run_without_progress_ends_with_its_best_weights(workers: Workers, tmp_path: Path, kind: str) -> None:
    for found in workers.run(2, f"{CASES}:patience", folder=str(tmp_path), kind=kind):
        assert found["steps"] == 5
        assert found["best"] == [0.6, 2]
        assert found["checkpoint"] == "step-00000002"
        assert found["difference"] == 0.0


@pytest.mark.parametrize("shuffle", [pytest.param(False, marks=FULL), True])
def test_a_stream_goes_on_with_another_number_of_ranks(workers: Workers, tmp_path: Path, shuffle: bool) -> None:
    whole = workers.run(1, f"{CASES}:streamed", folder=str(tmp_path / "a"), steps=8, shuffle=shuffle)[0]
    losses: list[float] = []
    for ranks, steps in ((2, 3), (3, 6), (1, 8)):
        found = workers.run(ranks, f"{CASES}:streamed", folder=str(tmp_path / "b"), steps=steps, shuffle=shuffle)[0]
        losses += found["losses"]
    assert losses == pytest.approx(whole["losses"], rel=1e-9)
    assert found["parameters"] == pytest.approx(whole["parameters"], rel=1e-9)


WITHOUT_GRADIENTS: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 3},
    {"stage": 0, "optimizer": "sgd"},
    {"stage": 2, "optimizer": "sgd", "offload": {"optimizer": "host", "gradients": "host"}},
    {"stage": 3, "optimizer": "adam", "offload": {"optimizer": "file", "parameters": "file"}},
    *({"stage": stage, "update": {"in_backward": True}} for stage in range(4)),
    {"stage": 3, "optimizer": "sgd", "update": {"in_backward": True}},
    {"stage": 1, "optimizer": "adagrad", "update": {"in_backward": True}, "offload": {"optimizer": "host"}},
]
"""Two ranks, of which one has a gradient of the tower in two of six steps, and none has one in the others."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_part_without_a_gradient_is_left_alone(workers: Workers, tmp_path: Path, ranks: int) -> None:
    for rank in workers.run(ranks, f"{CASES}:towers", folder=str(tmp_path), cases=WITHOUT_GRADIENTS):
        for case, found in zip(WITHOUT_GRADIENTS, rank, strict=True):
            assert found["difference"] <= 1e-12, case
            assert found["passed over"] == [2, 0, 2, 0, 2, 2], case


def test_a_scheduler_of_torch(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(2, f"{CASES}:scheduled", folder=str(tmp_path))[0]
    assert found == pytest.approx([1e-2, 1e-2, 1e-3, 1e-3])


def test_the_seed_of_the_data_is_one_of_its_own(workers: Workers, tmp_path: Path) -> None:
    (losses,) = workers.run(1, f"{CASES}:ordered", folder=str(tmp_path), seeds=[None, 5, 4])
    assert losses[0] == losses[1] != losses[2]


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
