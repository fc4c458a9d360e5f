"""Runs whose settings are drawn at random, each beside a run in one process: `python scripts/drawn_runs.py --count 50`.

The number of a run is the seed of its draws. It has a model of `MODELS`, settings that change what is computed (`ARITHMETIC`),
which the run in one process has too, and settings that must change nothing (`PLACEMENT`), on 2 to 4 ranks. Some runs are stopped
and go on with another placement and number of ranks; in some a rank ends by SIGKILL at a random instant. In float64, losses,
norms, evaluations, all parameters and averages have to be equal (`TOLERANCE`). With `--kind local`, replicas take local steps,
beside two that are not divided any further; with `--kind wire`, two hosts send each other codes, and losses have to be near.

Prints a line for each run that differs, fails or hangs, with the numbers that draw it again, and counts refusals by their texts,
which shows what may be refused by mistake. Exits with 1 where something is wrong. Takes about ten seconds a run on two cores.
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

TOLERANCE = 1e-8
STEPS, SAMPLES, SECONDS = 6, 40, 180
ROOT = Path(__file__).parents[1]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64}
TEXT = {**SIZES, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "use_cache": False}
GROUPED = {**TEXT, "num_key_value_heads": 2}
LLAMA = {"model_type": "llama", **GROUPED}
EAGER = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "experts_implementation": "eager"}  # fused experts have no float64
QWEN = {"model_type": "qwen3_moe", **GROUPED, **EAGER, "head_dim": 8, "num_experts": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 64, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", **TEXT, **EAGER, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 8, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "use_cache": False,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
LORA = {"rank": 4, "targets": "all-linear"}
EXPERT_LORA = {"rank": 4, "options": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}}
NF4 = {"codec": "nf4", "block": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"config": {**LLAMA, "tie_word_embeddings": False}},
    "tied": {"config": {**LLAMA, "tie_word_embeddings": True}},
    "gpt2": {"config": GPT2},
    "gemma2": {"config": {"model_type": "gemma2", **GROUPED, "head_dim": 8, "sliding_window": 6}},
    "qwen3_moe": {"config": QWEN},
    "auxiliary": {"config": {**QWEN, "output_router_logits": True}},
    "mixtral": {"config": {"model_type": "mixtral", **GROUPED, "num_local_experts": 4, "experts_implementation": "eager"}},
    "deepseek_v3": {"config": DEEPSEEK},
    "lora": {"config": LLAMA, "lora": LORA},
    "qlora": {"config": LLAMA, "lora": LORA, "weights": NF4},
    "expert lora": {"config": QWEN, "lora": EXPERT_LORA},
    "expert qlora": {"config": QWEN, "lora": EXPERT_LORA, "weights": NF4},
    "bert": {"config": {"model_type": "bert", **TEXT, **NO_DROPOUT}, "head": "masked_lm"},
    "classes": {"config": {**LLAMA, "num_labels": 3}, "head": "sequence_classification"},
    "t5": {"config": T5, "head": "seq2seq_lm"},
    "module": {},
}
"""The section `model` of each; `module` is one of nobody's library (`_module`)."""
WITH_EXPERTS = ("qwen3_moe", "auxiliary", "mixtral", "deepseek_v3", "expert lora", "expert qlora")

Draw = Callable[[random.Random], Any]
Told = dict[str, Any]


def one_of(*values: Any) -> Draw:
    return lambda dice: dice.choice(values)


AVERAGES = {"decay": 0.9}, {"decay": 0.5, "evaluate": True}, {"decay": 0.9, "every_steps": 2, "start_step": 2}
CLASSES = ("torch.optim:Adamax", "torch.optim:RMSprop")
ARITHMETIC: dict[str, tuple[float, Draw]] = {
    "run.clip_norm": (0.5, one_of(0.0, 0.3)),
    "run.label_smoothing": (0.15, one_of(0.1)),
    "run.epochs": (0.15, one_of(1.5)),
    "run.load_best": (0.1, one_of(True)),
    "batch.global_size": (0.5, one_of(12, 10, 16)),
    "batch.last": (0.2, one_of("partial", "drop")),
    "data.shuffle": (0.1, one_of(False)),
    "ema": (0.35, one_of(*AVERAGES)),
    "optimizer.name": (0.4, one_of("sgd", "adam", "lion", "adagrad", *CLASSES)),
    "optimizer.groups": (0.2, one_of([{"match": "*.1.*", "lr_factor": 0.1}], [{"match": "*[234].*", "weight_decay": 0.0}])),
    "optimizer.in_backward": (0.1, one_of(True)),
    "model.train": (0.15, one_of(["*", "!*.1.*"], ["*.1.*"])),
    "model.attention": (0.2, one_of("eager", "sdpa")),
    "model.loss": (0.2, one_of("native")),
    "schedule.name": (0.3, one_of("linear", "constant_with_warmup", "wsd")),
    "recovery.spike_factor": (0.1, one_of(50.0)),
}
"""Keys that the run in one process has too: the chance of each, and its values."""
TIERS = ("none", "host", "file")
PLACEMENT: dict[str, tuple[float, Draw]] = {
    "zero.stage": (0.8, one_of(0, 1, 2, 3, 3)),
    "zero.prefetch": (0.2, one_of(0, 2)),
    "zero.gathered_budget": (0.3, one_of(0, 20000)),
    "zero.reduce_once": (0.2, one_of(True)),
    "zero.overlap": (0.15, one_of(False)),
    "parallel.transport": (0.3, one_of("gloo", "shared")),
    "parallel.context_method": (0.4, one_of("gather", "heads")),
    "parallel.sequence": (0.15, one_of(True)),
    "parallel.schedule": (0.5, one_of("gpipe", "interleaved", "zero_bubble")),
    "parallel.balance": (0.2, one_of("flops")),
    "batch.micro_size": (0.7, one_of(1, 2, 3, 4)),
    "batch.tokens": (0.12, one_of(32, 40)),
    "batch.balance": (0.2, one_of("speed", "list")),
    "batch.eval_micro_size": (0.2, one_of(1, 3)),
    "offload.optimizer.tier": (0.45, one_of(*TIERS)),
    "offload.gradients.tier": (0.3, one_of(*TIERS)),
    "offload.parameters.tier": (0.3, one_of(*TIERS)),
    "offload.activations.tier": (0.2, one_of("host", "file")),
    "offload.optimizer.fraction": (0.15, one_of(0.5)),
    "offload.parameters.fraction": (0.15, one_of(0.5)),
    "offload.checksums": (0.2, one_of(True)),
    "offload.durable": (0.25, one_of(True)),
    "model.activation_checkpointing": (0.4, one_of("block", "selective")),
    "model.tile_tokens": (0.15, one_of(5)),
    "data.workers": (0.15, one_of(1)),
    "recovery.audit_steps": (0.15, one_of(2)),
    "recovery.memory": (0.2, one_of("snapshots", "off")),
    "recovery.survivors": (0.15, one_of("restart")),
    "checkpoint.every_steps": (0.5, one_of(2, 3)),
    "checkpoint.asynchronous": (0.2, one_of(False)),
    "profile.step_figures": (0.1, one_of(False)),
}
"""Keys that must change nothing."""
AXES = ("tensor", "pipeline", "context", "expert", "replicate")
ALONE: Told = {
    "ranks": 1,
    "placement": {"zero.stage": 0, "batch.micro_size": 2, "recovery.memory": "off"},
    "stop": None,
    "kills": [],
}


def main() -> int:
    """Draw runs, and print those that are not as they should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--kind", choices=KINDS, default="exact")
    parser.add_argument("--model", choices=MODELS, help="one model alone")
    parser.add_argument(
        "--with", dest="given", nargs="*", default=[], help="keys that all runs have, such as zero.replicas=divided"
    )
    parser.add_argument("--show", action="store_true", help="print what is drawn")
    parser.add_argument("--keep", action="store_true", help="keep the folders of runs")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _train(json.loads(Path(options.rank).read_text(encoding="utf-8")))
        return 0
    given = {key: _value(text) for key, _, text in (each.partition("=") for each in options.given)}
    counts, refused = Counter[str](), Counter[str]()
    with _programs(options.keep) as (folder, python):
        for number in range(options.first, options.first + options.count):
            drawn = KINDS[options.kind](random.Random(number), draw(random.Random(number), options.model, given))
            if options.show:
                print(json.dumps(drawn, indent=1))
            verdict, text = judge(drawn, folder / str(number), python)
            counts[verdict.partition(" ")[0]] += 1
            if verdict == "refused":
                refused[re.sub(r"\d+", "N", text)] += 1
            elif verdict != "equal":
                print(f"--kind {options.kind} --first {number} --count 1: {verdict}, {drawn['model']}\n{text}", flush=True)
                print("   ", json.dumps({key: drawn[key] for key in ("arithmetic", "legs")}), flush=True)
    for text, times in refused.most_common():
        print(f"{times:4} refused: {text}")
    print(dict(counts))
    return int(not counts.keys() <= {"equal", "refused"})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@contextmanager
def _programs(keep: bool) -> Iterator[tuple[Path, str]]:
    """Yield a folder, and a Python in it that imports nothing: it is forked from a process that has imported all."""
    sys.path.insert(0, str(ROOT))
    from tests.support.programs import Programs
    from tests.support.workers import Workers

    folder = Path(tempfile.mkdtemp(prefix="drawn-"))
    workers = Workers(folder)
    programs = Programs(folder, workers)
    yield folder, str(programs.bin / "python")
    programs.close()
    workers.close()
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)


def draw(dice: random.Random, model: str | None, given: Told) -> Told:
    """Draw a model, arithmetic, and legs, each with ranks, a placement, the step where it stops, and kills."""
    name = model or dice.choice([*MODELS])
    arithmetic: Told = {key: value(dice) for key, (chance, value) in ARITHMETIC.items() if dice.random() < chance}
    if arithmetic.get("optimizer.name") == "lion" and name in ("bert", "gpt2"):
        del arithmetic["optimizer.name"]  # The gradients of biases of keys are zero but for rounding, whose sign it would take.
    if arithmetic.get("optimizer.name") == "sgd":
        arithmetic["optimizer.momentum"] = 0.9
    if name == "deepseek_v3" and dice.random() < 0.5:
        arithmetic["optimizer.expert_bias_rate"] = 0.01
    if "lora" in name:
        arithmetic.pop("model.train", None)
    if "optimizer.in_backward" in arithmetic:
        arithmetic |= {"run.clip_norm": 0.0, "run.on_nonfinite": "stop"}
        arithmetic.pop("recovery.spike_factor", None)
    stops = [dice.choice([1, 2, 3, 4])] if dice.random() < 0.35 else []
    if stops:
        arithmetic.pop("run.load_best", None)  # It may be that of the evaluation where a leg stopped.
    if "run.load_best" in arithmetic:
        arithmetic["checkpoint.every_steps"] = 2
    legs = []
    for stop in [*stops, None]:
        ranks = dice.choice([2, 2, 2, 3, 4, 4])
        kills = [[dice.randint(1, 5), dice.randrange(ranks), dice.randint(0, 60)]] if dice.random() < 0.25 else []
        legs.append({"ranks": ranks, "placement": _placement(dice, name, ranks) | given, "stop": stop, "kills": kills})
    return {"model": name, "arithmetic": arithmetic, "legs": legs}


def _placement(dice: random.Random, model: str, ranks: int) -> Told:
    found = {key: value(dice) for key, (chance, value) in PLACEMENT.items() if dice.random() < chance}
    left = ranks
    for axis in dice.sample(AXES, 2 if ranks == 4 else 1):
        if left % 2 == 0 and dice.random() < 0.6 and (axis != "expert" or model in WITH_EXPERTS):
            found[f"parallel.{axis}"] = 2
            left //= 2 if axis != "expert" else 1
    if found.get("parallel.schedule") == "interleaved":
        found["parallel.chunks"] = 2
    for axis, names in {
        "pipeline": ("schedule", "chunks", "balance"),
        "context": ("context_method",),
        "tensor": ("sequence",),
    }.items():
        for name in names if f"parallel.{axis}" not in found else ():
            found.pop(f"parallel.{name}", None)
    if "parallel.replicate" in found and dice.random() < 0.6:
        found["zero.replicas"] = "divided"
    if model == "auxiliary":  # Its loss depends on what is in a microbatch.
        found = {key: found[key] for key in found if key not in ("batch.tokens", "batch.balance", "batch.micro_size")}
    if "batch.tokens" in found:
        found["batch.micro_size"] = 1
        found.pop("batch.balance", None)
    if found.get("batch.balance") == "list":
        parts = ranks // math.prod(found.get(f"parallel.{axis}", 1) for axis in ("tensor", "pipeline", "context"))
        found["batch.balance"] = [1 + place for place in range(parts)]
    return _offloaded(found)


def _offloaded(found: Told) -> Told:
    """Return a placement without what its offload does not go with."""
    if "offload.activations.tier" in found:
        found["model.activation_checkpointing"] = "block"
    if found.get("zero.stage", 3) < 3:
        found.pop("offload.parameters.tier", None)
    if "offload.durable" in found:
        found["offload.optimizer.tier"] = "file"
        found.pop("offload.optimizer.fraction", None)
    for purpose in ("optimizer", "parameters"):
        if found.get(f"offload.{purpose}.tier", "none") == "none":
            found.pop(f"offload.{purpose}.fraction", None)
    return found


def _local(dice: random.Random, drawn: Told) -> Told:
    """Return the draw with two replicas that take local steps; each has the samples of one that is not divided any further."""
    arithmetic = drawn["arithmetic"] | {
        "parallel.sync_every": dice.choice([2, 3, 4]),
        "checkpoint.every_steps": dice.choice([0, 2]),
    }
    if dice.random() < 0.4:
        arithmetic["parallel.outer"] = {"lr": 0.7, "momentum": 0.9}
    arithmetic["batch.global_size"] = size = dice.choice([8, 16])
    for key in ("recovery.spike_factor", "optimizer.in_backward", "run.on_nonfinite", "run.load_best"):
        arithmetic.pop(key, None)
    leg = drawn["legs"][-1]
    inner = dice.choice(["tensor", "pipeline", "context", "shard"])
    foreign = (
        "offload.durable",
        "recovery.audit_steps",
        "batch.balance",
        "batch.tokens",
        "zero.replicas",
        "checkpoint.every_steps",
    )
    placement = {key: value for key, value in leg["placement"].items() if key not in foreign and key.split(".")[0] != "parallel"}
    placement |= {"parallel.replicate": 2, "batch.micro_size": size // (4 if inner == "shard" else 2), "recovery.memory": "auto"}
    placement |= {} if inner == "shard" else {f"parallel.{inner}": 2}
    first = {"parallel.replicate": 2, "zero.stage": 0, "batch.micro_size": size // 2}
    legs = [leg | {"ranks": 4, "placement": placement}]
    return drawn | {"arithmetic": arithmetic, "legs": legs, "plain": {**ALONE, "ranks": 2, "placement": first}}


def _coded(dice: random.Random, drawn: Told) -> Told:
    """Return the draw in float32 on two hosts, with a codec between them."""
    for leg in drawn["legs"]:
        placement = leg["placement"]
        placement |= {"parallel.replicate": 2, "zero.replicas": "divided"}
        placement["parallel.wire"] = dice.choice(["bfloat16", "int8", "int8", "auto"])
        leg["ranks"] = 4 if leg["ranks"] == 4 else 2
        for axis in ("tensor", "pipeline", "context", "expert") if leg["ranks"] == 2 else ():
            placement.pop(f"parallel.{axis}", None)
    return drawn | {"hosts": 2, "tolerance": 0.05, "dtype": "float32"}


KINDS: dict[str, Callable[[random.Random, Told], Told]] = {"exact": lambda dice, drawn: drawn, "local": _local, "wire": _coded}


def judge(drawn: Told, folder: Path, python: str) -> tuple[str, str]:
    """Run what was drawn, and the same in one process; returns a verdict and a text."""
    answers = []
    for place, legs in (("plain", [drawn.get("plain", ALONE)]), ("drawn", drawn["legs"])):
        (folder / place).mkdir(parents=True)
        for number, leg in enumerate(legs):
            out = folder / place / f"leg-{number}"
            path = out.with_suffix(".json")
            path.write_text(json.dumps({**drawn, **leg, "folder": str(folder / place), "out": str(out)}), encoding="utf-8")
            words = [python, "-m", "zeromesh", "run", "--nproc", str(leg["ranks"]), "--", __file__, "--rank", str(path)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            try:
                ended = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=SECONDS)
            except subprocess.TimeoutExpired as error:
                return f"HANGS ({place}, leg {number})", str(error.stdout)[-1500:]
            out.with_suffix(".log").write_text(ended.stdout + ended.stderr, encoding="utf-8")
            if ended.returncode:
                refusals = re.findall(r"errors\.(?:ConfigError|LayoutError): (.*(?:\n  .*)*)", ended.stderr)
                failed = f"FAILS ({place}, leg {number}, exit {ended.returncode})", ended.stderr.strip()[-700:]
                return ("refused", refusals[-1][:400]) if refusals else failed
        answers.append(_answers(folder / place, out))
    return _compared(*answers, tolerance=drawn.get("tolerance", TOLERANCE))


def _answers(folder: Path, out: Path) -> Told:
    """Return all figures of a run's steps and evaluations, and its tensors at the end, by name."""
    from safetensors.torch import load_file

    found: Told = {}
    for file, word in (("metrics.jsonl", "of"), ("evaluations.jsonl", "at")):
        path = folder / "run" / file
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ()):
            found |= {f"{key} {word} step {line['step']}": line[key] for key in ("loss", "grad_norm", "eval_loss") if key in line}
    return {**found, **load_file(f"{out}.safetensors")}


def _compared(plain: Told, drawn: Told, *, tolerance: float) -> tuple[str, str]:
    drawn = {name: value for name, value in drawn.items() if name in plain or " at step " not in name}  # where a leg stopped
    if plain.keys() != drawn.keys():
        return "DIFFERS", f"    names: {sorted(plain.keys() ^ drawn.keys())[:8]}"
    wrong = []
    for name, value in plain.items():
        other = drawn[name]
        if isinstance(value, float | int | None):
            far = abs((value or 0) - (other or 0)) / max(1.0, abs(value or 0))
        else:
            far = float((value.double() - other.double()).abs().max()) if value.numel() else 0.0
        if not far <= tolerance:
            wrong.append(f"    {name}: {far:.2e}")
    return ("DIFFERS", "\n".join([*wrong[:6], f"    {len(wrong)} of {len(plain)} values"])) if wrong else ("equal", "")


# In a rank


def _train(told: Told) -> None:
    """Train as a rank of one leg."""
    from safetensors.torch import save_file

    from zeromesh import Trainer
    from zeromesh.mesh import process_mesh
    from zeromesh.trainer.models.small_copy import whole_passes_in_float64

    rank = int(os.environ.get("RANK", "0"))
    if told.get("hosts") and told["ranks"] > 1:
        process_mesh.host_identity = lambda: f"host {rank * told['hosts'] // told['ranks']}"
    name = told["model"]
    made = {} if MODELS[name] else _module()
    data: Told = {"train_dataset": _samples(name, SAMPLES, 1), "eval_dataset": _samples(name, 7, 2), "data_collator": _padded}
    passes = nullcontext if "dtype" in told else whole_passes_in_float64
    with passes(), Trainer(config=_settings(told), callbacks=[_callback(told, rank)], **data, **made) as trainer:
        trainer.fit()
        state = {name: tensor.clone() for name, tensor in trainer.state_dict()}
        if "ema" in told["arithmetic"]:
            state |= {f"average of {name}": tensor.clone() for name, tensor in trainer.state_dict(ema=True)}
        if trainer.mesh.rank == 0:
            save_file({name: tensor.contiguous() for name, tensor in state.items()}, f"{told['out']}.safetensors")


def _settings(told: Told) -> Told:
    settings = {**told["arithmetic"], **told["placement"]}
    found: Told = {
        "precision": dict.fromkeys(("compute", "reduce", "master"), told.get("dtype", "float64")),
        "optimizer": {"lr": 0.01, "eps": 1e-4},
        "batch": {"global_size": 8, "micro_size": 2},
        "schedule": {"warmup_steps": 1},
        "parallel": {"timeout_seconds": 20},
        "run": {"max_steps": STEPS, "output_dir": told["folder"], "name": "run", "eval_every": 2, "seed": 5},
        "checkpoint": {"keep_last": 0},
        "model": dict(MODELS[told["model"]]),
    }
    if settings.get("optimizer.name") in ("sgd", "lion"):
        del found["optimizer"]["eps"]
    for key, value in settings.items():
        *names, last = key.split(".")
        place = found
        for name in names:
            place = place.setdefault(name, {})
        place[last] = value
    return found if found["model"] else {key: found[key] for key in found if key != "model"}


def _callback(told: Told, rank: int) -> Any:
    """Make a callback that compares copies on ranks, and stops a leg; ranks end by SIGKILL where they post what they do."""
    from zeromesh import Callback
    from zeromesh.telemetry.watchdog import Watchdog

    class Stops(Callback):
        step = 0

        def on_step_begin(self, trainer: Any, step: int) -> None:
            self.step = step

        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            if step % 2 and "parallel.sync_every" not in told["arithmetic"]:
                trainer.check_weights()
            if step == told["stop"]:
                trainer.request(stop=True)

    stops, posts, post = Stops(), Counter[int](), Watchdog.post

    def struck(self: Any, *given: Any, **named: Any) -> Any:
        posts[stops.step] += 1
        for step, victim, at in told["kills"]:
            mark = Path(f"{told['out']}.killed")
            due = stops.step > step or (stops.step == step and posts[step] > at)
            if victim == rank and due and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return post(self, *given, **named)

    Watchdog.post = struck  # type: ignore[method-assign]
    return stops


def _module() -> Told:
    """Return a model of nobody's library, with a buffer, a shared weight, a scalar and a parameter without use; and its loss."""
    import torch
    from torch import nn

    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(20), nn.Linear(20, 33), nn.GELU(), nn.Linear(33, 20))

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 20), nn.Linear(20, 64)
            self.layers = nn.ModuleList(block() for _ in range(4))
            self.head.weight = self.embed.weight
            self.scale, self.unused = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.ones(5))
            self.register_buffer("shift", torch.linspace(-1, 1, 20))

        def forward(self, input_ids: Any) -> Any:
            x = self.embed(input_ids) + self.shift
            for layer in self.layers:
                x = x + layer(x)
            return self.head(x) * self.scale

    def build() -> nn.Module:
        torch.manual_seed(3)
        return Module()

    def loss(model: Any, batch: Any) -> tuple[Any, int]:
        logits, targets = model(input_ids=batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return total, int((targets != -100).sum())

    return {"model": build, "compute_loss": loss}


def _padded(rows: list[Told]) -> Told:
    """Return a batch, padded to an even number of tokens, which two ranks can share out."""
    import torch

    longest = max(len(row["input_ids"]) for row in rows)
    found = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        if first.ndim:
            fill = -100 if name == "labels" else 0
            length = longest + longest % 2
            values = [torch.nn.functional.pad(each, (0, length - len(each)), value=fill) for each in values]
        found[name] = torch.stack(values)
    return found


def _samples(model: str, count: int, seed: int) -> list[Told]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        ids = torch.randint(1, 64, (12 + index % 5,), generator=generator)
        labels = ids.clone()
        labels[: index % 7] = -100
        if model == "classes":
            labels = torch.tensor(index % 3)
        if model == "bert":
            labels = torch.where(torch.arange(len(ids)) % 4 == index % 4, ids, -100)
        mask = {} if model == "module" else {"attention_mask": torch.ones_like(ids)}
        found.append({"input_ids": ids, "labels": labels, **mask})
    return found


if __name__ == "__main__":
    sys.exit(main())
