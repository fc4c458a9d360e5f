"""Experts that are fetched by need: memory, bytes that are read, and time, of a model of 4.6 billion parameters on one rank.

A Qwen3-MoE with 128 experts a layer, of which a token has ten (0.5 billion parameters), and random weights, written layer by layer
to `--folder` (9 GB, and 2.4 for its cache in four bits). LoRA of rank 4 on attention and experts, blocks recomputed, the base and
the optimizer's states on file.

`python scripts/benchmarks/bench_experts_fetch.py --folder /a/disk` runs each row in a process of its own and prints what
docs/benchmarks/experts.md has; `--only gathered` those whose name has this, `--keep` leaves the model there.
Bytes are those of experts' codes and scales that the file tier reads, in whole blocks of the disk. `chosen` are those of experts
that routers chose: of each forward, and of each recomputation, which backward shares.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.processes import ONE_THREAD, python_path

_SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "moe_intermediate_size": 512,
    "num_experts": 128,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "vocab_size": 48000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
_TINY = {**_SIZES, "hidden_size": 64, "num_hidden_layers": 2, "num_experts": 16, "vocab_size": 512}
_ROWS: dict[str, dict[str, Any]] = {
    "train, 16 tokens": {"tokens": 16},
    "train, 128 tokens": {"tokens": 128},
    "train, 16 tokens, gathered": {"tokens": 16, "gathered": True},
    "generate": {"tokens": 8, "generates": True},
    "generate, gathered": {"tokens": 8, "generates": True, "gathered": True},
}
_MEBIBYTE = 1 << 20


def main() -> int:
    """Run what the command line asks for; the exit code is 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where the model, the cache and runs lie")
    parser.add_argument("--only", default="", help="run the rows whose name contains this")
    parser.add_argument("--steps", type=int, default=3, help="of each run, or tokens that are generated")
    parser.add_argument("--keep", action="store_true", help="leave the model and its cache in the folder")
    parser.add_argument("--row", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder / "zeromesh-bench-experts"
    if options.row:
        print("RESULT", json.dumps(_measure(folder, options.steps, **json.loads(options.row))))
        return 0
    for name, sizes in (("tiny", _TINY), ("large", _SIZES)):
        if not (folder / name / "config.json").is_file():
            _write(folder / name, sizes)
    print("| | peak above imports, MiB | read a step, MiB | chosen, MiB | processor s a step |\n|---|---|---|---|---|")
    failed = False
    _run(options, {"tokens": 16, "steps": 1})  # Encodes the model.
    for name in [each for each in _ROWS if options.only in each]:
        row = _run(options, _ROWS[name])
        failed = failed or row is None
        if row is not None:
            read, chosen, seconds = (sum(row[key][1:]) / len(row[key][1:]) for key in ("read", "chosen", "seconds"))
            print(f"| {name} | {row['peak']:.0f} | {read:.1f} | {chosen:.1f} | {seconds:.2f} |", flush=True)
    if not options.keep:
        shutil.rmtree(folder)
    return int(failed)


def _run(options: argparse.Namespace, row: dict[str, Any]) -> dict[str, Any] | None:
    command = [sys.executable, __file__, "--folder", str(options.folder), "--steps", str(row.pop("steps", options.steps))]
    variables = {"PYTHONPATH": python_path(), "PATH": "/usr/bin:/bin", **ONE_THREAD}
    done = subprocess.run([*command, "--row", json.dumps(row)], env=variables, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        return None
    return dict(json.loads(found[0].removeprefix("RESULT ")))


def _write(folder: Path, sizes: dict[str, Any]) -> None:
    """Write a model with random weights, one layer in memory at a time, under the names of the Hub."""
    import torch
    import transformers as tf
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    config = tf.Qwen3MoeConfig(**sizes, dtype="bfloat16", architectures=["Qwen3MoeForCausalLM"])
    with torch.device("meta"):
        model = tf.Qwen3MoeForCausalLM(config)
    folder.mkdir(parents=True, exist_ok=True)
    generator, index = torch.Generator().manual_seed(3), {}
    layers = [f"model.layers.{number}." for number in range(config.num_hidden_layers)]
    shapes = {name: each.shape for name, each in model.state_dict().items()}
    for number, prefix in enumerate([*layers, ""]):
        own = [name for name in shapes if (name.startswith(prefix) if prefix else not name.startswith("model.layers."))]
        values = {
            name: torch.ones(shapes[name], dtype=torch.bfloat16)
            if "norm" in name
            else torch.empty(shapes[name], dtype=torch.bfloat16).normal_(std=0.05, generator=generator)
            for name in own
        }
        stored = {name: each.contiguous() for name, each in revert_weight_conversion(model, values).items()}
        file = f"model-{number:05}.safetensors"
        save_file(stored, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(stored, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.save_pretrained(folder)


@contextmanager
def _counted() -> Iterator[dict[str, float]]:
    """Yield the MiB of experts that are read from files, and those that tokens chose, so far."""
    import torch
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    from zeromesh.offload.io.file_tier import FileSlot

    found = {"read": 0.0, "chosen": 0.0}
    read, forward, lock = FileSlot._read_aligned, Qwen3MoeTopKRouter.forward, Lock()

    def reading(slot: FileSlot, begin: int, data: torch.Tensor) -> None:
        if "mlp.experts" in slot.label:
            with lock:
                found["read"] += data.nbytes / _MEBIBYTE
        read(slot, begin, data)

    def routing(router: Any, *args: Any) -> Any:
        result = forward(router, *args)
        elements = 3 * router.hidden_dim * _SIZES["moe_intermediate_size"]
        found["chosen"] += int(result[-1].unique().numel()) * elements * (1 / 2 + 1 / 64) / _MEBIBYTE
        return result

    with patch.object(FileSlot, "_read_aligned", reading), patch.object(Qwen3MoeTopKRouter, "forward", routing):
        yield found


def _measure(folder: Path, steps: int, tokens: int, *, generates: bool = False, gathered: bool = False) -> dict[str, Any]:
    """Train adapters over the model, or generate with it; `gathered`: with all experts of a layer at a time."""
    from bench.probe import Sampler, memory_now

    from zeromesh.units import build
    from zeromesh.zero import memory_model

    call, memory = _generate if generates else _train, None
    with ExitStack() as undo:
        for module in (build, memory_model) if gathered else ():
            undo.enter_context(patch.object(module, "fetched_module", lambda *args, **kwargs: ""))
        call(folder, "tiny", 2, tokens, {})
        base, sampler = memory_now(1), Sampler(1)
        sampler.watch(on=True)
        with _counted() as counters:
            rows = call(folder, "large", steps, tokens, counters)
        sampler.stop()
        memory = sampler.peak - base
    return {"peak": memory.total / _MEBIBYTE, **{key: [row[key] for row in rows] for key in rows[0]}}


def _sections(folder: Path, name: str) -> dict[str, Any]:
    return {
        "model": {"source": str(folder / name), "weights": {"codec": "nf4", "cache": str(folder / "cache")}},
        "precision": {"compute": "bfloat16"},
        "zero": {"stage": 3},
        "offload": {"parameters": "file"},
    }


def _train(folder: Path, name: str, steps: int, tokens: int, counters: dict[str, float]) -> list[dict[str, float]]:
    import torch

    from zeromesh import Callback, Trainer

    adapter = {
        "peft_type": "LORA",
        "r": 4,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    rows: list[dict[str, float]] = []

    class Steps(Callback):
        def on_step_begin(self, trainer: Trainer, step: int) -> None:
            self.before, self.began = dict(counters), time.process_time()

        def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
            rows.append({key: value - self.before[key] for key, value in counters.items()})
            rows[-1]["seconds"] = time.process_time() - self.began

    sections = _sections(folder, name)
    config = {
        **sections,
        "model": {**sections["model"], "adapters": {"default": adapter}, "activation_checkpointing": "block"},
        "offload": {"parameters": "file", "optimizer": "file", "directory": str(folder / "states")},
        "optimizer": {"lr": 1e-4, "weight_decay": 0.0},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "batch": {"global_size": 1, "micro_size": 1},
        "run": {"name": name, "output_dir": str(folder / "runs"), "max_steps": steps, "eval_at_end": False},
        "checkpoint": {"every_steps": 0},
    }
    (folder / "states").mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(7)
    data = [torch.randint(0, 512, (tokens,), generator=generator) for _ in range(steps)]
    with Trainer(None, config, [{"input_ids": each, "labels": each} for each in data], callbacks=[Steps()]) as trainer:
        trainer.fit()
    return rows


def _generate(folder: Path, name: str, steps: int, tokens: int, counters: dict[str, float]) -> list[dict[str, float]]:
    """Generate tokens for one prompt; the first row has the prompt too, and the others one token each."""
    from zeromesh import Generator

    rows: list[dict[str, float]] = []
    with Generator(folder / name, config=_generator_config(folder, name)) as made:
        for count in (1, 1 + steps):
            before, began = dict(counters), time.process_time()
            made.generate([list(range(tokens))], max_new_tokens=count, eos_token_id=None)
            rows.append({key: value - before[key] for key, value in counters.items()})
            rows[-1]["seconds"] = time.process_time() - began
    first, all_of_them = rows
    return [first, {key: (value - first[key]) / steps for key, value in all_of_them.items()}]


def _generator_config(folder: Path, name: str) -> dict[str, Any]:
    wide = {"compute": "bfloat16", "master": "float32", "reduce": "float32"}
    return {**_sections(folder, name), "precision": wide}


if __name__ == "__main__":
    sys.exit(main())
