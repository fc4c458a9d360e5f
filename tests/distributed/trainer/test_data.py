"""Conversations, pairs and text that are mixed: the same on any number of ranks, after a resume, and in plain PyTorch."""

from pathlib import Path

import data_cases
import pytest
import trainer_cases
from trainer_cases import plain_fit, settings
from workers import Workers

from zeromesh.trainer.config.sections.training import DataSection
from zeromesh.trainer.data.datasets import load_datasets
from zeromesh.trainer.data.packing import MixedDataset


def test_a_mixture_is_the_same_on_any_number_of_ranks_and_after_a_resume(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_cases.write(tmp_path)
    loaded = load_datasets(DataSection(**data))
    train = loaded.train
    assert isinstance(train, MixedDataset)
    assert 2 * len(train.parts[1]) < 6 * 6  # the parts' epochs end at different steps
    monkeypatch.setattr(trainer_cases, "SampleOrder", lambda length, seed: train.order(seed, shuffle=True))
    wanted = plain_fit(
        data_cases.model(), train, settings("", batch={"global_size": 6}, run={"max_steps": 6}), data_cases.loss_sum
    )
    found = {}
    for size in (1, 3):
        ranks = workers.run(size, "data_cases:trained", folder=str(tmp_path), data=data, name=f"ranks-{size}")
        found[size] = ranks[0]
        assert all(each["losses"] == found[size]["losses"] for each in ranks)
        assert found[size]["losses"] == pytest.approx(wanted.losses, rel=1e-9)
    assert found[3]["eval"] == pytest.approx(found[1]["eval"], rel=1e-9)
    assert "data.mixture: text 25.0%, chats 62.5%, pairs 12.5% of the sequences" in found[3]["said"]
    checkpoint = str(tmp_path / "ranks-3" / "checkpoints" / "step-00000002")
    resumed = workers.run(2, "data_cases:trained", folder=str(tmp_path), data=data, name="resumed", resume=checkpoint)
    assert resumed[0]["losses"] == pytest.approx(wanted.losses[2:], rel=1e-9)
