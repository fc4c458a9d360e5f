"""Runs whose states rest on other tiers: checkpoints go from tier to tier, nothing is left behind, every fault has a name."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.checkpoint.test_resume import step, unequal
from tests.support.trainer_cases import LLAMA, llama, seeded, sentences, settings
from tests.support.workers import PoolOptions, Workers
from zeromesh import Trainer
from zeromesh.errors import ConfigError, StorageError
from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.monitoring.step_metrics import read_metrics
from zeromesh.trainer.setup import memory_check

FULL = pytest.mark.full
BF16 = {"compute": "bfloat16", "master": "float32", "reduce": "float32"}
FILES = {"optimizer": "file", "parameters": "file"}
TIERS: tuple[dict[str, Any], ...] = (
    {},
    FILES,
    {"optimizer": "host", "gradients": "file"},
    {"optimizer": {"tier": "file", "fraction": 0.5}, "parameters": "host", "checksums": True},
    {},
)


@pytest.fixture
def fresh(workers: Workers) -> Iterator[Any]:
    """Runs a case in processes of its own, in which anything may happen."""
    with workers.fresh(PoolOptions(size=2, timeout_seconds=3.0)) as pool:
        yield partial(pool.outcomes, timeout=60)


@pytest.fixture
def trained(workers: Workers, tmp_path: Path) -> Callable[..., Any]:
    """Trains in a folder, or goes on there; returns what rank 0 has to say."""

    def play(folder: str, steps: int, sections: dict[str, Any], *, size: int = 2, **more: Any) -> Any:
        case = "checkpoint_cases:trained"
        return workers.run(size, case, folder=str(tmp_path / folder), steps=steps, sections=sections, **more)[0]

    return play


def check_same(tmp_path: Path, steps: int) -> None:
    """The checkpoints of both folders are equal, and no swap file is left."""
    assert unequal(step(tmp_path / "a", steps), step(tmp_path / "b", steps)) == []
    assert swap_files(tmp_path / "b") == []


def swap_files(folder: Path) -> list[Path]:
    return sorted((folder / "run" / "offload").glob("*"))


@pytest.mark.parametrize("in_backward", [pytest.param(False, marks=FULL), True])
def test_a_run_goes_on_from_any_tier_to_any_other_bit_by_bit(
    trained: Callable[..., Any], tmp_path: Path, in_backward: bool
) -> None:
    sections: dict[str, Any] = {"precision": BF16}
    if in_backward:
        sections |= {"optimizer": {"in_backward": True}, "run": {"clip_norm": 0.0, "on_nonfinite": "stop"}}
    total = 2 * len(TIERS)
    straight = trained("a", total, sections)
    for number, offload in enumerate(TIERS, start=1):
        found = trained("b", 2 * number, {**sections, "offload": offload})
    assert found["all"] == straight["all"]
    check_same(tmp_path, total)


def test_other_ranks_and_stages_load_what_was_on_files(trained: Callable[..., Any], tmp_path: Path) -> None:
    for number, (size, stage, offload) in enumerate(((3, 3, FILES), (2, 1, {"optimizer": "file"}), (1, 3, FILES)), 1):
        mirror = tmp_path / f"mirror-{number}"
        trained("", 2 * number, {"zero": {"stage": stage}, "offload": offload}, size=size, mirror=str(mirror))
        if number > 1:
            assert unequal(step(tmp_path, 2 * number - 2), mirror / "step-00000000") == []


def test_a_checkpoint_streams_from_files_in_bounded_pieces(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(2, "offload_cases:pieces", folder=str(tmp_path), steps=5, sections={"precision": BF16, "offload": FILES})
    assert all(0 < rank["largest"] <= 4 << 20 for rank in found)


def test_waits_are_in_the_metrics_and_the_console_says_what_rests_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(str(tmp_path), offload=FILES, precision=BF16)
    with Trainer(llama(), config, sentences()) as trainer:
        trainer.fit()
        assert swap_files(tmp_path) == []  # They have no names.
        assert trainer.engine is not None  # Whole, it would be in memory.
    said = capsys.readouterr().out
    assert "of swap files (" in said
    assert "optimizer moments" in said
    assert "stays partitioned; use save()" in said
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(line["file_wait_seconds"] >= 0 for line in lines)
    assert sum(line["file_wait_seconds"] for line in lines) > 0
    assert swap_files(tmp_path) == []


@pytest.mark.parametrize(
    ("size", "activations", "mode"),
    [
        pytest.param(2, "file", "block", marks=FULL),
        (1, {"tier": "file", "fraction": 0.5}, "selective"),
        pytest.param(2, "host", "block", marks=FULL),
    ],
)
def test_kept_inputs_of_blocks_rest_elsewhere_bit_by_bit(
    trained: Callable[..., Any], tmp_path: Path, size: int, activations: Any, mode: str
) -> None:
    sections = {"precision": BF16, "model": {"activation_checkpointing": mode}}
    kept = trained("a", 5, sections, size=size)
    found = trained("b", 5, {**sections, "offload": {**FILES, "activations": activations}}, size=size)
    assert found["losses"] == kept["losses"]
    check_same(tmp_path, 5)


# Faults


@pytest.mark.parametrize(
    ("how", "more", "words"),
    [("short", {}, "ends after"), ("short inside", {}, "ends after"), ("changed", {"checksums": True}, "are not what was written")],
)
def test_a_swap_file_that_was_damaged_is_a_named_error(
    fresh: Any, tmp_path: Path, how: str, more: dict[str, Any], words: str
) -> None:
    sections = {"offload": {**FILES, **more}}
    outcomes = fresh("offload_cases:vandalised", how=how, step=2, rank=1, folder=str(tmp_path), steps=4, sections=sections)
    assert outcomes[1].error == "StorageError"
    assert words in outcomes[1].message
    assert "zeromesh-run-rank1-" in outcomes[1].message
    assert outcomes[0].error == "CollectiveError"
    assert "StorageError" in outcomes[0].message
    assert swap_files(tmp_path) == []


def test_a_disk_that_fills_up_before_training_is_a_named_error(fresh: Any, tmp_path: Path) -> None:
    outcomes = fresh("offload_cases:full_disk", room=100_000, folder=str(tmp_path), steps=4, sections={"offload": FILES})
    assert [outcome.error for outcome in outcomes] == ["CollectiveError", "StorageError"]
    assert "No space left on device" in outcomes[1].message
    assert swap_files(tmp_path) == []


@pytest.mark.parametrize(
    ("site", "count"), [pytest.param("forward", 40, marks=FULL), pytest.param("reduce", 40, marks=FULL), ("optimizer", 18)]
)
def test_a_kill_inside_a_step_resumes_cleanly(
    trained: Callable[..., Any], fresh: Any, tmp_path: Path, site: str, count: int
) -> None:
    sections = {"offload": FILES}
    straight = trained("a", 10, sections)
    fault = f"kill@{site}:1:{count}"
    outcomes = fresh("checkpoint_cases:struck", fault=fault, folder=f"{tmp_path}/b", steps=10, sections=sections)
    assert outcomes[1].error == "died"
    assert swap_files(tmp_path / "b") == []
    assert trained("b", 10, sections)["all"] == straight["all"]
    check_same(tmp_path, 10)


def test_a_run_of_one_rank_goes_on_after_an_error(tmp_path: Path) -> None:
    """A step that an exception cut short has changed nothing."""

    def play(folder: str, fail_at: int) -> list[float]:
        calls = 0

        class Noisy:
            def __len__(self) -> int:
                return 16

            def __getitem__(self, index: int, /) -> Any:
                nonlocal calls
                calls += 1
                if calls == fail_at:
                    raise RuntimeError("a sample that cannot be read")
                return sentences()[index]

        config = settings(str(tmp_path / folder), offload=FILES, batch={"global_size": 8, "micro_size": 2})
        with Trainer(seeded(llama), config, Noisy()) as trainer:
            if fail_at:
                with pytest.raises(Exception, match="a sample that cannot be read"):
                    trainer.fit()
            return list(trainer.fit().losses)

    assert play("a", 0) == play("b", 13)


# Before training


@pytest.mark.parametrize(
    ("disk", "words"),
    [(200_000, ("swap files of", "195.3 KiB free", "{tier: file, fraction: 0.")), (0, ("give offload.directory a larger disk",))],
)
def test_a_disk_that_is_too_small_is_refused_with_what_would_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, disk: int, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(memory_check, "free_bytes", lambda directory: disk)
    with pytest.raises(StorageError) as caught:
        Trainer(llama(), settings(str(tmp_path), precision=BF16, offload=FILES), sentences()).fit()
    assert [word for word in words if word not in str(caught.value)] == []
    assert swap_files(tmp_path) == []


def test_kept_inputs_are_counted_before_they_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sections: dict[str, Any] = {
        "offload": {"activations": "file"},
        "data": {"train": __file__, "sequence_length": 16},
        "model": {"activation_checkpointing": "block", "config": {"model_type": "llama", **LLAMA, "vocab_size": 512}},
        "precision": BF16,
    }
    with Trainer(None, settings(str(tmp_path), **sections)) as trainer:
        trainer.fit()
        assert trainer.engine is not None or swap_files(tmp_path) == []
    blocks, samples, length, width = 2, 2, 16, 32
    expected = blocks * samples * length * width * 2
    assert f"({human_bytes(expected)} kept inputs of blocks)" in capsys.readouterr().out


def test_a_directory_that_cannot_be_made_is_a_named_error(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("no directory")
    config = settings(str(tmp_path), offload={"optimizer": "file", "directory": str(place / "swap")})
    with pytest.raises(ConfigError, match=r"offload.directory: .*file/swap' would be made in .*file', which is no dir"):
        Trainer(llama(), config, sentences()).fit()


def test_memory_is_asked_for_by_tier(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where states do not fit into memory, the refusal says which tiers would make them fit."""
    monkeypatch.setattr(memory_check, "available_bytes", lambda: 200 << 20)
    monkeypatch.setattr(memory_check, "swap_bytes", lambda: 0)
    wide = partial(llama, hidden_size=512, intermediate_size=1024, num_hidden_layers=8)
    with pytest.raises(StorageError, match=r"set offload\.optimizer to file, which needs .* MiB, and .* MiB of disk"):
        Trainer(wide, settings(str(tmp_path), precision=BF16), sentences()).fit()
