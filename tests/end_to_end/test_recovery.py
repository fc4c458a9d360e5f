"""Ranks of a run are killed, stop or fail: the others stay in their processes, and the run computes what it would have computed."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.simulated.device import compiler
from tests.support.waiting import ended, wait_for
from tests.unit.planning.test_machine import MACHINE
from zeromesh.errors import ConfigError
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.loop.recovery import Recovery
from zeromesh.trainer.monitoring.step_metrics import read_metrics
from zeromesh.trainer.planning.auto import subject_of
from zeromesh.trainer.planning.estimate import Estimator
from zeromesh.trainer.planning.layouts import Layout

pytestmark = pytest.mark.usefixtures("at_once")
RANKS, STEPS = 3, 8
SCRIPT = """\
import contextlib, errno, functools, io, json, os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback
from zeromesh import Trainer
from zeromesh.checkpoint import store
from zeromesh.mesh import process_groups, process_mesh
from zeromesh.offload.memory.state_memory import StateMemory
from zeromesh.optim import journal
from zeromesh.trainer.callbacks.callback import Callback
from zeromesh.trainer.data.sampler import SampleOrder
from zeromesh.trainer.loop.trained_model import TrainedModel
from zeromesh.trainer.monitoring import run_directory, step_metrics
from zeromesh.trainer.setup import memory_check

folder, rank, asked = Path(sys.argv[1]), int(os.environ["RANK"]), json.loads(sys.argv[2])
if "hosts" in asked:
    process_mesh.host_identity = lambda: f"host {rank % asked['hosts']}"
if asked.get("simulated"):
    sys.path.insert(0, asked["simulated"])
    from tests.simulated import cases  # noqa: F401


class Loss(nn.Sequential):
    def forward(self, x, y):
        return (super().forward(x) - y).square().mean()


class Counting(nn.Tanh):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls

    def get_extra_state(self):
        return self.calls


class Scaled(nn.Tanh):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor([2.0, 3.0])[int((folder / "struck-0").exists())])

    def forward(self, x):
        return super().forward(x) * self.scale


class Counted(nn.Tanh):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(8, dtype=torch.float64))

    def forward(self, x):
        if asked["buffers"] == "replaced":
            self.count = self.count + 1
        else:
            self.count.data.add_(1)
        return super().forward(x) / self.count


def changing():
    return nn.BatchNorm1d(8, dtype=torch.float64) if asked["buffers"] is True else Counted()


MIDDLES = {"buffers": changing, "counts": Counting, "scaled": Scaled}


def build():
    torch.manual_seed(0)
    middle = next((make for name, make in MIDDLES.items() if asked.get(name)), nn.Tanh)()
    width = 7 if asked.get("changes") and (folder / "struck-0").exists() else 8
    return Loss(nn.Linear(6, width), middle, nn.Linear(width, 1))


class Samples(list):
    read = 0

    def __len__(self):
        return super().__len__() - 12 * ("grows" in asked and not (folder / "struck-0").exists())

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None:
            self.read += 1
            faults.strike(f"sample {self.read} of a worker")
        return super().__getitem__(index)


def raises():
    raise RuntimeError("no more")


class Counts(Callback):
    begun = 0

    def on_step_begin(self, trainer, step):
        self.begun += 1

    def on_substep_end(self, trainer, step):
        faults.strike(f"substep of {step}")

    def on_step_end(self, trainer, step, line):
        if self.begun == asked.get("most"):
            trainer.request(stop=True)

    def on_epoch_end(self, trainer, epoch):
        faults.strike(f"end of epoch {epoch}")

    def state_dict(self):
        return {"begun": self.begun} if self.begun else {}

    def load_state_dict(self, state):
        self.begun = state.get("begun", 0)


class Faults(TrainerCallback):
    begun = step = 0

    def __init__(self):
        self.steps = []
        if (folder / "struck-0").exists():
            self.strike("start")

    def strike(self, when):
        for number, (at, victim, how) in enumerate(asked["faults"]):
            mark = folder / f"struck-{number}"
            if at == when and victim == rank and not mark.exists():
                mark.touch()
                if asked.get("edits"):
                    Path(__file__).write_text("raise RuntimeError('another script')")
                    (folder / "module.py").write_text("VALUE = 2")
                    (folder / "config.json").unlink()
                while how == "wait" and not (folder / "go on").exists():
                    time.sleep(0.01)
                if how != "wait":
                    raises() if how == "raise" else os.kill(os.getpid(), getattr(signal, how))

    def on_train_begin(self, *_, **__):
        self.begun += 1
        with (folder / f"pids-{rank}").open("a") as file:
            file.write(f"{os.getpid()}\\n")
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "zeromesh" in line]
        held = [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(maps)]
        with (folder / f"held-{rank}").open("a") as file:
            file.write(json.dumps(held) + "\\n")
        if (folder / "struck-0").exists():
            self.strike("recovery")

    def on_step_begin(self, args, state, control, **_):
        self.step = state.global_step + 1
        self.steps.append(self.step)
        if self.step in asked.get("full", ()) and not rank:
            (folder / "full").touch() if self.step == asked["full"][0] else (folder / "full").unlink(missing_ok=True)
        if asked.get("holds"):
            self.held = [each for unit in trainer.engine.units for each in unit.buckets]
        if asked.get("unfreezes"):
            model[2].requires_grad_(self.step >= asked["unfreezes"])
        self.strike(f"begin of {self.step}")
        self.strike(f"begin of {self.step}, time {self.steps.count(self.step)}")

    def on_step_end(self, args, state, control, **_):
        self.step += 0.5  # So positions in an exchange with averages differ from those in the update.
        if asked.get("stops"):
            control.should_training_stop |= state.global_step == asked["stops"]
        if asked.get("collective"):
            time.sleep(0.5 * (rank == 1))  # The others wait for it by then.
        self.strike(state.global_step)
        if asked.get("collective"):
            torch.distributed.all_reduce(torch.ones(1))

    def on_prediction_step(self, args, state, control, **_):
        self.strike(f"forward of evaluation {state.global_step}")

    def on_evaluate(self, args, state, control, **_):
        self.strike(f"evaluation {state.global_step}")


def strikes(function, when):
    def around(*arguments, **named):
        around.calls += 1
        if (folder / "struck-0").exists():
            faults.strike(f"{when} {around.calls}")
        return function(*arguments, **named)

    around.calls = 0
    return around


process_groups.make_group = strikes(process_groups.make_group, "group")
process_groups.dist.init_process_group = strikes(process_groups.dist.init_process_group, "meeting")
process_groups._Gloo.barrier = strikes(process_groups._Gloo.barrier, "connected")
mark, write, make_whole = StateMemory.mark, StateMemory.write_record, TrainedModel.make_whole


def marks(self, step, position=0):
    mark(self, step, position)
    if position:  # An odd one while elements change.
        faults.strike(f"position {position} of {faults.step}")


def writes(self, step, record):
    write(self, step, record)
    faults.strike(f"record of {step}")


def makes_whole(self):
    faults.strike("end")
    make_whole(self)


def on_disk(function, *arguments, **options):
    if (folder / "full").exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return function(*arguments, **options)


class File(io.FileIO):
    def write(self, data):
        return on_disk(super().write, data)


if "full" in asked:
    step_metrics.io.FileIO = File
    for module, name in ((run_directory, "write_whole"), (step_metrics, "write_whole"), (store, "_require_free")):
        setattr(module, name, functools.partial(on_disk, getattr(module, name)))
def left():
    found, slots = trainer._recovery.memory, trainer._recovery.snapshots
    held = [found and found.nbytes, slots and slots._own._memory.nbytes]
    return 1 if any(held) else 1 << 40


if asked.get("tight"):
    memory_check.available_bytes, memory_check.swap_bytes = left, int
TrainedModel.make_whole = makes_whole
StateMemory.mark, StateMemory.write_record, journal.CHUNK_ELEMENTS = marks, writes, 8
settings = {
    "zero": {"stage": 3},
    "precision": {"compute": "float64", "master": "float64", "reduce": "float64"},
    "batch": {"global_size": 12, "micro_size": 2},
    "run": {"name": "run", "output_dir": str(folder), "max_steps": STEPS, "eval_every": 0},
    "parallel": {"timeout_seconds": 60.0},
    "checkpoint": {"every_steps": 4, "asynchronous": False},
}
for name, section in asked.get("settings", {}).items():
    settings.setdefault(name, {}).update(section)
points = torch.randn(asked.get("samples", 48), 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
dataset = Samples({"x": x, "y": x[:1]} for x in points)
for step in asked.get("poisoned", ()):
    dataset[SampleOrder(length=len(points), seed=0).dataset_index(12 * step)]["y"] = torch.tensor([1e9]).double()
faults, model = Faults(), build() if asked.get("given") else build
if asked.get("given"):
    (first := model[0].weight).register_hook(lambda gradient: gradient * gradient.sign().clamp(min=0))
    model[2].requires_grad_("unfreezes" not in asked)
if asked.get("first") == "fit":
    with Trainer(build, {**settings, "run": {**settings["run"], "name": "first"}}, train_dataset=dataset) as trainer:
        trainer.fit()
if asked.get("first") == "fails":
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 5:
                raises()

    first = {**settings, "run": {**settings["run"], "name": "first"}}
    with (
        contextlib.suppress(RuntimeError),
        Trainer(build, first, train_dataset=dataset[::-1], callbacks=[Fails()]) as trainer,
    ):
        trainer.fit()
callbacks = [counts := Counts(), faults, *[EarlyStoppingCallback(1)] * ("stops" in asked)]
if asked.get("edits"):
    if not (folder / "struck-0").exists():
        for name, text in (("config.json", json.dumps(settings)), ("module.py", "VALUE = 1")):
            (own := folder / f"{rank}-{name}").write_text(text)
            own.rename(folder / name)
    from module import VALUE

    assert VALUE == 1
    settings = folder / "config.json"
with Trainer(model, settings, train_dataset=dataset, eval_dataset=dataset[:12], callbacks=callbacks) as trainer:
    if asked.get("first") == "evaluate":
        trainer.evaluate()
    if asked.get("first") == "barrier":
        trainer.mesh.world.barrier("data of the script")
    losses = trainer.fit(*asked.get("fit", ())).losses
    end = {"begun": faults.begun, "losses": losses, "counts": counts.begun}
    end["logged"] = [line["step"] for line in trainer.state.log_history]
    end["is the model"] = bool(asked.get("given")) and trainer.model is model and model[0].weight is first
    end["weights"] = [each.double().flatten().tolist() for _, each in sorted(trainer.state_dict())]
    while asked.get("evaluates"):
        trainer.evaluate()
        faults.strike("evaluations")
(folder / f"end-{rank}").write_text(json.dumps(end))
""".replace("STEPS", str(STEPS))


@dataclass
class Run:
    """A run of the script in a folder that has ended."""

    folder: Path
    process: subprocess.CompletedProcess[str]

    @cached_property
    def losses(self) -> list[float]:
        """Those of all steps, each of which was logged once."""
        lines = read_metrics(self.folder / "run" / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        return [line["loss"] for line in lines]

    def pids(self, rank: int) -> list[str]:
        """The process ids of a rank, one for each time that it has begun to train."""
        return (self.folder / f"pids-{rank}").read_text().split()

    def end(self, rank: int) -> Any:
        return json.loads((self.folder / f"end-{rank}").read_text())

    def went_well(self, undisturbed: "Run") -> bool:
        """Exactly as if nothing had happened: losses, weights, and what a callback has counted."""
        assert self.process.returncode == 0, self.process.stderr
        assert self.losses == undisturbed.losses
        for what in ("weights", "counts"):
            assert all(self.end(rank)[what] == undisturbed.end(rank)[what] for rank in range(RANKS)), what
        return True

    @property
    def lost_steps(self) -> bool:
        return "resumed from step" in self.process.stdout or "went on after step" not in self.process.stdout


def run(folder: Path, *faults: tuple[Any, int, str], launcher: Sequence[str] = (), **asked: Any) -> Run:
    """Run the script with faults `(when, rank, what)`: a step, a place in an update, or `recovery`, when a rank trains again."""
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    words = [sys.executable, "-m", "zeromesh", "run", "--nproc", str(RANKS), *launcher, str(script), str(folder)]
    return Run(folder, ended([*words, json.dumps({"faults": faults, **asked})], seconds=60))


@pytest.fixture(scope="module")
def undisturbed_run(programs: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(programs.bin / "python"))
        found = run(tmp_path_factory.mktemp("undisturbed"))
    assert found.process.returncode == 0, found.process.stderr
    assert len(found.losses) == STEPS
    return found


FULL = pytest.mark.full
OTHERS_MAY_COME = ("--nnodes", "1:2", "--rdzv-endpoint", "localhost:0")
NEEDS_COMPILER = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler for the simulated device")
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{f"stage {stage}": {"zero": {"stage": stage}} for stage in (0, 1, 2)},
    "gloo": {"parallel": {"transport": "gloo"}},
    "accumulation": {"batch": {"global_size": 12, "micro_size": 1}},
    "average": {"ema": {"decay": 0.9}},
    "replicas": {"parallel": {"replicate": 3}, "zero": {"stage": 1}},
    "divided": {"parallel": {"replicate": 3}, "zero": {"replicas": "divided"}},
    "host": {"offload": {"optimizer": "host", "gradients": "host"}},
    "momentum": {"optimizer": {"name": "sgd", "momentum": 0.9}},
    "codes": {"model": {"weights": {"codec": "int8", "block": 32}, "train": ["2.*"]}},
    "shares": {"batch": {"global_size": 14, "micro_size": 2, "balance": [1, 3, 2]}},
}
GIVEN: dict[str, dict[str, Any]] = {"given": {"given": True}, "unfreezes": {"given": True, "unfreezes": 3}}
LOCAL: dict[str, Any] = {"parallel": {"replicate": 3, "sync_every": 4, "outer": {"lr": 0.7, "momentum": 0.9}}, "zero": {"stage": 1}}


@pytest.fixture(scope="module")
def undisturbed_runs(programs: Any, undisturbed_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    found = {"plain": undisturbed_run}

    def of(layout: str) -> Run:
        if layout not in found:
            asked = GIVEN.get(layout) or {"settings": LAYOUTS[layout]}
            found[layout] = run(tmp_path_factory.mktemp("undisturbed"), **asked)
        return found[layout]

    return of


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        (0, "SIGKILL"),
        (1, "SIGSEGV"),
        (2, "raise"),
        (1, "SIGSTOP"),
        pytest.param(2, "SIGKILL", marks=FULL),
        pytest.param(0, "SIGSTOP", marks=FULL),
        pytest.param(0, "raise", marks=FULL),
    ],
)
def test_survivors_stay_and_no_step_is_lost(undisturbed_run: Run, tmp_path: Path, victim: int, how: str) -> None:
    stopped = {"parallel": {"timeout_seconds": 1.5}} if how == "SIGSTOP" else {}
    found = run(tmp_path, (5, victim, how), settings=stopped)
    assert found.went_well(undisturbed_run)
    assert not found.lost_steps
    for rank in range(RANKS):
        pids = found.pids(rank)
        assert len(pids) == 2
        assert (pids[0] == pids[1]) is (rank != victim)
        assert found.end(rank)["begun"] == (1 if rank == victim else 2), "callbacks are told of each beginning"
    assert f"rank {victim}" in found.process.stderr
    assert "the run goes on, with new processes for the ranks that have ended" in found.process.stderr
    (told,) = read_metrics(tmp_path / "run" / "recoveries.jsonl")
    assert (told["source"], told["lost_steps"]) == ("memory", 0)
    assert f"rank {victim}" in told["cause"] or how == "SIGSTOP"
    assert 0 < sum(told["parts"].values()) <= told["seconds"] + 0.1


@FULL
def test_a_stopped_rank_is_named_soon_once_usual_waits_are_known(tmp_path: Path) -> None:
    """By `parallel.timeout_seconds: auto`, also between two steps: 5 seconds at least, and a second and a half more."""
    settings = {"run": {"max_steps": 26}, "parallel": {"timeout_seconds": "auto"}}
    undisturbed = run(tmp_path / "undisturbed", settings=settings)
    found = run(tmp_path / "lost", (24, 1, "SIGSTOP"), settings=settings)
    assert found.went_well(undisturbed)
    assert not found.lost_steps
    (told,) = read_metrics(found.folder / "run" / "recoveries.jsonl")
    noticed = told["time"] - told["seconds"] - (found.folder / "struck-0").stat().st_mtime
    assert 4.5 < noticed < 6.5
    assert "a rank at work is late after 5.0 seconds" in found.process.stdout


@pytest.mark.sampled(2)
@pytest.mark.parametrize("when", ["record of 5", "position 1 of 5", pytest.param("position 2 of 5", marks=FULL), "position 3 of 5"])
@pytest.mark.parametrize("layout", ["plain", *(pytest.param(each, marks=FULL) for each in LAYOUTS if each != "plain")])
def test_an_update_is_finished_for_a_rank_that_is_killed_in_it(
    undisturbed_runs: Callable[[str], Run], tmp_path: Path, layout: str, when: str
) -> None:
    found = run(tmp_path, (when, 1, "SIGKILL"), settings=LAYOUTS[layout])
    assert found.went_well(undisturbed_runs(layout))
    assert not found.lost_steps


def test_ranks_are_lost_again_while_the_others_recover(undisturbed_run: Run, tmp_path: Path) -> None:
    found = run(tmp_path, ("position 3 of 5", 1, "SIGKILL"), ("recovery", 2, "SIGKILL"), (6, 0, "SIGKILL"))
    assert found.went_well(undisturbed_run)
    assert not found.lost_steps


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("when", "layout"), [("begin of 1", "given"), pytest.param(2, "given", marks=FULL), (5, "given"), (6, "unfreezes")]
)
def test_the_model_of_the_user_is_the_one_that_is_trained(
    undisturbed_runs: Callable[[str], Run], tmp_path: Path, when: Any, layout: str
) -> None:
    """With its parameters and their hooks. Before the first checkpoint too, as its values are in memory; before the first step only
    the script can make it again."""
    found = run(tmp_path, (when, 1, "SIGKILL"), **GIVEN[layout])
    assert found.went_well(undisturbed_runs(layout))
    assert all(found.end(rank)["is the model"] for rank in range(RANKS))
    assert (found.pids(0)[0] == found.pids(0)[-1]) is (when != "begin of 1")


def test_ranks_that_hold_states_have_no_memory_and_new_ones_neither(undisturbed_runs: Callable[[str], Run], tmp_path: Path) -> None:
    """A callback keeps states of the mesh that is gone, so that all ranks go on without memory, also those that come later."""
    found = run(tmp_path, (6, 1, "SIGKILL"), (7, 1, "SIGKILL"), **GIVEN["unfreezes"], holds=True)
    assert found.went_well(undisturbed_runs("unfreezes"))
    assert len({*found.pids(0)}) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("asked", "pids"),
    [
        ({"settings": {"recovery": {"survivors": "restart"}}}, 2),
        ({"settings": {"recovery": {"memory": "off"}}}, 1),
        pytest.param({"first": "evaluate"}, 2, marks=FULL),
        ({"first": "fit"}, 2),
        pytest.param({"first": "barrier"}, 2, marks=FULL),
        ({"fit": [False]}, 1),
        pytest.param({"settings": {"recovery": {"memory": "off"}, "checkpoint": {"resume": "never"}}}, 1, marks=FULL),
    ],
)
def test_a_run_goes_on_from_a_checkpoint(undisturbed_run: Run, tmp_path: Path, asked: dict[str, Any], pids: int) -> None:
    """Where all ranks start again, where memory is off; also of a run that resumes from nothing else."""
    found = run(tmp_path, (6, 1, "SIGKILL"), **asked)
    assert found.process.returncode == 0, found.process.stderr
    assert found.losses == undisturbed_run.losses
    assert len({*found.pids(0)}) == pids
    if asked != {"fit": [False]}:
        assert "resumed from step 4" in found.process.stdout


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("when", "source"),
    [
        # Between two spikes, and after them.
        pytest.param("begin of 4, time 2", "went on after step 3, from the memory", marks=FULL),
        ("begin of 3, time 2", "resumed from step 2"),
        ("begin of 4, time 3", "went on after step 3, from the memory"),
        pytest.param("begin of 4, time 3", "went on after step 3, from a snapshot", marks=FULL),
    ],
)
def test_a_rank_is_lost_after_the_run_has_gone_back(tmp_path: Path, when: str, source: str) -> None:
    """Nothing that was computed after the checkpoint comes back, as from the record of an update of the same number."""
    settings: dict[str, dict[str, Any]] = {
        "recovery": {"spike_factor": 50.0, "spike_window": 2, "rewind_steps": 1},
        "checkpoint": {"every_steps": 2},
        "run": {"max_nonfinite": 2},
    }
    poison = {"samples": 96, "poisoned": [3, 4]}
    undisturbed = run(tmp_path / "undisturbed", settings=settings, **poison)
    if "snapshot" in source:
        settings["recovery"] |= {"memory": "snapshots", "every_steps": 1}
    found = run(tmp_path / "lost", (when, 1, "SIGKILL"), settings=settings, **poison)
    assert found.went_well(undisturbed)
    assert source in found.process.stdout
    assert len(found.losses) == 5
    assert "back from step 3 to 2" in found.process.stdout


@pytest.fixture(scope="module")
def undisturbed_local_run(undisturbed_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("undisturbed"), settings=LOCAL)


@pytest.mark.full
def test_replicas_of_local_steps_go_on_from_a_checkpoint(undisturbed_local_run: Run, tmp_path: Path) -> None:
    """No memory has all replicas at one step, and each goes on with its own moments."""
    found = run(tmp_path, (6, 1, "SIGKILL"), settings=LOCAL)
    assert found.went_well(undisturbed_local_run)
    assert "resumed from step 4" in found.process.stdout


@pytest.mark.full
def test_replicas_of_local_steps_end_together_at_a_sync(undisturbed_local_run: Run, tmp_path: Path) -> None:
    stopped = run(tmp_path, (2, 1, "SIGTERM"), settings=LOCAL)
    assert stopped.process.returncode == 143, stopped.process.stderr
    assert "stopped after step 4" in stopped.process.stdout
    assert run(tmp_path, (2, 1, "SIGTERM"), settings=LOCAL).went_well(undisturbed_local_run)


IN_BACKWARD = {"optimizer": {"in_backward": True}, "run": {"clip_norm": 0.0, "on_nonfinite": "stop"}}
REPOSITORY = str(Path(__file__).parents[2])


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("when", "settings", "asked"),
    [
        (6, {"recovery": {"survivors": "restart"}}, {}),
        ("record of 2", {"optimizer": {"name": "adamw", "states": "int8"}}, {}),
        pytest.param(6, {"offload": {"optimizer": "file"}}, {}, marks=FULL),
        pytest.param(6, IN_BACKWARD, {}, marks=FULL),
        (6, {}, {"given": True, "unfreezes": 2}),
        pytest.param(6, {}, {"buffers": True}, marks=FULL),
        pytest.param(6, {"optimizer": {"name": "muon"}}, {}, marks=FULL),
        pytest.param(6, {"optimizer": {"name": "adagrad"}}, {}, marks=FULL),
        pytest.param("record of 2", {"zero": {"stage": 1}, "ema": {"decay": 0.9}}, {}, marks=FULL),
        pytest.param(6, {"recovery": {"memory": "auto"}}, {"simulated": REPOSITORY}, marks=[FULL, NEEDS_COMPILER]),
    ],
)
def test_a_run_goes_on_from_a_snapshot(tmp_path: Path, when: Any, settings: dict[str, Any], asked: dict[str, Any]) -> None:
    """Every three steps there is one, and the others stay or start again. A rank that is lost in it leaves the one before."""
    alone = {"checkpoint": {"every_steps": 0}, **settings}
    undisturbed = run(tmp_path / "undisturbed", settings=alone, **asked)
    section = {"memory": "snapshots", "every_steps": 3, **alone.get("recovery", {})}
    found = run(tmp_path / "lost", (when, 1, "SIGKILL"), settings={**alone, "recovery": section}, **asked)
    assert found.went_well(undisturbed)
    assert "went on after step 3, from a snapshot in memory" in found.process.stdout


@pytest.mark.full
def test_a_snapshot_counts_on_where_the_run_goes_on_from_newer_states(tmp_path: Path) -> None:
    """It is of step 3 and the one that is left when another rank is lost, after a step with other trained parameters."""
    asked: dict[str, Any] = {"given": True, "unfreezes": 6}
    undisturbed = run(tmp_path / "undisturbed", **asked)
    settings = {"checkpoint": {"every_steps": 0}, "recovery": {"copies": 1, "every_steps": 3}}
    lost = [(step, 1, "SIGKILL") for step in (2, 5, 6)]
    found = run(tmp_path / "lost", *lost, launcher=OTHERS_MAY_COME, settings=settings, hosts=2, **asked)
    assert found.went_well(undisturbed)
    sources = [line["source"] for line in read_metrics(found.folder / "run" / "recoveries.jsonl")]
    assert sources == ["memory", "memory", "snapshot"]
    assert "went on after step 3, from a snapshot" in found.process.stdout


@pytest.mark.parametrize("when", [("substep of 3", 6), pytest.param((1, "begin of 2"), marks=FULL)])
@pytest.mark.parametrize("given", [False, pytest.param(True, marks=FULL)])
def test_buffers_that_passes_leave_alone_are_those_of_the_others(tmp_path: Path, when: tuple[Any, ...], given: bool) -> None:
    """Also where a new process would make others, as where they come from a checkpoint. No step is lost."""
    undisturbed = run(tmp_path / "undisturbed", scaled=True, given=given)
    faults = [(each, number % 2, "SIGKILL") for number, each in enumerate(when)]
    found = run(tmp_path / "lost", *faults, scaled=True, given=given)
    assert found.went_well(undisturbed)
    sources = [line["source"] for line in read_metrics(found.folder / "run" / "recoveries.jsonl")]
    assert sources == ["memory"] * len(when)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("when", ["substep of 1", pytest.param("substep of 3", marks=FULL), 6])
@pytest.mark.parametrize("how", [pytest.param(True, marks=FULL), "in place", "replaced"])
def test_buffers_that_passes_change_come_from_a_checkpoint(tmp_path: Path, when: Any, how: bool | str) -> None:
    """Or are made anew with the run; also where torch's version counters do not tell a change, or a new tensor is in its place."""
    undisturbed = run(tmp_path / "undisturbed", buffers=how)
    found = run(tmp_path / "lost", (when, 1, "SIGKILL"), buffers=how)
    assert found.went_well(undisturbed)
    assert read_metrics(found.folder / "run" / "recoveries.jsonl")[0]["source"] == "checkpoint"


@pytest.mark.parametrize("launcher", [(), OTHERS_MAY_COME])
def test_copies_need_another_host(tmp_path: Path, launcher: Sequence[str]) -> None:
    """One that comes later will do."""
    found = run(tmp_path, launcher=launcher, settings={"recovery": {"copies": 1}})
    said = "recovery.copies: 1 has copies on another host, and all ranks are on one; start them on several"
    assert (found.process.returncode, said in found.process.stderr) == ((0, False) if launcher else (2, True))


@pytest.mark.parametrize("section", [{"survivors": "keep"}, {"memory": "snapshots"}, {"survivors": "restart", "copies": 1}])
def test_what_a_launcher_of_others_cannot_give_is_refused(monkeypatch: pytest.MonkeyPatch, section: dict[str, Any]) -> None:
    """Where it is asked for: the resolved configuration of a run names all keys, also those that were left as they are."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    name, value = [*section.items()][-1]
    with pytest.raises(ConfigError, match=f"recovery.{name}: {value} needs a launcher that keeps ranks and memory"):
        Recovery.begin(load_config({"recovery": section}), None, stays=True)
    resolved = load_config({"recovery": load_config(None).recovery.model_dump()})
    assert Recovery.begin(resolved, None, stays=True) is None


NARROW = {"precision": {"compute": "bfloat16", "master": "float32", "reduce": "float32"}, "checkpoint": {"every_steps": 0}}
ON_FILES: dict[str, Any] = {**NARROW, "offload": {"parameters": "file"}, "model": {"train": ["2.*"]}}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        pytest.param(NARROW, {"given": True, "unfreezes": 6}, marks=FULL),
        pytest.param({**NARROW, "ema": {"decay": 0.5}}, {"given": True, "unfreezes": 6}, marks=FULL),
        (ON_FILES, {}),
        ({**ON_FILES, "model": {}}, {"given": True, "unfreezes": 100}),
    ],
)
def test_weights_that_are_frozen_have_their_values_after_a_loss(
    tmp_path: Path, settings: dict[str, Any], asked: dict[str, Any]
) -> None:
    """Also where they are on files, which end with their ranks, and where they are trained from a later step on."""
    undisturbed = run(tmp_path / "undisturbed", settings=settings, **asked)
    found = run(tmp_path / "lost", (4, 1, "SIGKILL"), settings=settings, **asked)
    assert found.went_well(undisturbed)
    assert found.lost_steps is (asked.get("unfreezes") == 100), "of a model that is given, they are nowhere else"


@pytest.mark.parametrize("way", ["memory", *(pytest.param(way, marks=FULL) for way in ("snapshots", "durable"))])
def test_frozen_weights_are_those_that_the_run_has_begun_from(tmp_path: Path, way: str) -> None:
    """They are those of a checkpoint in which they were trained, and not those of the model's source."""
    first = run(tmp_path / "first", settings={"precision": NARROW["precision"]})
    resumed = {"every_steps": 0, "resume": str(first.folder / "run" / "checkpoints" / "step-00000004")}
    settings: dict[str, Any] = {**ON_FILES, "checkpoint": resumed}
    if way == "snapshots":
        settings |= {"recovery": {"memory": "snapshots", "every_steps": 1}, "offload": {}}
    if way == "durable":
        settings["offload"] = {"parameters": "file", "optimizer": "file", "durable": True}
    undisturbed = run(tmp_path / "undisturbed", settings=settings)
    found = run(tmp_path / "lost", (6, 1, "SIGKILL"), settings=settings)
    assert found.process.returncode == 0, found.process.stderr
    assert "went on after step" in found.process.stdout or way == "durable"
    assert found.end(0)["weights"] == undisturbed.end(0)["weights"]


@pytest.mark.parametrize("memory", ["snapshots", pytest.param("auto", marks=FULL)])
def test_a_run_takes_the_memory_that_a_plan_counts(tmp_path: Path, memory: str) -> None:
    """Of snapshots, and of gradients that a journal may need after their step."""
    keys = ["model.config.hidden_size=64", "model.config.num_hidden_layers=2", "data.tokenizer=bytes", "zero.stage=3"]
    keys += ["batch.global_size=4", "batch.micro_size=2", "data.sequence_length=32", "precision.compute=float32"]
    keys += ["run.max_steps=3", f"run.output_dir={tmp_path}", "run.name=run", f"recovery.memory={memory}"]
    config = load_config(None, keys)
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    found = ended([sys.executable, "-m", "zeromesh", "train", str(tmp_path / "run.yaml"), "--nproc", "2"], seconds=60)
    assert found.returncode == 0, found.stderr
    line = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["memory"]["device"]
    with closing(subject_of(config)) as subject:
        counted = Estimator(subject, MACHINE, 2).estimate(Layout(shard=2, stage=3, micro=2)).check().memory["device"]
    names = {"moments", "snapshots" if memory == "snapshots" else "gradients"}
    assert {name: line.get(name) for name in names} == pytest.approx({name: counted[name] for name in names}, rel=0.05)
    assert ("snapshots" in line) is (memory == "snapshots")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("faults", [(), ((6, 1, "SIGKILL"),)])
def test_a_run_does_not_go_on_from_a_snapshot_of_another(undisturbed_run: Run, tmp_path: Path, faults: Any) -> None:
    """Of one that has failed before it in the same processes, with the same layout and optimizer."""
    found = run(tmp_path, *faults, first="fails", settings={"recovery": {"memory": "snapshots", "every_steps": 2}})
    assert found.went_well(undisturbed_run)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layout", "settings", "asked"),
    [
        ("plain", {}, {}),
        pytest.param("unfreezes", {}, GIVEN["unfreezes"], marks=FULL),
        ("plain", {"recovery": {"memory": "snapshots", "every_steps": 1}}, {"first": "fails"}),
    ],
)
def test_states_that_are_there_do_not_lack_the_next_start(
    undisturbed_runs: Callable[[str], Run], tmp_path: Path, layout: str, settings: dict[str, Any], asked: dict[str, Any]
) -> None:
    """Where the host has no memory beside them: they are used again, or given back for those of a checkpoint. What another run has
    left is given back before the model is built."""
    faults = [] if "first" in asked else [(6, 1, "SIGKILL")]
    assert run(tmp_path, *faults, settings=settings, tight=True, **asked).went_well(undisturbed_runs(layout))


@FULL
def test_a_snapshot_of_another_model_leaves_no_trace(tmp_path: Path) -> None:
    """The builder makes another model after the fault: the run begins anew, and no count of the lost one's updates is left."""
    settings = {"recovery": {"memory": "snapshots", "survivors": "restart"}, "checkpoint": {"every_steps": 0}}
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "struck-0").touch()
    new = run(tmp_path / "new", changes=True, settings=settings)
    found = run(tmp_path / "lost", (4, 1, "SIGKILL"), changes=True, settings=settings)
    assert found.went_well(new)


@FULL
def test_what_a_process_holds_does_not_grow_with_recoveries(tmp_path: Path) -> None:
    """Descriptors, threads and mappings of memory that is shared, from the third of twenty-two recoveries on."""
    settings = {"run": {"max_steps": 26}, "recovery": {"limit": 30}}
    undisturbed = run(tmp_path / "undisturbed", settings=settings)
    faults = [(step, 1 + step % 2, "SIGKILL") for step in range(2, 24)]
    found = run(tmp_path / "lost", *faults, settings=settings)
    assert found.went_well(undisturbed)
    assert len({*found.pids(0)}) == 1
    held = [json.loads(line) for line in (found.folder / "held-0").read_text().splitlines()]
    assert len(held) == 23
    assert min(held[3:13]) == min(held[13:])
    assert all(descriptors - held[3][0] in (-1, 0, 1) for descriptors, *_ in held[3:]), "one may be open for a moment"
    assert {tuple(rest) for _, *rest in held[3:]} == {tuple(held[3][1:])}


CHANGED = "/run is of a run with other settings:\n  - data.train_samples: 36 then, 48 now\nundo these changes"


@pytest.mark.parametrize(
    ("faults", "asked", "said", "recoveries"),
    [
        ([(5, 1, "SIGKILL")], {"settings": {"recovery": {"survivors": "end"}}}, "rank 1", 0),
        ([(5, 1, "raise")] * 3, {}, "RuntimeError: no more", 2),
        ([(5, 1, "SIGKILL")], {"grows": True}, CHANGED, 1),
        pytest.param(
            [(7, 1, "SIGKILL")],
            {"grows": True, "settings": {"recovery": {"memory": "snapshots", "every_steps": 1}}},
            *(CHANGED, 1),
            marks=FULL,
        ),
    ],
)
def test_a_run_ends(tmp_path: Path, faults: Any, asked: dict[str, Any], said: str, recoveries: int) -> None:
    """Where it is to, where the same fault comes back, and where the data have changed since it has begun."""
    found = run(tmp_path, *faults, **asked)
    assert found.process.returncode != 0
    assert said in found.process.stderr
    assert found.process.stderr.count("the run goes on") == recoveries


def test_a_run_that_began_with_a_checkpoint_of_another_goes_on_from_its_own(undisturbed_run: Run, tmp_path: Path) -> None:
    """Also before its first one."""
    begun = str(undisturbed_run.folder / "run" / "checkpoints" / "step-00000004")
    how = {"recovery": {"memory": "off"}, "checkpoint": {"every_steps": 2, "resume": begun}}
    found = run(tmp_path, (5, 1, "SIGKILL"), (7, 1, "SIGKILL"), settings=how)
    assert found.process.returncode == 0, found.process.stderr
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["loss"] for line in lines] == undisturbed_run.losses[4:]
    assert found.process.stdout.count("resumed from step 4") == 2
    assert found.process.stdout.count("resumed from step 6") == 1
    assert len({*found.pids(0)}) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("victim", [1, 0])
@pytest.mark.parametrize(
    "when",
    [
        *("start", "meeting 1", "group 3", "connected 5"),
        *(pytest.param(each, marks=FULL) for each in ("group 1", "group 2", "group 4", "connected 1", "connected 3")),
    ],
)
def test_a_rank_is_lost_before_the_others_have_formed_a_mesh_again(
    undisturbed_run: Run, tmp_path: Path, victim: int, when: str
) -> None:
    """Also while they wait to be connected with it."""
    found = run(tmp_path, (5, victim, "SIGKILL"), (when, victim, "SIGKILL"), settings={"checkpoint": {"every_steps": 100}})
    assert found.went_well(undisturbed_run)
    assert not found.lost_steps
    assert found.process.stderr.count("was killed by SIGKILL") == 2
    assert len({*found.pids(2)}) == 1


@pytest.mark.parametrize("how", ["SIGKILL", "raise"])
def test_a_rank_is_lost_while_callbacks_of_the_others_wait_for_it(undisturbed_run: Run, tmp_path: Path, how: str) -> None:
    """They do so in torch's own collectives, whose errors are of no class of ours."""
    found = run(tmp_path, (5, 1, how), collective=True)
    assert found.went_well(undisturbed_run)
    assert not found.lost_steps
    assert [len({*found.pids(rank)}) for rank in range(RANKS)] == [1, 2, 1]


def stopped_run(folder: Path, *faults: Any, everyone: bool = False, **asked: Any) -> Run:
    """A run to which SIGTERM comes at its second fault, and to its launcher more than a second before those that wait go on."""

    def stop() -> None:
        (started,) = [each for each in psutil.Process().children() if str(folder) in each.cmdline()]
        for each in [started, *(started.children(recursive=True) if everyone else ())]:
            each.terminate()
        time.sleep(1.1 * (faults[-1][0] == "recovery"))
        (folder / "go on").touch()

    waits = threading.Thread(target=lambda: (wait_for((folder / "struck-1").exists), stop()))
    waits.start()
    stopped = run(folder, *faults, **asked)
    waits.join()
    assert stopped.process.returncode == 143, stopped.process.stderr
    return stopped


def test_a_stop_ends_what_follows_training_though_a_rank_was_lost_there(tmp_path: Path) -> None:
    """All ranks have started again, and none trains, so that no stop waits until all do."""
    lost = [("evaluations", 1, "SIGKILL"), ("evaluations", 1, "wait")]
    found = stopped_run(tmp_path, *lost, evaluates=True)
    assert "nothing was trained" in found.process.stdout


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("fault", "everyone", "section"),
    [
        (("start", 1, "wait"), False, {}),
        (("start", 1, "wait"), True, {}),
        (("recovery", 1, "wait"), True, {}),
        ((4, 0, "SIGSTOP"), False, {}),
        pytest.param((4, 1, "SIGSTOP"), True, {}, marks=FULL),
        pytest.param(*(("start", 1, "wait"), False, {"survivors": "restart", "memory": "snapshots", "every_steps": 1}), marks=FULL),
    ],
)
def test_a_stop_waits_until_ranks_that_recover_can_save(
    undisturbed_run: Run, tmp_path: Path, fault: Any, everyone: bool, section: dict[str, Any]
) -> None:
    """It comes while a new process begins, and others may rest, or in its `fit`, before all train, or a rank is lost before it has
    saved: they go on from memory, take a step, save and end; also where all processes get the signal."""
    how = {"recovery": section, "checkpoint": {"every_steps": 100}}
    faults = [(2, 1, "SIGKILL"), fault]
    stopped = stopped_run(tmp_path, *faults, everyone=everyone, settings=how)
    assert "went on after step" in stopped.process.stdout, stopped.process.stdout
    found = run(tmp_path, *faults, settings=how)
    assert "resumed from step" in found.process.stdout
    assert found.went_well(undisturbed_run)


@pytest.mark.full
def test_faults_at_different_steps_are_none_that_comes_back(undisturbed_run: Run, tmp_path: Path) -> None:
    """Where all ranks start again, which ends them."""
    how = {"recovery": {"survivors": "restart"}, "checkpoint": {"every_steps": 2}}
    found = run(tmp_path, *((step, 1, "SIGKILL") for step in (3, 5, 7)), settings=how)
    assert found.process.returncode == 0, found.process.stderr
    assert found.losses == undisturbed_run.losses


STOPS: dict[str, Any] = {"stops": 7, "settings": {"run": {"eval_every": 3, "log_every": 5, "max_steps": 11}}}


def rows(found: Run, name: str) -> list[Any]:
    """The lines of a file of the run, without times."""
    lines = read_metrics(found.folder / "run" / name)
    return [{key: line.get(key) for key in ("step", "loss", "eval_loss")} for line in lines]


@pytest.fixture(scope="module")
def undisturbed_stop(undisturbed_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("undisturbed"), **STOPS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("when", "victim"),
    [
        ("evaluation 6", 0),
        pytest.param("evaluation 6", 1, marks=FULL),
        pytest.param(4, 1, marks=FULL),
        (7, 1),
        pytest.param(7, 0, marks=FULL),
        ("forward of evaluation 7", 1),
        pytest.param("forward of evaluation 7", 0, marks=FULL),
        ((4, "end"), 0),
        pytest.param((4, "end"), 1, marks=FULL),
        pytest.param("end", 1, marks=FULL),
    ],
)
def test_what_follows_a_step_counts_once(undisturbed_stop: Run, tmp_path: Path, when: Any, victim: int) -> None:
    """For callbacks that stop a run early, and an end that one has asked for is one in the next start; also where a rank is lost
    at the very end of a run that has recovered before."""
    times = when if isinstance(when, tuple) else (when,)
    found = run(tmp_path, *((each, victim, "SIGKILL") for each in times), **STOPS)
    assert found.process.returncode == 0, found.process.stderr
    assert found.process.stdout.count("from the memory of the ranks") == len(times)
    assert "ended after step 7: a callback asked to stop" in found.process.stdout
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert rows(found, name)[-1]["step"] == (5 if name == "metrics.jsonl" else 7)
        assert {row["step"]: row for row in rows(found, name)} == {row["step"]: row for row in rows(undisturbed_stop, name)}
    expected = [undisturbed_stop.end(rank) for rank in range(RANKS)]
    assert all(found.end(rank)[what] == expected[rank][what] for rank in range(RANKS) for what in ("weights", "logged", "counts"))


def test_a_run_that_had_ended_early_goes_on_where_a_rank_is_lost_in_its_first_step(tmp_path: Path) -> None:
    """A callback's end is one for the launch that it was asked for in, and not for a later one, whatever is lost in that."""
    assert run(tmp_path, **STOPS).process.returncode == 0
    found = run(tmp_path, ("substep of 8", 1, "SIGKILL"), **{**STOPS, "stops": 9})
    assert found.process.returncode == 0, found.process.stderr
    assert "ended after step 9: a callback asked to stop" in found.process.stdout


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("when", "settings"),
    [
        ("substep of 3", {}),
        (2, {"recovery": {"memory": "off"}}),
        pytest.param(6, {"recovery": {"memory": "off"}}, marks=FULL),
        pytest.param("substep of 5", {"recovery": {"memory": "snapshots", "every_steps": 3}}, marks=FULL),
        ("end of epoch 0", {"recovery": {"memory": "off"}}),
    ],
)
def test_a_step_that_is_made_again_counts_once(undisturbed_run: Run, tmp_path: Path, when: Any, settings: dict[str, Any]) -> None:
    """For callbacks, on all ranks: its midst, or steps since a checkpoint or since the beginning. What a callback has asked for in
    steps that are lost is forgotten."""
    asked = {"most": 7, "samples": 84} if when == "end of epoch 0" else {}
    found = run(tmp_path / "lost", (when, 1, "SIGKILL"), settings=settings, **asked)
    assert found.went_well(run(tmp_path / "undisturbed", **asked) if asked else undisturbed_run)


def test_an_evaluation_that_ends_an_epoch_counts_once(tmp_path: Path) -> None:
    found = run(tmp_path, ("forward of evaluation 4", 1, "SIGKILL"), samples=24, settings={"run": {"eval_every": "epoch"}})
    assert "from the memory of the ranks" in found.process.stdout
    assert [row["step"] for row in rows(found, "evaluations.jsonl")] == [2, 4, 6, 8]


def test_a_run_whose_modules_have_states_of_their_own_begins_anew(tmp_path: Path) -> None:
    alone: dict[str, Any] = {"settings": {"checkpoint": {"every_steps": 0}}, "counts": True}
    undisturbed = run(tmp_path / "undisturbed", **alone)
    found = run(tmp_path / "lost", (5, 1, "SIGKILL"), **alone)
    assert found.went_well(undisturbed)
    assert found.lost_steps


def test_a_script_and_its_configuration_are_edited_while_it_runs(undisturbed_run: Run, tmp_path: Path) -> None:
    """The new process computes what the others do."""
    found = run(tmp_path, (5, 1, "SIGKILL"), edits=True)
    assert found.went_well(undisturbed_run)
    assert not found.lost_steps


def test_a_rank_whose_data_worker_is_killed_is_lost(undisturbed_run: Run, tmp_path: Path) -> None:
    found = run(tmp_path, ("sample 17 of a worker", 1, "SIGKILL"), settings={"data": {"workers": 1}})
    assert found.went_well(undisturbed_run)
    assert "a data worker is gone: process" in found.process.stderr
    assert not found.lost_steps


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=FULL)])
def test_a_rank_is_lost_while_the_disk_is_full(undisturbed_run: Run, tmp_path: Path, victim: int) -> None:
    """So full that neither the checkpoint of step 4 nor a line has room, until step 7."""
    found = run(tmp_path, (5, victim, "SIGKILL"), full=[3, 7])
    assert found.process.returncode == 0, found.process.stderr
    assert found.process.stdout.count("metrics.jsonl' cannot be written: No space left on device. Training") == 2
    assert "the checkpoint of step 4 was not written" in found.process.stdout
    assert "went on after step 5, from the memory of the ranks" in found.process.stdout
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, *range(5, STEPS + 1)]
    assert all(found.end(rank)["weights"] == undisturbed_run.end(rank)["weights"] for rank in range(RANKS))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "when",
    [
        "forward of evaluation 6",
        "position 1 of 6.5",
        pytest.param("position 4 of 6.5", marks=FULL),
        pytest.param("position 7 of 6.5", marks=FULL),
        pytest.param("position 17 of 6.5", marks=FULL),
    ],
)
def test_an_evaluation_of_averages_loses_no_step(tmp_path: Path, when: str) -> None:
    """They are exchanged with the weights in memory, which a rank that is lost may have done in part."""
    settings = {"ema": {"decay": 0.9, "evaluate": True}, "run": {"eval_every": 3}, "checkpoint": {"every_steps": 0}}
    undisturbed = run(tmp_path / "undisturbed", settings=settings)
    found = run(tmp_path / "lost", (when, 1, "SIGKILL"), settings=settings)
    assert found.went_well(undisturbed)
    assert (found.folder / "struck-0").exists()
    assert not found.lost_steps
