"""One rank of a run of `bench_context.py`: a Llama on one sequence a step. Rank 0 prints what it took as one line of JSON."""

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
import transformers as tf
from torch.profiler import ProfilerActivity, profile

from bench.activations import running
from zeromesh import Callback, Trainer

RESULT = "CONTEXT "


class Watch(Callback):
    """The CPU seconds of the second step, and the highest sum of what PyTorch's allocator gave in the third."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.profiled = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.peak = 0

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        self.began = time.process_time()
        if step == 3:
            self.profiled.start()

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        self.seconds.append(time.process_time() - self.began)
        if step == 3:
            self.profiled.stop()
            self.peak = max(running(self.profiled))


def main(given: Mapping[str, Any]) -> None:
    tokens, watch = int(given["tokens"]), Watch()
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "use_cache": False, "max_position_embeddings": tokens, **given["model"]}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes))
    ids = torch.randint(0, sizes["vocab_size"], (tokens,), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory(dir=given["folder"]) as folder:
        sections = {"run": {"max_steps": given["steps"], "output_dir": folder, "name": "run", "log_every": 1}}
        config = {"batch": {"global_size": 1, "micro_size": 1}, **given["sections"], **sections}
        imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        callbacks = [watch] if given["steps"] > 2 else []
        with Trainer(model, config, [{"input_ids": ids, "labels": ids}], callbacks=callbacks) as trainer:
            parameters = sum(each.numel() for each in model.parameters())
            loss = list(trainer.fit().losses)[-1]
    found = {"peak": watch.peak, "seconds": watch.seconds[1:2], "loss": loss, "parameters": parameters}
    found |= {"resident": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - imported) << 10}
    if os.environ.get("RANK", "0") == "0":
        print(RESULT + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
