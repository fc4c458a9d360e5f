"""Rows in files, and tokenizers of a few words."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.support.trainer_cases import settings
from zeromesh import Trainer

CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CHAT_TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows in the form that the path's suffix says, JSON lines, one list of JSON, CSV or Parquet; returns the path."""
    if path.suffix == ".parquet":
        datasets.Dataset.from_list([dict(row) for row in rows]).to_parquet(path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        path.write_text(json.dumps(rows) if path.suffix == ".json" else lines)
    return str(path)


def word_tokenizer(words: Sequence[str], unknown: str, *, text: str = "", **special: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of words between white space, whose ids are their places; `text`, such as `<bos> $A`, says what surrounds one."""
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if text:
        around = [(word, words.index(word)) for word in sorted({*text.split()} - {"$A"})]
        made.post_processor = processors.TemplateProcessing(single=text, special_tokens=around)
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def one_rank(folder: Path, model: Any = None, dataset: Any = None, /, **sections: Any) -> Trainer:
    """A trainer of two steps in this process, without an evaluation at the end; arguments of `Trainer` stand among the sections."""
    names = ("processing_class", "data_collator", "callbacks", "compute_loss")
    keywords = {name: sections.pop(name) for name in names if name in sections}
    sections["run"] = {"max_steps": 2, "eval_at_end": False, **sections.get("run", {})}
    return Trainer(model, settings(str(folder), **sections), dataset, **keywords)


def joined_ids(dataset: Any) -> Any:
    """The flat ids of all sequences of joined documents."""
    return dataset.text.tokens[dataset.begins[dataset.cuts[0]] : dataset.ends[dataset.cuts[-1] - 1]]


def joined_text(dataset: Any) -> bytes:
    return bytes(joined_ids(dataset).astype("u1"))
