"""The cost of recording a rank's latest events: nanoseconds of an event, and a step of a small model with and without it.

    torchrun --nproc-per-node 2 scripts/benchmarks/bench_events.py

Steps with and without alternate in one run, so that what else the machine does falls on both.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from zeromesh import Trainer
from zeromesh.telemetry.status_board import BEGIN, Activity, EventRing, StatusBoard, new_row
from zeromesh.telemetry.watchdog import Watchdog
from zeromesh.trainer.callbacks import Callback
from zeromesh.trainer.config.load import load_config

_CALLS, _STEPS = 100_000, 160


class _NoRing(EventRing):
    """Forgets what it is told."""

    def add(self, code: int, at: int = 0) -> None:
        """Do nothing."""


class _Alternate(Callback):
    """Takes the record away in every second step, and keeps the seconds of both kinds."""

    def __init__(self) -> None:
        self.seconds: tuple[list[float], list[float]] = ([], [])
        self._rings: tuple[EventRing, EventRing] | None = None

    def on_step_begin(self, trainer: Any, step: int) -> None:
        """Choose the record of the step."""
        self._rings = self._rings or (trainer.mesh.watch.ring, _NoRing())
        trainer.mesh.watch.ring = trainer.mesh.recorder.ring = self._rings[step % 2]
        self._began = time.perf_counter()

    def on_optimizer_step(self, trainer: Any, step: int) -> None:
        """Keep its seconds. The first steps are others."""
        if step > 20:
            self.seconds[step % 2].append(time.perf_counter() - self._began)


def _nanoseconds(call: Callable[[int], object]) -> float:
    def once() -> float:
        began = time.perf_counter()
        for number in range(_CALLS):
            call(number)
        return 1e9 * (time.perf_counter() - began) / _CALLS

    return min(once() for _ in range(5))


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def main() -> None:
    """Measure and print on rank 0."""
    ring, watch = EventRing(), Watchdog(StatusBoard({0: new_row()}, 0), 0, 30.0, compare_events=True)
    empty = _nanoseconds(lambda number: None)
    figures = {
        "an event": _nanoseconds(lambda number: ring.add(BEGIN | 3)) - empty,
        "a post with it": _nanoseconds(lambda number: watch.post(Activity.FORWARD, number & 7)) - empty,
    }
    watch.ring = _NoRing()
    figures["a post without"] = _nanoseconds(lambda number: watch.post(Activity.FORWARD, number & 7)) - empty
    watch.close()
    size = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            {
                "model": {"config": {"model_type": "llama", "num_key_value_heads": 4, "use_cache": False, **size}},
                "data": {"train": "stdlib", "tokenizer": "bytes", "sequence_length": 128},
                "zero": {"stage": 3},
                "batch": {"global_size": 8, "micro_size": 2},
                "checkpoint": {"every_steps": 0},
                "run": {"output_dir": folder, "max_steps": _STEPS, "log_every": 1000},
            }
        )
        alternate = _Alternate()
        with Trainer(config=config, callbacks=[alternate]) as trainer:
            trainer.fit()
            rank = trainer.mesh.rank
    if rank == 0:
        _print("; ".join(f"{what}: {value:.0f} ns" for what, value in figures.items()))
        recorded, plain = map(statistics.median, alternate.seconds)
        _print(f"a step: {1e3 * recorded:.2f} ms with the record, {1e3 * plain:.2f} ms without")


if __name__ == "__main__":
    main()
