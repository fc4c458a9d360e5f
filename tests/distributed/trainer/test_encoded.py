"""Frozen weights that rest as a codec's bytes have the same values in every layout, on every tier, and after a reshard."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.tables import row, tried
from tests.support.trainer_cases import llama, sentences, settings
from tests.support.workers import Workers
from zeromesh import Trainer
from zeromesh.errors import ConfigError

FULL = pytest.mark.full
HOST, FILE = ({"parameters": tier} for tier in ("host", "file"))
LAYOUTS: list[tuple[int, int, dict[str, int], tuple[pytest.MarkDecorator, ...]]] = [
    (1, 0, {}, ()),
    (1, 3, {}, (FULL,)),
    (2, 0, {}, (FULL,)),
    (2, 1, {}, ()),
    (2, 2, {}, (FULL,)),
    (3, 3, {}, ()),
    (4, 3, {"replicate": 2}, (FULL,)),
    (2, 3, {"tensor": 2}, ()),
    (2, 1, {"pipeline": 2}, ()),
    (4, 2, {"tensor": 2, "pipeline": 2}, (FULL,)),
]


def layout(ranks: int, stage: int, axes: dict[str, int], marks: tuple[pytest.MarkDecorator, ...]) -> Any:
    words = " ".join(f"{axis} {size}" for axis, size in axes.items())
    return pytest.param(ranks, "trained", {"stage": stage, "axes": axes}, marks=marks, id=f"{ranks} {stage} {words}")


test_losses_are_those_of_the_decoded_weights = tried(
    "encoded_cases",
    [
        *(layout(*each) for each in LAYOUTS),
        *(row(2, "trained", stage=3, weights=name) for name in ("fp4", "int8", "fp8")),
        *(row(2, "trained", *marks, stage=3, offload=tier) for tier, marks in ((HOST, (FULL,)), (FILE, ()))),
        row(2, "trained", stage=3, activation_checkpointing="block"),
    ],
)
test_memory_is_what_was_predicted = tried(
    "encoded_cases",
    [
        row(1, "counted", stage=0),
        row(1, "counted", stage=3, offload=FILE, prefetch=2),
        row(2, "counted", stage=3),
    ],
)
ALL = {"r": 4, "lora_alpha": 6, "use_rslora": True, "use_dora": True, "target_modules": ["q_proj", "down_proj"]}
ALL |= {"modules_to_save": ["embed_tokens"]}
PISSA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": "pissa"}
test_adapters_by_configuration_are_those_of_peft = tried(
    "encoded_cases",
    [
        *(row(2, "alike", *marks, stage=stage, adapter=ALL) for stage, marks in ((0, (FULL,)), (1, (FULL,)), (3, ()))),
        *(row(2, "alike", stage=2, adapter=ALL, axes=axes) for axes in ({"tensor": 2}, {"pipeline": 2})),
        row(1, "alike", FULL, stage=2, adapter=ALL, weights=None),
        row(2, "alike", stage=3, adapter=PISSA, weights=None),
        row(2, "alike", FULL, stage=2, adapter=PISSA),
        row(
            2, "alike", FULL, stage=1, adapter={**PISSA, "init_lora_weights": "olora"}, weights=None, axes={"tensor": 2}
        ),
        row(1, "alike", FULL, stage=3, adapter={**PISSA, "init_lora_weights": "orthogonal"}),
    ],
)


def test_runs_go_on_in_other_layouts(workers: Workers, tmp_path: Path) -> None:
    folder = str(tmp_path / "whole")
    whole = workers.run(1, "encoded_cases:moved", folder=folder, steps=4, stage=0, frozen="whole")[0]
    message = workers.run(2, "encoded_cases:another_base", folder=folder)[0]
    assert "frozen weights that are kept encoded differ" in message, message
    folder = str(tmp_path / "parts")
    first = workers.run(2, "encoded_cases:moved", folder=folder, steps=2, stage=1, axes={"tensor": 2})
    second = workers.run(3, "encoded_cases:moved", folder=folder, steps=4, stage=3, frozen="whole")
    third = workers.run(2, "encoded_cases:moved", folder=folder, steps=6, stage=2, axes={"pipeline": 2})
    losses = [*first[0]["losses"], *second[0]["losses"]]
    assert losses == pytest.approx(whole["losses"], rel=1e-9)
    assert len(third[0]["losses"]) == 2


def test_a_model_without_frozen_matrices_is_refused(tmp_path: Path) -> None:
    config = settings(str(tmp_path), model={"weights": "nf4"})
    with pytest.raises(ConfigError, match=r"model\.weights"), Trainer(llama(), config, sentences()) as trainer:
        trainer.fit()
