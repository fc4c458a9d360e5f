"""One rank of a run of `bench_wires.py`: a Llama in several ways, in turn. The first rank of each host prints what it took as a
line of JSON: the seconds of each step, and the bytes that its host has sent in it. Takes the microbatches of a step, and the
ways."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
import transformers as tf

from bench.thin_wire import RESULT, sent
from zeromesh import Callback, Trainer

STEPS, LENGTH = 5, 64
SIZES = {
    "vocab_size": 256,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "use_cache": False,
}
DIVIDED = {"parallel": {"replicate": 2}, "zero": {"replicas": "divided"}}
WAYS: dict[str, dict[str, Any]] = {
    "flat": {},
    "whole": {"parallel": {"replicate": 2}},
    "sums16": {**DIVIDED, "precision": {"reduce": "bfloat16"}},
    **{name: {**DIVIDED, "parallel": {"replicate": 2, "wire": name}} for name in ("exact", "bfloat16", "int8", "int4", "auto")},
}
"""Stage 3 over all ranks, replicas with all states, and those that divide them: with sums that travel in bfloat16, and by codec."""


class Watch(Callback):
    """When each step has ended, and what the host had sent by then."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, int]] = []
        self.chosen = ""

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        self.ends.append((time.perf_counter(), sent()))
        if trainer.engine is not None:
            self.chosen = trainer.engine.optimizer_step.gradients.replicas.note or ""


def main() -> None:
    microbatches, *ways = sys.argv[1:]
    samples, tokens = int(os.environ["WORLD_SIZE"]) * int(microbatches), torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (4 * samples, LENGTH), generator=tokens)
    data = [{"input_ids": row, "labels": row} for row in rows]
    for name in ways:
        with tempfile.TemporaryDirectory() as folder:
            config = {
                "run": {"max_steps": STEPS, "output_dir": folder, "name": "run"},
                "batch": {"global_size": samples, "micro_size": 1},
                "checkpoint": {"every_steps": 0},
                **WAYS[name],
            }
            watch = Watch()
            with Trainer(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)), config, data, callbacks=[watch]) as trainer:
                trainer.fit()
        pairs = list(zip(watch.ends, watch.ends[1:], strict=False))
        found = {
            "way": name,
            "seconds": [after[0] - before[0] for before, after in pairs],
            "bytes": [after[1] - before[1] for before, after in pairs],
            "chosen": watch.chosen,
        }
        if os.environ["LOCAL_RANK"] == "0":
            print(RESULT + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
