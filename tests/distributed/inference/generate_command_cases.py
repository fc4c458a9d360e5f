"""`zeromesh generate` on workers, of a tiny model with a tokenizer of its own."""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.input_cases import command
from zeromesh.mesh.process_mesh import Mesh

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def write_model(directory: Path, *, layers: int = 2, hidden: int = 32) -> None:
    """A Llama of bytes in float64, with a chat template."""
    words = {token: number for number, token in enumerate(["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    bytes_ = Tokenizer(models.BPE(vocab=words, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=len(words), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def commands(mesh: Mesh, folder: str) -> None:
    """What the command says in several ways of giving it prompts, and the results that it writes."""
    root = Path(folder)
    lines = [
        {"text": "Once", "id": "a"},
        {"input_ids": [5, 6, 7], "max_new_tokens": 3},
        {"messages": [{"role": "user", "content": "Hi"}], "do_sample": True, "temperature": 1.5, "id": 9},
        {"text": "Twice", "do_sample": True},
    ]
    if mesh.rank == 0:
        write_model(root / "model")
        (root / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (root / "bad.jsonl").write_text('{"text": "a"}\n{"input_ids": [999]}\n')
        (root / "beams.jsonl").write_text(json.dumps({**lines[0], "num_beams": 3}) + "\n")
        (root / "one.jsonl").write_text(json.dumps(lines[0]) + "\n")
    mesh.world.barrier("files")
    asked = ["generate", "model", "--prompts", "p.jsonl", "--max-new-tokens", "8"]
    with contextlib.chdir(root):
        found = {
            "shown": command(mesh, asked),
            "written": command(mesh, [*asked, "--out", "r.jsonl", f"parallel.pipeline={mesh.world_size}"]),
            "bad": command(mesh, ["generate", "model", "--prompts", "bad.jsonl"]),
            "field": command(mesh, [*asked, "generation.temprature=1"]),
            "chat": command(mesh, ["generate", "model", "--chat", "--out", "x"]),
            "beams": command(mesh, ["generate", "model", "--prompts", "beams.jsonl", "--max-new-tokens", "8"]),
            "one": command(mesh, ["generate", "model", "--prompts", "one.jsonl", "generation.max_new_tokens=8"]),
        }
        talk = io.TextIOWrapper(io.BytesIO(b"Hi\n/reset\n\n\xff\nHi\nHo\n/exit\nnot this"), encoding="utf-8")
        with mock.patch.object(sys, "stdin", talk):
            found["talk"] = command(mesh, ["generate", "model", "--chat", "--max-new-tokens", "4"])
        for seed in "12":
            talk = io.TextIOWrapper(io.BytesIO(b"Hi\n/reset\nHi\n"), encoding="utf-8")
            asked = ["generate", "model", "--chat", "--max-new-tokens", "8", "--seed", seed, "generation.do_sample=true"]
            with mock.patch.object(sys, "stdin", talk):
                found[f"seed {seed}"] = command(mesh, asked)
        with mock.patch.object(sys, "stdin", None):
            found["closed"] = command(mesh, ["generate", "model", "--chat"])
        rows = _lines(Path("r.jsonl").read_text())
    if mesh.rank:
        assert not found["shown"]["out"]
        return
    assert [row["id"] for row in rows] == ["a", 1, 9, 3]
    assert [row["new_tokens"] for row in rows if row["finish"] == "length"][1:2] == [3]
    # Another layout gives the same tokens, those that are drawn too.
    for row, shown in zip(rows, _lines(found["shown"]["out"]), strict=True):
        assert row["tokens"] == shown["tokens"]
        assert row["logprobs"] == pytest.approx(shown["logprobs"], rel=0, abs=1e-9)
    assert found["bad"]["code"] == found["field"]["code"] == found["chat"]["code"] == 2
    for name, said in {
        "bad": "bad.jsonl, line 2: the prompt has token 999, and the model knows 258",
        "field": "temprature is no field of transformers' GenerationConfig",
        "closed": "--chat reads from standard input, which is closed; leave it open",
        "chat": "--chat reads from the terminal",
    }.items():
        assert said in found[name]["err"]
    assert found["one"]["out"].rstrip("\n") == rows[0]["text"]
    # What is written as it comes is of a running batch, which beams that a prompt asks for cannot join.
    assert [row["logprobs"] for row in _lines(found["beams"]["out"])] == [None]
    answers = found["talk"]["out"].split("> ")
    assert "bytes that are no UTF-8, which is no text; /reset begins anew" in answers[4]
    assert len(answers) == 8, "a greeting, and a sign for each line that was read"
    assert found["talk"]["code"] == 0
    drawn = [text for seed in "12" for text in found[f"seed {seed}"]["out"].split("> ")[1:4:2]]
    assert len(set(drawn)) == 4, "each answer is another, in each conversation"


def refusals(mesh: Mesh, folder: str) -> None:
    """Models that `serve` cannot serve are refused before anyone listens."""
    root = Path(folder)
    if mesh.rank == 0:
        write_model(root / "wordless")
        for file in (root / "wordless").glob("tokenizer*"):
            file.unlink()
        config = tf.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        tf.T5ForConditionalGeneration(config).save_pretrained(root / "encoder")
    mesh.world.barrier("files")
    for name, why in {
        "encoder": "T5ForConditionalGeneration has an encoder",
        "wordless": "answers are text, and the model's directory has no tokenizer",
    }.items():
        with contextlib.chdir(root):
            said = command(mesh, ["serve", name, "--port", "0"])
        assert said["code"] == 2
        assert why in said["err"]
        assert "serving" not in said["err"]
