"""What people do with a Trainer of transformers, each done to the original and to the one over the engine, on one process."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers as tf
from torch.utils.data import IterableDataset

from tests.distributed.integrations.accelerate_cases import fresh_state
from tests.distributed.integrations.hf_trainer_cases import TRAINS_ALONE, arguments_of, history, noting
from tests.support.plain import like
from tests.support.trainer_cases import llama, seeded, sentences
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.transformers import on_zeromesh

Make = Callable[..., Any]
_OVERRIDDEN = """
    training_step compute_loss create_optimizer create_scheduler get_train_dataloader _get_train_sampler get_eval_dataloader
    _prepare_inputs log evaluate prediction_step evaluation_loop _save_checkpoint _maybe_log_save_evaluate save_model _save
    get_batch_samples _clip_grad_norm create_optimizer_and_scheduler
"""
_ATTRIBUTES = """
    optimizer lr_scheduler accelerator model_wrapped callback_handler control data_collator compute_metrics label_names
    is_in_train model_init hyperparameter_search floating_point_ops num_examples get_optimizer_group
"""


def _trained(trainer: Any) -> Any:
    trainer.train()
    return history(trainer, -1, "train_loss")


def _on(event: str, call: Callable[..., None]) -> list[tf.TrainerCallback]:
    def method(self: Any, args: Any, state: Any, control: Any, **named: Any) -> None:
        call(**named)

    return [type("Callback", (tf.TrainerCallback,), {event: method})()]


def overrides(make: Make) -> Any:
    kind = type("Noting", (tf.Trainer,), {"called": set(), **{name: noting(name) for name in _OVERRIDDEN.split()}})
    found = _trained(make(kind, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2))
    return found, sorted(kind.called)


def two_backwards(make: Make) -> Any:
    class Twice(tf.Trainer):  # type: ignore[misc]
        def training_step(self, *arguments: Any, **named: Any) -> Any:
            return super().training_step(*arguments, **named) + super().training_step(*arguments, **named)

    return _trained(make(Twice, gradient_accumulation_steps=2))


def losses(make: Make) -> Any:
    class Own(tf.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
            outputs = model(**inputs)
            loss = outputs.logits.pow(2).mean()
            return (loss, outputs) if return_outputs else loss

    def measure(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs.logits.pow(2).sum() / num_items_in_batch

    own = _trained(make(Own, gradient_accumulation_steps=2))
    return own, _trained(make(given={"compute_loss_func": measure}, gradient_accumulation_steps=2))


def callbacks(make: Make) -> Any:
    found: list[Any] = []

    def rate(optimizer: Any, **_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3

    def in_place(model: Any, **_: Any) -> None:
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(0.9)

    def data(model: Any, **_: Any) -> None:
        for each in model.parameters():
            each.data = each.data * 0.9

    def weights(model: Any, **_: Any) -> None:
        found.append([float(each.sum()) for each in model.state_dict().values()])

    for event, call in (
        ("on_step_begin", rate),
        ("on_step_end", in_place),
        ("on_step_end", data),
        ("on_step_end", weights),
    ):
        found.append(_trained(make(given={"callbacks": _on(event, call)})))
    return found


def models(make: Make) -> Any:
    trainer = make(given={"model_init": lambda: llama()})
    found = [_trained(trainer), trainer.evaluate()["eval_loss"], _trained(trainer)]
    trainer.model = trainer.model_wrapped = seeded(llama)
    return found, trainer.evaluate()["eval_loss"], [name for name in _ATTRIBUTES.split() if not hasattr(trainer, name)]


def changes(make: Make) -> Any:
    trainer = make(include_num_input_tokens_seen=True)
    trainer.args.learning_rate, trainer.args.max_steps = 1e-3, 3
    trainer.compute_metrics = lambda prediction: {"mean": float(prediction.predictions.mean())}
    result, *_ = trainer.train()
    groups = trainer.optimizer.state_dict()["param_groups"]
    shown = [trainer.get_learning_rates(), trainer.get_num_trainable_parameters(), [each["lr"] for each in groups]]
    return (
        result,
        history(trainer, -1, "train_loss"),
        trainer.evaluate()["eval_mean"],
        trainer.state.num_input_tokens_seen,
        shown,
    )


def full_eval(make: Make) -> Any:
    trainer = make(bf16_full_eval=make is not _plain)
    trainer.train()
    trainer.evaluate()
    return _trained(trainer)


def streams(make: Make) -> Any:
    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(sentences())

    trainer = make(given={"train_dataset": Stream(), "eval_dataset": Stream()})
    return _trained(trainer), trainer.evaluate()["eval_loss"]


def options(make: Make) -> Any:
    named: list[dict[str, Any]] = [
        {"optim": "adafactor", "neftune_noise_alpha": 0.1},
        {"train_sampling_strategy": "group_by_length", "max_grad_norm": 0.0},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1, "eval_delay": 1},
    ]
    return [_trained(make(**each)) for each in named]


def nothing_to_resume(make: Make) -> Any:
    try:
        make().train(resume_from_checkpoint=True)
    except ValueError as error:
        return str(error)[:20]
    return None


PROBES = (
    overrides, two_backwards, losses, callbacks, models, changes, full_eval, streams, options, nothing_to_resume,
)  # fmt: skip


def _plain(kind: Any = tf.Trainer, *, over: Any = None, given: Any = None, **changes: Any) -> Any:
    torch.manual_seed(3)
    given = {"train_dataset": sentences(), "eval_dataset": sentences(5, seed=4), **(given or {})}
    asked = {"max_steps": 3, "gradient_accumulation_steps": 1, "learning_rate": 1e-2, **TRAINS_ALONE, **changes}
    model = None if "model_init" in given else seeded(llama)
    return (over or kind)(model, arguments_of(Path(tempfile.mkdtemp()), **asked), **given)


def alike(mesh: Mesh, folder: str, stage: int) -> None:
    """All probes find over the engine what they find in the original."""

    def mine(kind: Any = tf.Trainer, *, given: Any = None, **changes: Any) -> Any:
        given = {**(given or {}), "zeromesh": {"zero": {"stage": stage}}}
        return _plain(over=on_zeromesh(kind), given=given, **changes)

    with patch.object(tempfile, "tempdir", folder):
        for probe in PROBES:
            found = []
            for make in (_plain, mine):
                with fresh_state():
                    found.append(probe(make))
            like(found[1], found[0], rel=2e-5, abs_=2e-5, where=probe.__name__)
