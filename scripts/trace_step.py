"""Count the project's files and Python calls of a training step, a save and a load, on one rank; prints one line of JSON.

`python scripts/trace_step.py` measures the checkout that Python imports; `scripts/structure_report.py --trace` compares several.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import zeromesh
from zeromesh import Trainer
from zeromesh.trainer.callbacks.callback import Callback

HOME = str(Path(zeromesh.__file__).resolve().parent.parent)
BLOCKS, WIDTH = 4, 64


class Net(nn.Module):
    """A few blocks with a scalar loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Counter(Callback):
    """Counts the project's calls by phase: a step without a save, then what follows a step that asks for one, then a load."""

    def __init__(self) -> None:
        self.phase = ""
        self.calls: dict[str, int] = defaultdict(int)
        self.files: dict[str, set[str]] = defaultdict(set)

    def profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        """What `sys.setprofile` calls."""
        name = frame.f_code.co_filename
        if (
            self.phase
            and event == "call"
            and name.startswith(f"{HOME}/zeromesh/")
            and not name.endswith("trace_step.py")
        ):
            self.calls[self.phase] += 1
            self.files[self.phase].add(str(Path(name).resolve()))

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        if step == 2:
            self.phase = "step"
        if step == 3:
            self.phase = "save"
            trainer.request(save=True)

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        if step == 4:
            self.phase = ""

    def on_train_begin(self, trainer: Trainer) -> None:
        self.phase = ""


def main() -> None:
    """Train four steps with a save after the third, go on from it, and print the counts."""
    torch.set_num_threads(1)
    counter = Counter()
    data = [{"x": torch.randn(WIDTH)} for _ in range(16)]
    sys.setprofile(counter.profile)
    threading.setprofile(counter.profile)
    with tempfile.TemporaryDirectory() as folder:
        for steps in (4, 5):
            config = {
                "run": {"name": "trace", "output_dir": folder, "max_steps": steps},
                "batch": {"global_size": 4},
                "checkpoint": {"every_steps": 100, "resume": "auto"},
            }
            with Trainer(Net, config, data, callbacks=[counter]) as trainer:
                counter.phase = "load" if steps == 5 else ""
                trainer.fit()
    sys.setprofile(None)
    found = {f"files of a {phase}": len(counter.files[phase]) for phase in ("step", "save", "load")}
    print(
        json.dumps(found | {f"Python calls of a {phase}": counter.calls[phase] for phase in ("step", "save", "load")})
    )


if __name__ == "__main__":
    main()
