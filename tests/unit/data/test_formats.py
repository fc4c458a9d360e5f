"""Rows of each `data.format`, and text as models learn it, from a configuration alone to a model that has learnt them."""

import json
import math
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as tf
from PIL import Image
from torch.testing import assert_close

from tests.support.text_files import CHAT_TEMPLATE, one_rank, word_tokenizer, write_rows
from tests.support.trainer_cases import llama, seeded, sentences, settings
from zeromesh import Trainer
from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.config.sections.model import ModelSection
from zeromesh.trainer.config.sections.training import DataSection
from zeromesh.trainer.data.datasets import load_datasets, load_pictures
from zeromesh.trainer.models.build import class_names

_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = {"model_type": "bert", **_SIZES, "max_position_embeddings": 32}
ONE_CLASS = {**BERT, "num_labels": 1}
LLAMA = {"model_type": "llama", **_SIZES, "vocab_size": 256}
NUMBERED = [f"w{n}" for n in range(60)]


@pytest.fixture
def words(tmp_path: Path) -> str:
    """The directory of a tokenizer of 64 words that puts BERT's tokens around a text."""
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    made = word_tokenizer([*special.values(), *NUMBERED], "[PAD]", text="[CLS] $A [SEP]", **special)
    made.save_pretrained(tmp_path / "words")
    return str(tmp_path / "words")


def trained(tmp_path: Path, **sections: Any) -> tuple[Any, Any]:
    """The run, and what it has learnt by its report."""
    sections = {"run": {"max_steps": 6}, "optimizer": {"lr": 1e-2}, **sections}
    with one_rank(tmp_path, **sections) as trainer:
        report = trainer.fit()
        assert all(map(math.isfinite, report.losses))
        assert report.losses[-1] < report.losses[0]
        trainer.save(tmp_path / "out")
        return trainer.run, report


def check_refused(kind: type[Exception], said: str, /, *given: Any, **sections: Any) -> None:
    """The trainer of one rank with these arguments cannot evaluate."""
    with pytest.raises(kind, match=said), one_rank(*given, **sections) as trainer:
        trainer.evaluate()


def labelled(tmp_path: Path, form: str, classes: list[Any]) -> str:
    kinds = [0, 1] * 16
    texts = [" ".join(f"w{10 * kind + n % 7}" for n in range(number % 5 + 1)) for number, kind in enumerate(kinds)]
    rows = [{"text": text, "label": classes[kind]} for text, kind in zip(texts, kinds, strict=True)]
    return write_rows(tmp_path / f"rows.{form}", rows)


@pytest.mark.parametrize(("form", "classes"), [("csv", ["bad", "good"]), ("jsonl", [0, 1]), ("parquet", ["10", "9"])])
def test_a_column_of_labels_makes_a_classifier(tmp_path: Path, words: str, form: str, classes: list[Any]) -> None:
    """Its configuration has the names of the classes, numbers in the order of numbers; texts are as the tokenizer makes them."""
    data = {"train": labelled(tmp_path, form, classes), "format": "labels", "tokenizer": words, "sequence_length": 16}
    model = {"config": BERT, "head": "sequence_classification"}
    run, _ = trained(tmp_path, model=model, data={**data, "eval_fraction": 0.2})
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(saved["id2label"].values()) == (["9", "10"] if form == "parquet" else list(map(str, classes)))
    sample = run.data.train[0]
    assert sample["input_ids"][0] == 1
    assert sample["labels"].shape == ()
    kind = int(sample["input_ids"][1] - 4) // 10
    assert int(sample["labels"]) == (1 - kind if form == "parquet" else kind)
    assert len(run.data.eval) + len(run.data.train) == 32


def classifier(directory: Path, sure_of: int, **config: Any) -> str:
    """The directory of a classifier of texts that is sure of one class."""
    made = tf.BertForSequenceClassification(tf.BertConfig(**BERT, vocab_size=64, **config))
    with torch.no_grad():
        made.classifier.weight.zero_()
        made.classifier.bias.fill_(-5)[sure_of] = 5
    made.save_pretrained(directory)
    return str(directory)


NAMED = {"id2label": {0: "good", 1: "bad"}, "label2id": {"good": 0, "bad": 1}}


@pytest.mark.parametrize(
    ("stored", "config", "labels", "numbers"),
    [
        (NAMED, {}, ["good", "bad"], [0, 1]),
        (NAMED, {}, ["good"], [0]),
        (NAMED, {}, [1], [1]),
        (NAMED, {"num_labels": 2}, ["good", "bad"], [0, 1]),
        (NAMED, {"id2label": {"0": "x", "1": "a"}}, ["x", "a"], [0, 1]),
        (NAMED, {"num_labels": 3}, ["x", "a", "m"], [2, 0, 1]),
        (NAMED, {}, ["nice", "bad"], "classes that the model does not have: nice; it has good, bad"),
        (NAMED, {"num_labels": 3}, ["x"], "has no class but 'x'; labels need two"),
        ({"num_labels": 3}, {}, [2, 0], [2, 0]),
        ({"num_labels": 3}, {}, ["LABEL_2", "LABEL_0"], [2, 0]),
        ({"num_labels": 3}, {"num_labels": 3}, [2, 0], [2, 0]),
        ({"num_labels": 3}, {"num_labels": 5}, [4, 0], [4, 0]),
        ({"num_labels": 3}, {}, ["b", "a"], "does not have: a, b; it has LABEL_0, LABEL_1, LABEL_2. .*model.config.id2label"),
        ({"num_labels": 3}, {}, [3, 0], "classes that the model does not have: 3; it has"),
        ({"id2label": {0: "2", 1: "1"}}, {}, [1, 2], [1, 0]),
        ({"id2label": {0: "2", 1: "1"}}, {}, [0, 1], "classes that the model does not have: 0; it has 2, 1"),
        ({"num_labels": 1}, {}, [7, 3], [1, 0]),
        (None, {}, ["b", "a"], [1, 0]),
        (None, {"num_labels": 3}, [2, 0], [2, 0]),
    ],
)  # fmt: skip
def test_labels_have_the_numbers_of_the_classes_that_a_model_has(
    tmp_path: Path, words: str, stored: Any, config: dict[str, Any], labels: list[Any], numbers: list[int] | str
) -> None:
    """Of names that the model has, or of numbers; a new head takes those of the data."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "w1", "label": each} for each in labels])
    keys: dict[str, Any] = {"config": {**BERT, **config}}
    if stored is not None:
        keys = {"source": classifier(tmp_path / "made", 0, **stored), "config": config}
    own = class_names(ModelSection(**keys, head="sequence_classification"), None)
    section = DataSection(train=rows, format="labels", tokenizer=words, sequence_length=8, eval_fraction=0.0)
    if isinstance(numbers, str):
        with pytest.raises(DataError, match=numbers):
            load_datasets(section, own=own)
        return
    assert [int(each["labels"]) for each in load_datasets(section, own=own).train] == numbers


@pytest.mark.parametrize("given", ["source", "model", "callable"])
def test_a_classifier_that_is_sure_and_right_has_no_loss(tmp_path: Path, words: str, given: str) -> None:
    """Its own names number the rows that it is trained on and evaluated with, and stay its own."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "w1", "label": each} for each in ["good"] * 30 + ["bad"]])
    source = classifier(tmp_path / "made", 0, **NAMED)
    data = {"train": rows, "eval": rows, "format": "labels", "tokenizer": words, "sequence_length": 8}
    sections: dict[str, Any] = {"data": data, "precision": {"compute": "float32"}}
    load = tf.AutoModelForSequenceClassification.from_pretrained
    if given == "callable":
        made = partial(tf.BertForSequenceClassification, tf.BertConfig(**BERT, vocab_size=64, **NAMED))
        check_refused(ConfigError, "model: it is built with classes good, bad, .* as bad, good", tmp_path, made, **sections)
        return
    model = [load(source)] if given == "model" else []
    sections |= {} if model else {"model": {"source": source, "head": "sequence_classification"}}
    with one_rank(tmp_path, *model, **sections) as trainer:
        assert trainer.evaluate()["eval_loss"] == pytest.approx(10 / 31, abs=1e-3)
        assert trainer.run.model.module.config.id2label == NAMED["id2label"]


@pytest.mark.parametrize("kind", ["gemma", "opt", "source"])
def test_a_class_is_read_from_the_last_token_of_a_text(tmp_path: Path, kind: str) -> None:
    """Whatever the model's own padding is, so that the loss does not depend on how many rows are padded to one length."""
    rows = [{"text": ("good " if n % 2 else "bad ") * (1 + n % 5), "label": n % 2} for n in range(8)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    sizes: dict[str, Any] = {"model_type": kind, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"ffn_dim": 24, "word_embed_proj_dim": 32} if kind == "opt" else {"num_key_value_heads": 2, "head_dim": 8}
    model: dict[str, Any] = {"config": {**sizes, "max_position_embeddings": 32}}
    if kind == "source":
        made = tf.LlamaConfig(**_SIZES, vocab_size=256, pad_token_id=ord("d"), eos_token_id=None, bos_token_id=None)
        tf.LlamaForSequenceClassification(made).save_pretrained(tmp_path / "made")
        model = {"source": str(tmp_path / "made")}
    data = {"train": path, "eval": path, "format": "labels", "tokenizer": "bytes", "sequence_length": 32}
    found = []
    for micro in (1, 4):
        sections = {"batch": {"global_size": 8, "micro_size": micro}, "precision": {"compute": "float32"}, "data": data}
        with one_rank(tmp_path, **sections, model={**model, "head": "sequence_classification"}) as trainer:
            found.append(trainer.evaluate()["eval_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"config": LLAMA}, r"data\.format: labels are for a model that has classes"),
        ({"config": ONE_CLASS, "head": "sequence_classification"}, "num_labels is 1, and the data has 2 classes"),
    ],
)
def test_models_that_labels_do_not_fit(tmp_path: Path, words: str, model: dict[str, Any], message: str) -> None:
    data = {"train": labelled(tmp_path, "jsonl", ["a", "b"]), "format": "labels", "tokenizer": words}
    with pytest.raises(ConfigError, match=message):
        trained(tmp_path, model=model, data={**data, "sequence_length": 16})


@pytest.mark.parametrize(
    ("key", "name", "text", "message"),
    [
        (
            "eval",
            "eval.jsonl",
            '{"text": "w1", "label": "c"}\n',
            r"data\.eval .* classes that the model does not have: c; it has a, b",
        ),
        (
            "eval",
            "pairs.jsonl",
            '{"prompt": "w1", "completion": "w2"}\n',
            r"pairs\.jsonl' row 0 has no field 'text', only 'prompt', 'completion'",
        ),
        ("train", "none.csv", "text,label\n", r"none\.csv' has no rows"),
        ("train", "one.jsonl", '{"text": "w1", "label": "c"}\n', "has no class but 'c'; labels need two"),
        ("train", "bad.jsonl", '{"text": "w1", "label": 0.5}\n', "row 0: 'text' is str and 'label' float"),
    ],
)
def test_labels_that_cannot_be_learnt(tmp_path: Path, words: str, key: str, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    data = {"train": labelled(tmp_path, "jsonl", ["a", "b"]), key: str(tmp_path / name), "format": "labels"}
    with pytest.raises(DataError, match=message):
        load_datasets(DataSection(**data, tokenizer=words, sequence_length=16))


def test_a_masked_language_model_learns_plain_text(tmp_path: Path, words: str) -> None:
    (tmp_path / "a.txt").write_text(" ".join(f"w{n % 7}" for n in range(600)))
    data = {"train": str(tmp_path / "a.txt"), "tokenizer": words, "sequence_length": 16, "mask_fraction": 0.3}
    run, _ = trained(tmp_path, model={"config": BERT, "head": "masked_lm"}, data=data)
    batch = run.model.feeds.train().first_batch()
    masked = batch["labels"] != -100
    assert torch.all(batch["labels"][masked] >= 4)
    assert 0.1 < masked.double().mean() < 0.6
    with pytest.raises(DataError, match=r"data\.tokenizer has none"):
        trained(tmp_path, model={"config": BERT, "head": "masked_lm"}, data={**data, "tokenizer": "bytes"})


ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
CHAT = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "3"}]
SHAREGPT = {"conversations": [{"from": "human", "value": "Add 1 and 2."}, {"from": "gpt", "value": "3"}], "system": "Be brief."}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("form", "row", "text"),
    [
        ("alpaca", ALPACA, "user: Add.\n\n1 and 2\nassistant: 3\n"),
        ("alpaca", {**ALPACA, "input": "", "system": "Be brief."}, "system: Be brief.\nuser: Add.\nassistant: 3\n"),
        ("sharegpt", SHAREGPT, "system: Be brief.\nuser: Add 1 and 2.\nassistant: 3\n"),
        ("sharegpt", {"conversations": CHAT, "system": "Be brief."}, "system: Be brief.\nuser: Add.\nassistant: 3\n"),
    ],
)
def test_rows_of_other_trainers_are_conversations(tmp_path: Path, form: str, row: dict[str, Any], text: str) -> None:
    data = {"train": write_rows(tmp_path / "rows.jsonl", [row] * 8), "format": form, "chat_template": CHAT_TEMPLATE}
    data |= {"sequence_length": 64, "eval_fraction": 0.0, "packing": False}
    run, _ = trained(tmp_path, model={"config": LLAMA}, data=data)
    sample = run.data.train[0]
    assert bytes(sample["input_ids"].tolist()).startswith(text.encode())
    assert bytes(sample["labels"][sample["labels"] != -100].tolist()) == b"3\n"


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        ("alpaca", {**ALPACA, "output": None}, "what the assistant says is NoneType"),
        ("sharegpt", {"conversations": [{"from": "robot", "value": "a"}]}, "from 'robot', and has to be from one of hu"),
        ("sharegpt", {"conversations": [{"value": "a"}]}, "from"),
        ("sharegpt", {"conversations": "a"}, "no row of data.format sharegpt"),
    ],
)
def test_rows_that_are_not_of_their_format(tmp_path: Path, form: Any, row: dict[str, Any], message: str) -> None:
    train = write_rows(tmp_path / "rows.jsonl", [row])
    section = DataSection(train=train, format=form, chat_template=CHAT_TEMPLATE)
    with pytest.raises(DataError, match=rf"row 0 is no row of data\.format {form}: .*{message}|{message}"):
        load_datasets(section)


ROOT = Path(__file__).resolve().parents[3]
ADDED = (
    (
        "trainer/config/sections/formats.py",
        "FORMATS = {\n",
        '    "quiz": RowFormat(("question", "reply"), parts=_quiz),\n',
        'def _quiz(row):\n    return {"messages": _message("user", row["question"]) + _message("assistant", row["reply"])}\n\n\n',
    ),
    (
        "trainer/data/text_sources.py",
        "_READERS: dict[str, Callable[[SourceFile], Iterator[dict[str, Any]]]] = {\n",
        '    "quiz": _quiz_rows,\n',
        "def _quiz_rows(file):\n    with _text(file.path, file.encoding) as lines:\n"
        '        yield from (dict(zip(("question", "reply"), line.strip().split(" = "))) for line in lines)\n\n\n',
    ),
)


def test_a_new_format_of_rows_or_files_is_a_row_of_a_table_and_a_function(tmp_path: Path) -> None:
    """Both are added in a copy, each in one place, and a step is trained, by a process that imports the copy."""
    for name in ("zeromesh", "trainer", "offload"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    for path, table, row, function in ADDED:
        source = (tmp_path / path).read_text()
        assert source.count(table) == 1
        (tmp_path / path).write_text(source.replace(table, f"{function}{table}{row}"))
    (tmp_path / "rows.quiz").write_text("1 + 2 = 3\n" * 16)
    data = {"train": str(tmp_path / "rows.quiz"), "format": "quiz", "chat_template": CHAT_TEMPLATE}
    data |= {"sequence_length": 32, "eval_fraction": 0.0, "packing": False}
    keys = settings(str(tmp_path), run={"max_steps": 1}, model={"config": LLAMA}, data=data)
    if (child := os.fork()) == 0:
        code = 1
        try:
            for name in [name for name in sys.modules if name.partition(".")[0] == "zeromesh"]:
                del sys.modules[name]
            sys.path.insert(0, str(tmp_path))
            import zeromesh

            with zeromesh.Trainer(None, keys) as trainer:
                trainer.fit()
                found = [zeromesh.__file__, trainer.run.data.train[0]["labels"].tolist()]  # type: ignore[index]
                (tmp_path / "found.json").write_text(json.dumps(found))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    place, labels = json.loads((tmp_path / "found.json").read_text())
    assert place == str(tmp_path / "zeromesh" / "__init__.py")
    assert bytes(each for each in labels if each >= 0) == b"3\n"


# Text with the tokenizer and the beginnings that generation has, without padding, and without targets

OLD = "{% for m in messages %}{{ m.content }} {% endfor %}"
NEW = "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
CHAT = {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]}


@pytest.fixture
def begins() -> tf.PreTrainedTokenizerFast:
    """A tokenizer of 64 words that begins a text with <bos>."""
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "chat_template": OLD}
    return word_tokenizer(["<pad>", "<bos>", "<eos>", "<end>", *NUMBERED], "<pad>", text="<bos> $A <eos>", **special)


def texts(tmp_path: Path) -> dict[str, Any]:
    train = write_rows(tmp_path / "a.jsonl", [{"text": "w1 w2 w3"}] * 40)
    return {"train": train, "eval_fraction": 0.0, "sequence_length": 8}


def test_a_model_brings_its_own_tokenizer(tmp_path: Path, begins: tf.PreTrainedTokenizerFast) -> None:
    own = tmp_path / "own"
    seeded(llama).save_pretrained(own)
    said = r"data\.tokenizer: null means the tokenizer of the model, and '.*own' has none"
    check_refused(ConfigError, said, tmp_path, model={"source": str(own)}, data=texts(tmp_path))
    begins.save_pretrained(own)
    given = type(llama()).from_pretrained(own)
    for model, section in ((None, {"source": str(own)}), (given, {})):
        with one_rank(tmp_path, model, model=section, data=texts(tmp_path)) as trainer:
            ids = trainer.run.data.train[0]["input_ids"].tolist()  # type: ignore[index]
        assert ids == [1, 5, 6, 7, 2, 1, 5, 6]
    said = "bytes for a model that a callable builds, and this one comes from"
    check_refused(ConfigError, said, tmp_path, lambda: type(llama()).from_pretrained(own), data=texts(tmp_path))
    with one_rank(tmp_path, llama(vocab_size=256), data=texts(tmp_path)) as trainer:
        assert bytes(trainer.run.data.train[0]["input_ids"].tolist()) == b"w1 w2 w3"  # type: ignore[index]


def chats(tmp_path: Path, template: str) -> dict[str, Any]:
    train = write_rows(tmp_path / "c.jsonl", [CHAT] * 8)
    return {"train": train, "format": "chat", "chat_template": template, "eval_fraction": 0.0, "sequence_length": 16}


@pytest.mark.parametrize("named", [False, True])
def test_the_template_that_was_learnt_is_saved(tmp_path: Path, begins: tf.PreTrainedTokenizerFast, named: bool) -> None:
    """On a copy of the user's tokenizer; and generation ends where answers end."""
    if named:
        begins.chat_template = {"default": OLD, "new": NEW}
    data = chats(tmp_path, "new" if named else NEW)
    with one_rank(tmp_path, seeded(llama), data=data, processing_class=begins) as trainer:
        trainer.fit()
        trainer.save(tmp_path / "out")
        assert trainer.run.model.module.generation_config.eos_token_id == [3]
    assert tf.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == NEW
    assert begins.chat_template == ({"default": OLD, "new": NEW} if named else OLD)


def test_a_name_that_no_template_has_is_refused(tmp_path: Path, begins: tf.PreTrainedTokenizerFast) -> None:
    given = {"data": chats(tmp_path, "tool_use"), "processing_class": begins}
    check_refused(DataError, "'tool_use' is no template, file or name", tmp_path, seeded(llama), **given)


EXPERTS = {"vocab_size": 256, **_SIZES, "num_key_value_heads": 2}
EXPERTS |= {"output_router_logits": True, "router_aux_loss_coef": 1.0, "intermediate_size": 32}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_no_loss_depends_on_how_much_padding_follows(tmp_path: Path, kind: str) -> None:
    rows = [{"prompt": f"{n}+{n}=", "completion": f"{n + n}"} for n in (1, 2, 33, 444)]
    path = write_rows(tmp_path / "p.jsonl", rows)
    narrow = dict.fromkeys(("compute", "master", "reduce"), "float32")
    found = []
    for length in (16, 64):
        data = {"train": path, "eval": path, "format": "pairs", "packing": False, "sequence_length": length}
        sections = {"model": {"config": {**EXPERTS, "model_type": kind}}, "data": data, "precision": narrow}
        with one_rank(tmp_path, **sections) as trainer:
            found += [trainer.evaluate()["eval_loss"], *trainer.fit().losses]
    assert found[: len(found) // 2] == pytest.approx(found[len(found) // 2 :], rel=1e-6)


def untaught(count: int, *places: slice) -> list[dict[str, Any]]:
    rows = sentences(count)
    for row in [row for place in places for row in rows[place]]:
        row["labels"] = torch.full_like(row["labels"], -100)
    return rows


def test_a_global_batch_without_targets_is_passed_over(tmp_path: Path) -> None:
    """The first one, and another: no update, no nan, and the others as if it were not there."""
    rows, found = untaught(32, slice(8), slice(16, 24)), []
    for data, steps in ((rows, 4), ([*rows[8:16], *rows[24:]], 2)):
        run = {"max_steps": steps, "name": f"s{steps}"}
        with one_rank(tmp_path, seeded(llama), data, data={"shuffle": False}, run=run) as one:
            found.append(one.fit())
    report, wanted = found
    assert (report.passed_over, report.final_step, len(report.losses)) == (2, 2, 2)
    assert all(map(math.isfinite, report.losses))
    assert report.losses[0] == wanted.losses[0]
    check_refused(DataError, "every label", tmp_path, seeded(llama), rows[:8], run={"name": "none"})


class EndsEpoch(tf.TrainerCallback):  # type: ignore[misc]
    """Asks for the end of the epoch at the first `on_step_begin`."""

    asked = False

    def on_step_begin(self, args: Any, state: Any, control: tf.TrainerControl, **named: Any) -> None:
        control.should_epoch_stop, self.asked = not self.asked, True


def test_requests_of_a_step_that_is_passed_over_are_dropped(tmp_path: Path) -> None:
    """The ranks agree on requests after steps alone."""
    keys = {"data": {"shuffle": False}, "run": {"max_steps": 4}, "callbacks": [EndsEpoch()]}
    with one_rank(tmp_path, seeded(llama), untaught(32, slice(8)), **keys) as trainer:
        report = trainer.fit()
    assert (report.passed_over, report.final_step) == (1, 3)


def count_later(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
    total = model(**{**batch, "labels": batch["input_ids"]}).loss
    return total * 0 + total, int((batch["labels"] != -100).sum())


def test_targets_that_are_counted_after_forward_may_be_none(tmp_path: Path) -> None:
    model = seeded(llama)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    keys = {"data": {"shuffle": False}, "run": {"max_steps": 1}, "compute_loss": count_later}
    with one_rank(tmp_path, model, untaught(16, slice(8)), **keys) as trainer:
        report = trainer.fit()
        after = dict(trainer.state_dict())
    assert (report.passed_over, report.losses) == (1, ())
    assert_close({name: each.to(before[name].dtype) for name, each in after.items()}, before, rtol=0, atol=0)


def test_text_beside_tokens_is_not_given_to_a_collator(
    tmp_path: Path, begins: tf.PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [[5, 6, 7][: n % 3 + 1] * 2 for n in range(8)]
    rows = [{"input_ids": each, "text": "a", "tags": [1] * n, "labels": [5] * len(each)} for n, each in enumerate(ids)]
    given = {"data_collator": tf.DataCollatorForTokenClassification(begins)}
    with one_rank(tmp_path, seeded(llama), rows, **given, processing_class=begins) as trainer:
        assert all(map(math.isfinite, trainer.fit().losses))
    assert "train_dataset: left out before the data_collator text, tags, which LlamaForCausalLM.forward" in " ".join(
        capsys.readouterr().out.split()
    )
    check_refused(Exception, r"text|tensor", tmp_path, seeded(llama), rows, **given, data={"remove_unused": False})


# Folders of pictures

VIT = {"model_type": "vit", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
CAT, DOG = (30, 40, 50), (200, 190, 180)


def folder(root: Path, count: int = 12, **labels: tuple[int, int, int]) -> Path:
    for label, color in (labels or {"cat": CAT, "dog": DOG}).items():
        (root / label).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (10 + number, 9), color).save(root / label / f"{number}.png")
    return root


def pictures(train: Path, **section: Any) -> Any:
    processor = tf.ViTImageProcessorPil(size={"height": 8, "width": 8})
    return load_pictures(DataSection(train=str(train), format="pictures", **section), processor, "RGB")


def test_sub_folders_are_labels_and_a_part_is_held_out_by_name(tmp_path: Path) -> None:
    root = folder(tmp_path / "all", count=40)
    (root / "cat" / "notes.txt").write_text("no picture")
    found = pictures(root, eval_fraction=0.2)
    assert found.classes == ("cat", "dog")
    assert len(found.train) + len(found.eval) == 80
    assert not {path for path, _ in found.train.files} & {path for path, _ in found.eval.files}
    sample = found.train[0]
    assert (list(sample["pixel_values"].shape), int(sample["labels"])) == ([3, 8, 8], 0)
    assert pictures(root, eval_fraction=0.2).train.files == found.train.files
    named = pictures(root, eval={"a": str(root), "b": str(folder(tmp_path / "b", dog=DOG))})
    assert {name: len(each) for name, each in named.eval.items()} == {"a": 80, "b": 12}
    assert {label for _, label in named.eval["b"].files} == {1}
    processor = tf.ViTImageProcessorPil(size={"height": 8, "width": 8})
    section = DataSection(train=str(root), eval=str(tmp_path / "b"), format="pictures")
    classes = ("dog", "bird", "cat")
    swapped = load_pictures(section, processor, "RGB", (classes, True))
    assert swapped.classes == classes
    assert [{label for _, label in each.files} for each in (swapped.train, swapped.eval)] == [{0, 2}, {0}]


def test_pictures_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    root = folder(tmp_path / "all")
    with pytest.raises(DataError, match=r"data.eval has classes that the model does not have: bird; it has cat, dog"):
        pictures(root, eval=str(folder(tmp_path / "other", bird=CAT)))
    with pytest.raises(DataError, match=r"'.*all/cat/0.png' does not lie in a sub-folder of '.*' that is its label"):
        pictures(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no picture in sub-folders of"):
        pictures(tmp_path / "empty")
    with pytest.raises(DataError, match=r"one.png' is no folder"):
        pictures(tmp_path / "one.png")
    (root / "dog" / "broken.png").write_bytes(b"none")
    with pytest.raises(DataError, match=r"1 of 25 files are no pictures: .*dog/broken.png"):
        pictures(root)
    with patch.dict("sys.modules", {"PIL": None, "PIL.Image": None}), pytest.raises(DataError, match="pip install Pillow"):
        pictures(root)
    with pytest.raises(ConfigError, match=r"data.format: pictures is for all data"):
        load_config({"data": {"mixture": {"a": {"train": str(root), "format": "pictures"}}}})


def test_a_picture_that_ends_early_is_named_when_it_is_read(tmp_path: Path) -> None:
    root = folder(tmp_path / "all", count=1)
    picture = root / "cat" / "0.png"
    picture.write_bytes(picture.read_bytes()[:50])
    with pytest.raises(DataError, match=r"cat/0.png' cannot be read as a picture: "):
        pictures(root, eval_fraction=0.0).train[0]


def test_a_model_learns_pictures_and_is_saved_with_their_names(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "model": {"head": "image_classification", "config": {**VIT, "image_size": 8, "patch_size": 4}},
        "data": {"train": str(folder(tmp_path / "all")), "eval": str(folder(tmp_path / "test", 3)), "format": "pictures"},
        "run": {"output_dir": str(tmp_path), "name": "run", "max_steps": 6},
        "optimizer": {"lr": 1e-2},
        "precision": {"compute": "float32"},
    }
    with Trainer(config=config) as trainer:
        learnt = trainer.fit().eval_loss
        trainer.save(tmp_path / "saved")
    assert learnt < 0.69
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["id2label"] == {"0": "cat", "1": "dog"}
    assert tf.AutoImageProcessor.from_pretrained(tmp_path / "saved").size == {"height": 8, "width": 8}
    # The saved directory is a model of its own, with the processor that it was trained with.
    config["model"] = {"head": "image_classification", "source": str(tmp_path / "saved")}
    config["run"]["name"] = "further"
    with Trainer(config=config) as trainer:
        assert trainer.evaluate()["eval_loss"] == pytest.approx(learnt, abs=1e-5)
    config["model"]["head"] = "base"
    with pytest.raises(
        ConfigError, match=r"data.format: pictures are for a model that has classes.* set model.head: image_classification"
    ):
        Trainer(config=config).evaluate()
