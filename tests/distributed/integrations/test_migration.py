"""Trainings with the settings of other trainers compute what those compute."""

from pathlib import Path
from typing import Any

import pytest
from workers import Workers

FIELDS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 5,
    "learning_rate": 1e-2,
    "weight_decay": 0.5,
    "warmup_steps": 2,
    "train_sampling_strategy": "sequential",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine", "max_grad_norm": 0.1},
        {"max_steps": -1, "num_train_epochs": 1.5, "per_device_train_batch_size": 5, "warmup_steps": 0.3},
        {
            "max_steps": -1,
            "num_train_epochs": 1,
            "per_device_train_batch_size": 5,
            "gradient_accumulation_steps": 1,
            "dataloader_drop_last": True,
        },
        pytest.param(
            {"optim": "sgd", "optim_args": "momentum=0.9", "lr_scheduler_type": "constant_with_warmup"},
            marks=pytest.mark.full,
        ),
    ],
    ids=["defaults", "accumulation", "epochs", "whole batches", "sgd"],
)
def test_arguments_train_as_in_transformers(workers: Workers, tmp_path: Path, fields: dict[str, Any]) -> None:
    (said,) = workers.run(1, "migration_cases:trained", folder=str(tmp_path), fields=FIELDS | fields)
    assert said["apart"] < 1e-4 < 5e-3 < said["moved"]
    assert said["given"]


def test_two_ranks_train_as_one_process_of_transformers(workers: Workers, tmp_path: Path) -> None:
    for said in workers.run(2, "migration_cases:trained", folder=str(tmp_path), fields=FIELDS, shared=2):
        assert said["keys"]["batch"]["global_size"] == 4
        assert said["apart"] < 1e-4 < 5e-3 < said["moved"]


def test_a_deepspeed_configuration_beside_arguments(workers: Workers, tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    }
    said = workers.run(2, "migration_cases:trained", folder=str(tmp_path), fields=FIELDS, config=config, shared=2)[0]
    assert (said["keys"]["zero"]["stage"], said["keys"]["offload"]["optimizer"]) == (2, "host")
    assert said["apart"] < 1e-4 < 5e-3 < said["moved"]


def test_the_seed_of_the_data_is_one_of_its_own(workers: Workers, tmp_path: Path) -> None:
    (losses,) = workers.run(1, "migration_cases:ordered", folder=str(tmp_path), seeds=[None, 3, 4])
    assert losses[0] == losses[1] != losses[2]
