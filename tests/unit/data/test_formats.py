"""Rows of each `data.format`, from a configuration alone to a model that has learnt them."""

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.support.trainer_cases import settings
from zeromesh import Trainer
from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.config.sections.training import DataSection
from zeromesh.trainer.data.datasets import load_datasets

WORDS = {
    word: number for number, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(60))])
}
BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 256,
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.fixture
def words(tmp_path: Path) -> str:
    made = Tokenizer(models.WordLevel(WORDS, unk_token="[PAD]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [("[CLS]", 1), ("[SEP]", 2)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(tmp_path / "words")
    return str(tmp_path / "words")


def trained(tmp_path: Path, **sections: Any) -> tuple[Any, Any]:
    """The run, and what it has learnt by its report."""
    sections = {"run": {"max_steps": 6, "eval_at_end": False}, "optimizer": {"lr": 1e-2}, **sections}
    with Trainer(None, settings(str(tmp_path), **sections)) as trainer:
        report = trainer.fit()
        assert all(map(math.isfinite, report.losses))
        trainer.save(tmp_path / "out")
        return trainer.run, report


def labelled(tmp_path: Path, form: str, classes: list[Any]) -> str:
    rows = [{"text": " ".join(f"w{10 * kind + n % 7}" for n in range(number % 5 + 1)), "label": classes[kind]}
            for number, kind in enumerate([0, 1] * 16)]  # fmt: skip
    path = tmp_path / f"rows.{form}"
    if form == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            writer.writerows(rows)
    elif form == "parquet":
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(("form", "classes"), [("csv", ["bad", "good"]), ("jsonl", [0, 1]), ("parquet", ["10", "9"])])
def test_a_column_of_labels_makes_a_classifier(tmp_path: Path, words: str, form: str, classes: list[Any]) -> None:
    """Its configuration has the names of the classes, numbers in the order of numbers; texts are as the tokenizer makes them."""
    data = {"train": labelled(tmp_path, form, classes), "format": "labels", "tokenizer": words, "sequence_length": 16}
    run, report = trained(
        tmp_path, model={"config": BERT, "head": "sequence_classification"}, data={**data, "eval_fraction": 0.2}
    )
    assert report.losses[-1] < report.losses[0]
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(saved["id2label"].values()) == (["9", "10"] if form == "parquet" else list(map(str, classes)))
    sample = run.data.train[0]
    assert sample["input_ids"][0] == 1
    assert sample["labels"].shape == ()
    kind = int(sample["input_ids"][1] - 4) // 10
    assert int(sample["labels"]) == (1 - kind if form == "parquet" else kind)
    assert len(run.data.eval) + len(run.data.train) == 32


def test_labels_that_cannot_be_learnt_are_refused(tmp_path: Path, words: str) -> None:
    data = {
        "train": labelled(tmp_path, "jsonl", ["a", "b"]),
        "format": "labels",
        "tokenizer": words,
        "sequence_length": 16,
    }
    with pytest.raises(ConfigError, match=r"data\.format: labels are for a model that has classes"):
        trained(tmp_path, model={"config": LLAMA}, data=data)
    few = {"config": {**BERT, "num_labels": 1}, "head": "sequence_classification"}
    with pytest.raises(ConfigError, match="num_labels is 1, and the data has 2 classes"):
        trained(tmp_path, model=few, data=data)
    (tmp_path / "eval.jsonl").write_text('{"text": "w1", "label": "c"}\n')
    with pytest.raises(DataError, match=r"data\.eval .* classes that the training text does not have: c"):
        load_datasets(DataSection(**data, eval=str(tmp_path / "eval.jsonl")))
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "w1", "completion": "w2"}\n')
    with pytest.raises(DataError, match=r"pairs\.jsonl' row 0 has no field 'text', only 'prompt', 'completion'"):
        load_datasets(DataSection(**data, eval=str(tmp_path / "pairs.jsonl")))
    (tmp_path / "none.csv").write_text("text,label\n")
    with pytest.raises(DataError, match=r"none\.csv' has no rows"):
        load_datasets(DataSection(**{**data, "train": str(tmp_path / "none.csv")}))
    with pytest.raises(DataError, match="has no class but 'c'; labels need two"):
        load_datasets(DataSection(**{**data, "train": str(tmp_path / "eval.jsonl")}))
    (tmp_path / "bad.jsonl").write_text('{"text": "w1", "label": 0.5}\n')
    with pytest.raises(DataError, match="row 0: 'text' is str and 'label' float"):
        load_datasets(DataSection(**{**data, "train": str(tmp_path / "bad.jsonl")}))


def test_a_masked_language_model_learns_plain_text(tmp_path: Path, words: str) -> None:
    (tmp_path / "a.txt").write_text(" ".join(f"w{n % 7}" for n in range(600)))
    data = {"train": str(tmp_path / "a.txt"), "tokenizer": words, "sequence_length": 16, "mask_fraction": 0.3}
    run, report = trained(tmp_path, model={"config": BERT, "head": "masked_lm"}, data=data)
    assert report.losses[-1] < report.losses[0]
    batch = run.model.feeds.train().first_batch()
    masked = batch["labels"] != -100
    assert torch.all(batch["labels"][masked] >= 4)
    assert 0.1 < masked.double().mean() < 0.6
    with pytest.raises(DataError, match=r"data\.tokenizer has none"):
        trained(tmp_path, model={"config": BERT, "head": "masked_lm"}, data={**data, "tokenizer": "bytes"})


ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
SHAREGPT = {
    "conversations": [{"from": "human", "value": "Add 1 and 2."}, {"from": "gpt", "value": "3"}],
    "system": "Be brief.",
}


@pytest.mark.parametrize(
    ("form", "row", "text"),
    [
        ("alpaca", ALPACA, "user: Add.\n\n1 and 2\nassistant: 3\n"),
        ("alpaca", {**ALPACA, "input": "", "system": "Be brief."}, "system: Be brief.\nuser: Add.\nassistant: 3\n"),
        ("sharegpt", SHAREGPT, "system: Be brief.\nuser: Add 1 and 2.\nassistant: 3\n"),
    ],
)
def test_rows_of_other_trainers_are_conversations(tmp_path: Path, form: str, row: dict[str, Any], text: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    data = {"train": str(tmp_path / "rows.jsonl"), "format": form, "chat_template": TEMPLATE, "sequence_length": 64}
    data |= {"eval_fraction": 0.0, "packing": False}
    run, report = trained(tmp_path, model={"config": LLAMA}, data=data)
    assert report.losses[-1] < report.losses[0]
    sample = run.data.train[0]
    assert bytes(sample["input_ids"].tolist()).startswith(text.encode())
    assert bytes(sample["labels"][sample["labels"] != -100].tolist()) == b"3\n"


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        ("alpaca", {**ALPACA, "output": None}, "what the assistant says is NoneType"),
        ("sharegpt", {"conversations": [{"from": "robot", "value": "a"}]}, "robot"),
        ("sharegpt", {"conversations": [{"role": "user", "content": "a"}]}, "from"),
        ("sharegpt", {"conversations": "a"}, "no row of data.format sharegpt"),
    ],
)
def test_rows_that_are_not_of_their_format_are_refused(
    tmp_path: Path, form: str, row: dict[str, Any], message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n")
    section = DataSection(train=str(tmp_path / "rows.jsonl"), format=form, chat_template=TEMPLATE)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=rf"row 0 is no row of data\.format {form}: .*{message}|{message}"):
        load_datasets(section)


ROOT = Path(__file__).resolve().parents[3]
TRAIN = """
import json, sys, zeromesh
with zeromesh.Trainer(None, json.loads(sys.argv[1])) as trainer:
    trainer.fit()
    print(zeromesh.__file__, trainer.run.data.train[0]["labels"].tolist())
"""


def test_a_new_format_of_rows_or_files_is_a_row_of_a_table_and_a_function(tmp_path: Path) -> None:
    """Both are added in a copy, each in one place, and a step is trained."""
    for name in ("zeromesh", "trainer", "offload"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path, table, row, function in (
        (
            "trainer/config/sections/formats.py",
            "FORMATS = {\n",
            '    "quiz": RowFormat(("question", "reply"), parts=_quiz),\n',
            'def _quiz(row):\n    return {"messages": _said("user", row["question"]) + _said("assistant", row["reply"])}\n\n\n',
        ),
        (
            "trainer/data/text_sources.py",
            "_READERS: dict[str, Callable[[SourceFile], Iterator[dict[str, Any]]]] = {\n",
            '    "quiz": _quiz_rows,\n',
            "def _quiz_rows(file):\n    with _text(file.path, file.encoding) as lines:\n"
            '        yield from (dict(zip(("question", "reply"), line.strip().split(" = "))) for line in lines)\n\n\n',
        ),
    ):
        source = (tmp_path / path).read_text()
        assert source.count(table) == 1
        (tmp_path / path).write_text(source.replace(table, f"{function}{table}{row}"))
    (tmp_path / "rows.quiz").write_text("1 + 2 = 3\n" * 16)
    data = {"train": str(tmp_path / "rows.quiz"), "format": "quiz", "chat_template": TEMPLATE, "sequence_length": 32}
    keys = settings(str(tmp_path), model={"config": LLAMA}, data={**data, "eval_fraction": 0.0, "packing": False})
    keys["run"] |= {"max_steps": 1}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, json.dumps(keys)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    place, _, labels = done.stdout.splitlines()[-1].partition(" ")
    assert place == str(tmp_path / "zeromesh" / "__init__.py")
    assert bytes(each for each in json.loads(labels) if each >= 0) == b"3\n"
