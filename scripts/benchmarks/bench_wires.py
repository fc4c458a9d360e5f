"""Measures what replicas on two hosts with a thin wire cost: `python scripts/benchmarks/bench_wires.py [PART ...]`.

Hosts are network namespaces with names of their own, joined by a bridge, each with two ranks; what a host sends is slowed down by a
token bucket (`tc tbf`). That needs root, `ip`, `tc` and `unshare`. A part is one of these, both by default:

hosts: steps of a Llama of 14 million parameters in bfloat16, `--microbatches` of one sequence of 64 tokens each: stage 3 over all
ranks, replicas with all states, replicas that divide them, and these with each codec and with what `auto` takes. For each rate the
median seconds of a step, the bytes that a host sends in it by the counters of its interface, and both as parts of the first row and
of that without a codec. The ways take turns, `--rounds` times. Two minutes a rate and round on two idle cores.

loss: the loss after 240 steps of the quickstart's model, 4 sequences of 256 tokens a step, on two ranks of this host, with each
codec, and its distance from the exact one. `nudged` is exact, but with a learning rate that is a thousandth larger: how far
training carries a change as small as that of a codec. A minute for each run on two idle cores.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.thin_wire import run_on, slow_down
from bench.wires import WAYS

from tests.support.hosts import hosts
from zeromesh.trainer.monitoring.step_metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
NAMES, SLOTS, PORT = ("alpha", "beta"), 2, 29511
RATES = ("200mbit", "1gbit", "10gbit", "none")
STEPS = 240


def between_hosts(rates: list[str], rounds: int, ways: list[str], microbatches: int) -> None:
    words = [str(microbatches), *ways]
    with tempfile.TemporaryDirectory() as folder, hosts(Path(folder), *NAMES) as made:
        for number, rate in enumerate(rates):
            slow_down(made, rate)
            seconds, nbytes, chosen = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list), ""
            for turn in range(rounds):
                for found in run_on(made, SLOTS, PORT + rounds * number + turn, "bench.wires", words):
                    way = str(found["way"])
                    seconds[way] += found["seconds"]  # type: ignore[arg-type]
                    nbytes[way] += found["bytes"]  # type: ignore[arg-type]
                    chosen = str(found["chosen"]) if way == "auto" else chosen
            print(f"\n{rate}\n\n| way | MB | of flat | seconds | of flat | of exact |\n|---|---|---|---|---|---|", flush=True)
            for way in ways:
                size, time = (statistics.median(each[way]) for each in (nbytes, seconds))
                parts = [size / statistics.median(nbytes[ways[0]]), time / statistics.median(seconds[ways[0]])]
                beside = time / statistics.median(seconds["exact"]) if "exact" in ways else float("nan")
                print(f"| {way} | {size / 1e6:.1f} | {parts[0]:.3f} | {time:.2f} | {parts[1]:.2f} | {beside:.2f} |", flush=True)
            print(chosen, flush=True)


def losses(seed: int, codecs: list[str]) -> None:
    found = {}
    print(f"\nseed {seed}\n\n| codec | mean loss of 20 steps | evaluation loss | apart |\n|---|---|---|---|", flush=True)
    for name in codecs:
        with tempfile.TemporaryDirectory() as folder:
            keys = {
                "parallel.replicate": 2,
                "parallel.transport": "gloo",
                "parallel.wire": "exact" if name == "nudged" else name,
                "optimizer.lr": 1.001e-3 if name == "nudged" else 1e-3,
                "zero.replicas": "divided",
                "batch.global_size": 4,
                "batch.micro_size": 2,
                "run.seed": seed,
                "run.max_steps": STEPS,
                "run.eval_every": STEPS,
                "run.output_dir": folder,
                "checkpoint.every_steps": 0,
            }
            words = [f"{key}={value}" for key, value in keys.items()]
            command = [sys.executable, "-m", "zeromesh", "train", str(ROOT / "configs/quickstart.yaml"), "--nproc", "2"]
            variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL, env=variables, cwd=folder)
            lines = read_metrics(Path(folder, "quickstart", "metrics.jsonl"))
            evaluations = read_metrics(Path(folder, "quickstart", "evaluations.jsonl"))
        loss = statistics.mean(line["loss"] for line in lines[-20:])
        found[name] = evaluations[-1]["eval_loss"]
        apart = found[name] / found["exact"] - 1
        print(f"| {name} | {loss:.4f} | {found[name]:.4f} | {apart:+.3%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["hosts", "loss"])
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--codecs", nargs="+", default=["exact", "nudged", "bfloat16", "int8", "int4"], help="of `loss`, exact first"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=4)
    given = parser.parse_args()
    if "hosts" in given.parts:
        between_hosts(given.rates, given.rounds, given.ways, given.microbatches)
    if "loss" in given.parts:
        for seed in given.seeds:
            losses(seed, given.codecs)


if __name__ == "__main__":
    main()
