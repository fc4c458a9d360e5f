"""Runs in which ranks kill themselves at random instants, compared with undisturbed ones: `python scripts/kill_storm.py`.

Each layout of `LAYOUTS` trains a small Llama for 25 steps, once undisturbed and `--times` times in a storm: with the chance
`--rate` a rank ends by SIGKILL when it posts what it does, and six to sixty times as often around marks and records of an update.
A run that goes on to its end must have the same bits in every loss, every norm and every parameter. One that the launcher ends is
counted as ended, and why is printed: all ranks were killed at once, or some of them three times after the same step. Prints a row a
layout, and exits with 1 where something differs. Takes ten minutes on two cores.

With `--outside N` ranks are killed by this command instead, N times in each run of 6 N steps without checkpoints: any of them at
any time in a step, and often another one, or the new one, up to two seconds later, wherever it is in the recovery. As one is always
left, a run that begins anew or ends counts as different. `--outside 4 --times 1` takes half an hour. With `--hosts H` the ranks of
each run are started by H launchers, as on H hosts, which divide the ranks, rounded up.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
from bench.processes import free_port

from zeromesh.trainer.monitoring.step_metrics import read_metrics, step_of

WIDE = {"compute": "float64", "reduce": "float64", "master": "float64"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage {stage}": (3, {"zero": {"stage": stage}}) for stage in range(4)},
    "gloo": (3, {"parallel": {"transport": "gloo"}}),
    "nothing kept": (3, {"zero": {"gathered_budget": 0}}),
    "tensor x pipeline": (4, {"parallel": {"tensor": 2, "pipeline": 2}}),
    "replicas": (4, {"parallel": {"replicate": 2}, "zero": {"stage": 2}}),
    "context": (4, {"parallel": {"context": 2}}),
    "host": (3, {"offload": {"optimizer": "host", "gradients": "host"}}),
    "average": (3, {"ema": {"decay": 0.9}}),
    "bfloat16": (3, {"precision": {"compute": "bfloat16"}}),
    "momentum": (3, {"optimizer": {"name": "sgd", "momentum": 0.9, "lr": 0.01}}),
}
STEPS = 25


def main() -> int:
    """Run the layouts, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--only", choices=LAYOUTS, help="one layout")
    parser.add_argument("--outside", type=int, default=0, metavar="N", help="kills from outside in each run")
    parser.add_argument("--hosts", type=int, default=1, metavar="H", help="launchers that start the ranks of a run")
    parser.add_argument("--seed", type=int, default=0, help="of kills from outside")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)  # the layout and the folder of a rank
    options = parser.parse_args()
    steps = 6 * options.outside or STEPS
    if options.rank:
        _train(*options.rank, rate=options.rate, steps=steps)
        return 0
    dice = random.Random(options.seed) if options.outside else None
    all_equal, total = True, Counter[str]()
    print("layout              kills  from memory  from disk  begun anew  equal  ended  seconds")
    for layout in [options.only] if options.only else LAYOUTS:
        began, sums = time.time(), Counter[str]()
        with tempfile.TemporaryDirectory() as folder:
            wanted, _ = _run(layout, Path(folder) / "undisturbed", 0.0, options)
            for number in range(options.times):
                rate = 0.0 if options.outside else options.rate
                found, counts = _run(layout, Path(folder) / str(number), rate, options, dice)
                sums += counts + Counter({"equal": int(found == wanted), "ended": int(found is None)})
        wrong = options.outside and sums["anew"] + sums["ended"]
        equal = wanted is not None and sums["equal"] + sums["ended"] == options.times and not wrong
        all_equal, total = all_equal and equal, total + sums
        counts_shown = "  ".join(f"{sums[name]:9}" for name in ("kills", "memory", "disk", "anew", "equal", "ended"))
        print(f"{layout:18}{counts_shown}  {time.time() - began:7.0f}{'' if equal else '  DIFFERENT'}", flush=True)
    print(f"{total['kills']} kills; {'all runs that went on are equal' if all_equal else 'something differs'}")
    return int(not all_equal)


def _run(
    layout: str, folder: Path, rate: float, options: argparse.Namespace, dice: random.Random | None = None
) -> tuple[list[Any] | None, Counter[str]]:
    """Run a layout; returns its losses, norms and a digest of its parameters, or None where it was ended, and what happened. With
    `dice` the ranks are killed from outside."""
    folder.mkdir()
    outside, hosts = options.outside, options.hosts
    each = -(-LAYOUTS[layout][0] // hosts)
    meet = ["--nnodes", str(hosts), "--rdzv-endpoint", f"localhost:{free_port()}"] if hosts > 1 else []
    words = ["--rate", str(rate), "--outside", str(outside), "--rank", layout, str(folder)]
    command = [sys.executable, "-m", "zeromesh", "run", "--nproc", str(each), *meet]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launchers, outputs = [], [folder / f"{number}.{name}" for number in range(hosts) for name in ("out", "err")]
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("w")) for path in outputs]
        for number in range(hosts):
            own = ["--node-rank", str(number)] if hosts > 1 else []
            out, err = files[2 * number : 2 * number + 2]
            launchers.append(subprocess.Popen([*command, *own, "--", __file__, *words], stdout=out, stderr=err, env=environment))
            stack.callback(launchers[-1].kill)  # Its ranks end with it.
        if dice is not None:
            threading.Thread(target=_strike_from_outside, args=(launchers, folder, outside, dice), daemon=True).start()
        codes = [launcher.wait(timeout=600) for launcher in launchers]
    out, err = ("".join(path.read_text() for path in outputs[name::2]) for name in (0, 1))
    kills = (folder / "kills").read_text().count("\n") if (folder / "kills").exists() else 0
    said = {"memory": "went on after step", "disk": "resumed from step", "anew": f"step 1/{6 * outside or STEPS} "}
    counts = {name: out.count(text) for name, text in said.items()}
    counts["anew"] = max(0, counts["anew"] - 1)
    if any(codes):
        if not kills:
            raise RuntimeError(err)
        lines = err.splitlines()
        print(f"{layout} has ended: {([line for line in lines if 'no more recovery' in line] or lines)[-1]}", flush=True)
        return None, Counter({"kills": kills, **counts})
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    figures = [[line["step"], line["loss"], line["grad_norm"]] for line in lines]
    return [*figures, (folder / "digest").read_text()], Counter({"kills": kills, **counts})


def _strike_from_outside(launchers: list[subprocess.Popen[bytes]], folder: Path, times: int, dice: random.Random) -> None:
    """Kill ranks of a run at random instants, `times` times, and most times another one, or the new one, in the recovery."""

    def step() -> int:
        path = folder / "run" / "metrics.jsonl"
        return max([0, *map(step_of, read_metrics(path))]) if path.exists() else 0

    def ranks() -> list[psutil.Process]:
        importers = [importer for launcher in launchers for importer in psutil.Process(launcher.pid).children()]
        return [each for importer in importers for each in importer.children()]

    def kill(victim: psutil.Process) -> None:
        victim.kill()
        with (folder / "kills").open("a") as file:
            file.write("killed\n")

    with suppress(psutil.NoSuchProcess):  # The run has ended.
        while step() < 3:
            time.sleep(0.05)
        for _ in range(times):
            there = ranks()
            time.sleep(dice.uniform(0.0, 0.4))
            kill(dice.choice(there))
            if (whom := dice.choice(["new", "new", "old", "none"])) != "none":
                time.sleep(dice.uniform(0.0, 2.0))
                if found := [each for each in ranks() if (each in there) == (whom == "old")]:
                    kill(dice.choice(found))
            before = step()
            while step() < before + 2:  # One of the two steps at least is made with new ranks.
                time.sleep(0.05)


def _train(layout: str, folder: str, *, rate: float, steps: int) -> None:
    """Train as one rank of a layout, and end by SIGKILL at random."""
    import torch
    import transformers as tf

    from zeromesh import Trainer
    from zeromesh.offload.memory.allocation import tensor_bytes
    from zeromesh.offload.memory.state_memory import StateMemory
    from zeromesh.optim import journal
    from zeromesh.telemetry.watchdog import Watchdog

    dice = random.Random(os.getpid() * 7 + time.time_ns())

    def strike(times: int) -> None:
        if dice.random() < times * rate:
            with Path(folder, "kills").open("a") as file:
                file.write("killed\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def struck(owner: Any, name: str, times: int) -> None:
        method = getattr(owner, name)

        def around(*given: Any, **named: Any) -> Any:
            strike(times)
            found = method(*given, **named)
            strike(times)
            return found

        setattr(owner, name, around)

    struck(StateMemory, "mark", 6)
    struck(StateMemory, "write_record", 60)
    struck(Watchdog, "post", 1)
    journal.CHUNK_ELEMENTS = 2048
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "use_cache": False}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 64, (12,), generator=generator) for _ in range(64)]
    settings: dict[str, Any] = {
        "precision": WIDE,
        "optimizer": {"lr": 0.01},
        "batch": {"global_size": 12, "micro_size": 1},
        "run": {"max_steps": steps, "output_dir": folder, "name": "run", "clip_norm": 0.5, "eval_at_end": False},
        "checkpoint": {"every_steps": 10 if steps == STEPS else 0},
        "recovery": {"limit": 1000},
        **LAYOUTS[layout][1],
    }
    data = [{"input_ids": row, "labels": row} for row in rows]
    build = lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, **heads))  # noqa: E731
    with Trainer(build, settings, data) as trainer:
        trainer.fit()
        digest = hashlib.blake2b(digest_size=8)
        for name, tensor in sorted(trainer.state_dict()):
            digest.update(name.encode() + tensor_bytes(tensor).numpy().tobytes())
        if trainer.mesh.rank == 0:
            Path(folder, "digest").write_text(digest.hexdigest())


if __name__ == "__main__":
    sys.exit(main())
