"""Text as models learn it: with the tokenizer and the beginnings that generation has, without padding, and without targets."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.testing import assert_close
from transformers import AutoTokenizer, PreTrainedTokenizerFast, TrainerCallback, TrainerControl

from tests.support.trainer_cases import llama, seeded, sentences, settings
from zeromesh import Trainer
from zeromesh.errors import ConfigError, DataError

WORDS = {
    word: number for number, word in enumerate(["<pad>", "<bos>", "<eos>", "<end>", *(f"w{n}" for n in range(60))])
}
OLD = "{% for m in messages %}{{ m.content }} {% endfor %}"
NEW = "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
CHAT = {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]}


@pytest.fixture
def words() -> PreTrainedTokenizerFast:
    """A tokenizer of 64 words that begins a text with <bos>."""
    made = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=OLD, **special)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def run(tmp_path: Path, model: Any = None, /, *arguments: Any, **sections: Any) -> Trainer:
    sections = {**sections, "run": {"max_steps": 2, "eval_at_end": False, **sections.get("run", {})}}
    keywords = {name: sections.pop(name) for name in ("processing_class", "data_collator") if name in sections}
    return Trainer(model, settings(str(tmp_path), **sections), *arguments, **keywords)


def texts(tmp_path: Path) -> dict[str, Any]:
    return {
        "train": write(tmp_path / "a.jsonl", [{"text": "w1 w2 w3"}] * 40),
        "eval_fraction": 0.0,
        "sequence_length": 8,
    }


def test_a_model_brings_its_own_tokenizer(tmp_path: Path, words: PreTrainedTokenizerFast) -> None:
    own = tmp_path / "own"
    seeded(llama).save_pretrained(own)
    with (
        pytest.raises(
            ConfigError, match=r"data\.tokenizer: null means the tokenizer of the model, and '.*own' has none"
        ),
        run(tmp_path, model={"source": str(own)}, data=texts(tmp_path)) as trainer,
    ):
        trainer.evaluate()
    words.save_pretrained(own)
    given = type(llama()).from_pretrained(own)
    for model, section in ((None, {"source": str(own)}), (given, {})):
        with run(tmp_path, model, model=section, data=texts(tmp_path)) as trainer:
            ids = trainer.run.data.train[0]["input_ids"].tolist()  # type: ignore[index]
        assert ids == [1, 5, 6, 7, 2, 1, 5, 6]
    with (
        pytest.raises(ConfigError, match="bytes for a model that a callable builds, and this one comes from"),
        run(tmp_path, lambda: type(llama()).from_pretrained(own), data=texts(tmp_path)) as trainer,
    ):
        trainer.evaluate()
    with run(tmp_path, llama(vocab_size=256), data=texts(tmp_path)) as trainer:
        assert bytes(trainer.run.data.train[0]["input_ids"].tolist()) == b"w1 w2 w3"  # type: ignore[index]


@pytest.mark.parametrize("named", [False, True])
def test_the_template_that_was_learnt_is_saved(tmp_path: Path, words: PreTrainedTokenizerFast, named: bool) -> None:
    """On a copy of the user's tokenizer; and generation ends where answers end."""
    if named:
        words.chat_template = {"default": OLD, "new": NEW}
    data = {
        "train": write(tmp_path / "c.jsonl", [CHAT] * 8),
        "format": "chat",
        "chat_template": "new" if named else NEW,
    }
    data |= {"eval_fraction": 0.0, "sequence_length": 16}
    with run(tmp_path, seeded(llama), data=data, processing_class=words) as trainer:
        trainer.fit()
        trainer.save(tmp_path / "out")
        assert trainer.run.model.module.generation_config.eos_token_id == [3]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == NEW
    assert words.chat_template == ({"default": OLD, "new": NEW} if named else OLD)


def test_a_name_that_no_template_has_is_refused(tmp_path: Path, words: PreTrainedTokenizerFast) -> None:
    data = {"train": write(tmp_path / "c.jsonl", [CHAT]), "format": "chat", "chat_template": "tool_use"}
    with (
        pytest.raises(DataError, match="'tool_use' is no template, no file and no name"),
        run(tmp_path, seeded(llama), data=data, processing_class=words) as trainer,
    ):
        trainer.evaluate()


EXPERTS = {
    "model_type": "mixtral",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 1.0,
}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_no_loss_depends_on_how_much_padding_follows(tmp_path: Path, kind: str) -> None:
    rows = [{"prompt": f"{n}+{n}=", "completion": f"{n + n}"} for n in (1, 2, 33, 444)]
    path = write(tmp_path / "p.jsonl", rows)
    narrow = dict.fromkeys(("compute", "master", "reduce"), "float32")
    found = []
    for length in (16, 64):
        data = {"train": path, "eval": path, "format": "pairs", "packing": False, "sequence_length": length}
        sections = {"model": {"config": {**EXPERTS, "model_type": kind}}, "data": data, "precision": narrow}
        with run(tmp_path, **sections) as trainer:
            found += [trainer.evaluate()["eval_loss"], *trainer.fit().losses]
    assert found[: len(found) // 2] == pytest.approx(found[len(found) // 2 :], rel=1e-6)


def test_a_global_batch_without_targets_is_passed_over(tmp_path: Path) -> None:
    """The first one, and another: no update, no nan, and the others as if it were not there."""
    rows = sentences(32)
    for row in (*rows[:8], *rows[16:24]):
        row["labels"] = torch.full_like(row["labels"], -100)
    found = []
    for data, steps in ((rows, 4), ([*rows[8:16], *rows[24:]], 2)):
        with run(
            tmp_path, seeded(llama), data, data={"shuffle": False}, run={"max_steps": steps, "name": f"s{steps}"}
        ) as one:
            report = one.fit()
            found.append(report)
    report, wanted = found
    assert (report.passed_over, report.final_step, len(report.losses)) == (2, 2, 2)
    assert all(map(math.isfinite, report.losses))
    assert report.losses[0] == wanted.losses[0]
    with (
        run(tmp_path, seeded(llama), rows[:8], run={"name": "none"}) as one,
        pytest.raises(DataError, match="every label"),
    ):
        one.evaluate()


class EndsEpoch(TrainerCallback):  # type: ignore[misc]
    """Asks for the end of the epoch at the first `on_step_begin`."""

    asked = False

    def on_step_begin(self, args: Any, state: Any, control: TrainerControl, **named: Any) -> None:
        control.should_epoch_stop, self.asked = not self.asked, True


def test_requests_of_a_step_that_is_passed_over_are_dropped(tmp_path: Path) -> None:
    """The ranks agree on requests after steps alone."""
    rows = sentences(32)
    for row in rows[:8]:
        row["labels"] = torch.full_like(row["labels"], -100)
    config = settings(str(tmp_path), data={"shuffle": False}, run={"max_steps": 4, "eval_at_end": False})
    with Trainer(seeded(llama), config, rows, callbacks=[EndsEpoch()]) as trainer:
        report = trainer.fit()
    assert (report.passed_over, report.final_step) == (1, 3)


def count_later(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
    total = model(**{**batch, "labels": batch["input_ids"]}).loss
    return total * 0 + total, int((batch["labels"] != -100).sum())


def test_targets_that_are_counted_after_forward_may_be_none(tmp_path: Path) -> None:
    rows = sentences(16)
    for row in rows[:8]:
        row["labels"] = torch.full_like(row["labels"], -100)
    model = seeded(llama)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    config = settings(str(tmp_path), data={"shuffle": False}, run={"max_steps": 1, "eval_at_end": False})
    with Trainer(model, config, rows, compute_loss=count_later) as trainer:
        report = trainer.fit()
        after = dict(trainer.state_dict())
    assert (report.passed_over, report.losses) == (1, ())
    assert_close({name: each.to(before[name].dtype) for name, each in after.items()}, before, rtol=0, atol=0)


def test_text_beside_tokens_is_not_given_to_a_collator(
    tmp_path: Path, words: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"input_ids": [5, 6, 7][: n % 3 + 1] * 2, "text": "a", "tags": [1] * n} for n in range(8)]
    rows = [{**row, "labels": [5] * len(row["input_ids"])} for row in rows]  # type: ignore[arg-type]
    from transformers import DataCollatorForTokenClassification

    collate = DataCollatorForTokenClassification(words)
    with run(tmp_path, seeded(llama), rows, data_collator=collate, processing_class=words) as trainer:
        assert all(map(math.isfinite, trainer.fit().losses))
    assert "train_dataset: left out before the data_collator text, tags, which LlamaForCausalLM.forward" in " ".join(
        capsys.readouterr().out.split()
    )
    with (
        run(tmp_path, seeded(llama), rows, data_collator=collate, data={"remove_unused": False}) as trainer,
        pytest.raises(Exception, match=r"text|tensor"),
    ):
        trainer.evaluate()
