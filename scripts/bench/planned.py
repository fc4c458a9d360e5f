"""One rank of a planned layout: `python -m bench.planned KEYS [FILE]`, started by `launch.run_ranks`.

Trains as a user does and prints one line that begins with `RESULT`: the layout, the seconds of the timed steps, and the highest
memory of the others above that after imports, as in `bench.probe`.
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

WARM = 3
"""Steps before those that are timed. Memory is looked at in them, which the looking slows down."""


class Watch(Callback):
    """Looks at memory until the timed steps begin."""

    def __init__(self, ranks: int, steps: int) -> None:
        self.steps = steps
        self.base = memory_now(ranks)
        self.sampler = Sampler(ranks)
        self.sampler.watch(on=True)
        self.seconds: list[float] = []
        self.phases: list[Mapping[str, float]] = []
        self.peak = Memory()
        self.ledger: dict[str, int] = {}

    def on_train_begin(self, trainer: Any) -> None:
        """Reset the sampler: what building took does not count."""
        self.sampler.reset()

    def on_step_end(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Note a step; the last one that is not timed ends the looking."""
        if step == WARM:
            self.sampler.watch(on=False)
            self.peak = self.sampler.peak
        if step == self.steps:
            self.ledger = {each.name: nbytes for each, nbytes in trainer.engine.ledger.by_purpose().items()}
        if step > WARM:
            self.seconds.append(metrics["step_seconds"])
            self.phases.append(metrics["phases"])


def main() -> None:
    """Train, print."""
    die_with_parent()
    torch.set_num_threads(1)
    ranks = read_environment().world_size
    config = load_config(sys.argv[2] if len(sys.argv) > 2 else None, json.loads(sys.argv[1]), ranks=ranks)
    watch = Watch(ranks, config.run.max_steps)
    with Trainer(config=config, callbacks=[watch]) as trainer:
        trainer.fit()
        notes = [note for note in trainer.config.notes if note.startswith("auto: ")]
    found = {
        "auto": notes[-1].removeprefix("auto: ").partition(", the first row")[0] if notes else "",
        "seconds": watch.seconds,
        "phases": watch.phases,
        "peak": (watch.peak - watch.base).total,
        "base": watch.base.total,
        "ledger": watch.ledger,
    }
    print(RESULT + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
