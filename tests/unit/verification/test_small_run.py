"""The small run of a verification: its sizes, its configuration, its samples, and what is switched off."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from tests.support.architectures import tiny
from tests.support.trainer_cases import LLAMA, llama, sentences, settings
from zeromesh.errors import ConfigError
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.verification.shrink import SmallRun, exact, shrink, small_config, without_dropout


def mesh_of(data: int = 1, context: int = 1, tensor: int = 1, pipeline: int = 1, experts: int = 1) -> Any:
    return SimpleNamespace(**{name: SimpleNamespace(size=size) for name, size in locals().items()})


def config_of(**sections: Any) -> Any:
    return load_config(settings("out", **sections))


def made(model: Any, mesh: Any, samples: Any = None, **sections: Any) -> SmallRun:
    inputs = UserInputs(model=model, train_dataset=samples)
    return shrink(config_of(**sections), inputs, mesh, Path("folder"))


@pytest.mark.parametrize(
    ("micro", "data", "batch"), [(1, 1, (3, 1)), (2, 1, (5, 2)), (8, 1, (5, 2)), (1, 2, (5, 1)), (2, 2, (11, 2)), (1, 4, (11, 1))]
)
def test_a_step_has_two_rounds_and_an_incomplete_one(micro: int, data: int, batch: tuple[int, int]) -> None:
    found = small_config(config_of(batch={"global_size": 32, "micro_size": micro}), mesh_of(data), Path("folder"))
    assert (found.batch.global_size, found.batch.micro_size) == batch
    assert (found.run.max_steps, found.run.output_dir, found.run.seed) == (5, "folder", 5)


@pytest.mark.parametrize(
    ("sections", "wanted"),
    [
        ({"schedule": {"name": "linear", "warmup_steps": 0}}, {"schedule.warmup_steps": 0}),
        ({"schedule": {"name": "linear", "warmup_steps": 3}}, {"schedule.warmup_steps": 1}),
        ({"schedule": {"name": "cosine", "warmup_steps": 0, "warmup_ratio": 0.5}}, {"schedule.warmup_steps": 1}),
        ({"schedule": {"name": "warmup_stable_decay", "decay_steps": 3}}, {"schedule.decay_steps": 2}),
        ({"schedule": {"name": "warmup_stable_decay", "decay_steps": 1}}, {"schedule.decay_steps": 1}),
        (
            {"ema": {"decay": 0.9, "start_step": 40, "every_steps": 10}},
            {"ema.start_step": 1, "ema.every_steps": 2, "ema.decay": 0.9},
        ),
        ({"ema": {"decay": 0.9, "start_step": 0, "every_steps": 1}}, {"ema.start_step": 0, "ema.every_steps": 1}),
        ({"zero": {"stage": 2}, "optimizer": {"lr": 0.5}}, {"zero.stage": 2, "optimizer.lr": 0.5}),
        ({}, {"run.clip_norm": 0.5, "model.tile_tokens": None}),
        ({"optimizer": {"expert_bias_rate": 0.1}}, {"optimizer.expert_bias_rate": 0.0}),
        ({"recovery": {"audit_steps": 2, "spike_factor": 9.0}}, {"recovery.audit_steps": 0, "recovery.spike_factor": 0.0}),
        ({"model": {"tile_tokens": 4096}}, {"model.tile_tokens": 5}),
        ({"model": {"lora": {"rank": 2, "dropout": 0.5}}}, {"model.lora.dropout": 0.0, "model.lora.rank": 2}),
    ],
)  # fmt: skip
def test_what_a_small_run_keeps_of_a_configuration(sections: dict[str, Any], wanted: dict[str, Any]) -> None:
    found: Any = small_config(config_of(**sections), mesh_of(), Path("folder")).model_dump(mode="json")
    for key, value in wanted.items():
        one = found
        for name in key.split("."):
            one = one[name]
        assert one == value, key


def test_dropout_of_adapters_stays_where_it_is_compared() -> None:
    config = config_of(model={"lora": {"rank": 2, "dropout": 0.5}})
    lora = small_config(config, mesh_of(), Path("folder"), dropout=True).model.lora
    assert lora is not None
    assert lora.dropout == 0.5


@pytest.mark.parametrize(("eps", "wanted"), [(1e-8, 1e-6), (1e-3, 1e-3)])
def test_the_exact_configuration(eps: float, wanted: float) -> None:
    narrow = {"compute": "bfloat16", "master": "float32", "reduce": "float32", "linear": "float8"}
    given = config_of(precision=narrow, optimizer={"eps": eps}, model={"compile": True})
    found = exact(given)
    roles = found.precision
    assert (roles.compute, roles.master, roles.reduce, roles.linear) == ("float64", "float64", "float64", None)
    assert (found.optimizer.eps, found.model.compile) == (wanted, False)
    assert (found.run, found.batch) == (given.run, given.batch)


class _Own(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop, self.dropout_rate, self.resid_pdrop, self.layerdrop, self.p = nn.Dropout(rate), 0.0, rate, 0.0, 0.7
        self.config = SimpleNamespace(apply_spec_augment=True, layerdrop=0.25)


@pytest.mark.parametrize(("rate", "had"), [(0.5, True), (0.0, False)])
def test_dropout_is_switched_off(rate: float, had: bool) -> None:
    model = _Own(rate)
    assert without_dropout(model) is had
    assert (model.drop.p, model.resid_pdrop, model.p) == (0.0, 0.0, 0.7)
    assert (model.config.apply_spec_augment, model.config.layerdrop) == (False, 0.0)
    assert type(model.config.layerdrop) is float


def test_a_small_model_is_taken_as_it_is_with_its_own_samples() -> None:
    model, samples = llama(attention_dropout=0.5), sentences(30)
    before = model.model.norm.weight.clone()
    found = made(model, mesh_of(), samples)
    assert found.notes == ("its own data", "dropout is off; --check dropout compares what is drawn")
    assert [each["labels"].tolist() for each in found.samples] == [each["labels"].tolist() for each in samples[:25]]
    assert torch.equal(model.model.norm.weight, before)
    assert not torch.equal(found.model.model.norm.weight, before)  # type: ignore[union-attr]
    assert made(lambda: llama(), mesh_of(), iter(samples)).notes == ("its own data",)
    shown = made(model, mesh_of())
    assert shown.notes[0] == "25 samples of 16 random tokens, with other numbers of targets in each"


LARGE = {"hidden_size": 256, "intermediate_size": 700, "vocab_size": 5000, "num_hidden_layers": 6}
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("mesh", "changes", "wanted"),
    [
        (mesh_of(), {"num_attention_heads": 8, "num_key_value_heads": 4}, (128, 4, 2, 48, 32, 2)),
        (mesh_of(tensor=2), {"num_attention_heads": 8, "num_key_value_heads": 8}, (128, 2, 2, 48, 16, 2)),
        (mesh_of(tensor=4), {"num_attention_heads": 8, "num_key_value_heads": 2}, (128, 8, 2, 48, 96, 2)),
        (mesh_of(pipeline=3), {"num_attention_heads": 8, "num_key_value_heads": 8}, (128, 2, 2, 48, 16, 3)),
        (mesh_of(tensor=2), {**EIGHT, "vocab_size": 5001}, (129, 2, 2, 48, 16, 2)),
        (mesh_of(tensor=2), {**EIGHT, "intermediate_size": 701}, (128, 2, 2, 49, 16, 2)),
    ],
)  # fmt: skip
def test_small_sizes_are_divisible_by_ranks_where_the_large_ones_are(
    mesh: Any, changes: dict[str, int], wanted: tuple[int, ...]
) -> None:
    with torch.device("meta"):
        model = llama(**{**LARGE, **changes})
    small: Any = made(model, mesh).model.config  # type: ignore[union-attr]
    names = ("vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_size")
    assert tuple(getattr(small, name) for name in (*names, "num_hidden_layers")) == wanted


def test_small_experts_can_be_spread_over_the_ranks() -> None:
    with torch.device("meta"):
        model = tiny("qwen3_moe", **{**LARGE, **EIGHT, "num_experts": 6, "moe_intermediate_size": 4096})
    small: Any = made(model, mesh_of(data=3, experts=3)).model.config  # type: ignore[union-attr]
    assert small.num_experts == 6


def test_samples_are_distinct_and_have_other_numbers_of_targets() -> None:
    found = made(llama(), mesh_of(data=2, tensor=3)).samples
    ids, labels = ([each[name] for each in found] for name in ("input_ids", "labels"))
    assert {len(each) for each in ids} == {18}, "tensor ranks share out 16 tokens or a few more"
    assert len({tuple(each.tolist()) for each in ids}) == len(found) == 5 * 11
    assert [int((each != -100).sum()) for each in labels[:20]] == [
        *(18, 17, 16, 15, 14, 0, 12, 11, 10, 9, 8, 7, 6, 0, 4, 3, 18, 17, 16, 15)
    ]
    assert all(torch.equal(one[two != -100], two[two != -100]) for one, two in zip(ids, labels, strict=True))
    assert min(int(each.min()) for each in ids) >= 3
    assert "position_ids" not in found[0]


def test_samples_of_heads() -> None:
    sizes = {name: LLAMA[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
    bert = tf.BertConfig(**sizes, num_attention_heads=4, num_labels=3)
    answers = made(tf.BertForQuestionAnswering(bert), mesh_of()).samples
    assert [(int(each["start_positions"]), int(each["end_positions"])) for each in answers[:16:15]] == [(0, 15), (1, 15)]
    rows = made(tf.BertForSequenceClassification(bert), mesh_of()).samples
    assert [int(each["labels"]) for each in rows[:5]] == [0, 1, 2, 0, 1]
    tokens = made(tf.BertForTokenClassification(bert), mesh_of()).samples
    assert {int(label) for each in tokens for label in each["labels"]} == {-100, 0, 1, 2}
    assert made(tiny("t5"), mesh_of()).samples[1].keys() == {"input_ids", "labels"}
    with pytest.raises(ConfigError, match="nothing is known of what Linear is fed with"):
        made(nn.Linear(2, 2), mesh_of())
