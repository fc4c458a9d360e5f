"""Experts that stay where they are, beside transformers' FSDP2 with its expert parallelism: seconds, bytes and memory of a step.

A Qwen3-MoE of 26.5 million parameters in fp32 (4 layers of 32 experts, of which a token has four), trained by a loop of one's own
with torch's AdamW on two ranks, one a host: `python scripts/benchmarks/bench_experts.py`. Hosts are network namespaces, joined by a
cable that sends at one of `--rates`; `local` are two ranks of this host. That needs root, `ip`, `tc` and `unshare`. The ways take
turns, `--rounds` times; medians of steps and rounds are printed, and ratios to `fsdp2+expert`. Each way prints the loss of its last
step, which has to be one and the same, but for `alone`: there each rank trains the whole model by itself, on its own samples: it
sends nothing, but updates all parameters, of which ranks that divide them update a half. Ten minutes on two idle cores.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.experts import WAYS
from bench.processes import ONE_THREAD, start_ranks, wait_for
from bench.thin_wire import RESULT, run_on, slow_down

from tests.support.hosts import hosts

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 1024,
    "decoder_sparse_step": 1,
    "use_cache": False,
}
PORT, SECONDS = 29611, 600.0


def on_this_host(folder: Path, words: list[str]) -> list[dict[str, Any]]:
    """Run two ranks here, which share memory."""
    logs = [folder / f"{rank}.log" for rank in range(2)]
    processes = start_ranks([sys.executable, "-m", "bench.experts", *words], logs, ONE_THREAD)
    if not wait_for(processes, SECONDS) or any(process.poll() for process in processes):
        raise SystemExit(logs[0].read_text()[-4000:])
    lines = [line for log in logs for line in log.read_text().splitlines() if line.startswith(RESULT)]
    return [json.loads(line.removeprefix(RESULT)) for line in lines]


def table(rate: str, shape: str, ways: list[str], rounds: int, model: Path) -> None:
    """Print the rows of one rate and one shape of a step."""
    words = [str(model), *shape.split("x")]
    found = defaultdict[str, list[dict[str, Any]]](list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if rate == "local":
            for _ in range(rounds):
                for way in ways:
                    found[way] += on_this_host(folder, [way, *words])
        else:
            with hosts(folder, "alpha", "beta") as made:
                slow_down(made, rate)
                for turn in range(rounds):
                    for number, way in enumerate(ways):
                        found[way] += run_on(made, 1, PORT + turn * len(ways) + number, "bench.experts", [way, *words])
    print(f"\n{rate}, {shape}\n\n| way | seconds | of it | MB | MiB | of it | loss |\n|---|---|---|---|---|---|---|")
    beside = found.get("fsdp2+expert", found[ways[0]])
    time, memory = (median(beside, key) for key in ("seconds", "memory"))
    for way in ways:
        seconds, peak, nbytes = (median(found[way], key) for key in ("seconds", "memory", "bytes"))
        parts = f"{seconds / time:.2f} | {nbytes / 1e6:.1f} | {peak / 2**20:.0f} | {peak / memory:.2f}"
        print(f"| {way} | {seconds:.3f} | {parts} | {found[way][-1]['loss']:.6f} |", flush=True)


def median(found: list[dict[str, Any]], key: str) -> float:
    """The median of all steps of all rounds, or of all rounds."""
    values = [each[key] for each in found]
    return statistics.median([step for steps in values for step in steps] if isinstance(values[0], list) else values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["local", "1gbit"])
    parser.add_argument("--shapes", nargs="+", default=["128x1", "512x4"], help="tokens of a sequence x microbatches")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).save_pretrained(folder)
        for rate in given.rates:
            for shape in given.shapes:
                table(rate, shape, given.ways, given.rounds, Path(folder))


if __name__ == "__main__":
    main()
