"""Starts without a configuration, and the defaults of a model that has weights."""

import argparse
import gzip
import json
from pathlib import Path

import pytest
import transformers as tf

from zeromesh import Trainer
from zeromesh.errors import ConfigError
from zeromesh.trainer.cli.main import make_parser
from zeromesh.trainer.cli.train import _convert_start_arguments
from zeromesh.trainer.config.load import load_config

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 30}


def parsed(*words: str) -> argparse.Namespace:
    options = make_parser().parse_args(["train", *words])
    _convert_start_arguments(options)
    return options


def directory(tmp_path: Path) -> Path:
    config = tf.LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=64)
    tf.LlamaForCausalLM(config).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def test_a_model_and_a_file_make_a_configuration(tmp_path: Path) -> None:
    model, data = directory(tmp_path), tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "", "completion": ""}\n' * 2)
    keys = ("optimizer.betas=[0.5, 0.6]", "batch.global_size=6")
    options = parsed("--model", str(model), "--data", str(data), "--lora", *keys)
    config = load_config(None, options.overrides, tunes="whole")
    assert (config.model.source, config.data.train, config.data.format) == (str(model), str(data), "pairs")
    assert (config.data.sequence_length, config.run.name, config.run.epochs) == (64, "m-lora", 3)
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.exempt) == (2e-4, 0.0, "biases_and_norms")
    assert (config.optimizer.betas, config.batch.micro_size) == ((0.5, 0.6), 2)
    assert "defaults for tuning" in config.notes[0]
    (tmp_path / "saved.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "saved.yaml").model_dump() == config.model_dump()


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("rows.jsonl", '{"messages": []}\n{"messages": []}', "chat"),
        ("rows.jsonl", '{"prompt": "", "completion": ""}', "pairs"),
        ("rows.jsonl", '{"instruction": "", "output": ""}', "alpaca"),
        ("rows.jsonl", '{"text": ""}', "text"),
        ("rows.json", json.dumps([{"instruction": "a", "output": "b"}], indent=1), "alpaca"),
        ("rows.csv", "\ufeffprompt;completion\r\na;b\r\n", "pairs"),
        ("rows.jsonl.gz", json.dumps({"conversations": []}), "sharegpt"),
        ("rows.txt", '{"messages": []}', "text"),
        ("broken.jsonl", '{"messages": ', "text"),
    ],
)
def test_rows_are_recognised_in_files_of_all_kinds(tmp_path: Path, name: str, text: str, kind: str) -> None:
    data = tmp_path / name
    data.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    (tmp_path / "m").mkdir()
    options = parsed("--model", str(tmp_path / "m"), "--data", str(data))
    assert load_config(None, options.overrides).data.format == kind


@pytest.mark.parametrize(
    ("architecture", "columns", "head", "kind"),
    [
        ("BertForSequenceClassification", "text,label", "sequence_classification", "labels"),
        ("BertForMaskedLM", "text,label", "sequence_classification", "labels"),
        ("BertForMaskedLM", "text,id", "masked_lm", "text"),
        ("GPT2LMHeadModel", "text,label", "causal_lm", "text"),
        (None, "text", "causal_lm", "text"),
    ],
)
def test_a_directory_has_its_task(tmp_path: Path, architecture: str | None, columns: str, head: str, kind: str) -> None:
    """A classifier on rows with labels is tuned as one, and not as a model of the next token with a new head."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text(json.dumps({"architectures": architecture and [architecture]}))
    (tmp_path / "rows.csv").write_text(f"{columns}\na,b\n")
    options = parsed("--model", str(tmp_path / "m"), "--data", str(tmp_path / "rows.csv"))
    config = load_config(None, options.overrides)
    assert (config.model.head, config.data.format) == (head, kind)


def test_no_text_is_longer_than_the_tokenizer_says(tmp_path: Path) -> None:
    """As the positions of RoBERTa, say, are counted from 2."""
    (tmp_path / "m").mkdir()
    (tmp_path / "a.txt").touch()
    (tmp_path / "m/config.json").write_text('{"max_position_embeddings": 514}')
    for most, length in ((512, 512), (10**30, 514), (1e30, 514), (None, 514)):
        (tmp_path / "m/tokenizer_config.json").write_text(json.dumps({"model_max_length": most}))
        options = parsed("--model", str(tmp_path / "m"), "--data", str(tmp_path / "a.txt"))
        assert f"data.sequence_length={length}" in options.overrides


@pytest.mark.parametrize(
    ("sizes", "words", "changes"),
    [
        ({}, (), {}),
        ({"max_position_embeddings": 4096}, (), {}),
        ({"n_positions": 100}, (), {"data.sequence_length": 100}),
        ({"max_position_embeddings": True}, (), {}),
        ([], (), {}),
        ({}, ("--lora",), {"run.name": "m-lora", "model.lora": {"rank": 16, "targets": "all-linear"}}),
        ({}, ("--data", "b.txt"), {"data.train": ["a.txt", "b.txt"]}),
        ({}, ("--eval", "b.txt"), {"data.eval": "b.txt"}),
        ({}, ("--eval", "x=b.txt"), {"data.eval": {"x": "b.txt"}}),
        ({}, ("--eval", "b=.txt"), {"data.eval": "b=.txt"}),  # That of a file that is there.
        ({}, ("--eval", "b.txt", "--eval", "x=a.txt"), {"data.eval": {"b": "b.txt", "x": "a.txt"}}),
    ],
)
def test_the_keys_of_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: object, words: tuple[str, ...], changes: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text(json.dumps(sizes))
    for name in ("a.txt", "b.txt", "b=.txt"):
        (tmp_path / name).write_text("a")
    options = parsed("run.seed=1", "--model", "m", "--data", "a.txt", *words)
    *keys, last = options.overrides
    assert last == "run.seed=1", "the user's keys come last, and count"
    assert {key: json.loads(value) for key, _, value in (each.partition("=") for each in keys)} == {
        "model.source": "m",
        "data.train": "a.txt",
        "data.format": "text",
        "model.head": "causal_lm",
        "data.sequence_length": 1024,
        "run.name": "m-tuned",
        "run.epochs": 3,
    } | changes
    assert options.tune


@pytest.mark.parametrize(("key", "epochs"), [("run.max_steps=40", None), ("run.max_steps=null", 3)])
def test_a_start_of_so_many_steps_has_them(tmp_path: Path, key: str, epochs: float | None) -> None:
    (tmp_path / "a.txt").write_text("a")
    run = load_config(None, parsed(key, "--model", str(directory(tmp_path)), "--data", f"{tmp_path}/a.txt").overrides).run
    assert (run.epochs, run.most_steps) == (epochs, None if epochs else 40)


@pytest.mark.parametrize("words", [(), ("--model", "m"), ("--data", "f"), ("x.yaml", "--model", "m", "--data", "f"), ("--lora",)])
def test_half_a_start_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="give either a configuration, or --model DIR --data FILE"):
        parsed(*words)


@pytest.mark.parametrize("data", ["/none/of.jsonl", "/none/*.jsonl", "hub:none"])
def test_wrong_paths_are_told_with_all_other_problems(data: str) -> None:
    options = parsed("--model", "/none", "--data", data, "run.seed=no")
    with pytest.raises(ConfigError, match=r"(?s)run.seed: got 'no'.*model.source: '/none' does not exist"):
        load_config(None, options.overrides)


def test_a_configuration_is_taken_as_it_is() -> None:
    options = parsed("x.yaml", "run.seed=1")
    assert (options.config, options.overrides, options.tune) == ("x.yaml", ["run.seed=1"], False)


def test_a_model_with_weights_has_the_defaults_of_tuning(tmp_path: Path) -> None:
    loaded = tf.LlamaForCausalLM.from_pretrained(directory(tmp_path))
    assert Trainer(loaded, {"optimizer": {"lr": 1e-3}}).config.optimizer.betas == (0.9, 0.999)
    tuned = Trainer(loaded).config
    assert (tuned.optimizer.lr, tuned.optimizer.weight_decay, tuned.batch.micro_size) == (2e-5, 0.01, 4)
    fresh = tf.LlamaForCausalLM(loaded.config.__class__(**SIZES, num_key_value_heads=2))
    assert Trainer(fresh).config.optimizer.lr == 3e-4


def test_pictures_and_labels_are_recognised_and_sets_have_names(tmp_path: Path) -> None:
    (tmp_path / "all" / "cat").mkdir(parents=True)
    (tmp_path / "all" / "cat" / "1.JPG").touch()
    (tmp_path / "rows.csv").write_text("text,label\ngood,1\n")
    model, table = str(directory(tmp_path)), str(tmp_path / "rows.csv")
    config = load_config(None, parsed("--model", model, "--data", str(tmp_path / "all")).overrides)
    assert (config.data.format, config.model.head) == ("pictures", "image_classification")
    sets = ("--eval", table, "--eval", f"other={tmp_path / 'all'}")
    config = load_config(None, parsed("--model", model, "--data", table, *sets).overrides)
    assert config.data.eval == {"rows": table, "other": str(tmp_path / "all")}
    assert load_config(None, parsed("--model", model, "--data", table, "--eval", table).overrides).data.eval == table
    with pytest.raises(ConfigError, match=r"--eval: two of .* have one name; give NAME=FILE"):
        parsed("--model", model, "--data", table, "--eval", table, "--eval", table)
