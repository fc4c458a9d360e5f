"""Runs on a Ray cluster, whose nodes are raylets on this machine, which are killed and started while it trains."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import ended, logged_steps, sessions, wait_for
from zeromesh.trainer.monitoring.step_metrics import read_metrics

pytestmark = [pytest.mark.full, pytest.mark.ray]
ROOT = Path(__file__).resolve().parents[2]
RANKS = 2  # of a node
CONFIG = """\
model: {config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
                 num_key_value_heads: 2}}
data: {train: FOLDER/text.txt, sequence_length: 64, eval_fraction: 0.0}
precision: {compute: float64, master: float64, reduce: float64}
batch: {global_size: 24, micro_size: 1}
schedule: {name: constant, warmup_steps: 0}
run: {name: run, output_dir: FOLDER, max_steps: 1000000}
checkpoint: {every_steps: 10}
parallel: {timeout_seconds: 5}
"""
LOOP = """\
import sys
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def loop(asked):
    from zeromesh import Trainer

    with Trainer(config=asked["config"]) as trainer:
        trainer.fit()


config, folder, name = sys.argv[1:]
trainer = TorchTrainer(
    loop,
    train_loop_config={"config": config},
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
    run_config=RunConfig(name=name, storage_path=folder),
)
trainer.fit()
"""


def written(folder: Path, steps: int = 1_000_000) -> Path:
    """The configuration of a run in a folder."""
    folder.mkdir()
    (folder / "text.txt").write_text("What a run learns does not depend on who computes it. " * 400)
    path = folder / "config.yaml"
    path.write_text(CONFIG.replace("FOLDER", str(folder)).replace("1000000", str(steps)))
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without cores, which drivers connect to; nodes are added by tests."""
    tools = pytest.importorskip("ray.cluster_utils", reason="needs Ray: pip install 'ray[train]'")
    before, folder = dict(os.environ), tempfile.mkdtemp(prefix="zm-ray-")
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder}
    made = tools.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    os.environ["RAY_ADDRESS"] = made.address
    yield made
    made.shutdown()
    os.environ.clear()
    os.environ |= before
    shutil.rmtree(folder, ignore_errors=True)


def losses(folder: Path) -> list[float]:
    """Those of all steps, each of which was logged once."""
    lines = read_metrics(folder / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def processes(folder: Path) -> list[int]:
    """The process ids of all ranks, in their order."""
    return [each["pid"] for each in json.loads((folder / "run" / "ranks.json").read_text())["ranks"]]


def is_close(found: list[float], expected: list[float]) -> bool:
    return max(abs(a - b) / b for a, b in zip(found, expected, strict=True)) <= 1e-12


def test_a_node_is_lost_and_another_comes(cluster: Any, tmp_path: Path, record_property: Any) -> None:
    nodes = [cluster.add_node(num_cpus=RANKS) for _ in range(2)]
    folder, alone = tmp_path / "together", tmp_path / "alone"
    command = [sys.executable, "-m", "zeromesh", "train", str(written(folder)), "--nproc", str(RANKS)]
    with sessions() as begin, (tmp_path / "log").open("w") as log:
        driver = begin([*command, "--on", "ray", "--nodes", "2"], stdout=log, stderr=subprocess.STDOUT)
        said = (tmp_path / "log").read_text
        wait_for(lambda: logged_steps(folder) >= 12, 240, said)
        pids = processes(folder)
        (folder / "config.yaml").unlink()  # Ranks that come later have that of the command.
        cluster.remove_node(nodes[0], allow_graceful=False)
        killed = time.monotonic()
        wait_for(lambda: "resumed from step" in said(), 120, said)
        seconds = time.monotonic() - killed
        record_property("seconds until the rest goes on", seconds)
        assert "is gone; the run goes on" in said()
        wait_for(lambda: len(processes(folder)) == RANKS and logged_steps(folder) >= 14, 120, said)
        assert processes(folder) in (pids[:RANKS], pids[RANKS:]), "those that are left have stayed"
        cluster.add_node(num_cpus=RANKS)
        wait_for(lambda: len(processes(folder)) == 2 * RANKS, 240, said)
        assert {*processes(folder)} & {*pids}, "and stay when others come"
        at = logged_steps(folder)
        wait_for(lambda: logged_steps(folder) >= at + 5, 240, said)
        driver.send_signal(signal.SIGINT)
        assert driver.wait(timeout=60) == 128 + signal.SIGINT, said()
        assert "stopping after this step" in said()
    found = losses(folder)
    assert ended([*command[:4], str(written(alone, len(found)))], seconds=240).returncode == 0
    assert is_close(found, losses(alone))
    assert seconds < 8


def test_a_run_that_fails_ends_with_its_exit_code(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=RANKS)
    script = tmp_path / "script.py"
    script.write_text("import os\nraise SystemExit(7 * int(os.environ['RANK']))\n")
    words = ("--on", "ray", "--nodes", "2", "--nproc", "1", "--max-restarts", "0", str(script))
    found = ended([sys.executable, "-m", "zeromesh", "run", *words], seconds=240)
    assert found.returncode == 7, found.stderr
    assert "rank 1" in found.stderr
    assert "exit code 7" in found.stderr


def test_copies_need_another_node(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=RANKS)
    words = ("--on", "ray", "--nodes", "1", "recovery.copies=1")
    found = ended([sys.executable, "-m", "zeromesh", "train", str(written(tmp_path / "run", 2)), *words], seconds=240)
    assert found.returncode == 2, found.stderr
    assert "recovery.copies: 1 has copies on another host, and all ranks are on one" in found.stderr


def test_the_trainer_is_the_same_in_a_loop_of_ray_train(cluster: Any, tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch", reason="needs Ray Train: pip install 'ray[train]'")
    cluster.add_node(num_cpus=RANKS)
    script, folder, alone = tmp_path / "loop.py", tmp_path / "together", tmp_path / "alone"
    script.write_text(LOOP)
    found = ended([sys.executable, str(script), str(written(folder, 8)), str(tmp_path), "by-ray"], seconds=300)
    assert "ZeRO stage 3 on 2 CPU ranks" in found.stdout, found.stderr
    command = [sys.executable, "-m", "zeromesh", "train", str(written(alone, 8))]
    assert ended(command, seconds=240).returncode == 0
    assert is_close(losses(folder), losses(alone))
