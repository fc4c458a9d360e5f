"""Local steps: their speed on a slow link, and what they learn: `python scripts/benchmarks/bench_local_steps.py` (as root).

    speed     two hosts of this machine (network namespaces, `tc tbf` at `--rate`) train 3.3M parameters, one replica each, that
              sleep `--seconds` a step in place of computing, whatever else cores do: `alone` meets nobody until its end,
              `every 20` is brought together after 20 steps, `every 1` sums each step's gradients. Seconds a step, from the end of
              one sync to that of a later one, and the bytes that replicas send
    quality   a small Llama is trained for a while, and goes on for `--more` steps: as `one` replica; as two with other samples
              each, which after 20 steps are averaged (`average`) or follow an outer optimizer (`outer`), or which sum gradients
              (`every 1`). Evaluation losses, and how much less than one replica's they are, over `--rounds` orders of samples

Printed are medians (lowest, highest) over rounds, and ratios round by round.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
from bench.report import Spread  # noqa: E402

EVERY = 20
SLEEPER = """\
import time

import torch
from torch import nn


class Sleeper(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(256, 512), nn.Linear(512, 256)
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(12))

    def forward(self, input_ids, labels):
        time.sleep(SECONDS)
        hidden = self.embed(input_ids).mean(1)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return nn.functional.cross_entropy(self.head(hidden), labels[:, -1])
"""
_TIMEOUT = 3600.0


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of metrics."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(folder: Path, config: Mapping[str, Any], command: Sequence[str]) -> None:
    """Run a command with a configuration."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(dict(config)))
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    variables.pop("GLOO_SOCKET_IFNAME", None)
    log = folder / "log"
    with log.open("w") as out:
        words = [*command, str(path)]
        found = subprocess.run(words, stdout=out, stderr=out, env=variables, timeout=_TIMEOUT, check=False)
    if found.returncode:
        sys.exit(log.read_text()[-4000:])


def quickstart() -> dict[str, Any]:
    """The configuration of the quickstart, without checkpoints and evaluations."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "trainer/configs/quickstart.yaml").read_text())
    config["run"] = {"name": "run", "eval_every": 0, "eval_at_end": False}
    return config | {"checkpoint": {"every_steps": 0}, "schedule": {"name": "constant"}}


def speed(options: argparse.Namespace) -> None:
    """Measure steps on two hosts."""
    from tests.support.hosts import hosts

    # The first sync, at which figures begin, has memory to allocate.
    ways = {"alone": (10**6, 2 * EVERY + 1), "every 20": (EVERY, 3 * EVERY + 1), "every 1": (1, 12)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    sent: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name, hosts(Path(name), "alpha", "beta") as two:
        for each in two.names:
            inside = ["ip", "netns", "exec", f"{two.prefix}-{each}"]
            shape = ["tc", "qdisc", "add", "dev", "wire0", "root", "tbf", "rate", options.rate]
            subprocess.run([*inside, *shape, "burst", "64kb", "latency", "200ms"], check=True)
        for number in range(options.rounds):
            for way, (every, steps) in ways.items():
                folder = Path(name) / f"{way.replace(' ', '-')}-{number}"
                folder.mkdir()
                (folder / "sleeper.py").write_text(SLEEPER.replace("SECONDS", str(options.seconds)))
                config = quickstart()
                config["model"] = {"python": "sleeper:Sleeper"}
                config["data"] |= {"sequence_length": 64}
                config["run"] |= {"output_dir": str(folder), "max_steps": steps, "log_every": 1}
                config["parallel"] = {"replicate": 2, "sync_every": every, "timeout_seconds": 600}
                config["batch"] = {"global_size": 4, "micro_size": 2}
                launch = [sys.executable, "-m", "zeromesh", "launch", "--ssh", two.ssh]
                launch += ["--hostfile", str(two.hostfile(folder / "hosts"))]
                train(folder, config, [*two.middle, *launch])
                lines = {line["step"]: line for line in lines_of(folder / "run" / "metrics.jsonl")}
                first, last = (1, steps - 1) if every == 1 else (EVERY, steps - 1)
                # A line is written after its step, and at a sync after the replicas have met.
                seconds[way].append((lines[last]["time"] - lines[first]["time"]) / (last - first))
                moved = (lines[n].get("communication", {}).get("replicate", {}) for n in range(first + 1, last + 1))
                sent[way] = sum(row["bytes"] for each in moved for row in each.values()) / (last - first)
                print(f"{way}: {seconds[way][-1]:.3f} s", file=sys.stderr, flush=True)
    print(f"two hosts of one replica each, {options.rate}, {options.seconds:g} s a step without the other")
    print("| replicas | s a step | speed of alone | MB a step to the other |\n|---|---:|---:|---:|")
    for way in ways:
        ratio = Spread.of(alone / own for alone, own in zip(seconds["alone"], seconds[way], strict=True))
        print(f"| {way} | {Spread.of(seconds[way]).text(2)} | {ratio.text(2)} | {sent[way] / 1e6:.2f} |")


def quality(options: argparse.Namespace) -> None:
    """Compare what replicas learn from a trained model on."""
    ways: dict[str, dict[str, Any]] = {
        "one": {},
        "average": {"replicate": 2, "sync_every": EVERY},
        "outer": {"replicate": 2, "sync_every": EVERY, "outer": {"lr": 0.7, "momentum": 0.9}},
        "every 1": {"replicate": 2},
    }
    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "num_attention_heads": 4}
    losses: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as name:
        config = quickstart()
        config["model"]["config"] |= {**sizes, "num_key_value_heads": 4}
        config["data"] |= {"sequence_length": 128, "eval_samples": 512}
        config["batch"] = {"global_size": 8, "micro_size": 8}
        zeromesh = [sys.executable, "-m", "zeromesh", "train"]
        first = Path(name) / "first"
        first.mkdir()
        begun = {**config, "run": {**config["run"], "output_dir": str(first), "max_steps": options.first}}
        train(first, {**begun, "checkpoint": {"every_steps": options.first}}, [*zeromesh, "--nproc", "1"])
        (trained,) = (first / "run" / "checkpoints").glob("step-*")
        config["model"] = {"source": str(trained)}
        for number in range(options.rounds):
            for way, parallel in ways.items():
                folder = Path(name) / f"{way.replace(' ', '-')}-{number}"
                folder.mkdir()
                replicas = parallel.get("replicate", 1)
                run = {"output_dir": str(folder), "max_steps": options.more, "eval_at_end": True, "seed": number + 1}
                own = {**config, "run": {**config["run"], **run}, "parallel": {**parallel, "timeout_seconds": 600}}
                own |= {"batch": {"global_size": 8 * replicas, "micro_size": 8}, "optimizer": {"lr": options.lr}}
                train(folder, own, [*zeromesh, "--nproc", str(replicas)])
                losses[way].append(lines_of(folder / "run" / "evaluations.jsonl")[-1]["eval_loss"])
                print(f"{way}: {losses[way][-1]:.4f}", file=sys.stderr, flush=True)
    print(f"{options.first} steps, then {options.more} more of 8 samples for each replica, learning rate {options.lr:g}")
    print("| replicas | evaluation loss | less than one replica's |\n|---|---:|---:|")
    for way in ways:
        less = Spread.of(one - own for one, own in zip(losses["one"], losses[way], strict=True))
        print(f"| {way} | {Spread.of(losses[way]).text(4)} | {less.text(4)} |")


def main() -> int:
    """Measure one part or both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("speed", "quality", "both"), default="both")
    for name, default in (("--rounds", 3), ("--first", 400), ("--more", 200)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--rate", default="100mbit", help="of each host, as tc writes it")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    for part in (speed, quality):
        if options.part in (part.__name__, "both"):
            part(options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
