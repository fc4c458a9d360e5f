"""Counts and scalars of losses, the values that a batch's labels may have, and modes that a run changes and puts back."""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.architectures import on_meta
from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.losses.losses import checked_count, make_loss
from zeromesh.trainer.losses.trial import shifted
from zeromesh.trainer.models.prepare import enable_activation_checkpointing, in_evaluation_mode, keep_attributes


def test_scalars_of_a_users_loss_are_kept_beside_its_sum() -> None:
    own: Any = lambda model, batch: (torch.ones(1, 1), 2.0, {"a": 3})  # noqa: E731
    loss = make_loss(nn.Linear(1, 1), compute_loss=own)
    total, outputs, *others = loss.run(nn.Identity(), {"input": torch.ones(1)}, seed=None)
    assert (total.shape, outputs.tolist(), others) == ((), [1.0], [2, {"a": 3}])
    assert [checked_count(count) for count in (0, 3, 2.0)] == [0, 3, 2]
    for count in (-1, 0.5, True, "1", None):
        with pytest.raises(ConfigError, match=r"whole number of 0 or more; got "):
            checked_count(count)


@pytest.mark.parametrize(("mode", "allowed"), [("auto", False), ("native", True)])
def test_labels_beyond_the_vocabulary_are_refused_where_kernels_do_not_see_them(mode: Any, allowed: bool) -> None:
    loss = make_loss(on_meta("llama", vocab_size=8), mode=mode)
    assert loss.count({"labels": torch.tensor([[99, 7, -100, 0]])}) == 2  # The first one is no target.
    beyond = {"labels": torch.tensor([[1, 8]])}
    if allowed:
        assert loss.count(beyond) == 1
        return
    with pytest.raises(DataError):
        loss.count(beyond)


def test_smoothing_needs_known_targets() -> None:
    for model, given, whose in (
        (on_meta("llama", vocab_size=8), lambda model, batch: (torch.ones(()), 1), "compute_loss"),
        (nn.Linear(1, 1), None, r"Linear \(loss_type None\)"),
        (on_meta("bert", "question_answering"), None, r"BertForQuestionAnswering \(loss_type ForQuestionAnswering\)"),
    ):
        with pytest.raises(ConfigError, match=rf"run\.label_smoothing: the targets of {whose} are not known"):
            make_loss(model, compute_loss=given, smoothing=0.1)
    assert make_loss(on_meta("llama", vocab_size=8), smoothing=0.1).causal
    assert not make_loss(on_meta("bert", "masked_lm"), smoothing=0.1).causal
    assert not make_loss(on_meta("bert", "token_classification"), smoothing=0.1).causal


def test_shifted_labels_end_without_a_target() -> None:
    assert shifted(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [[2, 3, -100], [5, 6, -100]]


def test_modes_of_modules_are_put_back() -> None:
    model: Any = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    model[1].eval()
    with suppress(KeyError), in_evaluation_mode(model):
        assert not any(each.training for each in model.modules())
        raise KeyError
    assert [each.training for each in model.modules()] == [True, True, False]
    own = model[1].forward
    model[1].forward = own
    restore = keep_attributes(model)
    model.eval()
    model[0].forward = model[1].forward = model.save_pretrained = print
    restore()
    assert [each.training for each in model.modules()] == [True, True, False]
    assert "forward" not in vars(model[0])
    assert "save_pretrained" not in vars(model)
    assert vars(model[1])["forward"] == own


def test_layers_that_checkpoint_by_themselves_stay_as_they_were_given() -> None:
    model = on_meta("llama", vocab_size=8)
    assert enable_activation_checkpointing(model, "none") == 0
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert enable_activation_checkpointing(model, "none") == 2
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ConfigError, match=r"with use_reentrant=True, outside of backward"):
        enable_activation_checkpointing(model, "none")
    store: Any = SimpleNamespace()
    with pytest.raises(ConfigError, match=r"activation_checkpointing: none keeps all activations on the device"):
        enable_activation_checkpointing(model, "none", store=store)
