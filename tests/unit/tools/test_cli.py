"""The command line: what it starts, what it prints and how it exits."""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zeromesh.trainer
from tests.support.commands import ended
from zeromesh.errors import CollectiveError, ConfigError, DataError, ZeromeshError
from zeromesh.launch.leader import Nodes, WorkersFailed
from zeromesh.trainer import TrainerConfig
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.cli.reports import examples
from zeromesh.trainer.cli.train import exit_code_of

Runs = list[TrainerConfig]
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text("run: {name: here}\n")
    return str(path)


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[TrainerConfig]:
    """The configurations that a stand-in for the trainer has been run with."""
    runs: list[TrainerConfig] = []

    class Trainer:
        def __init__(self, *, config: TrainerConfig) -> None:
            self.config = config

        def fit(self) -> None:
            runs.append(self.config)

        def __enter__(self) -> Trainer:
            return self

        def __exit__(self, *error: object) -> None:
            """Nothing to close."""

    monkeypatch.setitem(vars(zeromesh.trainer), "Trainer", Trainer)
    return runs


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands that would have been started; the last entry of `results` is what the launcher returns."""
    calls: list[Any] = []

    def launch_workers(arguments: Any, *, processes: int, nodes: Nodes, notify: object) -> int:
        calls.append((processes, tuple(arguments)))
        return 0

    monkeypatch.setattr("zeromesh.launch.rendezvous.launch_workers", launch_workers)
    return calls


def test_one_process_trains(config: str, fitted: Runs, launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends without another look at all objects, which took one to two seconds after the last line of a run."""
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    assert main(["train", config, "run.seed=3"]) == 0
    assert [(run.run.name, run.run.seed) for run in fitted] == [("here", 3)]
    assert not launched
    assert gc.freeze in registered


@pytest.mark.parametrize(
    "words", [["{}", "--nproc", "2", "run.seed=3"], ["--nproc", "2", "{}", "run.seed=3"], ["{}", "run.seed=3", "--nproc=2"]]
)
def test_nproc_starts_workers(
    config: str, fitted: Runs, launched: list[Any], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    words = [word.format(config) for word in words]
    assert main(["train", *words]) == 0
    ((processes, arguments),) = launched
    assert processes == 2
    assert arguments[arguments.index("-m") :] == ("-m", "zeromesh", "train", "--worker", *words)
    assert not fitted
    assert main(["evaluate", *words]) == 0
    assert (launched[1][0], launched[1][1][arguments.index("train") :]) == (2, ("evaluate", "--worker", *words))
    # What a worker is started with is a command line that this command understands, whatever the number of ranks is now.
    monkeypatch.setattr("zeromesh.trainer.cli.main.become_worker", lambda *_, **__: None)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert main(arguments[arguments.index("train") :]) == 0
    assert fitted[0].run.seed == 3
    assert len(launched) == 2


SCRIPT = """\
import pathlib, sys
print(__name__, sys.argv[1:], sys.path[0] == str(pathlib.Path(__file__).resolve().parent))
if "fails" in sys.argv:
    open("nowhere/this.txt")
sys.exit(7)
"""


def test_run_runs_a_script_as_python_does(
    tmp_path: Path, launched: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    words = [str(path), "--nproc", "3", "--", "lr=1"]
    with pytest.raises(SystemExit, match="7"):
        main(["run", *words])
    assert capsys.readouterr().out == "__main__ ['--nproc', '3', '--', 'lr=1'] True\n"
    path.with_name("where.py").write_text("import sys; sys.exit(__file__)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"^{tmp_path / 'where.py'}$"):
        main(["run", "where.py"])
    assert main(["run", str(path), "fails"]) == 1
    trace = capsys.readouterr().err
    assert trace.startswith(f'Traceback (most recent call last):\n  File "{path}", line 4, in <module>\n')
    assert "FileNotFoundError" in trace
    assert main(["run", str(tmp_path)]) == 2
    assert f"zeromesh run {tmp_path}: this is no file that can be read" in capsys.readouterr().err
    assert not launched
    assert main(["run", "--nproc", "2", *words]) == 0
    ((processes, arguments),) = launched
    assert processes == 2
    assert arguments[arguments.index("zeromesh") :] == ("zeromesh", "run", "--worker", "--nproc", "2", *words)


def test_under_a_launcher_the_ranks_are_there(
    config: str, fitted: Runs, launched: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    for words, code in (([], 0), (["--nproc", "2"], 0), (["--nproc", "3"], 2)):
        assert main(["train", config, *words]) == code
    assert "rank 1: --nproc 3: torchrun has started 2 processes on this host" in capsys.readouterr().err
    assert len(fitted) == 2
    assert not launched


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "{}", "zero.stage=5"], "zero.stage: got 5"),
        (["train", "{}", "--nproc", "2", "parallel.shard=3"], "= 3, but the run has 2 ranks"),
        (["train", "{}", "parallel.replicate=2"], "which does not divide the world of 1 rank"),
        (["train", "{}.gone"], "no such file"),
        (["config", "{}", "run.nmae=x"], "did you mean run.name?"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    config: str, launched: list[Any], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    written = ended(capsys, [word.format(config) for word in words], 2).err
    assert written.startswith("zeromesh: ")
    assert message in written
    assert "Traceback" not in written
    assert not launched


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["train", "c", "--nproc", "0"], "got '0'; allowed is an integer >= 1"),
        (["train", "c", "--nprocs-per-node", "2"], "unknown arguments: --nprocs-per-node"),
        (["fit"], "invalid choice"),
        (["checkpoint"], "required: ACTION"),
        (["checkpoint", "mend"], "invalid choice"),
        (["checkpoint", "export", "a"], "required: OUT"),
        (["checkpoint", "export", "a", "b", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["checkpoint", "diff", "a", "b", "--tolerance", "-1"], "got '-1'; allowed is a number >= 0"),
        (["checkpoint", "merge", "a"], "required: --out"),
        (["checkpoint", "list", "a", "b"], "unknown arguments: b"),
    ],
)
def test_a_wrong_command_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(DataError("no text"), 2), (CollectiveError("rank 1 is gone"), 1), (KeyboardInterrupt(), 130)]
)
def test_errors_of_a_run(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setitem(vars(zeromesh.trainer), "Trainer", fail)
    assert main(["train", config]) == code
    assert capsys.readouterr().err == f"zeromesh: {str(error) or 'interrupted'}\n"


def test_exit_codes_tell_the_users_mistakes_from_broken_runs(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of neither keep their traceback."""
    monkeypatch.setitem(vars(zeromesh.trainer), "Trainer", None)
    with pytest.raises(TypeError):
        main(["train", config])
    assert [exit_code_of(error) for error in (ConfigError("x"), DataError("x"))] == [2, 2]
    assert [exit_code_of(error) for error in (CollectiveError("x"), ZeromeshError("x"), ValueError("x"))] == [1, 1, 1]


@pytest.mark.parametrize(
    ("result", "code", "message"),
    [
        (WorkersFailed(ranks=(1,), message="no text", exit_code=2), 2, "zeromesh: rank 1: no text\n"),
        (WorkersFailed(ranks=(0, 1), message="no text", exit_code=2), 2, "zeromesh: ranks 0, 1: no text\n"),
        (130, 130, "zeromesh: stopped; all workers have ended\n"),
    ],
)
def test_what_workers_end_with(
    config: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    result: WorkersFailed | int,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr("zeromesh.launch.rendezvous.launch_workers", lambda *_, **__: result)
    assert main(["train", config, "--nproc", "2"]) == code
    assert capsys.readouterr().err == message


def test_config_prints_what_it_can_read_again(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = ended(capsys, ["config", config, "optimizer.lr=1e-3"]).out
    assert "lr: 0.001\n" in printed
    (tmp_path / "again.yaml").write_text(printed)
    assert ended(capsys, ["config", str(tmp_path / "again.yaml")]).out == printed


def test_python_m_zeromesh_loads_no_torch_to_refuse(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("zero: {stage: 5}")
    command = [sys.executable, "-X", "importtime", "-m", "zeromesh", "train", str(tmp_path / "bad.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "zero.stage: got 5" in done.stderr
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "zeromesh.trainer.config.trainer_config" in loaded
    assert not loaded & {"torch", "transformers", "datasets"}


def test_the_installed_command_knows_its_version() -> None:
    command = [str(Path(sys.executable).parent / "zeromesh"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"zeromesh {zeromesh.__version__}\n"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as stdout:
        ended = subprocess.run([sys.executable, "-m", "zeromesh", "init"], stdout=stdout, stderr=subprocess.PIPE)
    assert ended.returncode in (0, 1)
    assert ended.stderr == b""


def test_init_of_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    listed = ended(capsys, ["init"]).out
    assert "quickstart            A small Llama" in listed
    names = [line.split("  ")[0] for line in listed.splitlines()]
    assert names == [*sorted(examples()), "zeromesh init NAME writes one of them here"]
    assert "gpt2-tied             in JSON: gpt2-tied.json\n" in listed
    assert "zeromesh train lora.yaml" in ended(capsys, ["init", "lora"]).out
    assert "configs/" not in Path("lora.yaml").read_text()
    assert main(["init", "mixture"]) == 0
    own = "name your own data in place of scripts/examples/chats.jsonl and scripts/examples/pairs.jsonl"
    said = " ".join(capsys.readouterr().out.split())
    assert f"{own}, and train it with: zeromesh train mixture.yaml" in said
    Path("lora.yaml").write_text("mine")
    assert "lora.yaml' was not written: File exists" in ended(capsys, ["init", "lora"], 1).err
    assert Path("lora.yaml").read_text() == "mine"


def test_what_cannot_be_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a script's run the configuration's model was built, of which the checkpoint has no weight."""
    assert main(["evaluate", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "a directory without config.resolved.yaml or config.json" in said
    assert "a model directory (a run of TRL has one: model)" in said
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    (run / "config.resolved.yaml").write_text("{}\n")
    (run / "starts.jsonl").write_text('{"step": 0, "given": ["model", "train_dataset", "lr_scheduler"]}\n')
    for path in (run, run / "config.resolved.yaml"):
        said = ended(capsys, ["evaluate", str(path)], 2).err
        assert "a script made this run, and gave the trainer model, train_dataset, which" in said
        assert "only that script can evaluate it" in said
