"""`train.method`: what of a configuration TRL gets, by its names, and what is refused by ours."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerState

from zeromesh.errors import ConfigError
from zeromesh.trainer import Trainer
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.config.sections.base import find_object
from zeromesh.trainer.data.tokenizer import ByteTokenizer
from zeromesh.trainer.integrations import trl

DPO: dict[str, Any] = {"train": {"method": "dpo", "options": {"beta": 0.3}}, "data": {"tokenizer": "bytes"}}


def arguments(ranks: int = 2, **sections: Any) -> dict[str, Any]:
    return trl.arguments_of(load_config({**DPO, **sections}), ranks)


def test_keys_have_the_names_of_trl() -> None:
    found = arguments(
        batch={"global_size": 16, "micro_size": 2},
        optimizer={"lr": 1e-5, "betas": [0.9, 0.98]},
        schedule={"name": "cosine", "warmup_ratio": 0.1},
        run={"max_steps": 7, "clip_norm": 0.5, "log_every": 3, "eval_every": "epoch"},
        checkpoint={"every_steps": 0},
        precision={"compute": "float32"},
        zero={"stage": 3},
        data={"tokenizer": "bytes", "eval": "scripts/examples/preferences.jsonl"},
    )
    wanted = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-5,
        "adam_beta2": 0.98,
        "lr_scheduler_type": "cosine",
        "max_steps": 7,
        "max_grad_norm": 0.5,
        "logging_strategy": "steps",
        "logging_steps": 3,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "bf16": False,
        "fp16": False,
        "beta": 0.3,
    }
    assert {name: found[name] for name in wanted} == wanted
    assert found["warmup_steps"] == 0.1


@pytest.mark.parametrize(
    ("sections", "found"),
    [
        ({}, {"bf16": True, "fp16": False}),
        ({"precision": {"compute": "float16"}}, {"bf16": False, "fp16": True}),
        ({"model": {"activation_checkpointing": "block"}}, {"gradient_checkpointing": True}),
        ({"model": {"activation_checkpointing": "none"}}, {"gradient_checkpointing": False}),
        ({"run": {"verbose": True}}, {"log_level": "info"}),
        ({"run": {"verbose": False}}, {"log_level": None}),
        ({"batch": {"global_size": 6, "micro_size": 3}, "parallel": {"tensor": 2}}, {"gradient_accumulation_steps": 2}),
        ({"batch": {"micro_size": 3}}, {"gradient_accumulation_steps": None}),
    ],
)
def test_settings_that_are_converted(sections: dict[str, Any], found: dict[str, Any]) -> None:
    given = arguments(**sections)
    assert {name: given.get(name) for name in found} == found


def test_what_trl_has_no_word_for_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as error:
        arguments(
            ranks=3,
            data={"packing": False, "loss_on": "all"},
            run={"label_smoothing": 0.1},
            optimizer={"name": "sgd"},
            batch={"global_size": 16, "micro_size": 2},
        )
    named = {problem.partition(":")[0] for problem in error.value.problems}
    assert named == {"batch.global_size", "data.loss_on", "data.packing", "optimizer.name", "run.label_smoothing"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": {"method": "grpo"}}, "train.rewards"),
        ({"train": {"method": "dpo", "rewards": [{"python": "math:sqrt"}]}}, "train.rewards"),
        ({"train": {"method": "dpo", "options": {"bf16": True}}}, "train.options.bf16"),
        (
            {"train": {"method": "grpo", "rewards": [{"python": "math:sqrt"}]}, "data": {"sequence_length": 8}},
            "data.sequence_length: GRPO has no such limit",
        ),
        ({"model": {"activation_checkpointing": "full"}}, "model.activation_checkpointing"),
        ({"batch": {"global_size": 4, "micro_size": 3}}, "batch.global_size: 4 is no multiple of 6"),
        ({"train": {"method": "dpo", "options": {"learning_rate": 1}}, "optimizer": {"lr": 1}}, "train.options.learning"),
        ({"train": {"method": "ppo"}}, "train.method"),
        ({"train": {"method": "grpo", "rewards": [{"python": "math"}]}}, "package.module:function"),
        ({"checkpoint": {"resume": "configs"}}, "checkpoint.resume: configs is not to be had from TRL"),
        ({"run": {"eval_every": 3}}, "run.eval_every: TRL holds no part of the data out"),
        ({"ema": {"decay": 0.9}}, "ema.decay: train.method dpo hands the run to TRL"),
        ({"data": {"train": {"python": "a:b"}, "tokenizer": "bytes"}}, r"data.train: TRL's trainers read files here"),
        ({"data": {"eval": {"a": "README.md"}, "tokenizer": "bytes"}}, r"data.eval: TRL's trainers read files here"),
    ],
)
def test_methods_rewards_and_data_are_checked(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        arguments(**sections)


def test_a_key_that_is_set_to_nothing_is_as_if_left_out() -> None:
    """A null on the command line takes away what the file sets."""
    assert arguments(model={"weights": None}, data={"chat_template": None}) == arguments()
    with pytest.raises(ConfigError, match=r"model\.weights: train.method dpo hands the run to TRL"):
        arguments(model={"weights": "nf4"})


def test_a_reward_is_a_function_of_a_module() -> None:
    import math

    config = load_config({"train": {"method": "grpo", "rewards": [{"python": "math:sqrt"}, {"python": "math:none"}]}})
    assert find_object(config.train.rewards[0].python, "train.rewards") is math.sqrt
    with pytest.raises(ConfigError, match=r"train.rewards: math:none"):
        find_object(config.train.rewards[1].python, "train.rewards")


def test_rows_and_tokens(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n", encoding="utf-8")
    assert trl._rows(str(file))[0] == {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(ConfigError, match="are not files of one of"):
        trl._rows([str(file), "rows.csv"])
    for given in ("rows.txt", str(tmp_path / "none.jsonl")):
        with pytest.raises(ConfigError, match=given.rpartition("/")[2]):
            trl._rows(given)
    assert trl._rows(str(file), ["prompt label", "chosen rejected"])[0]["chosen"] == "b"
    with pytest.raises(ConfigError, match=r"1 rows with the columns prompt, chosen, rejected; needed are prompt label"):
        trl._rows(str(file), ["prompt label"])
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match=r"empty.jsonl"):
        trl._rows(str(tmp_path / "empty.jsonl"), ["chosen rejected"])
    tokenizer, plain = trl._tokenizer("bytes"), ByteTokenizer()
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (plain.vocab_size, 255, 255)
    for text in ("Grün 7", "  a\t\0\n", "ÿ <0x41> </>", "日本 😀"):
        assert tokenizer(text)["input_ids"] == plain.encode_prompt(text)
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    with pytest.raises(ConfigError, match=r"data.tokenizer: missing"):
        trl._tokenizer(None)


def test_our_own_trainer_is_for_targets() -> None:
    with pytest.raises(ConfigError, match=r"train.method: dpo"):
        Trainer(config=DPO)


def test_the_configuration_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    keys = [f"run.output_dir={tmp_path}", "run.max_steps=2", "run.verbose=true"]
    trl.train(load_config("configs/dpo.yaml", keys))
    assert (tmp_path / "dpo/model/config.json").is_file()
    assert f"the model is in {tmp_path / 'dpo/model'}" in capsys.readouterr().out
    made = json.loads((tmp_path / "dpo/base/config.json").read_text())
    assert (made["vocab_size"], made["eos_token_id"]) == (256, 255)
    own = ["model.config=null", f"model.source={tmp_path / 'dpo/model'}", "data.tokenizer=null", "run.name=its-own"]
    trl.train(load_config("configs/dpo.yaml", [*keys, *own]))
    assert f"the model is in {tmp_path / 'its-own/model'}" in capsys.readouterr().out
    base = (tmp_path / "dpo/base/model.safetensors").stat()
    trl.train(load_config("configs/dpo.yaml", [*keys, "zero.stage=1", "batch.micro_size=1"]))
    assert "nothing was trained: run 'dpo' is complete at step 2" in capsys.readouterr().out
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 80, encoding="utf-8")
    for key, changed in {
        "optimizer.lr": "optimizer.lr=0.5",
        "train.method": "train.method=kto",
        "train.options": "train.options={beta: 0.7}",
        "data.train": f"data.train={other}",
        "batch.global_size": "batch.global_size=2",
        "model.config": "model.config={model_type: llama, hidden_size: 64}",
        "run.seed": "run.seed=7",
    }.items():
        with pytest.raises(ConfigError, match=rf"is of a run with other settings; undo .*(?s:.*){key}: .* then, .* now"):
            trl.train(load_config("configs/dpo.yaml", [*keys, "run.max_steps=3", changed]))
    assert (tmp_path / "dpo/base/model.safetensors").stat() == base
    assert [path.name for path in (tmp_path / "dpo").glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize(
    ("step", "epoch", "max_steps", "complete"),
    [(2, 0.5, 2, True), (1, 0.5, 2, False), (2, 0.5, 3, False), (9, 3.0, -1, True), (8, 2.7, -1, False)],
)
def test_a_complete_run_is_known_by_its_steps_or_epochs(
    tmp_path: Path, step: int, epoch: float, max_steps: int, complete: bool
) -> None:
    TrainerState(global_step=step, epoch=epoch).save_to_json(str(tmp_path / "trainer_state.json"))
    assert trl._is_complete(tmp_path, SimpleNamespace(max_steps=max_steps, num_train_epochs=3.0)) is complete
