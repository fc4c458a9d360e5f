"""Measures what long and uneven sequences cost: `OMP_NUM_THREADS=1 python scripts/benchmarks/bench_context.py [PART ...]`.

A part is a row of `PARTS`, all by default. Each prints a table.

tokens: `batch.tokens` beside a number of samples, on samples whose lengths are spread as those of conversations (log-normal, 32 to
1,024 tokens), padded by the collator, with a Llama of two blocks on one rank: microbatches of a step, its CPU seconds (the median),
their ratio to 8 samples, and the largest relative difference of a loss. Takes a minute and a half.

tiles: the highest sum of activations of forward and backward by PyTorch's allocator, blocks recomputed, with token-wise modules in
tiles of 1,024 tokens and without, for 16,384 tokens and two blocks with an MLP four times as wide as they are. Takes a minute and
1 GiB.

attention: forward and backward of one attention layer (8 heads of 64, 2 key-value heads) in fp32 over the same documents, of 64 to
512 tokens: packed into one sequence, by attention within documents and by sdpa with a mask, and padded to the longest; CPU seconds,
the median of 3, and the mask's MiB. Takes a minute.

context: a step of one sequence of 8,192 tokens at stage 3 on 1, 2 and 4 ranks that share it, with a Llama of 4 blocks: the highest
sum of activations and gradients by PyTorch's allocator, and the CPU seconds of a rank's step. Takes three minutes.

long: a step of one sequence of 131,072 tokens on one rank, blocks recomputed with inputs on file, MLPs in tiles of 4,096, with a
Llama of 98 million parameters: the resident memory above that before the model's first step. `--tokens` takes fewer. Takes half an
hour and 10 GiB; not among those that run by default.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.activations import forget, running
from bench.contexts import RESULT
from bench.report import MEBIBYTE

from zeromesh import Callback, Trainer
from zeromesh.context.attention import document_attention
from zeromesh.context.documents import Documents, Span
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.models import prepare
from zeromesh.trainer.models.prepare import enable_activation_checkpointing, find_token_wise, use_tiles

LENGTH, TILE, WIDTH = 16384, 1024, 256
STEPS, GLOBAL, SAMPLES, BUDGET = 8, 64, 8, 8192


class CpuSeconds(Callback):
    """Takes the CPU time at the end of each step."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        self.at.append(time.process_time())

    def median(self) -> float:
        return statistics.median(after - before for before, after in pairwise(self.at))


def ragged(count: int) -> list[dict[str, Tensor]]:
    """Samples of lengths that are spread as those of conversations."""
    drawn = np.random.default_rng(0).lognormal(mean=5.3, sigma=0.8, size=count)
    generator, lengths = torch.Generator().manual_seed(0), drawn.clip(32, 1024).astype(int)
    rows = [torch.randint(1, 512, (int(length),), generator=generator) for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def padded(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """A batch that is as long as its longest sample."""
    ids = pad_sequence([each["input_ids"] for each in samples], batch_first=True)
    labels = pad_sequence([each["labels"] for each in samples], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


def tokens() -> None:
    """Compare microbatches of 8 samples with microbatches of at most 8,192 tokens."""
    data, first = ragged(STEPS * GLOBAL), None
    print("batch                    microbatches  CPU seconds  of samples  loss apart")
    for batch in ({"micro_size": SAMPLES}, {"tokens": BUDGET}):
        torch.manual_seed(0)
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, vocab_size=512, max_position_embeddings=1024))
        clock = CpuSeconds()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            config = {
                "batch": {"global_size": GLOBAL, **batch},
                "precision": {"compute": "float32"},
                "run": {"max_steps": STEPS, "output_dir": folder, "name": "run"},
                "checkpoint": {"every_steps": 0},
            }
            with Trainer(model, config, data, data_collator=padded, callbacks=[clock]) as trainer:
                losses = list(trainer.fit().losses)
                plan = trainer.run.model.feeds.train().plan
                rounds = sum(map(plan.rounds_of, range(STEPS))) / STEPS
        first = first or (clock.median(), losses)
        apart = max(abs(one - other) / other for one, other in zip(losses, first[1], strict=True))
        name, ratio = " ".join(f"{key} {value}" for key, value in batch.items()), clock.median() / first[0]
        print(f"{name:24} {rounds:12.1f} {clock.median():12.2f} {ratio:11.2f} {apart:11.1e}", flush=True)


def tiles() -> None:
    """Compare the activations of whole sequences with those of tiles."""
    # The profiler sees PyTorch's allocator alone, so what recomputed blocks keep comes from it here.
    prepare.allocate_lasting = lambda shape, dtype, device: torch.empty(shape, dtype=dtype)  # type: ignore[attr-defined]
    ids, first = torch.randint(0, 256, (1, LENGTH)), 0.0
    print("tile       MiB  of whole  CPU seconds")
    for tile in (None, TILE):
        torch.manual_seed(0)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, vocab_size=256, use_cache=False)).train()
        loss = make_loss(model)
        if tile is not None:
            use_tiles(model, tile, find_token_wise(model))
        enable_activation_checkpointing(model, "block")
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(forget)
        began = time.process_time()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            loss(model, {"input_ids": ids, "labels": ids}, seed=1.0).backward()
        took, peak = time.process_time() - began, max(running(profiled)) / MEBIBYTE
        first = first or peak
        print(f"{tile or 'whole':<7} {peak:6,.0f}  {peak / first:8.2f}  {took:11.1f}")


def attention() -> None:
    """Compare attention within packed documents with a mask of the sequence, and with a row for each document."""
    print("tokens  documents  within documents  sdpa, mask  padded  mask MiB")
    for length in (1024, 4096, 8192):
        drawn = np.random.default_rng(0).integers(64, 512, length).cumsum()
        ends = [*(int(each) for each in drawn if each < length), length]
        spans = tuple(Span(0, begin, end, end) for begin, end in pairwise([0, *ends]))
        documents = Documents(rows=1, length=length, spans=spans)
        numbers, _ = documents.tokens(torch.device("cpu"))
        longest = max(span.end - span.begin for span in spans)

        def inputs(rows: int, tokens: int) -> list[Tensor]:
            return [torch.randn(rows, heads, tokens, 64, requires_grad=True) for heads in (8, 2, 2)]

        def masked(query: Tensor, key: Tensor, value: Tensor, numbers: Tensor = numbers) -> Tensor:
            mask = (numbers[0][:, None] == numbers[0]).tril()
            return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

        packed, rows = inputs(1, length), inputs(len(spans), longest)
        whole = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        ways = (partial(document_attention, documents=documents), packed), (masked, packed), (whole, rows)
        took = [_median_seconds(way, given) for way, given in ways]
        shown = f"{took[0]:16.3f}  {took[1]:10.3f}  {took[2]:6.3f}"
        print(f"{length:6}  {len(spans):9}  {shown}  {length**2 / MEBIBYTE:8.1f}", flush=True)


def _median_seconds(attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> float:
    took = []
    for _ in range(3):
        began = time.process_time()
        attend(*inputs).sum().backward()
        took.append(time.process_time() - began)
    return statistics.median(took)


def _run(ranks: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Run `bench/contexts.py` on so many ranks; returns what rank 0 has found."""
    scripts = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "zeromesh", "run", "--nproc", str(ranks), str(scripts / "bench" / "contexts.py")]
        environment = {**os.environ, "PYTHONPATH": f"{scripts}:{os.environ.get('PYTHONPATH', '')}"}
        told = json.dumps({**given, "folder": folder})
        done = subprocess.run([*command, told], env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if RESULT in line]
    if not lines:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    found: dict[str, Any] = json.loads(lines[-1].partition(RESULT)[2])
    return found


def context() -> None:
    """Compare a rank's part of a step on whole sequences and on shares of them."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    model, first = {**sizes, "num_key_value_heads": 2}, (0.0, 0.0)
    print("ranks     MiB  of one  CPU seconds  of one  loss")
    for ranks in (1, 2, 4):
        sections = {"parallel": {"context": ranks}, "precision": {"compute": "float32"}, "checkpoint": {"every_steps": 0}}
        found = _run(ranks, {"tokens": 8192, "steps": 3, "model": model, "sections": sections})
        peak, seconds = found["peak"] / MEBIBYTE, found["seconds"][0]
        first = first if ranks > 1 else (peak, seconds)
        shown = f"{peak:6,.0f}  {peak / first[0]:6.2f}  {seconds:11.2f}  {seconds / first[1]:6.2f}"
        print(f"{ranks:5}  {shown}  {found['loss']:.6f}", flush=True)


def long(length: int) -> None:
    """Take a step of one long sequence."""
    sizes = {"hidden_size": 512, "intermediate_size": 20480, "num_hidden_layers": 2, "num_attention_heads": 8}
    sections = {
        "model": {"activation_checkpointing": "block", "tile_tokens": 4096},
        "offload": {"activations": "file"},
        "checkpoint": {"every_steps": 0},
    }
    model = {**sizes, "num_key_value_heads": 2, "vocab_size": 32000}
    found = _run(1, {"tokens": length, "steps": 1, "model": model, "sections": sections})
    shown = f"{found['resident'] / MEBIBYTE:,.0f} MiB, loss {found['loss']:.3f}"
    print(f"{found['parameters'] / 1e6:.0f} million parameters, {length:,} tokens: {shown}", flush=True)


PARTS: dict[str, Callable[[], None]] = {"tokens": tokens, "tiles": tiles, "attention": attention, "context": context}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "long", []], default=[], help="parts to measure")
    parser.add_argument("--tokens", type=int, default=1 << 17, help="tokens of the long sequence")
    arguments = parser.parse_args()
    for part in arguments.parts or PARTS:
        PARTS.get(part, partial(long, arguments.tokens))()
