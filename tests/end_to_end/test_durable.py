"""A run whose states are on files that outlive it goes on after its latest step: after a kill of all processes at any instant, and
when a rank is lost; with damaged files from a checkpoint. Losses and weights are those of a run to which nothing has happened."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import nn

import tests.support.durable_runs as runs
from tests.support.waiting import is_running, logged_steps, wait_for
from zeromesh.errors import CheckpointError, ConfigError
from zeromesh.offload import DurableTier
from zeromesh.trainer import Trainer
from zeromesh.trainer.callbacks.callback import Callback
from zeromesh.trainer.monitoring.step_metrics import read_metrics

FULL = pytest.mark.full
NARROW = {"compute": "bfloat16", "master": "float32", "reduce": "float32"}
HALF = {"compute": "bfloat16", "reduce": "float32"}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"precision": NARROW, "optimizer": {"states": "int8"}},
    "average": {"ema": {"decay": 0.9, "evaluate": True}, "zero": {"stage": 1}},
    "later average": {"ema": {"decay": 0.9, "start_step": 3, "every_steps": 2}},
    "bfloat16": {"precision": NARROW, "optimizer": {"states": "bfloat16"}},
    "no master weights": {"precision": {**HALF, "master": "none"}},
    "compensated": {"precision": {**HALF, "master": "kahan"}},
    "float16": {"precision": {"compute": "float16", "master": "float32", "reduce": "float32"}},
    "accumulation": {"batch": {"global_size": 12, "micro_size": 1}, "zero": {"stage": 2}},
    "checksums": {"offload": {"checksums": True}},
    "gradients in memory": {"offload": {"gradients": "none"}},
    "parameters": {"offload": {"parameters": "file"}},
    "small buffers": {"offload": {"staging": "4MiB"}, "optimizer": {"name": "adam"}},
}


class StruckError(Exception):
    """What ends a run in its midst."""


def strike() -> None:
    raise StruckError


def interrupted(folder: Path, when: str, asked: Any, *callbacks: Callback) -> None:
    restore = runs.at(when, strike)
    try:
        with pytest.raises(StruckError):
            runs.train(folder, asked, callbacks=callbacks)
    finally:
        restore()


def records(folder: Path) -> list[Path]:
    """The files of the two records, the older one first."""
    return sorted((folder / "run" / "offload").glob("*.commit?"), key=lambda path: path.stat().st_mtime_ns)


@cache
def undisturbed(folder: Path, name: str) -> dict[str, Any]:
    return runs.train(folder / name, SETTINGS[name])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


def goes_on(base: Path, folder: Path, name: str, since: int, more: Any = None) -> bool:
    """Exactly as if nothing had happened, from the step after `since` on."""
    found, whole = runs.train(folder, {**SETTINGS[name], **(more or {})}), undisturbed(base, name)
    assert found["weights"] == whole["weights"]
    assert found["losses"] == {step: loss for step, loss in whole["losses"].items() if step > since}
    lines = [read_metrics(each / "run" / "metrics.jsonl") for each in (folder, base / name)]
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]
    lines = [read_metrics(each / "run" / "evaluations.jsonl") for each in (folder, base / name)]
    assert [line["eval_loss"] for line in lines[0]] == [line["eval_loss"] for line in lines[1]]
    return True


@pytest.mark.parametrize("when", ["update 5", *(pytest.param(f"{each} commit 5", marks=FULL) for each in ("before", "after"))])
@pytest.mark.parametrize(
    "name", [name if name in ("plain", "int8", "average") else pytest.param(name, marks=FULL) for name in SETTINGS]
)
def test_a_run_goes_on_after_its_latest_step(
    base: Path, tmp_path: Path, name: str, when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(tmp_path, when, SETTINGS[name])
    since = 5 if when.startswith("after") else 4
    assert goes_on(base, tmp_path, name, since)
    said = capsys.readouterr().out
    assert f"states of step {since} are on files (offload.durable): no checkpoint is read" in said
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not list((tmp_path / "run" / "offload").iterdir()), "a run that is whole needs no files"


class Unfreezes(Callback):
    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        if step == 3:
            trainer.model[2].requires_grad_(True)


def frozen() -> nn.Module:
    model = runs.build()
    model[2].requires_grad_(False)
    return model


@pytest.mark.parametrize("settings", [{}, {"precision": NARROW}], ids=["no copy", "copy"])
def test_weights_that_are_trained_later_are_on_files(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Those that were frozen when the model was built, with and without a copy in another dtype that is gathered."""
    whole = runs.train(tmp_path / "whole", settings, frozen, [Unfreezes()])
    restore = runs.at("update 5", strike)
    with pytest.raises(StruckError):
        runs.train(tmp_path / "lost", settings, frozen, [Unfreezes()])
    restore()
    found = runs.train(tmp_path / "lost", settings, frozen, [Unfreezes()])
    assert found["losses"] == {step: loss for step, loss in whole["losses"].items() if step > 4}
    assert found["weights"] == whole["weights"]


class Counts(Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_begin(self, trainer: Any, step: int) -> None:
        self.seen.append(step)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"]


def test_a_record_has_the_states_of_callbacks_after_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the midst of the next one, in which it is written."""
    commit = DurableTier._commit

    def later(self: DurableTier, step: int, content: bytes) -> None:
        time.sleep(0.05)
        commit(self, step, content)

    monkeypatch.setattr(DurableTier, "_commit", later)
    interrupted(tmp_path, "update 5", {}, Counts())
    runs.train(tmp_path, {}, callbacks=[counts := Counts()])
    assert counts.seen == [*range(1, runs.STEPS + 1)]


def test_a_torn_record_does_not_count(base: Path, tmp_path: Path) -> None:
    interrupted(tmp_path, "after commit 4", {})
    torn = records(tmp_path)[-1]
    torn.write_bytes(torn.read_bytes()[:300])
    assert goes_on(base, tmp_path, "plain", 3)


@pytest.mark.parametrize("how", ["damaged", "missing", "no record"])
def test_states_that_are_not_whole_are_named(base: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint is used, and without one nothing is begun anew."""
    for saved in (False, True):
        folder, saves = tmp_path / str(saved), {"checkpoint": {"every_steps": 2 * saved, "asynchronous": False}}
        interrupted(folder, "update 6" if saved else "update 5", saves)
        (states,) = (folder / "run" / "offload").glob("*.states")
        data = bytearray(states.read_bytes())
        if how == "missing":
            states.unlink()
        elif how == "damaged":
            for at in range(0, len(data), 4096):  # Both places of all slots.
                data[at] ^= 1
            states.write_bytes(data)
        else:
            for each in records(folder):
                each.unlink()
        if how == "no record" and not saved:
            continue  # As a new run, of which nothing was committed.
        capsys.readouterr()
        if not saved:
            with pytest.raises(CheckpointError, match=r"master weights of .* not the bytes of step 4 .*remove the files"):
                runs.train(folder, saves)
            continue
        assert goes_on(base, folder, "plain", 4, saves)
        said = capsys.readouterr().out
        assert "resumed from step 4" in said
        assert ("WARNING: file tier, master weights of" in said) is (how != "no record")


def test_a_bit_that_has_flipped_is_found(tmp_path: Path) -> None:
    """In any of the slots, and no byte beside them matters."""
    interrupted(tmp_path, "after commit 4", {})
    (path,) = (tmp_path / "run" / "offload").glob("*.states")
    content = path.read_bytes()
    refused = set()
    for at in range(0, len(content), 4096):
        path.write_bytes(content[: at + 99] + bytes([content[at + 99] ^ 4]) + content[at + 100 :])
        try:
            runs.train(tmp_path, {"run": {"name": "run", "max_steps": 4, "eval_every": 0}})
        except CheckpointError as error:
            refused.add(str(error).partition(" of ")[0])
        break
    assert refused


def test_a_folder_that_is_found_elsewhere_is_no_new_run(base: Path, tmp_path: Path) -> None:
    """Files in a directory of several runs are known by the folder of theirs, and a link to it is that folder."""
    place = {"offload": {"directory": str(tmp_path / "disk")}}
    (folder := tmp_path / "folder").mkdir()
    interrupted(folder, "update 5", place)
    (link := tmp_path / "link").symlink_to(folder)
    interrupted(link, "update 6", place)
    folder.rename(tmp_path / "moved")
    before = (tmp_path / "moved" / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"moved/run has 5 steps, and neither files .* nor checkpoints are found"):
        runs.train(tmp_path / "moved", place)
    assert (tmp_path / "moved" / "run" / "metrics.jsonl").read_bytes() == before
    (tmp_path / "moved").rename(folder)
    assert goes_on(base, folder, "plain", 5, place)
    assert len(runs.train(folder, place)["losses"]) == runs.STEPS, "a run that is over leaves nothing to go on from"


def test_settings_that_have_changed_are_refused(tmp_path: Path) -> None:
    interrupted(tmp_path, "update 5", {})
    with pytest.raises(ConfigError, match=r"optimizer\.lr: 0\.01 then, 0\.02 now"):
        runs.train(tmp_path, {"optimizer": {"lr": 0.02}})
    with pytest.raises(ConfigError, match=r"files hold states of an earlier run, up to step 4, and checkpoint\.resume is never"):
        runs.train(tmp_path, {"checkpoint": {"every_steps": 0, "resume": "never"}})


def test_states_of_another_layout_stay(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here of moments in another form, which go on from the checkpoint."""
    saves = {"checkpoint": {"every_steps": 2, "asynchronous": False}}
    interrupted(tmp_path, "update 6", saves)
    before = {*(tmp_path / "run" / "offload").iterdir()}
    interrupted(tmp_path, "before commit 5", {**saves, "zero": {"stage": 1}})
    said = capsys.readouterr().out
    assert "resumed from step 4" in said
    assert f"WARNING: {min(map(str, before))}" in said
    assert "which alone reads its states of step 5: to keep these, start the run as it was" in said
    assert before < {*(tmp_path / "run" / "offload").iterdir()}
    assert goes_on(base, tmp_path, "plain", 5, saves)


@pytest.mark.parametrize("other", [{"durable": False}, {"durable": False, "optimizer": "none"}])
def test_states_are_not_passed_over_where_files_do_not_last(tmp_path: Path, other: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is begun anew over them, and an older checkpoint is used with a line."""
    interrupted(tmp_path, "after commit 3", {})
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"offload: files of this run have its states of step 3.*There is none now; remove"):
        runs.train(tmp_path, {"offload": {"optimizer": "file", **other}})
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    saves: dict[str, Any] = {"checkpoint": {"every_steps": 4, "asynchronous": False}}
    interrupted(tmp_path, "after commit 5", saves)
    capsys.readouterr()
    assert len(runs.train(tmp_path, {**saves, "offload": {"optimizer": "file", **other}})["losses"]) == 2
    assert "files of this run have its states of step 5" in capsys.readouterr().out


@pytest.mark.usefixtures("at_once")
def test_states_of_more_ranks_are_not_passed_over_in_silence(base: Path, tmp_path: Path) -> None:
    """Without a checkpoint, fewer ranks would begin anew."""
    ranks(tmp_path, settings={}, when="update 5", rank=1)
    with pytest.raises(CheckpointError, match=r"of another layout .* states of step 4: .* There is none now; remove"):
        runs.train(tmp_path, {})
    found = ranks(tmp_path, settings={})
    assert went_well(found, tmp_path, base, settings={}, given=False)
    assert "no checkpoint is read" in found.stdout


def test_a_checkpoint_that_is_as_new_is_used(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saves = {"checkpoint": {"every_steps": 4, "asynchronous": False}}
    interrupted(tmp_path, "after commit 4", saves)
    assert goes_on(base, tmp_path, "plain", 4, saves)
    assert "are on files (offload.durable)" not in capsys.readouterr().out


class Stops(Callback):
    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        trainer.request(stop=step == 3)


def test_a_run_that_a_callback_ends_leaves_no_files(tmp_path: Path) -> None:
    found = runs.train(tmp_path, {}, callbacks=[Stops()])
    assert len(found["losses"]) == 3
    assert not [each for each in (tmp_path / "run").rglob("*") if each.suffix in (".states", ".commit0", ".commit1")]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"offload": {"optimizer": "none"}}, "set offload.optimizer to file"),
        ({"offload": {"optimizer": {"tier": "file", "fraction": 0.5}}}, "set offload.optimizer to file"),
        ({"optimizer": {"name": "lion"}}, "optimizer of its own class"),
        (
            {"optimizer": {"in_backward": True}, "run": {"clip_norm": 0.0, "on_nonfinite": "stop"}},
            "optimizer.in_backward, which changes states early",
        ),
    ],
)
def test_what_files_cannot_cover_is_refused(tmp_path: Path, asked: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        runs.train(tmp_path, asked)


def test_buffers_that_are_saved_are_refused(tmp_path: Path) -> None:
    def build() -> Any:
        model = runs.build()
        model.register_buffer("seen", runs.torch.zeros(1))
        return model

    with pytest.raises(ConfigError, match=r"offload\.durable: seen: buffers that are saved"):
        runs.train(tmp_path, {}, build)


RANKS = 2


def ranks(folder: Path, *, killed_at: tuple[int, float] | None = None, **asked: Any) -> "subprocess.CompletedProcess[str]":
    """Run two ranks by a launcher, and kill it, and with it all, where that is asked for and an instant has come: `when`, or
    so many seconds after a step."""
    folder.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "zeromesh", "run", "--nproc", str(RANKS), str(Path(runs.__file__)), str(folder)]
    told = json.dumps({"settings": {}, "all": True, **asked})
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    kinds: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": variables}
    with subprocess.Popen([*words, told], **kinds) as process:
        if killed_at is not None:
            step, seconds = killed_at
            wait_for(lambda: process.poll() is not None or logged_steps(folder) >= step, 60)
            time.sleep(seconds)
        elif "when" in asked and asked.get("all", True):
            wait_for((folder / "struck").exists, 60)
        if killed_at is not None or ("when" in asked and asked.get("all", True)):
            process.kill()
            pids = [int(each.read_text()) for each in folder.glob("pid-*")]
            wait_for(lambda: not any(map(is_running, pids)))  # Their files are locked until then.
        said = process.communicate(timeout=60)
    return subprocess.CompletedProcess(words, process.returncode, *said)


def end(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"end-{rank}").read_text())


@cache
def undisturbed_ranks(folder: Path, asked: str) -> Path:
    found = ranks(folder / f"ranks-{abs(hash(asked))}", **json.loads(asked))
    assert found.returncode == 0, found.stderr
    return folder / f"ranks-{abs(hash(asked))}"


def went_well(found: "subprocess.CompletedProcess[str]", folder: Path, base: Path, **asked: Any) -> bool:
    assert found.returncode == 0, found.stderr
    whole = undisturbed_ranks(base, json.dumps(asked))
    lines = [read_metrics(each / "run" / "metrics.jsonl") for each in (folder, whole)]
    assert [(line["step"], line["loss"]) for line in lines[0]] == [(line["step"], line["loss"]) for line in lines[1]]
    assert all(end(folder, rank)["weights"] == end(whole, rank)["weights"] for rank in range(RANKS))
    return True


LAYOUTS: dict[str, Any] = {
    "plain": {},
    "stage 1": {"zero": {"stage": 1}},
    "stage 2, int8": {"zero": {"stage": 2}, "precision": NARROW, "optimizer": {"states": "int8", "lr": 0.01}},
    "stage 0": {"zero": {"stage": 0}},
    "average": {"ema": {"decay": 0.9, "evaluate": True}},
}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("layout", ["plain", *(pytest.param(each, marks=FULL) for each in LAYOUTS if each != "plain")])
@pytest.mark.parametrize("when", ["update 5", *(pytest.param(each, marks=FULL) for each in ("before commit 4", "after commit 5"))])
def test_all_processes_are_killed(base: Path, tmp_path: Path, layout: str, when: str) -> None:
    """The launcher too. The next start goes on from what all ranks have committed."""
    found = ranks(tmp_path, settings=LAYOUTS[layout], when=when, rank=1)
    assert found.returncode == -signal.SIGKILL
    found = ranks(tmp_path, settings=LAYOUTS[layout])
    assert went_well(found, tmp_path, base, settings=LAYOUTS[layout], given=False)
    assert "no checkpoint is read" in found.stdout


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("given", [False, pytest.param(True, marks=FULL)])
@pytest.mark.parametrize("when", ["update 5", pytest.param("before commit 4", marks=FULL)])
def test_a_rank_is_lost(base: Path, tmp_path: Path, when: str, given: bool) -> None:
    """The others stay in their processes, and at most the present step is lost."""
    found = ranks(tmp_path, when=when, rank=1, all=False, given=given)
    assert went_well(found, tmp_path, base, settings={}, given=given)
    (told,) = read_metrics(tmp_path / "run" / "recoveries.jsonl")
    assert told["source"] == "files"
    assert told["lost_steps"] <= 1


@pytest.mark.usefixtures("at_once")
def test_a_rank_is_lost_that_alone_has_not_committed_the_first_step(base: Path, tmp_path: Path) -> None:
    """Nothing is lost but that step: the run begins anew."""
    found = ranks(tmp_path, when="before commit 1", rank=1, all=False)
    assert went_well(found, tmp_path, base, settings={}, given=False)
    assert read_metrics(tmp_path / "run" / "recoveries.jsonl")[0]["lost_steps"] == 1


@FULL
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", ["plain", "stage 1", "stage 2, int8"])
def test_all_processes_are_killed_at_random_again_and_again(base: Path, tmp_path: Path, layout: str, seed: int) -> None:
    """At instants that nothing chooses, some of them while a run begins to go on."""
    asked, dice, steps = {**LAYOUTS[layout], "run": {"max_steps": 60}}, Random(seed), 0
    for _ in range(6):
        found = ranks(tmp_path, settings=asked, killed_at=(steps + dice.randrange(12), dice.random() / 20))
        if found.returncode == 0:
            break
        steps = logged_steps(tmp_path)
    found = ranks(tmp_path, settings=asked) if found.returncode else found
    assert went_well(found, tmp_path, base, settings=asked, given=False)
