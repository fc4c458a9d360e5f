"""Results on disk, of which none is lost or twice there whenever a run is killed; and `run.prompts`."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from tests.support.plain import calling
from tests.support.text_files import word_tokenizer
from zeromesh.errors import ConfigError, StorageError
from zeromesh.trainer import Trainer
from zeromesh.trainer.data.tokenizer import PretrainedTokenizer, TextStream
from zeromesh.trainer.inference.journal import SUFFIX, ResultJournal
from zeromesh.trainer.trackers.backends import RowPosition, TrackedRow, WandbTracker


def _row(number: int) -> dict[str, object]:
    return {"number": number, "text": f"tëxt\n{number}", "tokens": [number]}


def _journal(out: Path, count: int, *numbers: int) -> ResultJournal:
    journal = ResultJournal(out, "abc", count)
    for number in numbers:
        journal.add(_row(number))
    return journal


def test_results_are_in_order_and_the_journal_is_gone(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    journal = _journal(out, 3, 2, 0, 0, 1)
    assert not journal.missing()
    journal.finish()
    assert [json.loads(line) for line in out.read_text().splitlines()] == [_row(0), _row(1), _row(2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".results.jsonl.done", "results.jsonl"]
    # Finished results are not made again.
    content, again = out.read_bytes(), _journal(out, 3)
    assert again.finished
    assert not again.missing()
    again.finish()
    again.close()
    assert out.read_bytes() == content
    with pytest.raises(ConfigError, match="has content; name"):
        ResultJournal(out, "of other prompts", 3)
    out.write_bytes(content + b"{}\n")
    with pytest.raises(ConfigError, match="has content; name"):
        _journal(out, 3)


def test_a_journal_that_is_cut_anywhere_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    journal = _journal(out, 3, 1, 0)
    journal.close()
    content = journal.path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    for cut in range(len(content) + 1):
        journal.path.write_bytes(content[:cut])
        again = _journal(out, 3)
        whole = sum(end <= cut for end in ends)
        assert again.missing() == {0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 2], 3: [2]}[whole]
        for number in again.missing():
            again.add(_row(number))
        again.finish()
        assert len(out.read_text().splitlines()) == 3
    damaged = bytearray(content)
    damaged[ends[2] - 5] ^= 1
    journal.path.write_bytes(damaged)
    assert _journal(out, 3).missing() == [0, 2]


def test_results_of_others_and_places_that_are_no_files_are_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    journal = _journal(out, 1)
    with pytest.raises(ConfigError, match=r"another command is writing .*out\.part"):
        _journal(out, 1)
    journal.close()
    _journal(out, 1).close()
    with pytest.raises(ConfigError, match="has results of other prompts or settings; give another --out, or delete it"):
        ResultJournal(out, "abd", 1)
    with pytest.raises(StorageError, match="cannot be written"):
        _journal(tmp_path / "none" / "out", 1)
    assert journal.path.name == out.name + SUFFIX
    for other in (tmp_path, Path("/dev/null")):
        with pytest.raises(ConfigError, match="is no regular file"):
            _journal(other, 1)
    assert [path.name for path in tmp_path.iterdir()] == [journal.path.name]


def test_an_empty_file_and_one_beside_a_journal_are_written_over(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.touch()
    first = _journal(out, 2, 1)
    assert (first.finished, first.missing()) == (False, [0])
    first.close()
    out.write_text("half of an earlier command's results\n")
    again = _journal(out, 2)
    assert (again.finished, again.missing(), again.rows) == (False, [0], {1: _row(1)})
    again.add({**_row(1), "text": "other"})
    again.add(_row(0))
    again.finish()
    assert [json.loads(line) for line in out.read_text().splitlines()] == [_row(0), _row(1)]
    assert _journal(out, 2).rows == {0: _row(0), 1: _row(1)}
    (tmp_path / ".out.done").unlink()
    with pytest.raises(ConfigError, match="has content; name another"):
        _journal(out, 2)


def test_text_that_comes_in_pieces_has_whole_characters() -> None:
    text = "naïve 漢字\n🙂 end"
    stream = TextStream(lambda tokens: bytes(tokens).decode(errors="replace"))
    pieces = [stream.add([byte]) for byte in text.encode()]
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces)
    assert stream.add([0xE6], last=True) == "�"


def test_text_that_comes_in_pieces_is_that_of_all_tokens() -> None:
    """Also by decoders that leave out the space before the first token, and those that take bytes in a row together."""
    words = ["</s>", "▁", "▁▁▁", "▁a", "b", "▁b", ".", "\n", *(f"<0x{byte:02X}>" for byte in (10, *"漢字".encode()))]
    pieces = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    pieces.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    draw, sizes = random.Random(0), []

    def decode(tokens: Sequence[int]) -> str:
        sizes.append(len(tokens))
        return pieces.decode(list(tokens), skip_special_tokens=False)

    for _ in range(40):
        tokens = [token for _ in range(300) for token in draw.choice([[draw.randrange(9)], [9, 10, 11], [12, 13, 14]])]
        wanted, stream = decode(tokens), TextStream(decode)
        sizes.clear()
        told = [stream.add([token], last=place == len(tokens)) for place, token in enumerate(tokens, start=1)]
        assert "".join(told) == wanted
        assert max(sizes) < 150, "not all of a long text is decoded for each token"


def test_spaces_that_later_tokens_take_away_are_not_told_before() -> None:
    """By tokenizers that clean up the spaces before punctuation."""
    words = ["it", "'s", "n't", "do", "'", ",", "a", "'re", "?", "end"]
    tokenizer = word_tokenizer(words, "a", eos_token="end", clean_up_tokenization_spaces=True)
    decode = PretrainedTokenizer(tokenizer=tokenizer).decode
    draw, cleaned = random.Random(1), 0
    for _ in range(60):
        tokens = [draw.randrange(9) for _ in range(20)]
        stream = TextStream(decode)
        told = [stream.add([token], last=place == len(tokens)) for place, token in enumerate(tokens, start=1)]
        assert "".join(told) == decode(tokens)
        cleaned += decode(tokens) != " ".join(words[token] for token in tokens)
    assert cleaned > 50


def test_a_full_disk_is_named_and_what_was_kept_is_left(tmp_path: Path) -> None:
    journal = _journal(tmp_path / "r.jsonl", 2, 0)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), journal._file.fileno())
    with pytest.raises(StorageError, match="cannot be written: No space left"):
        journal.add(_row(1))
    journal.close()
    assert _journal(tmp_path / "r.jsonl", 2).missing() == [1]


SIZES = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 48, "vocab_size": 256}


def configured(folder: Path, run: dict[str, Any], **sections: Any) -> dict[str, Any]:
    text = folder / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(100)))
    return {
        "model": {"config": {**SIZES, "eos_token_id": 255, "bos_token_id": None}},
        "data": {"train": str(text), "tokenizer": "bytes", "sequence_length": 16, "cache": str(folder)},
        "checkpoint": {"every_steps": 0},
        "run": {"output_dir": str(folder), "name": "run", "max_steps": 2, **run},
        **sections,
    }


def test_a_file_of_prompts_at_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "2 times"}\n{"input_ids": [50, 32]}\n')
    run = {"prompts": str(file), "eval_every": 1, "generation": {"max_new_tokens": 3}}
    with Trainer(config=configured(tmp_path, run)) as trainer:
        trainer.fit()
        lines = [json.loads(line) for line in (trainer.run_directory / "samples.jsonl").read_text().splitlines()]
    wanted = [(step, prompt) for step in (1, 2) for prompt in ("2 times", "[50, 32]")]
    assert [(line["step"], line["prompt"]) for line in lines] == wanted
    assert f"step 2: '2 times' goes on {lines[2]['completion']!r}" in capsys.readouterr().out


def test_samples_of_a_step_are_there_when_it_is_saved(tmp_path: Path) -> None:
    run = {"prompts": ["2"], "prompts_every": 1, "max_steps": 1, "generation": {"max_new_tokens": 1}}
    seen: list[str] = []
    reads = calling(on_save=lambda trainer, step: seen.append((trainer.run_directory / "samples.jsonl").read_text()))
    with Trainer(config=configured(tmp_path, run, checkpoint={"every_steps": 1}), callbacks=[reads]) as trainer:
        trainer.fit()
    assert [json.loads(line)["step"] for line in seen[-1].splitlines()] == [1]


@pytest.mark.parametrize(
    ("run", "sections", "said"),
    [
        ({"prompts": ["x" * 47]}, {}, r"run.prompts: the prompt of sample 0 has 47 tokens"),
        ({"prompts": ["x"], "generation": {"max_new_tokens": 48}}, {}, r"run.prompts: the prompt of sample 0 has 1 tokens"),
        ({"prompts": ["x"], "generation": {"max_token": 3}}, {}, r"run.prompts: max_token is no field"),
        ({"prompts": "/no/such/file"}, {}, r"run.prompts: .*No such file"),
        ({"prompts": ["x"], "prompts_every": 0}, {}, r"run.prompts_every: got 0; allowed is an integer >= 1"),
        ({"prompts": {"text": "x"}}, {}, r"run.prompts: got a mapping .*; allowed is a list of texts, a file"),
    ],
)
def test_what_is_refused(tmp_path: Path, run: dict[str, Any], sections: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        Trainer(config=configured(tmp_path, run, **sections)).fit()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "3", "top_k": 3, "seed": 1}', "prompt 1 has top_k, seed; run.generation says how, for all prompts"),
        ('{"input_ids": [255, 256]}', "256"),
        ('{"text": 3}', "line 2: text is text, not 3"),
    ],
)
def test_a_prompt_of_a_file_that_is_refused(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "2"}\n' + line + "\n")
    run = {"prompts": str(file), "eval_every": 1, "generation": {"max_new_tokens": 3}}
    with pytest.raises((ConfigError, ValueError), match=message):
        Trainer(config=configured(tmp_path, run)).fit()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_samples_are_drawn_anew_at_each_step_and_for_each_prompt(tmp_path: Path) -> None:
    found = []
    for seed, name in ((0, "a"), (0, "b"), (1, "c")):
        fields = {"do_sample": True, "max_new_tokens": 12}
        run = {"prompts": ["2", "2"], "prompts_every": 1, "seed": seed, "name": name, "generation": fields}
        with Trainer(config=configured(tmp_path, run, optimizer={"lr": 0.0})) as trainer:
            trainer.fit()
            lines = (trainer.run_directory / "samples.jsonl").read_text().splitlines()
        found.append([json.loads(line)["completion"] for line in lines])
    assert found[0] == found[1]
    assert len({*found[0], *found[2]}) == 8


def test_without_evaluations_somebody_has_to_say_when(tmp_path: Path) -> None:
    config = configured(tmp_path, {"prompts": ["x"]})
    config["data"]["eval_fraction"] = 0.0
    with pytest.raises(ConfigError, match=r"run.prompts: .*there are none; set run.prompts_every"):
        Trainer(config=config).fit()


def test_wandb_gets_a_table(tmp_path: Path) -> None:
    seen: list[Any] = []
    run: Any = SimpleNamespace(directory=tmp_path, ident="x")
    library = SimpleNamespace(log=lambda row, **_: seen.append(row), tracker=SimpleNamespace(step=3))
    tracker = WandbTracker("wandb", run)
    tracker.tracker = library
    tracker.log(TrackedRow(RowPosition(4, evaluation=True), {}, (("2 times", " 2"),)))
    assert seen[0]["samples"].columns == ["step", "prompt", "completion"]
    assert seen[0]["samples"].data == [[4, "2 times", " 2"]]
    assert json.loads((tmp_path / "tracking-wandb.json").read_text()) == ["x", 4, True, 3]
