"""Directories of runs as a trainer leaves them, with everything in them that a report can show."""

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeromesh.trainer.config.trainer_config import TrainerConfig

HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"


_PHASES = {"data": 0.012, "forward": 0.28, "backward": 0.46, "communication": 0.09, "optimizer": 0.10, "offload_wait": 0.02}


def line_of(step: int, steps: int, chance: random.Random) -> dict[str, Any]:
    """A line of metrics with all that a trainer writes."""
    seconds = 0.42 + 0.05 * chance.random() + (3.1 if step == 1 else 0.0)
    falling = math.exp(-12 * step / steps)
    tokens = 65536
    return {
        "step": step,
        "loss": 2.1 + 7.5 * falling + chance.gauss(0, 0.06),
        "grad_norm": 0.8 + 6 * falling + abs(chance.gauss(0, 0.25)) + (60 if step == steps // 2 else 0),
        "lr": 6e-4 * min(1.0, 20 * step / steps) * (0.5 + 0.5 * math.cos(math.pi * step / steps)),
        "tokens": tokens * step,
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
        "peak_memory_bytes": 9_200_000_000 + (400_000_000 if step > 50 else 0),
        "mfu": 0.18 / seconds,
        "phases": {phase: share * seconds for phase, share in _PHASES.items()},
        "memory": {
            "device": {
                "parameters": 2_100_000_000,
                "master": 1_000_000_000,
                "gradients": 1_000_000_000,
                "activations": int(5e8 + 2e8 * chance.random()),
            },
            "file": {"moments": 4_000_000_000},
        },
        "file_wait_seconds": 0.02 * seconds,
        "bubble": {"predicted": 0.2, "measured": 0.2 + abs(chance.gauss(0, 0.02))},
        "communication": {
            "shard": {
                "all-gather": {"calls": 48, "bytes": 402653184, "seconds": 0.021 + 0.004 * chance.random()},
                "reduce-scatter": {"calls": 24, "bytes": 402653184, "seconds": 0.012},
            },
            "tensor": {"all-reduce": {"calls": 96, "bytes": 25165824, "seconds": 0.006}},
            "world": {"agreement": {"calls": 3, "bytes": 120, "seconds": 0.0007}},
        },
    }


def write_run(
    path: Path, *, steps: int = 200, seed: int = 0, ranks: int = 8, changes: Mapping[int, Mapping[str, Any]] | None = None
) -> Path:
    """A run of so many steps; `changes` are further fields of lines, by step."""
    chance, changed = random.Random(seed), changes or {}
    path.mkdir(parents=True)
    write_lines(path, [line_of(step, steps, chance) | dict(changed.get(step, {})) for step in range(1, steps + 1)])
    evaluations = [
        {"step": step, "eval_loss": 2.2 + 7.5 * math.exp(-12 * step / steps), "eval_accuracy": step / (steps + 50)}
        for step in range(50, steps + 1, 50)
    ]
    write_lines(path, evaluations, "evaluations.jsonl")
    sections = {
        "run": {"name": "llama-8b", "max_steps": steps},
        "optimizer": {"lr": 1e-3 if seed else 6e-4},
        "parallel": {"tensor": 2, "pipeline": 2} if ranks >= 4 else {},
        "offload": {"optimizer": {"tier": "file"}},
    }
    (path / "config.resolved.yaml").write_text(TrainerConfig.model_validate(sections).to_yaml())
    states = [
        {"rank": rank, "pid": 100 + rank, "step": steps, "doing": "in forward of unit layers.3", "failure": ""}
        for rank in range(ranks)
    ]
    (path / "ranks.json").write_text(json.dumps({"time": 1.79e9, "ranks": states}))
    # What a step's memory was: units that are gathered one after the other, and gradients that come with them.
    events: list[list[Any]] = [[0.0, "device", "parameters", 1 << 30], [0.0, "device", "moments", 2 << 30]]
    for place in range(40):
        events.append([0.01 + 0.01 * place, "device", "parameters", (1 << 30) + (place % 2) * (128 << 20)])
        events.append([0.01 + 0.01 * place, "device", "gradients", min(place, 40 - place) * (32 << 20)])
    events.append([0.0, "file", "moments", 4 << 30])
    content = {"step": 2, "seconds": 0.45, "events": sorted(events, key=lambda event: event[0])}
    (path / "step_memory.json").write_text(json.dumps(content))
    return path


def write_lines(path: Path, lines: list[dict[str, Any]], name: str = "metrics.jsonl") -> None:
    """Replace a run's lines of metrics, or of another file."""
    (path / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
