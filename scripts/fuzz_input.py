"""Gives commands directories, prompts, settings and paths that are wrong, and counts how they take it.

python scripts/fuzz_input.py --cases 400 --seed 0      # exit 1 where there is a traceback, no end, or a refusal without a name

Each case damages one thing of a whole model directory, of a run, of a file of rows, or one value of a command line, runs a command
in this process, and looks at its exit code and at what it says. A refusal names the key or the file that is wrong.
"""

import argparse
import contextlib
import gzip
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

from tokenizers import Tokenizer, models, pre_tokenizers
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
    *("run.max_steps", "run.output_dir", "run.epochs", "run.seed", "batch.global_size", "batch.micro_size", "data.train"),
    *("data.tokenizer", "data.sequence_length", "model.source", "model.head", "parallel.tensor", "parallel.timeout_seconds"),
    *("zero.stage", "offload.directory", "checkpoint.resume", "optimizer.lr", "schedule.name", "schedule.warmup_steps"),
)
TEMPLATES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 2000000000 }}",
    "{{ messages[99]['x'] }}",
    "{% if %}",
    "{{ raise_exception('no') }}",
)
FIELDS = (
    *("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "hidden_size", "head_dim", "vocab_size", "num_labels"),
    *("return_dict", "use_cache", "attn_implementation", "torch_dtype", "rope_theta", "tie_word_embeddings", "initializer_range"),
)
"""Fields of a configuration of transformers."""
ROWS: dict[str, dict[str, Any]] = {
    "text": {"text": "a a a a a a a a a a a a"},
    "labels": {"text": "a a a", "label": "x"},
    "chat": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a a"}]},
    "pairs": {"prompt": "a a", "completion": "a a"},
    "alpaca": {"instruction": "a", "input": "", "output": "a a"},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "a a"}]},
}
LIMIT_SECONDS = 60


def make_model(folder: Path) -> None:
    """Write a whole directory of a tiny model with a tokenizer."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64)).save_pretrained(folder)
    made = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for each in messages %}{{ each.content }} </s> {% endfor %}"
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


def damage_bytes(path: Path, draw: random.Random) -> str:
    """Cut a file, change some of its bytes, empty it, or put a directory or a link to nothing in its place."""
    whole = path.read_bytes()
    kind = draw.choice(["cut", "bytes", "bytes", "empty", "gone", "directory", "link", "UTF-16"])
    place = draw.randrange(len(whole) + 1)
    changed = whole[:place] + bytes(draw.randrange(256) for _ in range(8)) + whole[place + 8 :]
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(path)
    elif kind == "UTF-16":
        path.write_bytes(whole.decode("latin-1").encode("utf-16"))
    elif kind != "gone":
        path.write_bytes({"cut": whole[:place], "bytes": changed, "empty": b""}[kind])
    return f"{path.name}: {kind}"


def damage_row(row: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Put a wrong value at a key of a row, or of a message in it, or leave the key out."""
    row = json.loads(json.dumps(row))
    inside = [each for value in row.values() if isinstance(value, list) for each in value]
    where = draw.choice([row, *inside])
    key = draw.choice(sorted(where))
    if draw.random() < 0.2:
        del where[key]
    else:
        where[key] = draw.choice(VALUES)
    return row


def make_data_case(folder: Path, draw: random.Random) -> tuple[str, list[str]]:
    """Prepare a file of rows, one of which is wrong, or which is damaged as a file."""
    form = draw.choice(sorted(ROWS))
    rows = [ROWS[form]] * 5
    rows[draw.randrange(5)] = damage_row(ROWS[form], draw)
    path = folder / f"rows.{draw.choice(['jsonl', 'json', 'csv', 'tsv', 'jsonl.gz'])}"
    kind = path.name.partition(".")[2]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if kind == "json":
        text = json.dumps(rows)
    elif kind in ("csv", "tsv"):
        lines = [list(ROWS[form]), *([str(value) for value in row.values()] for row in rows)]
        text = "".join((draw.choice(",;") if kind == "csv" else "\t").join(line) + "\r\n" for line in lines)
    content = text.encode(errors="replace")
    path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    wrong = damage_bytes(path, draw) if draw.random() < 0.4 else f"{path.name}: {form}"
    start = ["train", str(folder / "c.yaml"), f"data.train={path}", f"data.format={form}", f"model.source={folder / 'model'}"]
    if form == "labels":
        start += ["model.head=sequence_classification"]
    short = ["train", "--model", str(folder / "model"), "--data", str(path), "run.max_steps=1", f"run.output_dir={folder}/runs"]
    return f"data {wrong}", draw.choice([start, [*short, "data.sequence_length=16"]])


def make_run_case(folder: Path, draw: random.Random) -> tuple[str, list[str]]:
    """Damage a file of a run, and look at the run or go on with it."""
    run = folder / "runs/c"
    files = sorted(path for path in run.rglob("*") if path.is_file())
    path = draw.choice(files)
    wrong = damage_json(path, draw) if path.suffix == ".json" and draw.random() < 0.5 else damage_bytes(path, draw)
    looks = [["evaluate"], ["status"], ["report"], ["trace"], ["checkpoint", "verify"], ["checkpoint", "inspect"], ["generate"]]
    commands = [[*words, str(run)] for words in looks]
    commands += [["checkpoint", "export", str(run), str(folder / "out")]]
    commands += [["train", str(folder / "c.yaml"), "run.max_steps=2"], ["config", str(run / "config.resolved.yaml")]]
    return f"run {wrong}", draw.choice(commands)


def make_case(folder: Path, draw: random.Random) -> tuple[str, list[str]]:
    """Prepare a case in `folder`; returns what is wrong, and the command."""
    model, prompts = folder / "model", folder / "prompts.jsonl"
    rows: list[dict[str, Any]] = [{"input_ids": [0, 2], "max_new_tokens": 2}]
    generate = ["generate", str(model), "--prompts", str(prompts)]
    kinds = ["directory", "directory", "row", "field", "key", "path", "template", "data", "data", "run", "run", "model"]
    kind = draw.choice(kinds)
    wrong = kind
    if kind in ("data", "run"):
        prompts.write_text(json.dumps(rows[0]))
        return (make_data_case if kind == "data" else make_run_case)(folder, draw)
    if kind == "directory":
        name = draw.choice(["config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
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
    elif kind == "model":
        wrong = f"model.config.{draw.choice(FIELDS)}={json.dumps(draw.choice(VALUES))[:400]}"
        given = draw.choice([f"model.source={model}", "model.config.model_type=llama"])
        generate = [draw.choice(["train", "plan", "config"]), str(folder / "c.yaml"), given, wrong]
    elif kind == "path":
        wrong = draw.choice(["n" * 300, "/proc/self/mem", "/dev/full", "/", f"{folder}/c.yaml/below", "~nobody-here/x"])
        command = draw.choice([["evaluate"], ["config"], ["status"], ["report"], ["checkpoint", "verify"], ["generate"]])
        generate = [*command, wrong]
    else:
        wrong = draw.choice(TEMPLATES)
        (model / "chat_template.jinja").write_text(wrong)
        rows = [{"messages": [{"role": "user", "content": "a"}], "max_new_tokens": 2}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return wrong, generate


def run_case(words: list[str]) -> tuple[str, str]:
    """Run a command; returns what became of it, and what it said."""
    said, out = io.StringIO(), io.StringIO()

    def late(*_: object) -> None:
        raise TimeoutError("no end")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_SECONDS)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
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
    # `status` and `checkpoint verify` print what they have found, and have another exit code where it is bad.
    lines += out.getvalue().splitlines()[-20:] if "status" in words or "verify" in words else []
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
        wrong.removeprefix("run ").partition(":")[0],
        wrong.partition("=")[0].rpartition(".")[2],
    ]
    return any(mark in said for mark in marks)


def fuzz(cases: int, seed: int) -> int:
    """Run so many cases; returns the exit code."""
    draw, counts, slowest = random.Random(seed), Counter[str](), 0.0
    with tempfile.TemporaryDirectory(prefix="zeromesh-fuzz-") as name:
        root = Path(name)
        make_model(root / "whole")
        (root / "text.txt").write_text("a " * 64)
        keys = [f"data.train={root}/text.txt", f"model.source={root}/whole", "data.sequence_length=8", "run.max_steps=1"]
        small = ["batch.global_size=1", "batch.micro_size=1", "run.name=c", f"run.output_dir={root}/runs"]
        (root / "c.yaml").write_text("{}")
        end, said = run_case(["train", str(root / "c.yaml"), *keys, *small])
        if end != "taken":
            raise SystemExit(f"the run that is to be damaged was not made: {said}")
        for number in range(cases):
            folder = root / str(number)
            shutil.copytree(root / "whole", folder / "model")
            shutil.copytree(root / "runs", folder / "runs")
            (folder / "text.txt").write_text("a " * 64)
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
