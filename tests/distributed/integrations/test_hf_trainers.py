"""`zeromesh.transformers`: trainers of transformers do what they did, overrides and all, and what cannot be right is refused."""

from pathlib import Path

import pytest

from tests.support.workers import Workers

CALLED = ["compute_loss", "create_optimizer", "get_train_dataloader", "log", "prediction_step", "training_step"]


@pytest.mark.parametrize(("stage", "adapted"), [(1, False), pytest.param(3, False, marks=pytest.mark.full), (3, True)])
def test_a_trainer_is_that_of_transformers(workers: Workers, tmp_path: Path, stage: int, adapted: bool) -> None:
    found = workers.run(2, "hf_trainer_cases:as_original", folder=str(tmp_path), stage=stage, adapted=adapted)[0]
    assert found["called"] == CALLED
    assert found["files"] == ["zeromesh"]
    assert found["best"]
    assert found["names"]
    for name in ("history", "resumed", "predictions", "weights"):
        assert found[name] <= 2e-5, found


def test_a_second_training_goes_on_with_the_optimizer(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(2, "hf_trainer_cases:twice", folder=str(tmp_path))[0]
    assert found["history"] <= 2e-5
    assert found["rows"] > 20


def test_generation_and_what_is_saved_of_low_precision(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(2, "hf_trainer_cases:generating", folder=str(tmp_path))[0]
    assert found["mine"] == pytest.approx(found["plain"], abs=0.02)
    assert found["mine tokens"] == found["plain tokens"]
    assert found["dtype"] == "torch.float32"


def test_ranks_that_share_layers_predict_each_sample_once(workers: Workers, tmp_path: Path) -> None:
    for found in workers.run(2, "hf_trainer_cases:generating_together", folder=str(tmp_path)):
        mine, plain = found["mine"], found["plain"]
        # transformers itself has samples twice where processes do not divide them, after all of them.
        assert (mine["size"], plain["size"]) == (5, 8)
        assert mine["tokens"] == plain["tokens"][:5]
        assert mine["beams"] == plain["beams"][:5]
        assert len({tuple(each) for each in mine["tokens"]}) > 1


def test_a_stream_goes_on_in_its_second_epoch(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(1, "hf_trainer_cases:streams", folder=str(tmp_path))[0]
    assert found["resumed"] == found["whole"]


@pytest.mark.parametrize(
    ("zeromesh", "adapted"),
    [({"zero": {"stage": 2}}, False), ({"zero": {"stage": 3}}, True), ({"parallel": {"tensor": 2}}, False)],
)
def test_plain_weights_are_loaded_into_a_divided_model(
    workers: Workers, tmp_path: Path, zeromesh: dict[str, dict[str, int]], adapted: bool
) -> None:
    arguments = {"folder": str(tmp_path), "zeromesh": zeromesh, "adapted": adapted}
    for found in workers.run(2, "hf_trainer_cases:weights_alone", **arguments):
        assert found["loaded"] == pytest.approx(found["best"], rel=1e-6), found
        assert found["part"] == 0
        assert found["strict"]


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_what_people_do_with_a_trainer_is_what_the_original_does(workers: Workers, tmp_path: Path, stage: int) -> None:
    assert workers.run(1, "hf_probes:differing", folder=str(tmp_path), stage=stage)[0] == []


@pytest.mark.parametrize(
    ("name", "said"),
    [("pipeline", "zeromesh.Trainer"), ("compiled", "torch.compile"), ("no trainer", "not built on")],
)
def test_what_cannot_be_right_is_refused_by_name(workers: Workers, tmp_path: Path, name: str, said: str) -> None:
    assert said in workers.run(1, "hf_trainer_cases:refused", folder=str(tmp_path), name=name)[0]
