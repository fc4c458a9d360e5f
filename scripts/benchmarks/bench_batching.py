"""Tokens per second of requests of mixed lengths: `python scripts/benchmarks/bench_batching.py`, on two ranks with a core each.

Every rank has the whole of a Llama of 34 million parameters in float32. Prompts have 8 to 128 tokens, and 8 to 512 new ones are
wanted, spread evenly over the logarithm, or with `--even` over the number itself; no text ends before. One after the other in each
round, on the same ranks:

    continuous      `Generator.generate`: requests join a running batch as others leave it
    static          transformers' `generate`, prompts padded on the left, each batch until its longest request is over
    paged           transformers' own continuous batching, with attention over pages

The first deals requests out itself, the others get every second one. Tokens per second are those that were asked for, by the time
of the slower rank. `load` is the most that a rank computed, by the mean of both. Prints medians over rounds, lowest and highest.

    --requests N    requests, by default 96         --batch N   that a rank runs at a time, by default 16
    --rounds N      by default 3                    --even      new tokens spread evenly
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.processes import ONE_THREAD, end_all, start_ranks, tails, wait_for
from bench.report import Spread

RANKS, VOCABULARY = 2, 8192
_TIMEOUT = 3600.0
Requests = list[tuple[list[int], int]]
"""Prompts, and how many new tokens each of them wants."""


def requests_of(count: int, *, even: bool) -> Requests:
    """The requests of a run, the same in all processes."""
    draw = random.Random(0)
    wanted = (lambda: draw.randint(8, 512)) if even else (lambda: round(8 * 64 ** draw.random()))
    return [([draw.randrange(VOCABULARY) for _ in range(draw.randint(8, 128))], wanted()) for _ in range(count)]


def build_model() -> Any:
    """The model, with random weights."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=1024, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config).eval()


def run_static(model: Any, requests: Requests, batch: int) -> None:
    """Continue batches one after the other, each until its longest request is over."""
    for begin in range(0, len(requests), batch):
        part = requests[begin : begin + batch]
        longest = max(len(prompt) for prompt, _ in part)
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(part):
            ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = torch.tensor(prompt), 1
        with torch.no_grad():
            model.generate(ids, attention_mask=mask, max_new_tokens=max(new for _, new in part), do_sample=False)


def run_paged(model: Any, requests: Requests, batch: int) -> None:
    """Continue requests by transformers' own continuous batching, with pages for a batch of the longest ones."""
    pages = -(-640 * batch // 32)
    settings = tf.GenerationConfig(max_new_tokens=512, eos_token_id=-1, do_sample=False)
    paging = tf.ContinuousBatchingConfig(page_size=32, num_blocks=pages, max_batch_tokens=256, max_requests_per_batch=batch)
    manager = model.init_continuous_batching(generation_config=settings, continuous_batching_config=paging)
    manager.start()
    for number, (prompt, new) in enumerate(requests):
        manager.add_request(prompt, request_id=str(number), max_new_tokens=new)
    open_requests = len(requests)
    while open_requests:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error or len(result.generated_tokens) != requests[int(result.request_id)][1]:
                raise RuntimeError(f"request {result.request_id}: {result.error or 'another number of tokens'}")
            open_requests -= 1
    manager.stop(block=True)


def worker(options: argparse.Namespace, folder: Path) -> None:
    """One rank: seconds of each way in each round, and what it computed itself."""
    from zeromesh import Generator

    tf.logging.set_verbosity_error()
    model, requests = build_model(), requests_of(options.requests, even=options.even)
    sections: dict[str, Any] = {"zero": {"stage": 0}, "run": {"output_dir": str(folder)}}
    rows: list[dict[str, float]] = []
    with Generator(folder / "model", precision={"compute": "float32"}, **sections) as generator:
        mesh = generator.mesh
        prompts = [{"input_ids": prompt, "max_new_tokens": new} for prompt, new in requests]
        own = requests[mesh.rank :: RANKS]
        ways: dict[str, Callable[[], object]] = {
            "continuous": lambda: generator.generate(prompts, batch=options.batch),
            "static": lambda: run_static(model, own, options.batch),
            "paged": lambda: run_paged(model, own, options.batch),
        }
        generator.generate(prompts[:4], batch=options.batch, max_new_tokens=4)
        for _ in range(options.rounds):
            row: dict[str, float] = {}
            for name, run in ways.items():
                mesh.world.barrier(name)
                began = time.perf_counter()
                run()
                row[name] = time.perf_counter() - began
                mesh.world.barrier(name)
            row["computed"] = generator.computed
            rows.append(row)
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(rows))


def main() -> int:
    """Measure, or be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--requests", 96), ("--batch", 16), ("--rounds", 3)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--even", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options, options.worker)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_model().save_pretrained(folder / "model")
        command = [sys.executable, __file__, "--worker", name]
        command += [f"--{key}={getattr(options, key)}" for key in ("requests", "batch", "rounds")]
        command += ["--even"] if options.even else []
        logs = [folder / f"{rank}.log" for rank in range(RANKS)]
        processes = start_ranks(command, logs, ONE_THREAD)
        if not wait_for(processes, _TIMEOUT) or end_all(processes):
            sys.stderr.write(tails(logs))
            return 1
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    wanted = sum(new for _, new in requests_of(options.requests, even=options.even))
    rates = {
        way: [wanted / max(rank[number][way] for rank in ranks) for number in range(options.rounds)]
        for way in ("continuous", "static", "paged")
    }
    loads = [max(row[number]["computed"] for row in ranks) for number in range(options.rounds)]
    means = [sum(row[number]["computed"] for row in ranks) / RANKS for number in range(options.rounds)]
    print(f"{options.requests} requests, {wanted} new tokens, {options.batch} at a time on each of {RANKS} ranks")
    print("| way | tokens/s | by static |\n|---|---:|---:|")
    for way, found in rates.items():
        ratio = Spread.of(rate / static for rate, static in zip(found, rates["static"], strict=True))
        print(f"| {way} | {Spread.of(found).text(0)} | {ratio.text(2)} |")
    print(f"load {Spread.of(a / b for a, b in zip(loads, means, strict=True)).text(3)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
