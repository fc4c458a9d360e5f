"""What `save` writes is a Hugging Face model directory: transformers loads it, and so does `model.source`."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.support.tables import row, tried
from tests.support.trainer_cases import MANY
from tests.support.workers import PoolOptions, Workers

FULL = pytest.mark.full
test_what_is_saved_is_what_was_trained = tried(
    "trainer_cases",
    [
        row(1, "saved", FULL, kind="llama", compute="float32", largest=MANY),
        row(2, "saved", kind="llama", compute="bfloat16", largest=40_000),
        row(2, "saved", FULL, kind="gpt2", compute="float64", largest=40_000),
        row(3, "saved", kind="gpt2", compute="bfloat16", largest=MANY),
    ],
)


def test_a_directory_that_is_there_keeps_what_is_not_the_models(workers: Workers, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "file").write_text("a file")
    (out / "notes.txt").write_text("mine")
    stale = ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "model.safetensors"]
    stale += ["adapter_config.json", "adapter_model.safetensors"]  # transformers would load an adapter on top
    for name in stale:
        (out / name).write_text("old")
    (tmp_path / "text.txt").write_text("one two three four five six seven " * 40)
    found = workers.run(2, "trainer_cases:resaved", folder=str(tmp_path), tokenizer=tokenizer_in(tmp_path / "words"))
    assert (out / "notes.txt").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "a file"
    kept = {"config.json", "generation_config.json", "model.safetensors", "notes.txt"}
    assert {path.name for path in out.iterdir() if "token" not in path.name} == kept
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    for rank in (0, 1):
        assert [line.partition(": ")[0] for line in found[rank]["said"]] == ["StorageError"] * 3
    refusal = f"'{tmp_path}/file' cannot be written (there is a file of this name; give a directory)"
    assert refusal in found[0]["said"][0]
    assert "by rank 0, whose error says why" in found[1]["said"][0]
    assert [each["again"] for each in found] == [True, True]
    assert found[0]["losses"] == found[1]["losses"]
    assert (found[0]["loaded"], found[0]["problems"], found[0]["tokens"]) == (True, [], [1, 2])


def tokenizer_in(folder: Path) -> str:
    """A tokenizer of seven words, as `save_pretrained` writes it."""
    words = ["<end>", "one", "two", "three", "four", "five", "six", "seven"]
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<end>"))
    made.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(folder)
    return str(folder)


# The disk has not removed the first file of the first old checkpoint before the last step ends.
test_old_checkpoints_are_removed_while_training_goes_on = tried("checkpoint_cases", [row(2, "removed_late")])


def test_a_slow_disk_is_waited_for(workers: Workers, tmp_path: Path) -> None:
    """Each call takes longer than ranks may be without progress."""
    calls = ["fsync", "mkdir", "posix_fallocate", "pwritev", "rename"]
    arguments = {"folder": str(tmp_path), "calls": calls, "seconds": 0.8, "patience": 30.0, "limit": 0.6}
    first, second = workers.run(2, "checkpoint_cases:slow_calls", **arguments)
    assert first == {"struck": calls, "ended": ""}
    assert second == {"struck": [], "ended": ""}


def test_a_disk_that_hangs_is_named(workers: Workers, tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "calls": ["fsync"], "seconds": 2.5, "patience": 1.0, "limit": 0.6}
    with workers.fresh(PoolOptions(size=2)) as pool:
        _, second = pool.run("checkpoint_cases:slow_calls", **arguments)
    assert second["ended"].startswith("CollectiveError: rank 1: ")
    assert "rank 0 (pid " in second["ended"]
    assert "waited for a disk: fsync of '" in second["ended"]
    assert "seconds, longer than checkpoint.timeout_seconds (1)" in second["ended"]
