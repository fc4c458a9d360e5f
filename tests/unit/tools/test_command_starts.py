"""What commands start with: the defaults and bounds of their options, and what they pass on to launchers, planners and servers."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zeromesh.trainer
from tests.support.commands import ended
from tests.unit.tools.checkpoint_runs import Copied
from zeromesh.errors import ConfigError, LayoutError, NonFiniteError
from zeromesh.launch.rendezvous import WorkersFailed
from zeromesh.launch.ssh import LaunchPlan
from zeromesh.trainer.cli.main import _parse, main
from zeromesh.trainer.cli.train import resolve_source
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.inference.generator import Generated
from zeromesh.trainer.monitoring.step_metrics import read_metrics

HOSTS = "gpu1 slots=4\ngpu2 slots=2\n"
MEETING = ["--rdzv-endpoint", "a:1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in {"c.yaml": "run: {name: here}\n", "hosts": HOSTS, "p": '{"text": "a"}\n{"text": "b"}\n'}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


class Launched:
    """A stand-in for the launcher: what it was last called with, and what it returns."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []
        self.result: Any = 0
        self.during: Callable[[], None] = lambda: None

    def __call__(self, arguments: Any, **given: Any) -> Any:
        self.during()
        self.calls.append(SimpleNamespace(words=[*arguments], **{"talks": False, "passes": 1, "nodes": None, **given}))
        return self.result


@pytest.fixture
def launched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    launcher = Launched()
    monkeypatch.setattr("zeromesh.launch.rendezvous.launch_workers", launcher)
    monkeypatch.setitem(vars(zeromesh.trainer), "Trainer", None)  # Nothing is trained here instead.
    return launcher


@pytest.mark.parametrize(
    ("words", "defaults"),
    [
        ("train c", {"nnodes": (1, 1), "rdzv_id": "zeromesh", "max_restarts": None, "lora": False, "nproc": None}),
        ("launch --hostfile h c", {"host_timeout": 15.0, "port": None, "min_hosts": None, "max_restarts": None}),
        ("generate m", {"batch": 16, "max_restarts": 3, "prompts": None, "seed": None, "check": False}),
        ("serve m", {"batch": 16, "host": "127.0.0.1", "port": 8000, "queue": 64, "grace": 10.0, "name": None}),
        ("verify c", {"check": (), "out": None}),
        ("verify c --check resume,dropout", {"check": ("resume", "dropout")}),
        ("plan c", {"top": 12, "ranks": None, "directory": Path("runs"), "json": False}),
        ("status r", {"interval": 1.0, "watch": False}),
        ("trace r --steps 3:7", {"steps": (3, 7), "out": None}),
        ("checkpoint export a b", {"dtype": "float32", "merge": False, "ema": False}),
        ("checkpoint diff a b", {"tolerance": None}),
        ("train c a.b=1 --verbose c.d=2", {"overrides": ["a.b=1", "c.d=2", "run.verbose=true"]}),
    ],
)
def test_defaults_of_options(words: str, defaults: dict[str, Any]) -> None:
    options = vars(_parse(words.split()))
    assert {name: options[name] for name in defaults} == defaults


@pytest.mark.parametrize(
    ("words", "allowed", "refused"),
    [
        ("train c --nproc", ["1"], ["0", "1.5"]),
        ("train c --nnodes", ["1", "2:2"], ["0", "3:2", "1:x", ":2"]),
        ("train c --node-rank", ["0"], ["-1"]),
        ("trace r --steps", ["1:1"], ["0:1", "3", "4:3"]),
        ("serve m --port", ["0", "65535"], ["-1", "65536"]),
        ("serve m --grace", ["0"], ["-0.1", "nan", "inf"]),
        ("status r --interval", ["0.1", "86400"], ["0.09", "86401"]),
        ("launch --hostfile h c --host-timeout", ["1", "86400"], ["0.9", "86401"]),
    ],
)
def test_bounds_of_options(words: str, allowed: list[str], refused: list[str]) -> None:
    for value in allowed:
        _parse([*words.split(), value])
    for value in refused:
        with pytest.raises(SystemExit):
            _parse([*words.split(), value])


@pytest.mark.parametrize(
    ("words", "processes", "nodes"),
    [
        (["--nproc", "2"], 2, {"most": 1, "max_restarts": 0, "run_id": "", "endpoint": "127.0.0.1:0"}),
        (["--max-restarts", "2"], 1, {"max_restarts": 2}),
        (["--nnodes", "2", *MEETING], 1, {"least": 2, "most": 2, "max_restarts": 0, "rank": None, "endpoint": "a:1"}),
        (["--nnodes", "2", *MEETING, "--node-rank", "1"], 1, {"rank": 1, "run_id": "zeromesh"}),
        (["--nnodes", "1:2", *MEETING, "--rdzv-id", "x"], 1, {"least": 1, "most": 2, "max_restarts": 3, "run_id": "x"}),
        (["--nnodes", "1:2", *MEETING, "--max-restarts", "0"], 1, {"max_restarts": 0}),
    ],
)
def test_what_launchers_are_told(launched: Launched, words: list[str], processes: int, nodes: dict[str, Any]) -> None:
    assert main(["train", "c.yaml", *words]) == 0
    (call,) = launched.calls
    assert call.processes == processes
    assert {name: getattr(call.nodes, name) for name in nodes} == nodes


def test_launchers_are_told_what_hosts_have_to_have_alike(launched: Launched, folder: Path) -> None:
    """No paths, and nothing that follows from the number of ranks, nor what is too long for a message."""
    long = {"model_type": "llama", "id2label": {str(number): "a label" for number in range(500)}}
    (folder / "deepspeed.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "steps_per_print": 5}))
    for words in (["c.yaml", f"model.config={json.dumps(long)}"], ["deepspeed.json"], ["c.yaml", "data.train=p"]):
        assert main(["train", *words, "checkpoint.resume=.", "--nnodes", "2", *MEETING]) == 0
    first, deepspeed, last = (call.nodes.settings for call in launched.calls)
    assert first["optimizer.lr"] == TrainerConfig().optimizer.lr
    assert first["checkpoint.resume"] == "a path"
    assert not {"data.train", "model.source", "run.output_dir", "tracking.backends", "model.config"} & {*first}
    assert not [key for key in deepspeed if key.startswith(("batch.", "parallel."))]
    assert last == {**first, "model.config": last["model.config"]}
    json.dumps(last)


@pytest.mark.parametrize(("hosts", "words"), [("2", False), ("1:2", True)])
def test_launchers_are_told_which_script_hosts_have_to_have_alike(
    launched: Launched, folder: Path, hosts: str, words: bool
) -> None:
    """And its command line where hosts come later: ranks that start together compare what it makes of a run."""
    script = folder / "train.py"
    for text, *arguments in (("1", "--lr", "1"), ("1", "--lr", "1"), ("1", "--lr", "2"), ("2", "--lr", "1")):
        script.write_text(text)
        assert main(["run", "--nnodes", hosts, *MEETING, str(script), *arguments]) == 0
    first, *others = (call.nodes.settings for call in launched.calls)
    assert others[0] == first
    assert (others[1] != first) is words
    assert others[2]["script"] != first["script"]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("os.environ['HF_HOME'] = '/a'", ["HF_HOME"]),
        ("def f():\n    environ['OMP_NUM_THREADS'], x = '2', 3", ["OMP_NUM_THREADS"]),
        ("os.environ.setdefault('TRANSFORMERS_OFFLINE', '1')", ["TRANSFORMERS_OFFLINE"]),
        ("os.environ.update({'HF_ENDPOINT': 'b'}, HF_HUB_OFFLINE='1')", ["HF_ENDPOINT", "HF_HUB_OFFLINE"]),
        ("os.environ |= {'USE_TF': '0'}", ["USE_TF"]),
        ("os.putenv('MKL_NUM_THREADS', '1'); del os.environ['XDG_CACHE_HOME']", ["MKL_NUM_THREADS", "XDG_CACHE_HOME"]),
        ("os.environ.pop('HF_TOKEN', None)", ["HF_TOKEN"]),
        ("os.environ['TOKENIZERS_PARALLELISM'] = 'false'; os.environ['MY_HF_HOME'] = 'a'", []),
        ("x = os.environ['HF_HOME']; print(os.environ.get('HF_HOME', 'HF_HOME'), 'HF_HOME')", []),
        ("this is no Python", []),
        ("\0", []),
    ],
)
def test_ranks_import_for_themselves_what_their_script_sets_variables_for(
    launched: Launched, folder: Path, capsys: pytest.CaptureFixture[str], line: str, names: list[str]
) -> None:
    (folder / "train.py").write_text(line)
    assert main(["run", "--nproc", "2", "train.py"]) == 0
    (call,) = launched.calls
    assert getattr(call, "modules", None) == (() if names else None)
    said = f"zeromesh: each rank imports for itself: the script sets {', '.join(names)}, which libraries read"
    assert (said in capsys.readouterr().err) is bool(names)


def test_several_hosts_need_a_meeting_place(launched: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--rdzv-endpoint HOST:PORT" in ended(capsys, ["train", "c.yaml", "--nnodes", "2"], 2).err
    assert not launched.calls


def test_a_launcher_of_one_rank_is_the_only_one(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (place | {"MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}).items():
        monkeypatch.setenv(name, value)
    said = ended(capsys, ["train", "c.yaml", "--nproc", "2"], 2).err
    assert said.startswith("zeromesh: --nproc 2: torchrun has started 1 process on this host")
    assert not launched.calls


HOST_OF_SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NNODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_NODELIST": "node[07-08]",
}


@pytest.mark.parametrize(
    ("words", "variables", "nodes"),
    [
        (["--nproc", "4"], {}, {"least": 2, "most": 2, "rank": 1}),
        (["--nproc", "1"], {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}, {"least": 2, "most": 2, "rank": 0}),
        (["--nproc", "4"], {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, {"rank": 1, "endpoint": "a:1"}),
        (["--nproc", "4", "--nnodes", "1:2"], {}, {"least": 1, "most": 2, "rank": None}),
        (["--nproc", "4", "--nnodes", "1:2", *MEETING], {}, {"endpoint": "a:1"}),
    ],
)
def test_a_task_of_slurm_on_each_host_launches_its_ranks(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, words: list[str], variables: Any, nodes: dict[str, Any]
) -> None:
    for name, value in (HOST_OF_SLURM | variables).items():
        monkeypatch.setenv(name, value)
    assert main(["train", "c.yaml", *words]) == 0
    (call,) = launched.calls
    assert call.processes == int(words[1])
    assert {name: getattr(call.nodes, name) for name in nodes} == nodes
    host, _, port = call.nodes.endpoint.partition(":")
    assert host == "a" or (host == "node07" and 10000 <= int(port) < 30000)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--node-rank", "0"], "--on ray numbers the nodes and meets by itself; leave --node-rank and"),
        (MEETING, "--on ray numbers the nodes and meets by itself"),
        ([], "RAY_ADDRESS is that of Ray's client"),
        (["--nproc", "2"], "--on ray needs one more package: pip install 'zeromesh[ray]'"),
    ],
)
def test_what_ray_does_not_do(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    there = SimpleNamespace(placement_group=None, PlacementGroupSchedulingStrategy=None)
    for name in ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, None if "pip install" in said else there)
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert said in ended(capsys, ["train", "c.yaml", "--on", "ray", "--nodes", "2", *words], 2).err
    assert not launched.calls


def test_a_start_without_a_configuration_is_saved_and_passed_on(launched: Launched, folder: Path) -> None:
    (folder / "m").mkdir()
    words = ["train", "--model", "m", "--data", "p", "--nproc", "2", "--save-config", "s.yaml", "run.seed=5"]
    for _ in range(2):  # The file that is there is the same.
        assert main(words) == 0
    at = launched.calls[1].words.index("train")
    assert launched.calls[1].words[at : at + 5] == ["train", "--worker", "--tune", "--", "-"]
    assert launched.calls[1].words[-1] == "run.seed=5"
    assert "seed: 5" in (folder / "s.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "least", "restarts"), [([], 2, 0), (["--min-hosts", "1"], 1, 3), (["--min-hosts", "2", "--max-restarts", "0"], 2, 0)]
)
def test_a_launch_over_ssh_goes_on_without_hosts_where_it_may(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], least: int, restarts: int
) -> None:
    plans: list[LaunchPlan] = []
    monkeypatch.setattr("zeromesh.trainer.cli.train.supervise", lambda plan, notify: plans.append(plan) or 0)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    options = ["--host-timeout", "7", "--env", "A=1=2", "parallel.tensor=3"]
    assert main(["launch", "--hostfile", "hosts", "c.yaml", *options, *words]) == 0
    (plan,) = plans
    assert (plan.least, plan.max_restarts, plan.silence_seconds, plan.port) == (least, restarts, 7.0, None)
    assert plan.variables == {"A": "1=2", "NCCL_DEBUG": "INFO"}
    plan.check(plan.hosts)
    with pytest.raises(LayoutError):
        plan.check(plan.hosts[:1])  # 4 ranks are left.


def test_all_mistakes_about_variables_are_said_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = ended(capsys, ["launch", "--hostfile", "hosts", "c.yaml", "--env", "1A=x", "--env", "NOT_SET"], 2).err
    assert "'1A' is no variable's name" in said
    assert "NOT_SET: the variable is not set here" in said


def test_sources_of_an_evaluation(copied: Copied, tmp_path: Path) -> None:
    run, auto = copied("llama"), ("checkpoint.resume=auto",)
    (run / "starts.jsonl").unlink()
    first, last = (run / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    assert resolve_source(str(run)) == (run / "config.resolved.yaml", auto, last)
    assert resolve_source(str(first)) == (run / "config.resolved.yaml", auto, first)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "base", "revision": null}')
    keys = ('run.name="adapter"', 'model.source="base"', f'model.adapters={{"default": "{adapter}"}}')
    assert resolve_source(str(adapter)) == (None, keys, None)
    (tmp_path / "config.json").write_text("{}")
    keys = (f"model.source={tmp_path}", f"run.name={tmp_path.name}", 'model.train=["!*"]')
    assert resolve_source(str(tmp_path)) == (None, keys, None)
    assert resolve_source("some.yaml") == (Path("some.yaml"), (), None)


@pytest.mark.parametrize(
    ("starts", "refused"),
    [
        ([["model"], []], False),
        ([[], ["model", "compute_metrics"]], True),
        ([["lr_scheduler", "compute_metrics", "preprocess_logits_for_metrics"]], False),
        ([None], False),
    ],
)
def test_a_scripts_run_is_told_by_its_last_start(copied: Copied, starts: list[Any], refused: bool) -> None:
    run = copied("llama")
    (run / "starts.jsonl").write_text("".join(json.dumps({"step": 0, "given": given}) + "\n" for given in starts))
    if refused:
        with pytest.raises(ConfigError, match="gave the trainer model, which no configuration holds"):
            resolve_source(str(run))
    else:
        assert resolve_source(str(run))[2] == run / "checkpoints" / "step-00000002"


@pytest.mark.parametrize(
    ("source", "rank", "loaded"),
    [
        ("{run}", 0, "step-00000002"),
        ("{run}/checkpoints/step-00000001", 0, "step-00000001"),
        ("{run}/config.resolved.yaml", 0, "step-00000002"),
        ("c.yaml", 0, None),
        ("{run}", 1, "step-00000002"),
    ],
)
def test_an_evaluation_is_of_the_weights_that_were_named(
    folder: Path, copied: Copied, monkeypatch: pytest.MonkeyPatch, source: str, rank: int, loaded: str | None
) -> None:
    run, weights, said = copied("llama"), list[Path](), list[str]()
    (run / "starts.jsonl").unlink()
    trainer = SimpleNamespace(
        load_weights=weights.append,
        run_directory=folder / "new" if source == "c.yaml" else run,
        run=SimpleNamespace(console=SimpleNamespace(note=said.append)),
        evaluate=lambda: {"eval_loss": 1.5},
        mesh=SimpleNamespace(rank=rank),
        state=SimpleNamespace(step=9),
    )
    monkeypatch.setattr("zeromesh.trainer.loop.evaluation.evaluation_line", lambda run, values: f"line {values}")
    monkeypatch.setitem(vars(zeromesh.trainer), "Trainer", lambda config: nullcontext(trainer))
    assert main(["evaluate", source.format(run=run)]) == 0
    path = None if loaded is None else run / "checkpoints" / loaded
    assert weights == [path] * (path is not None)
    assert said == [f"evaluating {path or 'the weights that the run would begin with'}", "line {'eval_loss': 1.5}"]
    written = trainer.run_directory / "evaluated.jsonl"
    assert written.exists() is (rank == 0)
    if rank == 0:
        (line,) = read_metrics(written)
        wanted = {"step": 9, "checkpoint": path and str(path), "eval_loss": 1.5}
        assert {name: line[name] for name in wanted} == wanted


def test_what_a_terminal_is_told_of_an_outcome(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(capsys, ["train", "c.yaml", "--nproc", "2"]) == ("", "")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert ended(capsys, ["train", "c.yaml", "--nproc", "2"]) == ("starting 2 processes\n", "")
    launched.result = WorkersFailed(ranks=(1,), message="word " * 40, exit_code=1)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    lines = ended(capsys, ["train", "c.yaml", "--nproc", "2"], 1).err.splitlines()
    assert max(map(len, lines)) <= 50
    assert [line[:2] for line in lines[1:]] == ["  "] * (len(lines) - 1)


# Generations and servers


@pytest.mark.parametrize(
    ("words", "restarts", "talks"),
    [
        (["--prompts", "p"], 0, False),
        (["--prompts", "p", "--out", "o"], 3, False),
        (["--prompts", "p", "--out", "o", "--max-restarts", "1"], 1, False),
        (["--chat"], 0, True),
    ],
)
def test_a_generation_starts_again_for_results_in_a_file(launched: Launched, words: list[str], restarts: int, talks: bool) -> None:
    assert main(["generate", "m", "--nproc", "2", *words]) == 0
    (call,) = launched.calls
    assert (call.processes, call.nodes.max_restarts, call.talks) == (2, restarts, talks)
    at = call.words.index("generate")
    assert call.words[at:] == ["generate", "--worker", "m", "--nproc", "2", *words]


@pytest.mark.parametrize("source", [[], ["--prompts", "-"]])
def test_ranks_read_a_copy_of_standard_input(launched: Launched, monkeypatch: pytest.MonkeyPatch, source: list[str]) -> None:
    lines, read = b'{"text": "a"}\n', dict[str, bytes]()
    launched.during = lambda: read.update({os.environ["ZEROMESH_PROMPTS"]: Path(os.environ["ZEROMESH_PROMPTS"]).read_bytes()})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert main(["generate", "m", "--nproc", "2", *source]) == 0
    ((path, content),) = read.items()
    assert content == lines
    assert not Path(path).exists()
    assert "ZEROMESH_PROMPTS" not in os.environ


def test_prompts_that_cannot_be_read_start_no_ranks(
    launched: Launched, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad").write_text('{"text": 7}\n')
    for stream, words in ((None, []), (sys.stdin, ["--prompts", "bad"]), (sys.stdin, ["--chat", "--prompts", "p"])):
        monkeypatch.setattr(sys, "stdin", stream)
        assert main(["generate", "m", "--nproc", "2", *words]) == 2
    said = capsys.readouterr().err
    assert "there are no prompts: give --prompts FILE" in said
    assert "--chat reads from the terminal" in said
    assert not launched.calls


@pytest.mark.parametrize(("result", "code"), [(128 + 15, 0), (128 + 2, 0), (0, 0), (1, 1), (137, 137)])
def test_a_server_that_is_told_to_stop_has_succeeded(launched: Launched, result: int, code: int) -> None:
    launched.result = result
    assert main(["serve", "m", "--nproc", "2"]) == code
    assert launched.calls[0].passes == 2


class FakeGenerator:
    """A generator of two results, the second of which comes first; it may fail after that."""

    tokenizer, fails = object(), False
    asked: list[Any]

    def __init__(self, source: str, layout: str | None, overrides: Any) -> None:
        dumped = {"model": source, "keys": overrides}
        self.config = SimpleNamespace(run=SimpleNamespace(seed=7), model_dump=lambda **_: dumped)
        self.mesh = SimpleNamespace(rank=0, world=SimpleNamespace(gather_json=lambda value, what: [value]))
        self.checked: list[Any] = [overrides, layout]
        FakeGenerator.asked = []

    def __enter__(self) -> FakeGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        FakeGenerator.asked.append(self.checked)

    def check_weights(self) -> None:
        self.checked.append("weights")

    def check_fields(self, fields: Any) -> None:
        self.checked.append(fields)

    def require_serving(self, fields: Any) -> None:
        raise ConfigError(f"not with {fields}")

    def request_of(self, prompt: Any, fields: Any) -> tuple[Any, None]:
        if prompt["text"] == "bad":
            raise ConfigError("no such prompt")
        return SimpleNamespace(fields={}), None

    def generate(self, prompts: Any, *, batch: int, on_results: Any, **fields: Any) -> None:
        FakeGenerator.asked += [prompts, {"batch": batch, **fields}]
        made = Generated(text="x", tokens=[1], logprobs=None, prompt_tokens=1, new_tokens=1, finish="stop")
        on_results({len(prompts) - 1: made})
        if self.fails:
            raise NonFiniteError("not finite")
        on_results(dict.fromkeys(range(len(prompts) - 1), made))


@pytest.fixture
def generator(folder: Path, monkeypatch: pytest.MonkeyPatch) -> type[FakeGenerator]:
    monkeypatch.setattr("zeromesh.trainer.inference.generator.Generator", FakeGenerator)
    return FakeGenerator


def test_results_are_shown_in_the_order_of_the_prompts(generator: type[FakeGenerator], capsys: pytest.CaptureFixture[str]) -> None:
    fields = ["--max-new-tokens", "5", "generation.temperature=0.5", "zero.stage=3"]
    out = ended(capsys, ["generate", "m", "--prompts", "p", "--check", "--config", "l.yaml", *fields]).out
    assert [(row["number"], row["id"]) for row in map(json.loads, out.splitlines())] == [(0, 0), (1, 1)]
    given = {"max_new_tokens": 5, "temperature": 0.5}
    first, words, checked = generator.asked
    assert (words, checked) == ({"batch": 16, **given}, [["zero.stage=3"], "l.yaml", "weights", given])
    assert first[0]["seed"] != first[1]["seed"]
    main(["generate", "m", "--prompts", "p", "--seed", "7"])  # That of the configuration.
    assert (generator.asked[0], generator.asked[2][2:]) == (first, [{}])
    main(["generate", "m", "--prompts", "p", "--seed", "8"])
    assert {row["seed"] for row in first}.isdisjoint(row["seed"] for row in generator.asked[0])


def test_results_in_a_file_are_made_once(
    generator: type[FakeGenerator], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "m", "--prompts", "p", "--out", "o"]
    with monkeypatch.context() as patch:
        patch.setattr(generator, "fails", True)
        said = ended(capsys, words, 1).err
    assert "o.part has 1 of 2 results; the same command goes on with the rest. Without one are: 0\n" in said
    assert ended(capsys, words).err == "zeromesh: 2 results in o\n"
    assert [prompt["text"] for prompt in generator.asked[0]] == ["a"]
    done = ended(capsys, words)
    assert (done.out, done.err) == ("", "zeromesh: 2 results in o, as they were already\n")
    assert len(generator.asked) == 1
    assert "has content; name" in ended(capsys, [*words, "--max-new-tokens", "9"], 2).err


def test_a_bad_prompt_is_named_by_its_line(
    generator: type[FakeGenerator], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "p").write_text('{"text": "a"}\n{"text": "bad"}\n')
    assert "p, line 2: no such prompt" in ended(capsys, ["generate", "m", "--prompts", "p"], 2).err
    assert len(generator.asked) == 1
    wrong = ended(capsys, ["generate", "m", "--prompts", "p", "generation.=1"], 2).err
    assert "generation.=1: a field of GenerationConfig is given as generation.temperature=0.7" in wrong


@pytest.mark.parametrize(
    ("words", "token", "wanted"),
    [
        ([], None, (None, 1024, 8000, 10.0)),
        ([], "  ", (None, 1024, 8000, 10.0)),
        (["--name", "x", "--port", "9", "--grace", "3", "generation.max_new_tokens=5"], " k\n", ("k", 5, 9, 3.0)),
    ],
)
def test_what_a_server_is_made_of(
    generator: type[FakeGenerator], monkeypatch: pytest.MonkeyPatch, words: list[str], token: str | None, wanted: Any
) -> None:
    made: list[Any] = []

    def server(inbox: Any, options: Any) -> Any:
        made.append((options.token, options.new_tokens, options.port, options.grace_seconds))
        return SimpleNamespace()

    monkeypatch.setattr("zeromesh.trainer.inference.server.app.HttpServer", server)
    if token is not None:
        monkeypatch.setenv("ZEROMESH_SERVE_TOKEN", token)
    assert main(["serve", "sub/m", *words]) == 2
    assert made == [wanted]


# Plans and certificates


def test_a_plan_without_a_layout_that_fits_is_exit_code_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def plan_config(config: Any, given: Any, **more: Any) -> Any:
        asked.append(more)
        return SimpleNamespace(best=None if more["ranks"] == 2 else "one"), None

    monkeypatch.setattr("zeromesh.trainer.planning.auto.plan_config", plan_config)
    monkeypatch.setattr("zeromesh.trainer.planning.report.plan_lines", lambda plan, shown, **_: [f"{shown} rows"])
    monkeypatch.setattr("zeromesh.trainer.planning.report.plan_json", lambda plan: {"best": plan.best})
    assert ended(capsys, ["plan", "c.yaml", "--ranks", "2"], 1).out == "12 rows\n"
    assert json.loads(ended(capsys, ["plan", "c.yaml", "--ranks", "4", "--json", "--host", "2"]).out) == {"best": "one"}
    assert asked == [
        {"device": None, "ranks": 2, "host": None, "more": True},
        {"device": None, "ranks": 4, "host": 2, "more": False},
    ]
    assert "leave c.yaml out, and plan it afterwards" in ended(capsys, ["plan", "c.yaml", "--measure"], 2).err
    assert "give the configuration that is to be planned, or --measure" in ended(capsys, ["plan"], 2).err


def test_ranks_that_measure(launched: Launched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("zeromesh.trainer.planning.auto.ranks_here", lambda: 5)
    for words, ranks in (([], 5), (["--ranks", "3"], 3)):
        assert main(["plan", "--measure", *words]) == 0
        assert launched.calls[-1].processes == ranks
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (place | {"MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    assert "has started 2 ranks, which measure" in ended(capsys, ["plan", "--measure", "--ranks", "3"], 2).err


@pytest.mark.parametrize("passed", [True, False])
def test_a_certificate_decides_the_exit_code(
    launched: Launched, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], passed: bool
) -> None:
    out = folder / "runs" / "here" / "certificate.json"
    out.parent.mkdir(parents=True)
    out.write_text('{"passed": true}')

    def written() -> None:
        assert not out.exists(), "that of an earlier command is gone"
        out.write_text(json.dumps({"passed": passed}))

    launched.during = written
    assert main(["verify", "c.yaml", "--nproc", "2"]) == int(not passed)
    launched.result = 7
    assert main(["verify", "c.yaml", "--nproc", "2"]) == 7
    trainer = SimpleNamespace(mesh=SimpleNamespace(rank=0))
    trainer.verify = lambda checks, out: SimpleNamespace(passed=passed, lines=lambda: [f"{checks} {out.name}"])

    class Trainer:
        def __init__(self, config: Any) -> None:
            """Nothing to make."""

        def __enter__(self) -> Any:
            return trainer

        def __exit__(self, *_: object) -> None:
            """Nothing to close."""

    monkeypatch.setitem(vars(zeromesh.trainer), "Trainer", Trainer)
    said = ended(capsys, ["verify", "c.yaml", "--check", "resume", "--out", "x.json"], int(not passed)).out
    assert said == "('resume',) x.json\nwritten: x.json\n"
