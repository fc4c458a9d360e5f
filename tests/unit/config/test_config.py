"""The configuration: what is refused and how it is said, what a round trip keeps, how files are guarded."""

import contextlib
import json
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import TrainingArguments

from zeromesh import Trainer
from zeromesh.errors import ConfigError
from zeromesh.trainer.config.load import load_config, suggestion
from zeromesh.trainer.config.messages import allowed, choices, known_paths
from zeromesh.trainer.config.sections.model import DEFAULT_MODEL
from zeromesh.trainer.config.sections.schedule import SCHEDULES
from zeromesh.trainer.config.trainer_config import TrainerConfig, schedule_of, with_length
from zeromesh.trainer.config.yaml_reader import MAX_BYTES, parse_yaml, plain_scalar, with_variables

ROOT = Path(__file__).resolve().parents[3]


def problems_of(source: Any, overrides: tuple[str, ...] = ()) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return caught.value.problems


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


LONG = "9" * 5000
# Each text has exactly one mistake; the message holds all the words beside it. One that begins as JSON is a file of JSON.
BAD = [
    ("optimizer: {learning_rate: 0.1}", ["optimizer.learning_rate: unknown key (got 0.1)", "optimizer.lr"]),
    ("optimzer: {lr: 0.1}", ["optimzer: unknown key", "did you mean optimizer?"]),
    ("lr: 0.1", ["lr: unknown key", "did you mean optimizer.lr?"]),
    ("parallel: {stage: 3}", ["parallel.stage", "did you mean zero.stage?"]),
    ("run: {run_name: a}", ["run.run_name: unknown key", "did you mean run.name?"]),
    ("schedule: {warmup: 3}", ["schedule.warmup:", "did you mean schedule.warmup_steps?"]),
    ("run: {gradient_accumulation_steps: 2}", ["batch.global_size (accumulation is derived from it)"]),
    ("parallel: {numa_binding: null}", ["parallel.numa_binding: unknown key (got null)", "torchrun --numa-binding and numactl do"]),
    ("qwerty: 1", ["qwerty: unknown key (got 1); allowed are model, data, parallel"]),
    ("optimizer.lr: 0.1", ["optimizer.lr: unknown key", "a file nests keys"]),
    ("zero: {stage: 5}", ["zero.stage: got 5", ">= 0 and <= 3"]),
    ("zero: {stage: true}", ["zero.stage: got true; allowed is an integer"]),
    ("zero: {stage: '3'}", ["zero.stage: got '3'"]),
    ("zero: {gathered_budget: 12 lightyears}", ["zero.gathered_budget: got '12 lightyears'", "256MiB"]),
    ("zero: {gathered_budget: -1}", ["zero.gathered_budget: got -1"]),
    ("zero: {overlap: yes}", ["zero.overlap: got 'yes'; allowed is true or false"]),
    ("model: {loss: liger}", ["model.loss: liger is not available: auto computes the same", "allowed is auto or native"]),
    ("offload: {optimizer: nvme}", ["offload.optimizer: nvme is not available", "called file", "none, host or file"]),
    ("offload: {parameters: cpu}", ["offload.parameters: cpu is not available", "called host"]),
    ("offload: {optimizer: auto}", ["offload.optimizer: got 'auto'"]),
    ("offload: {optimizer: {tier: file, fraction: 0}}", ["offload.optimizer.fraction: got 0", "> 0 and <= 1"]),
    ("offload: {optimizer: {tier: file, ratio: 1}}", ["ratio: unknown key", "did you mean offload.optimizer.fraction?"]),
    ("offload: {staging: 1KiB}", ["offload.staging: got '1KiB'", "4MiB or more"]),
    ("offload: {parameters: file}\nzero: {stage: 2}", ["offload.parameters: file does not go with zero.stage 2"]),
    ("offload: {activations: file}", ["offload.activations: file moves", "set it to block"]),
    (
        "offload: {activations: file}\nmodel: {activation_checkpointing: block, compile: true}",
        ["offload.activations: file does not go with model.compile"],
    ),
    ("offload: {directory: []}", ["offload.directory: got []"]),
    ("zero: {offload_optimizer: {device: cpu}}", ["did you mean offload.optimizer?"]),
    ("optimizer: {lr: .nan}", ["optimizer.lr: got nan; allowed is a number >= 0"]),
    ("optimizer: {lr: .inf}", ["optimizer.lr: got inf"]),
    ("optimizer: {lr: 1e999}", ["optimizer.lr: got inf"]),
    ("optimizer: {lr: fast}", ["optimizer.lr: got 'fast'; allowed is a number"]),
    ("optimizer: {lr: true}", ["optimizer.lr: got true; allowed is a number"]),
    ("optimizer: {lr: -1e-3}", ["optimizer.lr: got -0.001"]),
    ("optimizer: {lr: [1e-3]}", ["optimizer.lr: got [0.001]"]),
    ("optimizer: {betas: [0.9]}", ["optimizer.betas: got [0.9]; allowed is a list of two numbers"]),
    ("optimizer: {betas: [0.9, 1.0]}", ["optimizer.betas: got [0.9, 1.0]"]),
    ("optimizer: {name: lomo}", ["optimizer.name: lomo is not available: it updates each parameter by hooks", "in_backward"]),
    ("optimizer: {name: galore_adamw_layerwise}", ["optimizer.name: galore_adamw_layerwise", "without _layerwise"]),
    ("optimizer: {name: adamvv}", ["optimizer.name: got 'adamvv'", "muon, lion", "adafactor", "did you mean adam"]),
    ("optimizer: {name: adamw, options: {amsgrid: true}}", ["optimizer.options: adamw takes no 'amsgrid'", "amsgrad"]),
    ("optimizer: {name: muon, options: {lr: 1}}", ["optimizer.options: muon takes no 'lr'", "ns_steps", "optimizer.lr"]),
    ("optimizer: {name: adafactor, betas: [0.5, 0.5]}", ["optimizer.betas: adafactor takes no betas"]),
    ("optimizer: {name: nadam, betas: [0.5, 0.5], options: {betas: [0.5, 0.6]}}", ["betas is optimizer.betas too"]),
    ("optimizer: {name: nadam, options: {optim_target_modules: [a]}}", ["nadam takes no 'optim_target_modules'"]),
    ("optimizer: {name: sgd, states: int8}", ["optimizer.states: int8 is for adamw, adam, lion, not for sgd"]),
    ("precision: {master: none, compute: float32}", ["precision.master: none goes with precision.compute bfloat16"]),
    ("precision: {master: none}\nema: {decay: 0.5}", ["precision.master: none does not go with ema.decay 0.5"]),
    ("optimizer: {name: radam, options: {eps: -1}}", ["optimizer: radam cannot be made with", "Invalid epsilon"]),
    ("optimizer: 3", ["optimizer: got 3; allowed is a mapping of name, lr"]),
    ("precision: {compute: bf16}", ["precision.compute: got 'bf16'", "did you mean bfloat16?"]),
    (
        "precision: {master: bfloat16}",
        ["precision.master: bfloat16 is not available: none and kahan", "float32, float64, none or kahan"],
    ),
    ("batch: {micro_size: 32}", ["batch.micro_size: 32 is more than batch.global_size 16"]),
    (
        "batch: {micro_size: 4, tokens: 512}",
        ["batch.tokens: 512 is in place of batch.micro_size, which is 4; leave one of them out"],
    ),
    ("batch: {micro_size: auto, tokens: 512}", ["in place of batch.micro_size, which is auto"]),
    ("batch: {balance: fast}", ["batch.balance: got 'fast'; allowed is even, speed or a list of positive numbers"]),
    ("batch: {balance: [1, 0]}", ["batch.balance", "allowed is even, speed or a list of positive numbers"]),
    ("batch: {shares: measured, balance: even}", ["batch.shares"]),
    ("batch: {tokens: 0}", ["batch.tokens: got 0; allowed is an integer >= 1"]),
    ("batch: {micro_size: 0}", ["batch.micro_size: got 0; allowed is an integer >= 1"]),
    ("batch: {micro_size: 2.5}", ["batch.micro_size: got 2.5; allowed is an integer"]),
    ("run: {max_steps: 1e-3}", ["run.max_steps: got 0.001; allowed is an integer"]),
    ("run: {name: ../../etc}", ["run.name: got '../../etc'; allowed is a name"]),
    ("run: {name: 7}", ["run.name: got 7", "write it in quotes"]),
    ("run: {seed: -1}", ["run.seed: got -1; allowed is an integer >= 0 and < 2**63"]),
    ("schedule: {warmup_steps: 300}", ["schedule.warmup_steps: 300 is more than run.max_steps 200"]),
    ("schedule: {power: 2}", ["schedule.power has no effect on cosine"]),
    ("schedule: {name: wsd, decay_steps: 500}", ["schedule.decay_steps is 500"]),
    ("parallel: {tensor: 0}", ["parallel.tensor: got 0"]),
    ("zero: {replicas: divided, stage: 0}", ["zero.replicas: divided does not go with zero.stage 0"]),
    (
        "zero: {replicas: divided}\noptimizer: {in_backward: true}\nrun: {on_nonfinite: stop, clip_norm: 0}",
        ["zero.replicas: divided does not go with optimizer.in_backward"],
    ),
    ("parallel: {wire: int8, replicate: 2}", ["parallel.wire: int8 encodes what replicas send each other that divide"]),
    ("parallel: {wire: int4}\nzero: {replicas: divided}", ["parallel.wire: int4 encodes what replicas send each other"]),
    (
        "parallel: {wire: bfloat16, replicate: 2}\nzero: {replicas: divided}\n"
        "precision: {compute: float64, master: float64, reduce: float64}",
        ["parallel.wire: bfloat16 does not go with precision.compute float64"],
    ),
    ("parallel: {sequence: true}", ["parallel.sequence: true shares sequences out to tensor ranks"]),
    ("parallel: {plan: {'*.q': colwise}}", ["parallel.plan says how layers are divided"]),
    ("parallel: {pipeline: 2, schedule: interleaved}", ["parallel.chunks: 1 with parallel.schedule interleaved"]),
    ("parallel: {pipeline: 2, chunks: 2}", ["parallel.chunks: 2 with parallel.schedule 1f1b"]),
    ("parallel: {stages: [1, 1]}", ["parallel.stages is about stages"]),
    ("parallel: {pipeline: 2, stages: [1, 2, 1]}", ["parallel.stages has 3 numbers of blocks for 2 stages"]),
    ("parallel: {pipeline: 2, stages: [1, 0]}", ["parallel.stages"]),
    ("parallel: {shard: 0}", ["parallel.shard: got 0; allowed is auto or an integer >= 1"]),
    ("parallel: {shard: all}", ["parallel.shard: got 'all'"]),
    ("parallel: {timeout_seconds: 0}", ["parallel.timeout_seconds: got 0"]),
    (
        "precision: {compute: float64, reduce: float64}",
        ["precision.master float32, precision.reduce float64: the two have to be float64 where ", "is; set both to float64"],
    ),
    ("precision: {compute: float64, master: float64}", ["precision.master float64, precision.reduce float32"]),
    ("precision: {compute: float64}", ["float32, precision.reduce float32: the two have to be float64", "set both to float64"]),
    ("precision: {master: float64}", ["precision.master float64, precision.reduce float32", "set both to float32, or both"]),
    ("precision: {reduce: float64}", ["precision.master float32, precision.reduce float64"]),
    ("precision: {compute: float16}\nrun: {on_nonfinite: stop}", ["run.on_nonfinite: stop", "float16"]),
    ("optimizer: {in_backward: true}\nrun: {on_nonfinite: stop}", ["run.clip_norm: 1.0 does not go with"]),
    ("optimizer: {in_backward: true}\nrun: {clip_norm: 0}", ["run.on_nonfinite: skip does not go with"]),
    ("model: {source: /does/not/exist}", ["model.source: '/does/not/exist' does not exist"]),
    ("model: {source: ., config: {model_type: gpt2}}", ["model.config: given beside model.source '.'"]),
    ("model: {config: {hidden_size: 8}}", ["model.config.model_type: missing"]),
    ("model: {config: {model_type: llama, rope: {theta: .nan}}}", ["model.config.rope.theta: got nan"]),
    ("model: {config: {model_type: gpt2, n_positions: 128}}", ["data.sequence_length: 256 is more than"]),
    ("model: {config: {model_type: llama, dict: {dict: .nan}}}", ["model.config.dict.dict: got nan"]),
    ("model: {config: {model_type: llama, list: [{dict: [.nan]}]}}", ["model.config.list: got a list of 1"]),
    ("data: {train: /does/not/exist.txt}", ["data.train: '/does/not/exist.txt' does not exist"]),
    ("data: {train: [/does/not/exist.txt, .]}", ["data.train: '/does/not/exist.txt' does not exist"]),
    ("data: {train: []}", ["data.train: got []"]),
    ("data: {tokenizer: ./gpt2}", ["data.tokenizer: './gpt2' does not exist", "save_pretrained"]),
    ("data: {eval_fraction: 1.0}", ["data.eval_fraction: got 1.0; allowed is a number >= 0 and < 1"]),
    ("data: {sequence_length: 1}", ["data.sequence_length: got 1"]),
    ("- a\n- b", ["holds ['a', 'b']; allowed is a mapping of sections"]),
    ("run: {seed: 1}\nrun: {seed: 2}", ["line 2, column 1: key 'run' is given twice, first in line 1"]),
    ("run: {1: 2}", ["line 1, column 7: a key that is not text"]),
    ("run: !!python/object/apply:os.system [id]", ["line 1, column 6: tags (!...) are not allowed"]),
    ("run: {name: !!str x}", ["tags (!...) are not allowed"]),
    ("run: &a {name: x}\nbatch: {<<: *a}", ["line 2, column 9: merge keys (<<) are not supported"]),
    ("run: &a [*a]", ["line 1, column 6: an alias of something that it is a part of"]),
    ("run: *a", ["line 1, column 6: a text that begins with * needs quotes"]),
    ("run: [1", ["line 1, column 8: the text ends where something is still open"]),
    ("run: {seed: 1}\n---\nrun: {seed: 2}", ["a second document starts here"]),
    (f"run: {{seed: {LONG}}}", ["run.seed: got inf"]),
    (f"run:\n  max_steps: {LONG}\n", ["run.max_steps: got inf; allowed is an integer >= 1"]),
    ("run: " + "[" * 40 + "]" * 40, ["nested deeper than 32 levels"]),
    ("run:\n\tmax_steps: 3\n", ["line 2, column 1: a tab; indent with spaces"]),
    ("run:\n  name: a: b\n", ["line 2, column 10: a second ':' in one entry"]),
    ("run: {max_steps: 3\n", ["where something is still open"]),
    ("run:\n  name: a\x1bb\n", [r"line 2: the character \x1b is not allowed"]),
    ("# run:\n", ["is empty; write what to train"]),
    ("", ["is empty; write what to train"]),
    ('run: {max_steps: "3"}', ["run.max_steps: got '3'; allowed is an integer >= 1; write it without quotes"]),
    ('run: {deterministic: "true"}', ["allowed is true or false; write it without quotes"]),
    ("tracking: {backends: wandb}", ["allowed is a list of text; write a list: [wandb]"]),
    ('{"zero": {"stage": 5}}', ["zero.stage: got 5"]),
    ('{"optimizer": {"lr": NaN}}', ["optimizer.lr: got 'NaN'"]),
    (f'{{"optimizer": {{"lr": {LONG[:302]}}}}}', ["optimizer.lr: an integer of 1,004 bits"]),
    ('{"run": {"seed": 1E999}}', ["run.seed: got inf"]),
    ('{"run": {}, "run": {}}', ["key 'run' is given twice"]),
    ('{\n // why\n "run": {}}', ["line 3, column 7: a comma or a closing bracket is missing, or a comment"]),
    ('{"run":\t{"name": "a\tb"}}', ["line 1, column 8: a tab; indent with spaces"]),
    ('{"run": {"max_steps": 3', ["where something is still open"]),
    ("[" * 100_000, ["nested deeper than 32 levels"]),
    ('{"run": ' + "[" * 40 + "]" * 40 + "}", ["nested deeper than 32 levels"]),
    ('{"run": [' + "0," * 30_000 + "0]}", ["more than 20000 values"]),
]


@pytest.mark.parametrize(("text", "words"), BAD, ids=[text[:50] for text, _ in BAD])
def test_a_bad_file_gives_one_clear_problem(tmp_path: Path, text: str, words: list[str]) -> None:
    """Which never has a parser's own words."""
    path = write(tmp_path, text, "run.json" if text.startswith(("{", "[")) else "run.yaml")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (problem,) = caught.value.problems
    assert [word for word in words if word not in problem] == []
    assert str(caught.value).startswith(str(path))
    assert not [word for word in ("not YAML", "not JSON", "sys.set_int_max", "Expecting") if word in problem]


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "zero: {stage: 5}\nlr: 1\nbatch: {micro_size: 32}\ndata: {train: /nope}\nrun: {seed: x}")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["optimizer.eps=tiny", "nonsense"])
    starts = {problem.split(":")[0] for problem in caught.value.problems}
    wrong = {"zero.stage", "lr", "batch.micro_size", "data.train", "run.seed", "optimizer.eps"}
    assert starts == wrong | {"the override 'nonsense'"}
    assert str(caught.value).startswith(f"{path}: 7 problems\n")


def test_a_rule_about_a_wrong_key_stays_silent() -> None:
    """Long values are shortened."""
    (problem,) = problems_of({"batch": {"global_size": "many" * 300, "micro_size": 32}})
    assert problem.startswith("batch.global_size: got 'manymany")
    (choice,) = problems_of({"optimizer": {"name": "x" * 1000}})
    assert max(len(problem), len(choice)) < 300


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no such file"),
        ({"run.yaml": b"\xff\xfe\x00"}, "not UTF-8 text (byte 0)"),
        ({"run.yaml": b"run:\n" + b" " * MAX_BYTES}, "larger than 1048576 bytes"),
        ({"run.yaml/x": b""}, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (problem,) = problems_of(tmp_path / "run.yaml")
    assert message in problem


def test_a_yaml_bomb_is_refused_at_once(tmp_path: Path) -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for last, name in zip("abcdefghij", "bcdefghijk", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{last}'] * 9)}]")
    started = time.perf_counter()
    (problem,) = problems_of(write(tmp_path, "\n".join(lines)))
    assert time.perf_counter() - started < 1.0
    assert "holds more than 20000 values once its aliases are expanded" in problem


def test_harmless_anchors_work_and_share_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "run: {name: &n both, output_dir: *n}\nmodel: {config: {model_type: x, a: &a [1], b: *a}}")
    config = load_config(path)
    assert (config.run.name, config.run.output_dir) == ("both", "both")
    assert config.model.config == {"model_type": "x", "a": [1], "b": [1]}


@pytest.mark.parametrize(
    "secret",
    [
        "api_key: sk-hush",
        "tracking: {token: sk-hush}",
        "run: {hf_token: sk-hush}",
        "run: {password: [sk-hush]}",
        "model: {source: 'https://me:sk-hush@host/model'}",
        "data: {train: 'https://host/text?token=sk-hush'}",
        "zero: {stage: 'Bearer sk-hush'}",
    ],
)
def test_secrets_are_never_shown(tmp_path: Path, secret: str) -> None:
    assert not [problem for problem in problems_of(write(tmp_path, secret)) if "hush" in problem]
    assert not [problem for problem in problems_of(write(tmp_path, f"{secret}\n  - [")) if "hush" in problem]
    assert not [problem for problem in problems_of(None, ("run.api_key=sk-hush",)) if "hush" in problem]


def test_defaults_are_those_of_the_quick_start() -> None:
    config = load_config()
    found, defaults = config.model_dump(), TrainerConfig().model_dump()
    for each in (found, defaults):
        each["run"].pop("name")  # That of the script; where there is none, it has the time in it.
    assert found == defaults
    assert config.model.config == DEFAULT_MODEL
    assert (config.zero.stage, config.precision.compute, config.optimizer.betas) == (3, "bfloat16", (0.9, 0.95))
    assert load_config({"parallel": {"pipeline": 3, "stages": []}}).parallel.stages == ()
    for value, meant in (("even", "even"), ("measured", "speed"), ([2, 1], (2, 1))):
        assert load_config({"batch": {"shares": value}}).batch.balance == meant
    again = load_config({"run": None, "optimizer": None})
    assert (again.optimizer, again.run.max_steps) == (config.optimizer, config.run.max_steps)


def test_numbers_in_text_are_taken_where_a_number_is_meant(tmp_path: Path) -> None:
    sizes = {"256MiB": 2**28, "1.5GiB": 3 * 2**29, "10 KB": 10_000, "7B": 7, "0": 0, "1024": 1024}
    for text, size in sizes.items():
        assert load_config(None, [f"zero.gathered_budget={text}"]).zero.gathered_budget == size
    config = load_config(write(tmp_path, "optimizer: {lr: 1e-3, eps: '1e-6', weight_decay: 1}"))
    assert (config.optimizer.lr, config.optimizer.eps, config.optimizer.weight_decay) == (1e-3, 1e-6, 1.0)
    assert load_config(write(tmp_path, '{"optimizer": {"lr": "3e-4"}}', "run.json")).optimizer.lr == 3e-4


def test_overrides() -> None:
    config = load_config(
        {"optimizer": {"lr": 1.0}}, ["optimizer.lr=1e-3", "data.train=[., tests]", "data.eval=", "run.name='7'", "parallel.shard=2"]
    )
    assert (config.optimizer.lr, config.data.train, config.data.eval) == (1e-3, (".", "tests"), None)
    assert (config.run.name, config.parallel.shard) == ("7", 2)
    run = config.run.model_copy(update={"seed": 3})
    assert load_config(config, ["run.seed=3"]) == config.model_copy(update={"run": run})


def test_an_override_of_one_model_key_keeps_the_default_model(tmp_path: Path) -> None:
    """A source replaces it."""
    assert load_config(None, ["model.config.hidden_size=64"]).model.config == DEFAULT_MODEL | {"hidden_size": 64}
    given = load_config({"model": {"config": {"model_type": "gpt2"}}}, ["model.config.n_embd=64"]).model.config
    assert given == {"model_type": "gpt2", "n_embd": 64}
    config = load_config({"model": {"source": tmp_path}})
    assert (config.model.source, config.model.config) == (str(tmp_path), None)
    assert load_config(config) == config


def test_the_default_warm_up_is_a_tenth_of_every_run() -> None:
    for steps in (9, 10, 20, 200, 1000):
        config = load_config(None, [f"run.max_steps={steps}"])
        assert with_length(config, steps).schedule.warmup_steps == steps // 10
        assert schedule_of(config).warmup_steps == steps // 10
    assert "schedule.warmup_steps" in problems_of({"schedule": {"warmup_steps": 20}, "run": {"max_steps": 10}})[0]


def test_variables_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setenv("STEPS", "7")
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdefghijklmn")
    lines = ("run: {max_steps: '${STEPS}'}", "data:", "  text_field: a${STEPS}b", "  train: ['${OUT:-.}']")
    config = load_config(write(tmp_path, "\n".join(lines)), ["run.output_dir=${OUT:-runs}/x", "run.name=${STEPS}"])
    assert (config.run.max_steps, config.run.output_dir, config.run.name) == (7, "runs/x", "7")
    assert (config.data.text_field, config.data.train) == ("a7b", (".",))
    escaped = load_config(None, ["run.output_dir=$${OUT}"])
    assert escaped.run.output_dir == "${OUT}"
    assert load_config(write(tmp_path, escaped.to_yaml())).run.output_dir == "${OUT}"
    tracking = {"project": "${", "tags": ["${"]}
    named = load_config({"model": {"config": {"model_type": "x", "${OUT}": 1, "a": "${HOME}"}}, "tracking": tracking})
    assert load_config(write(tmp_path, named.to_yaml())) == named
    for text, said in (
        ("${OUT}", "run.output_dir: the variable OUT is not set; set it, or give a default: ${OUT:-default}"),
        ("${HF_TOKEN}", "${HF_TOKEN} names a secret"),
        ("${OUT-x}", "is no variable"),
    ):
        assert said in str(problems_of(None, (f"run.output_dir={text}",)))
        assert said in str(problems_of(write(tmp_path, f"run: {{output_dir: '{text}'}}")))
    assert "needs quotes" in str(problems_of(write(tmp_path, "run: {output_dir: ${OUT}}")))


def test_a_section_that_is_null_leaves_what_lies_below_it() -> None:
    """All its keys may be commented out: what another trainer's settings or the defaults for tuning say still holds."""
    settings = {"train_micro_batch_size_per_gpu": 3, "zeromesh": {"batch": None}}
    assert load_config(settings, ranks=1).batch.micro_size == 3
    assert load_config({"optimizer": None}, tunes="whole").optimizer.lr == 2e-5


def test_max_steps_and_epochs() -> None:
    by_epochs = load_config(None, ["run.epochs=3"])
    assert by_epochs.run.most_steps is None
    assert "max_steps: null" in by_epochs.to_yaml()
    for config in (by_epochs, load_config(None, ["run.epochs=3", "run.max_steps=2"])):
        again = load_config(yaml.safe_load(config.to_yaml()))
        assert (again, again.run.most_steps) == (config, config.run.most_steps)
    assert config.run.most_steps == 2
    assert load_config(None, ["run.max_steps=null"]).run.most_steps == 200


@pytest.mark.parametrize(
    "override", ["parallel.auto=1", "run.epochs=1e308", "schedule.num_cycles=1e308", "batch.global_size=1000000000"]
)
def test_numbers_without_end_are_refused_by_their_key(override: str) -> None:
    assert problems_of({}, (override,))[0].startswith(override.partition("=")[0])


def test_names_of_schedules_mean_what_they_mean_in_transformers() -> None:
    assert schedule_of(load_config(None, ["schedule.name=constant"])).factor(0) == 1.0
    for more in ("schedule.warmup_steps=5", "schedule.warmup_ratio=0.1", "schedule.warmup_shape=log"):
        assert "no effect on constant" in problems_of({}, ("schedule.name=constant", more))[0]
    ends = schedule_of(load_config(None, ["schedule.name=polynomial", "optimizer.lr=1e-3"]))
    assert 1e-3 * ends.factor(200) == pytest.approx(1e-7)


def test_configurations_are_frozen_and_check_themselves() -> None:
    config = TrainerConfig()
    assert TrainerConfig().model.config is not config.model.config
    with pytest.raises(ValidationError, match="frozen"):
        config.run.seed = 1  # type: ignore[misc]
    with pytest.raises(ValidationError, match=r"batch\.micro_size: 32 is more than"):
        TrainerConfig.model_validate({"batch": {"micro_size": 32}})
    with pytest.raises(ConfigError, match="got int; allowed is a path, a mapping or a TrainerConfig"):
        load_config(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [load_config, lambda given: Trainer(None, given), lambda given: Trainer(None, args=given)])
def test_arguments_of_transformers_are_sent_to_their_own_trainer(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        make(TrainingArguments(output_dir=str(tmp_path)))
    said = "TrainingArguments: use zeromesh.transformers.Trainer, the same constructor as transformers' own"
    assert str(caught.value) == said


def test_a_subclass_with_hooks_of_transformers_is_refused() -> None:
    class Own(Trainer):
        def training_step(self, model: Any, inputs: Any) -> None: ...

        def compute_loss(self, model: Any, inputs: Any) -> None: ...

    said = "Own overrides compute_loss, training_step, which transformers' Trainer calls"
    with pytest.raises(ConfigError, match=said):
        Own(None, {})


texts = st.text(
    st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"), min_size=1, max_size=20
) | st.sampled_from(
    ["1e-3", "null", "~", "yes", "0x1f", "1_000", ".nan", "- a", "a: b", "# c", "'", '"', "2024-01-01"]
    + ["<<", "=", "?", "1", "true", "run", "a b", "\u0085", "${HOME}", "${", "$${"]
)
numbers = st.floats(min_value=0, max_value=0.999, allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def configurations(draw: st.DrawFn) -> TrainerConfig:
    steps = draw(st.integers(1, 10**6))
    float64 = draw(st.booleans())
    return TrainerConfig.model_validate(
        {
            "model": {"config": {"model_type": "x"} | draw(st.dictionaries(texts, json_values, max_size=4))},
            "data": {
                "text_field": draw(texts),
                "shuffle": draw(st.booleans()),
                "eval_fraction": draw(numbers),
                "train": draw(texts | st.lists(texts, min_size=1, max_size=3)),
            },
            "parallel": {"shard": draw(st.just("auto") | st.integers(1, 64)), "replicate": draw(st.integers(1, 9))},
            "zero": {"stage": draw(st.integers(0, 3)), "gathered_budget": draw(st.integers(0, 2**60))},
            "offload": {
                "optimizer": draw(st.sampled_from(["none", "host", "file", {"tier": "file", "fraction": 0.5}])),
                "gradients": draw(st.sampled_from(["auto", "none", {"tier": "host", "fraction": 0.25}])),
                "checksums": draw(st.booleans()),
            },
            "precision": {"compute": "float64", "master": "float64", "reduce": "float64"} if float64 else {},
            "optimizer": {
                "lr": draw(st.floats(min_value=0, allow_nan=False, allow_infinity=False)),
                "betas": [draw(numbers), draw(numbers)],
                "no_decay": draw(st.lists(texts, max_size=3)),
            },
            "schedule": {"warmup_steps": draw(st.integers(0, steps))},
            "tracking": {"project": draw(texts), "tags": draw(st.lists(texts, max_size=2))},
            "run": {
                "name": draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)),
                "output_dir": draw(texts),
                "max_steps": steps,
                "seed": draw(st.integers(0, 2**63 - 1)),
            },
        }
    )


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(configurations())
def test_a_round_trip_through_files_changes_nothing(config: TrainerConfig) -> None:
    printed = with_variables(parse_yaml(config.to_yaml(), where="yaml"), lambda path: True)
    assert TrainerConfig.model_validate(printed) == config
    text = json.dumps(config.model_dump(mode="json"))
    assert TrainerConfig.model_validate(parse_yaml(text, where="json")) == config


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=200) | texts.map(lambda text: f"run: {{name: {text}}}"))
def test_any_text_gives_a_value_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        value = parse_yaml(text, where="text")
        if isinstance(value, dict):
            load_config(value)


@settings(deadline=None)
@given(json_values)
def test_values_that_yaml_writers_write_are_read_back(value: Any) -> None:
    assert parse_yaml(json.dumps({"a": value}, ensure_ascii=True), where="x") == {"a": value}
    assert parse_yaml(json.dumps({"a": value}, separators=(",", ":")), where="x") == {"a": value}


SCALARS = {"1e-3": 1e-3, "1E5": 1e5, ".5": 0.5, "5.": 5.0, "1_000": 1000, "-7": -7, "0x1F": 31, "0o17": 15, "017": 17}
SCALARS |= {"true": True, "~": None, "": None, ".inf": float("inf"), "-.INF": float("-inf")}
SCALARS |= {text: text for text in ("yes", "off", "2024-01-01", "1:30", "1.2.3", "e5")}


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_plain_scalars(text: str, value: object) -> None:
    assert plain_scalar(text) == value
    assert type(plain_scalar(text)) is type(value)


def test_plain_yaml_without_surprises_reads_as_with_pyyaml() -> None:
    text = TrainerConfig().to_yaml()
    assert parse_yaml(text, where="x") == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"run": {"steps": 3}}, "did you mean run.max_steps?"),
        ({"model": {"class": "x"}}, "did you mean model.head?"),
        ({"model": {"load_in_4bit": True}}, "did you mean model.weights"),
        ({"model": {"peft_config": {}}}, "did you mean model.lora?"),
        ({"base_model": "x", "datasets": [], "micro_batch_size": 2}, "datasets: here data.train"),
        ({"model_name_or_path": "x", "stage": "sft", "template": "llama3"}, "a configuration of LLaMA-Factory"),
        ({"model_name_or_path": "x", "learning_rate": 1, "gradient_accumulation_steps": 2}, "transformers or TRL"),
    ],
)
def test_words_of_other_trainers_are_known(source: dict[str, Any], said: str) -> None:
    assert said in "\n".join(problems_of(source))


def test_arguments_and_methods_of_other_trainers_are_known() -> None:
    with pytest.raises(ConfigError, match="no argument tokenizer; it is the argument processing_class here"):
        Trainer(None, tokenizer=object())
    with pytest.raises(ConfigError, match=r"no argument peft_config; it is model.lora here"):
        Trainer(None, peft_config=object())
    with pytest.raises(ConfigError, match=r"no argument max_steps; config has the key run\.max_steps"):
        Trainer(None, max_steps=2)
    with pytest.raises(AttributeError, match=r"has no train; it is trainer.fit\(\) here"):
        Trainer(None).train()


def test_suggestions_point_at_keys_that_exist() -> None:
    for foreign in ("learning_rate", "max_grad_norm", "per_device_train_batch_size", "bf16", "seq_len", "epochs"):
        assert (suggestion(f"run.{foreign}") or "").split(" ")[0] in known_paths()
    found = [
        suggestion(each) for each in ("model.name", "model.path", "parallel.ep", "parallel.outer.beta", "run.nam", "qwertyuiop")
    ]
    assert found == ["model.source", "model.source", "parallel.expert", "parallel.outer.momentum", "run.name", None]


def test_every_key_says_what_it_allows() -> None:
    assert [path for path, field in known_paths().items() if not allowed(field)] == []
    assert choices(known_paths()["schedule.name"]) == list(SCHEDULES)
    assert schedule_of(load_config(None, ["schedule.name=linear"])).factor(20) == 1.0


def test_the_reference_page_is_current() -> None:
    reference = runpy.run_path(str(ROOT / "scripts/pages/config_reference.py"))
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference["page"](), "run: python scripts/pages/config_reference.py"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.*")), ids=lambda path: path.name)
def test_shipped_configurations_load(path: Path) -> None:
    config = load_config(path)
    assert parse_yaml(config.to_yaml(), where="resolved") == config.model_dump(mode="json")


def test_there_are_shipped_configurations() -> None:
    assert len(list((ROOT / "configs").glob("*.yaml"))) >= 3
    assert list((ROOT / "configs").glob("*.json"))
