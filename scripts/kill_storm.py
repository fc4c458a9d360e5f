"""Runs in which ranks kill themselves at random instants, compared with undisturbed ones: `python scripts/kill_storm.py`.

Each layout of `LAYOUTS` trains a small Llama for 25 steps, once undisturbed and `--times` times in a storm: with the chance
`--rate` a rank ends by SIGKILL when it posts what it does, and six to sixty times as often around marks and records of an update.
A run that goes on to its end must have the same bits in every loss, every norm and every parameter. One that the launcher ends is
counted as ended, and why is printed: all ranks were killed at once, or some of them three times after the same step. Prints a row a
layout, and exits with 1 where something differs. Takes ten minutes on two cores.
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
import time
from collections import Counter
from pathlib import Path
from typing import Any

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
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)  # the layout and the folder of a rank
    options = parser.parse_args()
    if options.rank:
        _train(*options.rank, rate=options.rate)
        return 0
    all_equal, total = True, Counter[str]()
    print("layout              kills  from memory  from disk  equal  ended  seconds")
    for layout in [options.only] if options.only else LAYOUTS:
        began, sums = time.time(), Counter[str]()
        with tempfile.TemporaryDirectory() as folder:
            wanted, _ = _run(layout, Path(folder) / "undisturbed", 0.0)
            for number in range(options.times):
                found, counts = _run(layout, Path(folder) / str(number), options.rate)
                sums += counts + Counter({"equal": int(found == wanted), "ended": int(found is None)})
        equal = wanted is not None and sums["equal"] + sums["ended"] == options.times
        all_equal, total = all_equal and equal, total + sums
        counts_shown = "  ".join(f"{sums[name]:9}" for name in ("kills", "memory", "disk", "equal", "ended"))
        print(f"{layout:18}{counts_shown}  {time.time() - began:7.0f}{'' if equal else '  DIFFERENT'}", flush=True)
    print(f"{total['kills']} kills; {'all runs that went on are equal' if all_equal else 'something differs'}")
    return int(not all_equal)


def _run(layout: str, folder: Path, rate: float) -> tuple[list[Any] | None, Counter[str]]:
    """Run a layout; returns its losses, norms and a digest of its parameters, or None where it was ended, and what happened."""
    folder.mkdir()
    words = ["run", "--nproc", str(LAYOUTS[layout][0]), "--", __file__, "--rate", str(rate), "--rank", layout, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-m", "zeromesh", *words], capture_output=True, text=True, env=environment, timeout=600)
    kills = (folder / "kills").read_text().count("\n") if (folder / "kills").exists() else 0
    counts = {"memory": ended.stdout.count("went on after step"), "disk": ended.stdout.count("resumed from step")}
    if ended.returncode:
        if not kills:
            raise RuntimeError(ended.stderr)
        lines = ended.stderr.splitlines()
        print(f"{layout} has ended: {([line for line in lines if 'no more recovery' in line] or lines)[-1]}", flush=True)
        return None, Counter({"kills": kills, **counts})
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    figures = [[line["step"], line["loss"], line["grad_norm"]] for line in lines]
    return [*figures, (folder / "digest").read_text()], Counter({"kills": kills, **counts})


def _train(layout: str, folder: str, *, rate: float) -> None:
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
        "run": {"max_steps": STEPS, "output_dir": folder, "name": "run", "clip_norm": 0.5, "eval_at_end": False},
        "checkpoint": {"every_steps": 10},
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
