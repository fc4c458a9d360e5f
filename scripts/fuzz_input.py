"""Gives commands directories, prompts, settings and paths that are wrong, and counts how they take it.

python scripts/fuzz_input.py --cases 400 --seed 0      # exit 1 where there is a traceback, no end, or a refusal without a name

Each case damages one thing of a whole model directory, or one value of a command line, runs a command in this process, and looks
at its exit code and at what it says. A refusal names the key or the file that is wrong.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from zeromesh.trainer.cli.main import main

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2.5, 10**6, 10**12, 10**23, 1e308, float("nan"), float("inf")),
    *("", "hot", "auto", "\u0000", "n" * 300, "../..", "/proc/self/mem", [], [1], ["a"], {}, {"a": 1}, [[[]]]),
]
"""The text that stands in place of a right value."""
SAMPLER = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty"),
    *("no_repeat_ngram_size", "max_new_tokens", "min_new_tokens", "max_length", "eos_token_id", "pad_token_id", "seed"),
    *("suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id", "bad_words_ids", "sequence_bias", "num_beams"),
)
KEYS = (
    *(
        "run.max_steps",
        "run.output_dir",
        "run.epochs",
        "run.seed",
        "batch.global_size",
        "batch.micro_size",
        "data.train",
    ),
    *(
        "data.tokenizer",
        "data.sequence_length",
        "model.source",
        "model.head",
        "parallel.tensor",
        "parallel.timeout_seconds",
    ),
    *("zero.stage", "offload.directory", "checkpoint.resume", "optimizer.lr", "schedule.name", "schedule.warmup_steps"),
)
TEMPLATES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 2000000000 }}",
    "{{ messages[99]['x'] }}",
    "{% if %}",
    "{{ raise_exception('no') }}",
)
LIMIT_SECONDS = 60


def make_model(folder: Path) -> None:
    """Write a whole directory of a tiny model with a tokenizer."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64)).save_pretrained(folder)
    made = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    template = "{{ messages[0]['content'] }}"
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", chat_template=template).save_pretrained(folder)


def damage_json(path: Path, draw: random.Random) -> str:
    """Put a wrong value at a key of a JSON file, or break the file; returns what was done."""
    text = path.read_text()
    kind = draw.choice(["value", "value", "value", "cut", "deep", "bytes", "new"])
    if kind == "cut":
        path.write_text(text[: draw.randrange(len(text))])
    elif kind == "deep":
        path.write_text('{"a":' * 100_000)
    elif kind == "bytes":
        path.write_bytes(bytes(draw.randrange(256) for _ in range(200)))
    else:
        values = json.loads(text)
        key = draw.choice(sorted(values)) if kind == "value" else draw.choice(["num_local_experts", *SAMPLER])
        values[key] = draw.choice(VALUES)
        path.write_text(json.dumps(values))
        kind = f"{key}={values[key]!r:.40}"
    return f"{path.name}: {kind}"


def make_case(folder: Path, draw: random.Random) -> tuple[str, list[str]]:
    """Prepare a case in `folder`; returns what is wrong, and the command."""
    model, prompts = folder / "model", folder / "prompts.jsonl"
    rows: list[dict[str, Any]] = [{"input_ids": [0, 2], "max_new_tokens": 2}]
    generate = ["generate", str(model), "--prompts", str(prompts)]
    kind = draw.choice(["directory", "directory", "row", "field", "key", "path", "template"])
    wrong = kind
    if kind == "directory":
        name = draw.choice(
            ["config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
        )
        wrong = damage_json(model / name, draw)
        train = ["train", f"model.source={model}", f"data.tokenizer={model}"]
        generate = draw.choice([generate, [train[0], str(folder / "c.yaml"), *train[1:]]])
    elif kind == "row":
        name, value = draw.choice(SAMPLER), draw.choice(VALUES)
        rows.append({"input_ids": [0], "do_sample": True, "max_new_tokens": 2, name: value})
        wrong = f"row {name}={value!r:.40}"
    elif kind == "field":
        name, value = draw.choice(SAMPLER), draw.choice(VALUES)
        wrong = f"generation.{name}={json.dumps(value)[:400]}"
        generate += ["generation.do_sample=true", wrong]
    elif kind == "key":
        wrong = f"{draw.choice(KEYS)}={json.dumps(draw.choice(VALUES))[:400]}"
        generate = [draw.choice(["train", "plan", "config"]), str(folder / "c.yaml"), wrong]
    elif kind == "path":
        wrong = draw.choice(["n" * 300, "/proc/self/mem", "/dev/full", "/", f"{folder}/c.yaml/below", "~nobody-here/x"])
        command = draw.choice(
            [["evaluate"], ["config"], ["status"], ["report"], ["checkpoint", "verify"], ["generate"]]
        )
        generate = [*command, wrong]
    else:
        wrong = draw.choice(TEMPLATES)
        (model / "chat_template.jinja").write_text(wrong)
        rows = [{"messages": [{"role": "user", "content": "a"}], "max_new_tokens": 2}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return wrong, generate


def run_case(words: list[str]) -> tuple[str, str]:
    """Run a command; returns what became of it, and what it said."""
    said = io.StringIO()

    def late(*_: object) -> None:
        raise TimeoutError("no end")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_SECONDS)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = main(words)
    except SystemExit as error:
        code = int(error.code or 0)
    except TimeoutError:
        return "without end", said.getvalue()
    except BaseException:  # noqa: BLE001  # Whatever it is, it is counted.
        return "traceback", traceback.format_exc()
    finally:
        signal.alarm(0)
    lines = [line for line in said.getvalue().splitlines() if "zeromesh" in line]
    return ("refused" if code else "taken"), "\n".join(lines)


def is_named(said: str, wrong: str, folder: Path) -> bool:
    """Return True if a refusal names a key or a file."""
    marks = [
        str(folder),
        "model.",
        "data.",
        "run.",
        "generate:",
        "line ",
        "chat template",
        "--",
        wrong.partition("=")[0].rpartition(".")[2],
    ]
    return any(mark in said for mark in marks)


def fuzz(cases: int, seed: int) -> int:
    """Run so many cases; returns the exit code."""
    draw, counts, slowest = random.Random(seed), Counter[str](), 0.0
    with tempfile.TemporaryDirectory(prefix="zeromesh-fuzz-") as name:
        root = Path(name)
        make_model(root / "whole")
        for number in range(cases):
            folder = root / str(number)
            shutil.copytree(root / "whole", folder / "model")
            (folder / "text.txt").write_text("a a a a a a a a a a a a a a a a")
            sections = {"run": {"max_steps": 1, "output_dir": str(folder / "runs")}}
            sections |= {"data": {"sequence_length": 8, "train": [str(folder / "text.txt")]}}
            sections |= {"batch": {"global_size": 1, "micro_size": 1}}
            (folder / "c.yaml").write_text(json.dumps(sections))
            os.chdir(folder)
            wrong, words = make_case(folder, draw)
            began = time.monotonic()
            end, said = run_case(words)
            slowest = max(slowest, time.monotonic() - began)
            if end == "refused" and not is_named(said, wrong, folder):
                end = "refused without a name"
            counts[end] += 1
            if end not in ("refused", "taken"):
                sys.stdout.write(f"{number}: {end}: {wrong}: {' '.join(words)}\n{said}\n")
            os.chdir(root)
            shutil.rmtree(folder, ignore_errors=True)
        os.chdir("/")
    sys.stdout.write(f"{cases} cases: {dict(counts)}; the slowest took {slowest:.1f} s\n")
    return int(set(counts) - {"refused", "taken"} != set())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    sys.exit(fuzz(chosen.cases, chosen.seed))
