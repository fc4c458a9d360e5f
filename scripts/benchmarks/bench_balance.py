"""A step with a slow rank, shared out evenly and by speed: `python scripts/benchmarks/bench_balance.py`.

Ranks of this host train a small Llama in rounds of `--micro` samples a rank. The slow one is made so in one of two ways:

    asleep       every rank sleeps in forward, the slow one `--times` as long for each sample: four ranks, whatever else cores do
    computing    the slow one computes forward and backward of a copy of the model too: two ranks with a core each

Each round runs `even`, `speed` and `list` (the speeds as they are) in turn, with the same samples. Printed are medians over rounds
(lowest, highest) of the median step after shares have settled, `ideal` (the time of even shares, if work could be divided as finely
as one likes: harmonic mean of the ranks' seconds a sample), ratios round by round, and the largest difference of any loss.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.processes import ONE_THREAD, end_all, start_ranks, tails, wait_for
from bench.report import Spread

_TIMEOUT = 900.0
_SETTLED = 64  # steps, after which shares are no longer what the first measurements made them
_SLEEP = 0.015  # seconds a sample of the fast ranks that sleep


class Slow(nn.Module):
    """A model that sleeps `seconds` for each sample, and computes forward and backward of copies beside."""

    def __init__(self, model: nn.Module, seconds: float, copies: list[Any]) -> None:
        super().__init__()
        self.model, self.seconds, self.copies = (model, seconds, copies)  # A list, whose modules the trainer does not see.

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        """The mean loss of a batch."""
        time.sleep(self.seconds * len(input_ids))
        for each in self.copies:
            with torch.enable_grad():
                each(input_ids=input_ids, labels=labels).loss.backward()
        return self.model(input_ids=input_ids, labels=labels).loss


def worker(options: argparse.Namespace, folder: Path) -> None:
    """One rank: the seconds of its steps, and the losses."""
    import transformers as tf

    from zeromesh import Trainer

    slow = os.environ["RANK"] == str(options.ranks - 1)
    size = 64 if options.way == "asleep" else 256
    torch.manual_seed(0)
    model: Any = tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=512, hidden_size=size, intermediate_size=2 * size, num_hidden_layers=4, num_attention_heads=4,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    seconds = _SLEEP * (options.times if slow else 1.0) if options.way == "asleep" else 0.0
    model = Slow(model, seconds, [deepcopy(model)] if options.way == "computing" and slow else [])
    length = 16 if options.way == "asleep" else 128
    rows = torch.randint(0, 512, (512, length), generator=torch.Generator().manual_seed(1))
    balance = {"list": [options.times] * (options.ranks - 1) + [1.0]}.get(options.balance, options.balance)
    round_size = options.micro * options.ranks
    config: dict[str, Any] = {
        "run": {"max_steps": options.steps, "output_dir": str(folder), "seed": 3, "eval_every": 0},
        "batch": {"global_size": round_size * options.rounds_of_a_step, "micro_size": options.micro, "balance": balance},
        "checkpoint": {"every_steps": 0},
        "zero": {"stage": options.stage},
        "precision": {"compute": "float32"},
    }
    with Trainer(model, config, [{"input_ids": row, "labels": row} for row in rows]) as trainer:
        report = trainer.fit()
        seconds = trainer.run.progress.seconds
    found = {"seconds": seconds, "losses": list(report.losses)}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


def run(options: argparse.Namespace, balance: str) -> dict[str, Any]:
    """Train once; what rank 0 has found, and the last shares."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, __file__, "--worker", name, "--balance", balance]
        keys = ("way", "ranks", "micro", "times", "steps", "stage")
        command += [f"--{key}={getattr(options, key)}" for key in keys]
        command += [f"--rounds-of-a-step={options.rounds_of_a_step}"]
        logs = [folder / f"{rank}.log" for rank in range(options.ranks)]
        processes = start_ranks(command, logs, ONE_THREAD)
        if not wait_for(processes, _TIMEOUT) or end_all(processes):
            sys.exit(tails(logs))
        found: dict[str, Any] = json.loads((folder / "rank0.json").read_text())
        (metrics,) = folder.glob("*/metrics.jsonl")
        found["shares"] = json.loads(metrics.read_text().splitlines()[-1]).get("shares")
    found["step"] = statistics.median(found["seconds"][min(_SETTLED, options.steps // 2) :])
    print(f"{balance}: {1000 * found['step']:.1f} ms, shares {found['shares']}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Measure, or be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=("asleep", "computing"), default="asleep")
    for name, default in (("--ranks", 4), ("--micro", 8), ("--rounds", 3), ("--steps", 110), ("--stage", 3)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--rounds-of-a-step", type=int, default=1, help="microbatches of each rank in a step")
    parser.add_argument("--times", type=float, default=2.0, help="as long that the slow rank takes")
    parser.add_argument("--balance", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options, options.worker)
        return 0
    options.times = 2.0 if options.way == "computing" else options.times
    ways = ("even", "speed", "list")
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way in ways:
            found[way].append(run(options, way))
    # All ranks together do ranks - 1 + 1 / times samples in the time in which a fast one does one.
    ideal = options.ranks / (options.ranks - 1 + 1 / options.times) / options.times
    print(f"{options.ranks} ranks, one takes {options.times:g} times as long ({options.way}); ideal {ideal:.2f} of even")
    print("| shares | ms a step | of even | of ideal | last shares |\n|---|---:|---:|---:|---|")
    for way in ways:
        steps = [each["step"] for each in found[way]]
        ratio = Spread.of(step / even["step"] for step, even in zip(steps, found["even"], strict=True))
        scaled = Spread.of(step / even["step"] / ideal for step, even in zip(steps, found["even"], strict=True))
        shares = found[way][-1]["shares"]
        shown = ", ".join(map(str, shares.values())) if shares else str(options.micro)
        milliseconds = Spread.of(1000 * step for step in steps)
        print(f"| {way} | {milliseconds.text(0)} | {ratio.text(2)} | {scaled.text(2)} | {shown} |")
    losses = [each["losses"] for way in ways for each in found[way]]
    apart = max(abs(a / b - 1) for other in losses for a, b in zip(other, losses[0], strict=True))
    print(f"largest relative difference of a loss, float32: {apart:.1e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
