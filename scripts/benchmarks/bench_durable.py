"""Measures what `offload.durable` costs: seconds a step and bytes moved from and to files, beside the same run without it.

`python scripts/benchmarks/bench_durable.py --folder /a/disk` trains a small Llama with states on files, in turn with and without
`offload.durable`, and prints the fastest step of each kind, which depends least on what else the machine does, the median, and the
longest that a step has waited for the commit of the one before. The exit code is 1 where the fastest step takes more than 25 ms
longer, or states are moved in more bytes; the record of a commit is counted apart.
"""

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from zeromesh import Trainer
from zeromesh.offload import DurableTier
from zeromesh.offload.io.direct_io import PositionalFile
from zeromesh.trainer.monitoring.step_metrics import read_metrics

_ALLOWED_SECONDS = 0.025
_MOVED: Counter[str] = Counter()


def _counted(name: str) -> None:
    move = getattr(PositionalFile, name)

    def counting(self: PositionalFile, data: torch.Tensor, offset: int) -> None:
        kind = "records" if ".commit" in self.path else name if "zeromesh-" in self.path else "others"
        _MOVED[kind] += data.numel()
        move(self, data, offset)

    setattr(PositionalFile, name, counting)


def _time_waits() -> list[float]:
    """Return the seconds of waits for commits, to which later ones are added."""
    wait, found = DurableTier.wait, list[float]()

    def waiting(self: DurableTier) -> None:
        began = time.perf_counter()
        wait(self)
        found.append(time.perf_counter() - began)

    DurableTier.wait = waiting  # type: ignore[method-assign]
    return found


def _train(folder: str, options: argparse.Namespace, *, durable: bool) -> tuple[list[float], Counter[str]]:
    """Return the seconds of all steps but the first three, and the bytes moved in a step by kind."""
    sizes: dict[str, Any] = {"hidden_size": options.hidden, "intermediate_size": 4 * options.hidden, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": options.layers}
    tokens = torch.randint(0, 512, (64, options.tokens), generator=torch.Generator().manual_seed(0))
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    settings = {
        "zero": {"stage": 3},
        "precision": {"compute": "bfloat16"},
        "offload": {"optimizer": "file", "durable": durable},
        "batch": {"global_size": options.batch, "micro_size": options.batch},
        "run": {"name": f"durable-{durable}", "output_dir": folder, "max_steps": options.steps, "eval_every": 0},
        "checkpoint": {"every_steps": 0},
    }

    def build() -> Any:
        return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, **heads, use_cache=False))

    with contextlib.redirect_stdout(io.StringIO()), Trainer(build, settings, train_dataset=dataset) as trainer:
        _MOVED.clear()
        trainer.fit()
    lines = read_metrics(Path(folder) / f"durable-{durable}" / "metrics.jsonl")
    return [line["step_seconds"] for line in lines[3:]], Counter({kind: nbytes // options.steps for kind, nbytes in _MOVED.items()})


def main() -> int:
    """Train in turn, and print both; the exit code is 1 where the cost is too high."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where files lie; by default a temporary folder")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for name in ("read", "write"):
        _counted(name)
    waits = _time_waits()
    found: dict[bool, list[float]] = {False: [], True: []}
    moved: dict[bool, Counter[str]] = {}
    for _ in range(options.rounds):
        for durable in found:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                seconds, moved[durable] = _train(folder, options, durable=durable)
            found[durable] += seconds
    print("| offload.durable | fastest step, ms | median, ms | MiB read | MiB written | KiB of records |")
    print("|---|---|---|---|---|---|")
    for durable, seconds in found.items():
        figures = moved[durable]
        kinds = f"{figures['read'] / 2**20:.2f} | {figures['write'] / 2**20:.2f} | {figures['records'] / 2**10:.1f}"
        times = f"{1000 * min(seconds):.0f} | {1000 * statistics.median(seconds):.0f}"
        print(f"| {str(durable).lower()} | {times} | {kinds} |")
    more = min(found[True]) - min(found[False])
    print(f"{1000 * more:+.0f} ms for the fastest step; longest wait for a commit {1000 * max(waits):.1f} ms")
    same = all(moved[True][kind] <= moved[False][kind] for kind in ("read", "write"))
    return int(more > _ALLOWED_SECONDS or not same)


if __name__ == "__main__":
    sys.exit(main())
