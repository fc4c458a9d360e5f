"""One rank of a planned layout: `python -m bench.planned CONFIGURATION`, started by `launch.run_ranks`.

Trains as a user does and prints one line that begins with `RESULT`: the seconds of the timed steps, and the highest memory of the
others above that after imports, as in `bench.probe`.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

from bench.probe import Memory, Sampler, memory_now
from bench.worker import RESULT, die_with_parent
from zeromesh import Callback, Trainer
from zeromesh.environment import read_environment
from zeromesh.trainer.config.load import load_config

STEPS, TIMED = 7, 4
"""Steps of a run, and how many at its end are timed. Memory is looked at in those before them, which the looking slows down."""


class Watch(Callback):
    """Looks at memory until the timed steps begin."""

    def __init__(self, ranks: int) -> None:
        self.base = memory_now(ranks)
        self.sampler = Sampler(ranks)
        self.sampler.watch(on=True)
        self.seconds: list[float] = []
        self.phases: list[Mapping[str, float]] = []
        self.peak = Memory()
        self.ledger: dict[str, int] = {}

    def on_train_begin(self, trainer: Any) -> None:
        """What building took does not count."""
        self.sampler.reset()

    def on_step_end(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Note a step; the last one that is not timed ends the looking."""
        if step == STEPS - TIMED:
            self.sampler.watch(on=False)
            self.peak = self.sampler.peak
        if step == STEPS:
            self.ledger = {each.name: nbytes for each, nbytes in trainer.engine.ledger.by_purpose().items()}
        if step > STEPS - TIMED:
            self.seconds.append(metrics["step_seconds"])
            self.phases.append(metrics["phases"])


def main() -> None:
    """Train, print."""
    die_with_parent()
    torch.set_num_threads(1)
    config = load_config(None, json.loads(sys.argv[1]))
    watch = Watch(read_environment().world_size)
    with Trainer(config=config, callbacks=[watch]) as trainer:
        trainer.fit()
    found = {
        "seconds": watch.seconds,
        "phases": watch.phases,
        "peak": (watch.peak - watch.base).total,
        "base": watch.base.total,
        "ledger": watch.ledger,
    }
    print(RESULT + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
