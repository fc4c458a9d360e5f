"""What the classes over other libraries refuse or leave out, without a run."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeromesh.errors import CheckpointError, ConfigError
from zeromesh.trainer.integrations.accelerate import Accelerator, PreparedScheduler
from zeromesh.trainer.integrations.transformers import _OptimizerPlaceholder, on_zeromesh


def test_states_of_an_optimizer_that_zeromesh_has_not_written_are_refused() -> None:
    placeholder: Any = _OptimizerPlaceholder()
    with pytest.raises(CheckpointError, match="were not written by zeromesh"):
        placeholder.load_state_dict({"state": {}, "param_groups": []})
    assert [placeholder.read] == [False]
    placeholder.load_state_dict(placeholder.state_dict())
    assert [placeholder.read] == [True]
    with pytest.raises(ConfigError, match="dict is not built on transformers"):
        on_zeromesh(dict)


def test_gradients_are_clipped_by_their_norm_alone_and_only_to_a_limit() -> None:
    pytest.importorskip("lightning")
    from zeromesh.trainer.integrations.lightning import _clip_gradients

    limits: list[float] = []
    optimizer = SimpleNamespace(clip_grad_norm_=limits.append)
    for limit in (0.0, 0.5):
        _clip_gradients(optimizer, limit)
    assert limits == [0.5]
    with pytest.raises(ConfigError, match="gradient_clip_algorithm is value"):
        _clip_gradients(optimizer, 0.5, "value")


@pytest.mark.parametrize(("total", "skipped", "steps"), [(None, False, 3), (4, False, 2), (None, True, 0)])
def test_a_scheduler_advances_once_for_each_data_rank(total: int | None, skipped: bool, steps: int) -> None:
    """Up to its end, and not where an update was skipped; it has made two steps, and counts from 1."""
    own = SimpleNamespace(_step_count=3, done=0, **({} if total is None else {"total_steps": total}))

    def step() -> None:
        own._step_count += 1
        own.done += 1

    own.step = step
    prepared: Any = object.__new__(PreparedScheduler)
    state = SimpleNamespace(sync_gradients=True, adjust_scheduler=False)
    vars(prepared).update(
        scheduler=own, data_ranks=3, step_with_optimizer=True, split_batches=False, gradient_state=state,
        optimizers=[SimpleNamespace(step_was_skipped=skipped)],
    )  # fmt: skip
    prepared.step()
    assert own.done == steps


def test_a_loss_scale_needs_a_single_optimizer() -> None:
    made: Any = object.__new__(Accelerator)
    scaled = SimpleNamespace(optimizer=SimpleNamespace(scale=lambda loss: 8 * loss))
    state = SimpleNamespace(plugin_kwargs={}, num_steps=4)
    vars(made).update(_compute="float16", _optimizers=[scaled], gradient_state=state)
    x = torch.ones(1, requires_grad=True)
    made.backward(x.sum())
    assert x.grad is not None
    assert x.grad.tolist() == [2.0]
    made._optimizers = [scaled, scaled]
    with pytest.raises(ConfigError, match="float16 has a loss scale, and 2 optimizers differ"):
        made.backward(x.sum())
    made._compute = "bfloat16"
    made.backward(x.sum())
    assert x.grad.tolist() == [2.25]


def test_what_a_block_without_models_replaces_is_back_after_an_error() -> None:
    made: Any = Accelerator.__new__(Accelerator)
    made._optimizers, made._save_model_state_pre_hook = ["mine"], OrderedDict()
    with pytest.raises(KeyError), made._without_models():  # noqa: PT012
        (hook,) = made._save_model_state_pre_hook.values()
        hook([], weights := ["whole"], "out")
        assert (weights, made._optimizers, made.get_state_dict(torch.nn.Linear(1, 1), unwrap=False)) == ([], [], {})
        raise KeyError
    assert (made._save_model_state_pre_hook, made._optimizers, "get_state_dict" in vars(made)) == ({}, ["mine"], False)
