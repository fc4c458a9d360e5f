"""Cases of the scripts in `scripts/examples` that workers run, as they are or with transformers' Trainer put back."""

import contextlib
import io
import json
import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from zeromesh.mesh.process_mesh import Mesh

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts/examples"
OURS, THEIRS = "from zeromesh.transformers import Trainer\n", "from transformers import Trainer\n"
WORDS = ("the", "river", "winds", "through", "Turin", "and", "Ada", "writes", "letters", "to", "Emil", "in", "Kyoto")
NAMES = {"Turin": "LOC", "Kyoto": "LOC", "Ada": "PER", "Emil": "PER"}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}


def prepare(mesh: Mesh, folder: str) -> None:
    """Models of two kinds with a tokenizer, and text, records and words with labels to train, evaluate and predict."""
    root, draw = Path(folder), random.Random(3)
    sentences = [draw.choices(WORDS, k=draw.randint(4, 11)) for _ in range(200)]
    tokenizer = _tokenizer([" ".join(words) for words in sentences])
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(4)
    for name, model in {
        "llama": tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=64)),
        "bert": tf.BertModel(tf.BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=64, **NO_DROPOUT)),
    }.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    cuts = {"train": sentences[:21], "validation": sentences[21:32], "test": sentences[32:39]}
    (root / "train.txt").write_text("\n".join(" ".join(words) for words in sentences[:150]) + "\n")
    (root / "validation.txt").write_text("\n".join(" ".join(words) for words in sentences[150:]) + "\n")
    for split, part in cuts.items():
        lines = ["sentence,label", *(f"{' '.join(words)},{'place' if _named(words, 'LOC') else 'none'}" for words in part)]
        (root / f"{split}.csv").write_text("\n".join(lines) + "\n")
        records = [{"tokens": words, "ner_tags": [_tag(word) for word in words]} for words in part]
        (root / f"{split}.json").write_text("".join(json.dumps(record) + "\n" for record in records))


def _tokenizer(texts: list[str]) -> Any:
    """Words in pieces, between the marks that BERT has."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=60, special_tokens=special, show_progress=False))
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=64,
        **{f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")},
    )


def _named(words: list[str], kind: str) -> bool:
    return any(NAMES.get(word) == kind for word in words)


def _tag(word: str) -> str:
    return f"B-{NAMES[word]}" if word in NAMES else "O"


def run(mesh: Mesh, script: str, folder: str, words: list[str], theirs: bool = False) -> str:
    """Run a script as `python SCRIPT WORDS` would; what it printed."""
    text = (SCRIPTS / script).read_text()
    assert text.count(OURS) == 1
    assert "zeromesh" not in text.partition('"""\n')[2].replace(OURS, "")
    path = Path(folder) / f"{'theirs' if theirs else 'ours'}-{mesh.rank}-{script}"
    path.write_text(text.replace(OURS, THEIRS) if theirs else text)
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        contextlib.chdir(folder),
        patch.object(sys, "argv", [str(path), *words]),
        patch.dict(os.environ, {"HF_DATASETS_OFFLINE": "1"}),
    ):
        runpy.run_path(str(path), run_name="__main__")
    mesh.world.barrier("the end of a script")
    return out.getvalue()
