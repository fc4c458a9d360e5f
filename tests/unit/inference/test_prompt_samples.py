"""`run.prompts`: what a person reads of them, and what is refused before the first step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zeromesh.errors import ConfigError
from zeromesh.trainer import Trainer
from zeromesh.trainer.callbacks.callback import Callback
from zeromesh.trainer.trackers.backends import Place, TrackedRow, WandbTracker

SIZES = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 48, "vocab_size": 256}


def configured(folder: Path, run: dict[str, Any], **sections: Any) -> dict[str, Any]:
    text = folder / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(100)))
    return {
        "model": {"config": {**SIZES, "eos_token_id": 255, "bos_token_id": None}},
        "data": {"train": str(text), "tokenizer": "bytes", "sequence_length": 16, "cache": str(folder)},
        "checkpoint": {"every_steps": 0},
        "run": {"output_dir": str(folder), "name": "run", "max_steps": 2, **run},
        **sections,
    }


def test_a_file_of_prompts_at_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "2 times"}\n{"input_ids": [50, 32]}\n')
    run = {"prompts": str(file), "eval_every": 1, "generation": {"max_new_tokens": 3}}
    with Trainer(config=configured(tmp_path, run)) as trainer:
        trainer.fit()
        lines = [json.loads(line) for line in (trainer.run_directory / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [
        (n, p) for n in (1, 2) for p in ("2 times", "[50, 32]")
    ]
    assert f"step 2: '2 times' goes on {lines[2]['completion']!r}" in capsys.readouterr().out


class ReadsSamples(Callback):
    def on_save(self, trainer: Trainer, step: int) -> None:
        self.seen = [json.loads(line)["step"] for line in (trainer.run_directory / "samples.jsonl").open()]


def test_samples_of_a_step_are_there_when_it_is_saved(tmp_path: Path) -> None:
    run = {"prompts": ["2"], "prompts_every": 1, "max_steps": 1, "generation": {"max_new_tokens": 1}}
    reads = ReadsSamples()
    with Trainer(config=configured(tmp_path, run, checkpoint={"every_steps": 1}), callbacks=[reads]) as trainer:
        trainer.fit()
    assert reads.seen == [1]


@pytest.mark.parametrize(
    ("run", "sections", "said"),
    [
        ({"prompts": ["x" * 47]}, {}, r"run.prompts: the prompt of sample 0 has 47 tokens"),
        ({"prompts": ["x"], "generation": {"max_token": 3}}, {}, r"run.prompts: max_token is no field"),
        ({"prompts": "/no/such/file"}, {}, r"run.prompts: .*No such file"),
        ({"prompts": ["x"], "prompts_every": 0}, {}, r"run.prompts_every: got 0; allowed is an integer >= 1"),
        ({"prompts": {"text": "x"}}, {}, r"run.prompts: got a mapping .*; allowed is a list of texts, a file"),
    ],
)
def test_what_is_refused(tmp_path: Path, run: dict[str, Any], sections: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        Trainer(config=configured(tmp_path, run, **sections)).fit()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_without_evaluations_somebody_has_to_say_when(tmp_path: Path) -> None:
    config = configured(tmp_path, {"prompts": ["x"]})
    config["data"]["eval_fraction"] = 0.0
    with pytest.raises(ConfigError, match=r"run.prompts: .*no evaluation data; set run.prompts_every"):
        Trainer(config=config).fit()


def test_wandb_gets_a_table(tmp_path: Path) -> None:
    seen: list[Any] = []
    run: Any = SimpleNamespace(directory=tmp_path, ident="x")
    library = SimpleNamespace(log=lambda row, **_: seen.append(row), tracker=SimpleNamespace(step=3))
    tracker = WandbTracker("wandb", run)
    tracker.tracker = library
    tracker.log(TrackedRow(Place(4, evaluation=True), {}, (("2 times", " 2"),)))
    assert seen[0]["samples"].columns == ["step", "prompt", "completion"]
    assert seen[0]["samples"].data == [[4, "2 times", " 2"]]
    assert json.loads((tmp_path / "tracking-wandb.json").read_text()) == ["x", 4, True, 3]
