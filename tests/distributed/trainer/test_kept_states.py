"""What a checkpoint keeps beside tensors: settings as they were before the first forward, and states that JSON alone cannot say."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.trainer_cases import llama, seeded, sentences, settings
from zeromesh import Callback, Trainer
from zeromesh.errors import ConfigError, StorageError
from zeromesh.trainer.checkpoints.trainer_state import TrainerState, differences


class WritesIntoItsConfig(nn.Module):
    """A model whose forward changes fields of its configuration, as transformers' classifiers do with `problem_type`."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.inner = llama(**changes)
        self.config = self.inner.config

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.config.problem_type = "single_label_classification"
        self.config.seen = getattr(self.config, "seen", 0) + 1
        return self.inner(input_ids=input_ids, labels=labels)


class Keeps(Callback):
    """A callback with a state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def trainer_in(folder: Path, model: nn.Module, steps: int, *callbacks: Callback) -> Trainer:
    sections = {"run": {"max_steps": steps, "eval_at_end": False}, "checkpoint": {"every_steps": 1}}
    config = settings(str(folder), **sections, parallel={"timeout_seconds": 10})
    return Trainer(model, config, sentences(), callbacks=list(callbacks))


def test_what_a_model_writes_into_its_config_is_no_setting(tmp_path: Path) -> None:
    used = seeded(WritesIntoItsConfig)
    for steps, model in ((1, used), (2, seeded(WritesIntoItsConfig)), (3, used), (4, seeded(WritesIntoItsConfig))):
        with trainer_in(tmp_path, model, steps) as trainer:
            assert len(trainer.fit().losses) == 1
    with (
        trainer_in(tmp_path, seeded(lambda: WritesIntoItsConfig(attention_dropout=0.5)), 5) as trainer,
        pytest.raises(ConfigError, match=r"attention_dropout: 0.0 then, 0.5 now"),
    ):
        trainer.fit()


def test_states_that_are_not_finite_come_back(tmp_path: Path) -> None:
    value = {"best": math.inf, "list": [-math.inf, 1], "tensor": torch.ones(2)}
    model = seeded(llama)
    model.config.time_step_limit = (0.0, math.inf)
    with trainer_in(tmp_path, model, 1, Keeps(value)) as trainer:
        trainer.fit()
    restored = Keeps(None)
    again = seeded(llama)
    again.config.time_step_limit = (0.0, math.inf)
    with trainer_in(tmp_path, again, 2, restored) as trainer:
        trainer.fit()
    assert restored.value == {"best": math.inf, "list": [-math.inf, 1], "tensor": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("name", "said"),
    [("callback", "callbacks.Keeps.value: a set, which"), ("config", "trial of a checkpoint: .*object")],
)
def test_what_cannot_be_written_is_found_before_the_first_step(tmp_path: Path, name: str, said: str) -> None:
    model = seeded(llama)
    if name == "config":
        model.config.odd = object()
    callbacks = [Keeps({1, 2})] if name == "callback" else []
    with trainer_in(tmp_path, model, 2, *callbacks) as trainer, pytest.raises(StorageError, match=said):
        trainer.fit()
    assert trainer.config.run.max_steps == 2
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_state_is_read_as_it_was_written() -> None:
    kept = {"a": math.nan, "b": {"__float__": "no number"}}
    state = TrainerState(step=1, samples=0, tokens=0, updates=1, skipped=0, settings=kept, stream={"x": [math.inf]})
    read = TrainerState.from_json(json.loads(state.to_json()), "here")
    assert math.isnan(read.settings["a"])
    assert read.settings["b"] == kept["b"]
    assert read.stream == state.stream
    assert not differences(state.settings, read.settings)
