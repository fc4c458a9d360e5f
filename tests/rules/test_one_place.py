"""What comes with a new optimizer, schedule, key of the configuration or codec of weights has one place, at most two: each is added
to a copy of the source, which then trains a step with it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

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
CODEC = (
    ("zeromesh/checkpoint/format/safetensors_layout.py", "DTYPES = {\n", '    "F8_E5M2": torch.float8_e5m2,\n'),
    (
        "zeromesh/checkpoint/io/file_slices.py",
        'what takes the elements converts them to its own dtype."""\n',
        "    if tensor.dtype == torch.float8_e5m2:\n        return data.view(torch.int8).float() / 16\n",
    ),
)
"""Weights of which a byte is the number of sixteenths."""
CONFIG = """
model: {source: weights}
data: {train: text.txt, eval_fraction: 0, sequence_length: 16, tokenizer: bytes, cache: tokens}
batch: {global_size: 1, micro_size: 1}
optimizer: {name: sign, lr: 0.25}
schedule: {name: halved, warmup_steps: 0}
run: {name: new, max_steps: 1, colour: red}
checkpoint: {every_steps: 1}
"""


def coded(folder: Path) -> dict[str, torch.Tensor]:
    """Write a tiny model whose weights are of the codec; returns their values."""
    sizes = {"vocab_size": 259, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1))
    model.save_pretrained(folder)
    sixteenths = {
        name: torch.randint(-16, 17, value.shape, dtype=torch.int8) for name, value in model.state_dict().items()
    }
    save_file({name: value.view(torch.float8_e5m2) for name, value in sixteenths.items()}, folder / "model.safetensors")
    return {name: value.float() / 16 for name, value in sixteenths.items()}


def test_a_new_optimizer_schedule_key_or_codec_is_one_place(tmp_path: Path) -> None:
    for floor in ("zeromesh", "trainer", "offload", "configs"):
        shutil.copytree(ROOT / floor, tmp_path / floor, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path, line, added in (*OPTIMIZER, *SCHEDULE, *KEY, *CODEC):
        text = (tmp_path / path).read_text()
        assert text.count(line) == 1, f"{path} has not one {line!r}"
        (tmp_path / path).write_text(text.replace(line, line + added))
    assert [len({path for path, *_ in change}) for change in (OPTIMIZER, SCHEDULE, KEY, CODEC)] == [2, 1, 1, 2]
    before = coded(tmp_path / "weights")
    (tmp_path / "text.txt").write_text("the same words again and again, " * 10)
    (tmp_path / "new.yaml").write_text(CONFIG)
    for words in (("config", "new.yaml"), ("train", "new.yaml")):
        ended = subprocess.run(
            [sys.executable, "-m", "zeromesh", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert words[0] == "train" or "colour: red" in ended.stdout
    (line,) = read_metrics(tmp_path / "runs" / "new" / "metrics.jsonl")
    assert line["lr"] == 0.125
    (file,) = (tmp_path / "runs" / "new" / "checkpoints" / "step-00000001").glob("model-*.safetensors")
    after = load_file(file)
    assert after.keys() == before.keys()
    for name, value in before.items():  # One step by the sign of the gradient.
        assert set((after[name] - value).abs().unique().tolist()) <= {0.0, 0.125}, name
