"""Count the project's files and Python calls of a training step, a save and a load, on rank 0 of two; prints one line of JSON.

The calls of a step are also counted by kind of bookkeeping, with recording on and off, and its share of all calls is printed.
`python scripts/trace_step.py` measures the checkout that Python imports; `scripts/structure_report.py --trace` compares several.
`--functions` also prints the functions that a step calls most, and `--files` the files that it enters. `--prompt` counts the calls
of a prompt of 4 tokens on one rank, which a Llama of 4 blocks goes on from by 4 tokens.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import zeromesh
from zeromesh import Generator, Trainer
from zeromesh.trainer.callbacks.callback import Callback

HOME = str(Path(zeromesh.__file__).resolve().parent.parent)
BLOCKS, WIDTH = 4, 64
KINDS = {
    "recorder": ("telemetry/step_recorder.py", "telemetry/step_timer.py", "telemetry/clock.py"),
    "traffic": ("telemetry/comm_stats.py", "telemetry/traffic.py"),
    "ranges": ("zeromesh/profiler_ranges.py", "zeromesh/ranges.py"),
    "board": ("telemetry/status_board.py", "telemetry/board.py"),
    "watch": ("telemetry/watchdog.py", "telemetry/watch.py"),
    "ledger": ("memory/ledger.py", "offload/ledger.py"),
    "metrics": ("trainer/monitoring/", "trainer/trackers/"),
}
"""Which files are bookkeeping, by the end of their names or the folder that they are in."""


class Net(nn.Module):
    """A few blocks with a scalar loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class CallCounter(Callback):
    """Counts the project's calls by phase: a step without a save, then what follows a step that asks for one, then a load."""

    def __init__(self) -> None:
        self.phase = ""
        self.calls: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)

    def profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        """The function that `sys.setprofile` calls."""
        code = frame.f_code
        if self.phase and event == "call" and code.co_filename.startswith(f"{HOME}/zeromesh/"):
            path = str(Path(code.co_filename).resolve().relative_to(HOME))
            self.calls[self.phase][path, code.co_qualname] += 1

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

    def kinds(self) -> dict[str, int]:
        """The calls of a step by kind of bookkeeping."""
        found = dict.fromkeys(KINDS, 0)
        for (path, _), count in self.calls["step"].items():
            for kind, places in KINDS.items():
                if any(place in path for place in places):
                    found[kind] += count
        return found


def main() -> None:
    """Start two ranks with recording on, then two with recording off, and print what rank 0 has counted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="print the N functions called most")
    parser.add_argument("--files", action="store_true", help="print the files that a step enters, and the calls of each")
    parser.add_argument("--prompt", action="store_true", help="count the calls of a prompt")
    options = parser.parse_args()
    if options.prompt:
        _count_of_prompt(options.functions)
        return
    if "RANK" in os.environ:
        _count(options.functions, files=options.files)
        return
    found: dict[str, Any] = {}
    for recording in ("on", "off"):
        with tempfile.TemporaryDirectory() as folder:
            lines = _run_ranks(folder, recording, sys.argv[1:])
        print("\n".join(lines[:-1]), end="\n" if lines[1:] else "")
        counts = json.loads(lines[-1])
        if recording == "on":
            found |= {name: count for name, count in counts.items() if not isinstance(count, dict)}
        calls = counts["Python calls of a step"]
        found |= {f"{kind}, recording {recording}": count for kind, count in counts["kinds"].items()}
        found[f"% bookkeeping, recording {recording}"] = round(100 * sum(counts["kinds"].values()) / calls, 1)
    print(json.dumps(found))


def _run_ranks(folder: str, recording: str, options: list[str]) -> list[str]:
    """The lines that rank 0 has printed at its end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = []
    for rank in range(2):
        environment = os.environ | launch | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment |= {"TRACE_FOLDER": folder, "TRACE_RECORDING": recording}
        command = [sys.executable, __file__, *options]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    output = [process.communicate(timeout=300)[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit(f"a rank failed:\n{output[0]}{output[1]}")
    lines = output[0].splitlines()
    return lines[lines.index("counts") + 1 :]


def _count(functions: int, *, files: bool) -> None:
    """Train four steps with a save after the third, go on from it, and print the counts of this rank."""
    torch.set_num_threads(1)
    counter = CallCounter()
    data = [{"x": torch.randn(WIDTH)} for _ in range(16)]
    sys.setprofile(counter.profile)
    threading.setprofile(counter.profile)
    for steps in (4, 5):
        config = {
            "run": {"name": "trace", "output_dir": os.environ["TRACE_FOLDER"], "max_steps": steps},
            "batch": {"global_size": 8},
            "checkpoint": {"every_steps": 100, "resume": "auto"},
        }
        with Trainer(Net, config, data, callbacks=[counter]) as trainer:
            _switch(trainer, os.environ["TRACE_RECORDING"] == "on")
            counter.phase = "load" if steps == 5 else ""
            trainer.fit()
    sys.setprofile(None)
    print("counts")
    for (path, name), count in counter.calls["step"].most_common(functions):
        print(f"{count:6} {path} {name}")
    entered: Counter[str] = Counter()
    for (path, _), count in counter.calls["step"].items():
        entered[path] += count
    for path, count in entered.most_common() if files else ():
        print(f"{count:6} {path}")
    phases = ("step", "save", "load")
    found: dict[str, Any] = {f"files of a {phase}": len({path for path, _ in counter.calls[phase]}) for phase in phases}
    found |= {f"Python calls of a {phase}": counter.calls[phase].total() for phase in phases}
    print(json.dumps(found | {"kinds": counter.kinds()}))


def _count_of_prompt(functions: int) -> None:
    """Continue a prompt a second time, so that what is made once is there, and print the counts."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": BLOCKS, "num_attention_heads": 4}
    counter = CallCounter()
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, max_position_embeddings=128)).save_pretrained(folder)
        with Generator(folder) as generator:
            generator.generate([[1, 2, 3, 4]], max_new_tokens=4)
            sys.setprofile(counter.profile)
            counter.phase = "prompt"
            generator.generate([[5, 6, 7, 8]], max_new_tokens=4)
            sys.setprofile(None)
    calls = counter.calls["prompt"]
    for (path, name), count in calls.most_common(functions):
        print(f"{count:6} {path} {name}")
    floors = {floor: sum(n for (path, _), n in calls.items() if path.startswith(floor)) for floor in ("zeromesh", "trainer")}
    print(json.dumps({"Python calls of a prompt": calls.total(), **floors}))


def _switch(trainer: Trainer, on: bool) -> None:
    """Switch the recorder of a run; a checkout from before there was one always records."""
    recorder = getattr(trainer.mesh, "recorder", None)
    if recorder is not None:
        recorder.enabled = on


if __name__ == "__main__":
    main()
