"""A rank that computes wrongly is named and left out by the launcher, and data that are wrong are passed over, in one run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import ended
from zeromesh.trainer.monitoring.step_metrics import read_metrics

pytestmark = pytest.mark.usefixtures("at_once")
WRONG_FROM, POISONED, STEPS = 6, 8, 12  # steps from 1
SCRIPT = """\
import json, os, sys
from pathlib import Path
import torch
from torch import nn
from transformers import TrainerCallback
from zeromesh import Trainer
from zeromesh.trainer.data.sampler import SampleOrder

folder, rank, wrong = Path(sys.argv[1]), int(os.environ.get("RANK", 0)), int(sys.argv[2])


class Loss(nn.Sequential):
    def forward(self, x, y):
        return (super().forward(x) - y).square().mean()


def build():
    torch.manual_seed(0)
    return Loss(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


class Faults(TrainerCallback):
    step = 0

    def on_step_begin(self, args, state, control, **_):
        self.step = state.global_step + 1

    def flip(self, module, inputs, output):
        if rank == wrong and self.step >= WRONG_FROM:
            output = output.clone()
            with torch.no_grad():
                output[0, :1].view(torch.int64).bitwise_xor_(1 << 57)
            return output


settings = {
    "zero": {"stage": 3},
    "precision": {"compute": "float64", "master": "float64", "reduce": "float64"},
    "batch": {"global_size": 12, "micro_size": 2},
    "run": {"name": "run", "output_dir": str(folder), "max_steps": STEPS, "eval_every": 0},
    "checkpoint": {"every_steps": 4, "asynchronous": False},
    "recovery": {"spike_factor": 20.0, "spike_window": 3},
}
points = torch.randn(144, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
dataset = [{"x": x, "y": x[:1]} for x in points]
poisoned = SampleOrder(length=144, seed=0).dataset_index(12 * (POISONED - 1) + 5)
dataset[poisoned] = {"x": points[0], "y": torch.full((1,), 1e9, dtype=torch.float64)}
faults, model = Faults(), build()
model[0].register_forward_hook(faults.flip)
with Trainer(model, settings, train_dataset=dataset, callbacks=[faults]) as trainer:
    report = trainer.fit()
end = {"pid": os.getpid(), "ranks": int(os.environ.get("WORLD_SIZE", 1)), "final": report.final_step, "poisoned": poisoned}
(folder / f"end-{os.environ.get('RANK', 0)}").write_text(json.dumps(end))
"""
for name, value in {"WRONG_FROM": WRONG_FROM, "STEPS": STEPS, "POISONED": POISONED}.items():
    SCRIPT = SCRIPT.replace(name, str(value))


def run(folder: Path, ranks: int, wrong: int = -1) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    words = [sys.executable, "-m", "zeromesh", "run", "--nproc", str(ranks), str(script), str(folder), str(wrong)]
    return ended(words, seconds=60)


def lines(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "run" / "metrics.jsonl")


@pytest.mark.parametrize("wrong", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_wrong_rank_is_left_out_and_wrong_data_are_passed_over(programs: Any, tmp_path: Path, wrong: int) -> None:
    alone = run(tmp_path / "alone", 1)
    assert alone.returncode == 0, alone.stderr
    found = run(tmp_path / "found", 3, wrong)
    assert found.returncode == 0, found.stderr
    assert f"rank {wrong} computes wrongly" in found.stderr
    ends = [json.loads(path.read_text()) for path in sorted((tmp_path / "found").glob("end-*"))]
    assert [each["ranks"] for each in ends] == [2, 2]
    assert [each["final"] for each in ends] == [STEPS - 1] * 2

    losses = [[line["loss"] for line in lines(tmp_path / name)] for name in ("alone", "found")]
    assert len(losses[0]) == STEPS - 1
    assert losses[1] == pytest.approx(losses[0], rel=1e-12, abs=0)
    acts = [act for line in lines(tmp_path / "found") for act in line.get("judged", [])]
    assert [act["act"] for act in acts] == ["went on", "pass_over"]
    assert acts[1]["data_step"] == POISONED - 1
    assert ends[0]["poisoned"] in acts[1]["samples"]
    (told,) = read_metrics(tmp_path / "found" / "run" / "recoveries.jsonl")
    assert told["cause"].startswith(f"rank {wrong} computes wrongly: the ")
