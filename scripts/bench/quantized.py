"""One rank that trains adapters over a frozen base (`python -m bench.quantized ours JSON`, or `peft`), or generates with it.

Prints one line that begins with `RESULT` and holds what the rank has measured as JSON. Memory is that of `bench.probe`: the highest
proportional set size above that before the call, after a tiny model has had all imported. It is looked at in the first two steps,
and the others are timed.
"""

import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from bench.large import Tokens
from bench.probe import Memory, Sampler, memory_now
from bench.worker import RESULT
from zeromesh import Callback, Generator, Trainer

RANK = 16
_WATCHED = 2


class _Steps(Callback):
    """Times steps after the first ones, in which memory is looked at."""

    def __init__(self, sampler: Sampler) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.ledger_bytes, self.building = 0, Memory()
        self._sampler, self._began = sampler, 0.0

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        if step == 1:
            self.building = self._sampler.reset()
        self._began = time.perf_counter()

    def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        self._sampler.watch(on=step < _WATCHED)
        self.losses.append(metrics["loss"])
        assert trainer.engine is not None
        self.ledger_bytes = trainer.engine.ledger.peak()
        if step > _WATCHED:
            self.seconds.append(time.perf_counter() - self._began)


class _Sequences(Tokens):
    """Random sequences of as many tokens as `lengths` says in turn, and of the last one from then on."""

    def __init__(self, lengths: list[int], ranks: int) -> None:
        self._lengths, self._ranks = lengths, ranks

    def __getitem__(self, index: int, /) -> dict[str, torch.Tensor]:
        length = self._lengths[min(index // self._ranks, len(self._lengths) - 1)]
        return {name: row[:length] for name, row in super().__getitem__(index).items()}


def ours(folder: str, model: str, sections: dict[str, Any], steps: int, ranks: int, tokens: list[int]) -> dict[str, Any]:
    """Train adapters by this project's trainer."""

    def run(name: str, source: str, count: int, watching: Callback | None) -> None:
        config = {
            "model": {
                "source": source,
                "lora": {"rank": RANK, "targets": "all-linear"},
                "activation_checkpointing": "block",
                **sections.get("model", {}),
            },
            "precision": {"compute": "bfloat16"},
            "optimizer": {"lr": 1e-4, "weight_decay": 0.0},
            "schedule": {"name": "constant", "warmup_steps": 0},
            "batch": {"global_size": ranks, "micro_size": 1},
            "run": {"name": name, "output_dir": folder, "max_steps": count, "eval_at_end": False},
            "data": {"shuffle": False},
            "checkpoint": {"every_steps": 0},
            **{key: value for key, value in sections.items() if key != "model"},
        }
        data = _Sequences(tokens, ranks) if watching else [{name: row % 512 for name, row in Tokens()[0].items()}] * ranks
        with Trainer(None, config, data, callbacks=[watching] if watching else []) as trainer:
            trainer.fit()

    run("tiny", str(Path(model).parent / "tiny"), 2, None)
    base, sampler = memory_now(ranks), Sampler(ranks)
    sampler.watch(on=True)
    watching, began = _Steps(sampler), time.perf_counter()
    run("large", model, steps, watching)
    building = watching.building.total - base.total
    return {
        "ledger_bytes": watching.ledger_bytes,
        "building_bytes": building,
        **_measured(sampler, base, watching.seconds, watching.losses, began),
    }


def _measured(sampler: Sampler, base: Memory, seconds: list[float], losses: list[float], began: float) -> dict[str, Any]:
    sampler.stop()
    start = time.perf_counter() - began - sum(seconds)
    growth = sampler.peak - base
    return {"peak_bytes": growth.total, "growth": asdict(growth), "step_seconds": seconds, "losses": losses, "start_seconds": start}


def peft(model: str, steps: int, tokens: list[int], *, four_bits: bool) -> dict[str, Any]:
    """Train adapters by PEFT over bitsandbytes, or over a base in bfloat16, in a plain loop."""
    import peft as library

    def load(path: str) -> Any:
        how: dict[str, Any] = {"dtype": torch.bfloat16}
        if four_bits:
            kind = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
            how["quantization_config"] = tf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **kind)
        base = tf.AutoModelForCausalLM.from_pretrained(path, device_map="cpu", **how)
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.enable_input_require_grads()
        settings = library.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        return library.get_peft_model(base, settings).train()

    def step(made: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
        row = {name: tensor[None] for name, tensor in _Sequences(tokens, 1)[number].items()}
        loss = made(**row).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    def optimizer_of(made: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in made.parameters() if each.requires_grad], lr=1e-4)

    tiny = load(str(Path(model).parent / "tiny"))
    with torch.no_grad():
        tiny(input_ids=torch.zeros(1, 8, dtype=torch.long))
    base, sampler = memory_now(1), Sampler(1)
    sampler.watch(on=True)
    began = time.perf_counter()
    made = load(model)
    optimizer = optimizer_of(made)
    seconds, losses = [], []
    for number in range(steps):
        sampler.watch(on=number < _WATCHED)
        at = time.perf_counter()
        losses.append(step(made, optimizer, number))
        if number >= _WATCHED:
            seconds.append(time.perf_counter() - at)
    return _measured(sampler, base, seconds, losses, began)


def generate(folder: str, model: str, sections: dict[str, Any], steps: int) -> dict[str, Any]:
    """Generate, one token a step, with the base; parameters stay where `sections` has them."""
    prompts = [[1 + number, 5, 7] for number in range(4)]
    base, sampler, began = memory_now(1), Sampler(1), time.perf_counter()
    sampler.watch(on=True)
    with Generator(model, run={"output_dir": folder}, precision={"compute": "bfloat16"}, **sections) as generator:
        generator.generate(prompts, max_new_tokens=2)
        start = time.perf_counter() - began
        sampler.watch(on=False)
        seconds = []
        for _ in range(3):
            at = time.perf_counter()
            generator.generate(prompts, max_new_tokens=1)
            first = time.perf_counter() - at
            generator.generate(prompts, max_new_tokens=steps + 1)
            seconds.append((time.perf_counter() - at - 2 * first) / steps)
    sampler.stop()
    return {"step_seconds": seconds, "start_seconds": start, "peak_bytes": sampler.peak.total - base.total}


def encode(count: int) -> dict[str, Any]:
    """Elements a second that one core encodes in nf4 from bfloat16, and decodes into it."""
    from zeromesh.flat.codec import Codec

    codec = Codec(name="nf4", block=64, nested=True)
    values = torch.randn(count, generator=torch.Generator().manual_seed(1)).bfloat16()
    out, times = torch.empty_like(values), []
    for _ in range(5):
        at = time.perf_counter()
        made = codec.encode(lambda start, end: values[start:end], count)
        between = time.perf_counter()
        codec.decode(made.codes, codec.scale_values(made.scales, made.tables), out)
        times.append((between - at, time.perf_counter() - between))
    encoded, decoded = zip(*times, strict=True)
    return {"encoded": count / statistics.median(encoded), "decoded": count / statistics.median(decoded)}


def main() -> None:
    what, given = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(given.pop("threads", 1))
    print(RESULT + json.dumps({"ours": ours, "peft": peft, "generate": generate, "encode": encode}[what](**given)), flush=True)


if __name__ == "__main__":
    main()
