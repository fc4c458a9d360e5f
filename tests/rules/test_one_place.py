"""Each of these changes has one place: it is made in a copy of the source, which then trains a step with it."""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.waiting import ended
from zeromesh.trainer.monitoring.step_metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
TRACKED = '''class DummyTracker(Tracker):
    """Writes rows into a file."""

    def start(self) -> None:
        self.sent, _ = self._read_last_row()

    def log(self, row: TrackedRow) -> None:
        self._record_row(row.position)
        with open(self.run.directory / "dummy.jsonl", "a") as file:
            file.write(json.dumps([row.position.step, row.values["train/loss"]]) + "\\n")

    def finish(self) -> None:
        """Nothing is left."""


'''
CHANGES = {
    "an optimizer": [
        ("zeromesh/optim/fused_optimizer.py", "tuple[str, ...]]] = {\n", '    "sign": (SGD, ()),\n'),
        (
            "zeromesh/optim/fused_optimizer.py",
            "    with torch.no_grad():\n",
            '        if name == "sign":\n            master.sub_(common["lr"] * grad.sign())\n            return\n',
        ),
        ("trainer/config/sections/optimizer.py", "OPTIMIZERS = {\n", '    "sign": "torch.optim:SGD",\n'),
    ],
    "a schedule": [
        ("trainer/config/sections/schedule.py", "SCHEDULES: dict[str, dict[str, str]] = {\n", '    "halved": {},\n'),
        (
            "trainer/config/sections/schedule.py",
            "    # Imported here, so that reading a configuration loads neither torch nor transformers.\n",
            '    if schedule.name == "halved":\n        return lambda step: 0.5\n',
        ),
    ],
    "a key": [
        (
            "trainer/config/sections/outputs.py",
            '    """The name, length, logging, evaluation and seeds of a run."""\n',
            '\n    colour: keys.Text = "grey"\n    """The colour."""\n',
        )
    ],
    "a key that the engine reads": [
        ("zeromesh/settings/keys.py", "    overlap: bool = True\n", "    warmth: Count = 3\n"),
        ("zeromesh/settings/keys.py", '    on_nonfinite: Literal["skip", "stop"] = "skip"\n', "    calm: Count = 3\n"),
    ],
    "a codec of weights at rest": [
        ("zeromesh/settings/keys.py", 'CodecName = Literal["nf4", ', '"sixteenths", '),
        (
            "zeromesh/flat/codec.py",
            "CODECS: dict[CodecName, CodecRow] = {\n",
            '    "sixteenths": CodecRow(\n'
            "        block=32,\n"
            "        quantize=lambda values, block: (\n"
            "            (values * 16).to(torch.int8).view(torch.uint8), torch.ones(-(-len(values) // block))\n"
            "        ),\n"
            "        dequantize=lambda codes: codes.view(torch.int8).float() / 16,\n"
            "    ),\n",
        ),
    ],
    "a data type of files, of which a byte is the number of sixteenths": [
        ("zeromesh/checkpoint/io/format.py", "DTYPES = (\n", '    {"F8_E5M2FNUZ": torch.float8_e5m2fnuz} |\n'),
        (
            "zeromesh/checkpoint/io/file_slices.py",
            'here, as all bytes pass through that are not read into memory of the file\'s dtype directly."""\n',
            "    if tensor.dtype == torch.float8_e5m2fnuz:\n        return data.view(torch.int8).float() / 16\n",
        ),
    ],
    "a launcher": [
        (
            "zeromesh/environment.py",
            "_LAUNCHERS = {\n",
            '    "flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_LOCAL_SIZE"),\n',
        )
    ],
    "a tracker": [
        (
            "trainer/trackers/backends.py",
            '    return {**known, "log_dir": str(run.directory / "swanlab"), "settings": settings, **where}\n\n\n',
            TRACKED,
        ),
        ("trainer/trackers/backends.py", "TRACKERS = {\n", '    "dummy": TrackerKind(make=DummyTracker, modules=("json",)),\n'),
    ],
}
PLACES = {
    "an optimizer": 2,
    "a schedule": 1,
    "a key": 1,
    "a key that the engine reads": 1,
    "a codec of weights at rest": 2,
    "a data type of files, of which a byte is the number of sixteenths": 2,
    "a launcher": 1,
    "a tracker": 1,
}
"""In how many files each of them is."""
CONFIG = """
model: {source: weights}
data: {train: text.txt, eval_fraction: 0, sequence_length: 16, tokenizer: bytes, cache: tokens}
batch: {global_size: 2, micro_size: 1}
optimizer: {name: sign, lr: 0.25}
schedule: {name: halved, warmup_steps: 0}
zero: {warmth: 5}
run: {name: new, max_steps: 1, colour: red, calm: 4}
tracking: {backends: [dummy]}
checkpoint: {every_steps: 1}
"""
PROGRAM = """
import os
import transformers.models.llama.modeling_llama
from zeromesh import Trainer
from zeromesh.trainer.cli.main import main
rank = "0" if os.fork() else "1"  # What takes long is imported once.
os.environ |= {"FLUX_TASK_RANK": rank, "FLUX_TASK_LOCAL_ID": rank}
assert main(["config", "new.yaml"]) == 0
with Trainer(config="new.yaml") as trainer:
    assert (trainer.engine.options.warmth, trainer.engine.options.calm) == (5, 4)
    trainer.fit()
    settings = trainer.config.model_dump(exclude_unset=True)
settings["run"]["name"] = "encoded"
settings["model"] |= {"lora": {"rank": 1}, "weights": "sixteenths"}
with Trainer(config=settings) as trainer:
    trainer.fit()
assert rank == "1" or os.wait()[1] == 0
"""


def coded(folder: Path) -> dict[str, torch.Tensor]:
    """Write a tiny model whose weights are of the codec; returns their values."""
    sizes = {"vocab_size": 259, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1))
    model.save_pretrained(folder)
    sixteenths = {name: torch.randint(-16, 17, value.shape, dtype=torch.int8) for name, value in model.state_dict().items()}
    save_file({name: value.view(torch.float8_e5m2fnuz) for name, value in sixteenths.items()}, folder / "model.safetensors")
    return {name: value.float() / 16 for name, value in sixteenths.items()}


def test_each_of_these_is_one_place(tmp_path: Path) -> None:
    for floor in ("zeromesh", "trainer", "offload", "configs"):
        shutil.copytree(ROOT / floor, tmp_path / floor, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path, before, added in (each for change in CHANGES.values() for each in change):
        text = (tmp_path / path).read_text()
        assert text.count(before) == 1, f"{path} has not one {before!r}"
        (tmp_path / path).write_text(text.replace(before, before + added))
    assert {name: len({path for path, *_ in change}) for name, change in CHANGES.items()} == PLACES
    weights = coded(tmp_path / "weights")
    (tmp_path / "text.txt").write_text("the same words again and again, " * 10)
    (tmp_path / "new.yaml").write_text(CONFIG)
    meeting = {
        "PYTHONPATH": str(tmp_path),
        "FLUX_JOB_SIZE": "2",
        "FLUX_LOCAL_SIZE": "2",
        "MASTER_PORT": str(20000 + os.getpid() % 9000),
    }
    done = ended([sys.executable, "-c", PROGRAM], folder=tmp_path, **meeting)
    assert done.returncode == 0, done
    said = done.stdout + done.stderr
    run = tmp_path / "runs" / "new"
    assert "colour: red" in said
    assert read_metrics(run / "starts.jsonl")[0]["hardware"].startswith("2 ranks on")
    (line,) = read_metrics(run / "metrics.jsonl")
    assert line["lr"] == 0.125
    assert "WARNING" not in said
    assert json.loads((run / "dummy.jsonl").read_text()) == [1, line["loss"]]
    (encoded,) = read_metrics(tmp_path / "runs/encoded/metrics.jsonl")
    assert encoded["loss"] == line["loss"], "the codec has all values, and adapters begin with nothing"
    (file,) = (run / "checkpoints" / "step-00000001").glob("model-*.safetensors")
    after = load_file(file)
    assert after.keys() == weights.keys()
    for name, value in weights.items():  # One step by the sign of the gradient.
        assert set((after[name] - value).abs().unique().tolist()) <= {0.0, 0.125}, name
