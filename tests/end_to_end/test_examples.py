"""The scripts in `scripts/examples`: with transformers' Trainer, and with the import changed, on one rank and on two."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.waiting import ended
from tests.support.workers import Pool, PoolOptions, Workers

CASES = "example_cases"
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts/examples"
COMMON = {
    "num_train_epochs": 2, "learning_rate": 2e-3, "weight_decay": 0.01, "warmup_steps": 0.2, "adam_epsilon": 1e-4, "seed": 7,
    "train_sampling_strategy": "sequential", "logging_steps": 1, "eval_strategy": "epoch", "save_strategy": "epoch",
    "per_device_eval_batch_size": 16, "report_to": "none", "cache_dir": "cache",
}  # fmt: skip
CSV, JSON = ({f"{split}_file": f"{split}.{kind}" for split in ("train", "validation", "test")} for kind in ("csv", "json"))

DO = ["--do_train", "--do_eval", "--do_predict"]
RUNS: dict[str, tuple[str, dict[str, Any], int, list[str]]] = {
    "clm": (
        "run_clm.py",
        {
            "model_name_or_path": "llama", "train_file": "train.txt", "validation_file": "validation.txt", "block_size": 16,
            "max_train_samples": 21, "max_eval_samples": 12, "gradient_accumulation_steps": 2, "load_best_model_at_end": True,
        },
        4,
        DO[:2],
    ),
    "classification": (
        "run_classification.py",
        {"model_name_or_path": "bert", "learning_rate": 1e-2, **CSV, "metric_for_best_model": "accuracy"},
        8,
        DO,
    ),
    "ner": ("run_ner.py", {"model_name_or_path": "bert", "learning_rate": 2e-2, **JSON}, 8, DO),
}  # fmt: skip
"""Each: the script, its arguments, samples of a rank in a microbatch on one rank, and what it is to do."""
SHORT = {("clm", 2), ("classification", 1)}


@pytest.fixture(scope="module")
def pools(workers: Workers) -> Iterator[dict[int, Pool]]:
    """Workers of their own: what scripts set stays set in a process."""
    with workers.fresh(PoolOptions(size=1)) as one, workers.fresh(PoolOptions(size=2)) as two:
        yield {1: one, 2: two}


@pytest.fixture(scope="module")
def folder(pools: dict[int, Pool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data."""
    path = tmp_path_factory.mktemp("examples")
    pools[1].run(f"{CASES}:prepare", folder=str(path))
    return path


def arguments(name: str, ranks: int, output: str) -> list[str]:
    """The command line of a run; the global batch is the same on any number of ranks."""
    _, own, micro, does = RUNS[name]
    given = {**COMMON, **own, "per_device_train_batch_size": micro // ranks, "output_dir": output}
    # On ranks without a GPU, transformers' arguments have to say so.
    device = [] if torch.cuda.is_available() else ["--use_cpu"]
    return [*(f"--{key}={value}" for key, value in given.items()), *does, *device]


def theirs(pools: dict[int, Pool], folder: Path, name: str, ranks: int) -> Path:
    """The directory of a run with transformers' Trainer on as many ranks, which is made once."""
    directory = folder / f"{name}-{ranks}-theirs"
    if not directory.exists():
        words = arguments(name, ranks, directory.name)
        pools[ranks].run(f"{CASES}:run", script=RUNS[name][0], folder=str(folder), words=words, theirs=True)
    return directory


def results(path: Path) -> dict[str, dict[str, Any]]:
    """Files of values by their names."""
    return {each.name: json.loads(each.read_text()) for each in path.glob("*_results.json")}


def compare(mine: Path, theirs: Path) -> None:
    """Assert that two runs came to the same: values by name, what was logged, weights, predictions."""
    own, other = results(mine), results(theirs)
    assert set(own) == set(other)
    assert "all_results.json" in own
    for name in other:
        same_values(own[name], other[name], name)
    logged = [json.loads((path / "trainer_state.json").read_text()) for path in (mine, theirs)]
    assert set(logged[0]) == set(logged[1])
    assert [list(line) for line in logged[0]["log_history"]] == [list(line) for line in logged[1]["log_history"]]
    for number, line in enumerate(logged[1]["log_history"]):
        same_values(logged[0]["log_history"][number], line, f"line {number}")
    for name in ("global_step", "max_steps", "num_train_epochs", "best_global_step"):
        assert logged[0][name] == logged[1][name], name
    for text in ("predictions.txt", "predict_results.txt"):
        assert (mine / text).exists() == (theirs / text).exists()
        if (mine / text).exists():
            assert (mine / text).read_text() == (theirs / text).read_text()
    weights = [load_file(path / "model.safetensors") for path in (mine, theirs)]
    assert set(weights[0]) == set(weights[1])
    assert max(float((weights[0][name] - each).abs().max()) for name, each in weights[1].items()) < 2e-5
    assert (mine / "tokenizer.json").exists()
    for card in (mine / "README.md", theirs / "README.md"):
        assert "# " + card.parent.name in card.read_text()


def same_values(mine: dict[str, Any], theirs: dict[str, Any], where: str) -> None:
    assert set(mine) == set(theirs), where
    for name, value in theirs.items():
        if not name.endswith(("_runtime", "_per_second")):
            assert math.isclose(mine[name], value, rel_tol=1e-4, abs_tol=1e-6), (where, name, mine[name], value)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [pytest.param(name, ranks, marks=() if (name, ranks) in SHORT else pytest.mark.full) for name in RUNS for ranks in (1, 2)],
)
def test_only_the_import_is_changed(pools: dict[int, Pool], folder: Path, name: str, ranks: int) -> None:
    output = f"{name}-{ranks}"
    words = arguments(name, ranks, output)
    said = pools[ranks].run(f"{CASES}:run", script=RUNS[name][0], folder=str(folder), words=words)
    assert "***** eval metrics *****" in said[0]
    compare(folder / output, theirs(pools, folder, name, ranks))


@pytest.mark.full
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("name", RUNS)
def test_under_torchrun(pools: dict[int, Pool], folder: Path, name: str) -> None:
    """As a user starts it: processes of its own."""
    output = f"{name}-torchrun"
    words = arguments(name, 2, output)
    launch(folder, RUNS[name][0], words)
    compare(folder / output, theirs(pools, folder, name, 2))
    # Begun again, it goes on from its last checkpoint, by transformers' name for it.
    newest = max((folder / output).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    launch(folder, RUNS[name][0], [*words, f"--resume_from_checkpoint={newest}", "--num_train_epochs=3"])
    state = json.loads((folder / output / "trainer_state.json").read_text())
    assert state["global_step"] == 9
    assert [line["step"] for line in state["log_history"] if "loss" in line] == list(range(1, 10))


def launch(folder: Path, script: str, words: list[str]) -> None:
    """Run a script on two ranks of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*launcher, str(SCRIPTS / script), *words]
    done = ended(command, seconds=300, folder=folder, HF_HUB_OFFLINE="1", GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stderr
