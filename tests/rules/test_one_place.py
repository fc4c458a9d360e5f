"""What comes with a new optimizer, schedule, launcher or key of the configuration has one place: each is added to a copy of the
source, which then trains a step with it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from zeromesh.trainer.monitoring.step_metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZER = (
    ("zeromesh/optim/fused_optimizer.py", "OPTIMIZERS = {\n", '    "sign": OptimizerRow(SGD, (), ()),\n'),
    (
        "zeromesh/optim/fused_optimizer.py",
        "    with torch.no_grad():\n",
        '        if name == "sign":\n            master.sub_(common["lr"] * grad.sign())\n            return\n',
    ),
    ("trainer/config/sections/training.py", 'name: Literal["adamw", ', '"sign", '),
)
SCHEDULE = (
    (
        "trainer/config/sections/schedule.py",
        "SCHEDULES: dict[str, dict[str, str]] = {\n",
        '    "halved": {},\n',
    ),
    (
        "trainer/config/sections/schedule.py",
        "    # Imported here, so that reading a configuration loads neither torch nor transformers.\n",
        '    if schedule.name == "halved":\n        return lambda step: 0.5\n',
    ),
)
KEY = (
    (
        "trainer/config/sections/outputs.py",
        '    """The name, length, logging, evaluation and seeds of a run."""\n',
        '\n    colour: Text = "grey"\n    """The colour."""\n',
    ),
)
LAUNCHER = (
    (
        "zeromesh/environment.py",
        "_LAUNCHERS = {\n",
        '    "flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_LOCAL_SIZE"),\n',
    ),
)
CONFIG = """
model: {config: {model_type: llama, vocab_size: 259, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
  num_attention_heads: 1, num_key_value_heads: 1}}
data: {train: text.txt, eval_fraction: 0, sequence_length: 16, tokenizer: bytes, cache: tokens}
batch: {global_size: 2, micro_size: 1}
optimizer: {name: sign, lr: 0.25}
schedule: {name: halved, warmup_steps: 0}
run: {name: new, max_steps: 1, colour: red}
"""


def test_a_new_optimizer_schedule_launcher_or_key_is_one_place(tmp_path: Path) -> None:
    for floor in ("zeromesh", "trainer", "offload", "configs"):
        shutil.copytree(ROOT / floor, tmp_path / floor, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path, before, added in (*OPTIMIZER, *SCHEDULE, *LAUNCHER, *KEY):
        text = (tmp_path / path).read_text()
        assert text.count(before) == 1, f"{path} has not one {before!r}"
        (tmp_path / path).write_text(text.replace(before, before + added))
    assert [len({path for path, *_ in change}) for change in (OPTIMIZER, SCHEDULE, LAUNCHER, KEY)] == [2, 1, 1, 1]
    (tmp_path / "text.txt").write_text("the same words again and again, " * 10)
    (tmp_path / "new.yaml").write_text(CONFIG)
    meeting = {
        "PYTHONPATH": str(tmp_path),
        "FLUX_JOB_SIZE": "2",
        "FLUX_LOCAL_SIZE": "2",
        "MASTER_PORT": str(20000 + os.getpid() % 9000),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "zeromesh", "train", "new.yaml"],
            cwd=tmp_path,
            env={**os.environ, **meeting, "FLUX_TASK_RANK": str(rank), "FLUX_TASK_LOCAL_ID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, error = rank.communicate(timeout=240)
        assert rank.returncode == 0, out + error
    run = tmp_path / "runs" / "new"
    assert "colour: red" in (run / "config.resolved.yaml").read_text()
    assert read_metrics(run / "starts.jsonl")[0]["hardware"].startswith("2 ranks on")
    (line,) = read_metrics(run / "metrics.jsonl")
    assert line["lr"] == 0.125
