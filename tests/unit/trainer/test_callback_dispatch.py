"""Callbacks in one process: who is called with what, whose requests hold how long, and which states come back."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_callback import ExportableState

from zeromesh.errors import ConfigError
from zeromesh.trainer.callbacks import dispatcher as module
from zeromesh.trainer.callbacks.callback import Callback, RunState
from zeromesh.trainer.callbacks.dispatcher import CallbackDispatcher, arguments_of
from zeromesh.trainer.config.load import load_config


class Own(Callback):
    def __init__(self, state: Any = None) -> None:
        self.seen: list[Any] = []
        self.state = state

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        self.seen.append((trainer, step, metrics))

    def state_dict(self) -> dict[str, Any]:
        return self.state or {}

    def load_state_dict(self, state: Any) -> None:
        self.state = dict(state)


class Theirs(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Keeps what it is told, and answers as it is told."""

    def __init__(self, count: int = 0, answer: Any = None) -> None:
        self.count, self.answer = count, answer
        self.seen: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> Any:
        self.seen.append((state.global_step, named["optimizer"].param_groups[0]["lr"], named["lr_scheduler"].last_epoch))
        return self.answer(control) if self.answer else None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **named: Any) -> None:
        self.seen.append(dict(logs))
        logs["own"] = 7

    def state(self) -> dict[str, Any]:
        return {"args": {"count": self.count}, "attributes": {}}


class Saves(TrainerCallback):  # type: ignore[misc]
    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        pass


def trainer_of(step: int = 3, **state: Any) -> Any:
    """What a dispatcher reads of a trainer."""
    values = {"step": step, "max_steps": 9, "epoch": 0.5, "epochs": 1.2, "tokens": 64, "best_metric": None, "best_step": 0}
    now = RunState(**{**values, "best_checkpoint": None, "is_world_process_zero": True, **state})
    added: list[Any] = []
    scalars = SimpleNamespace(add=added.append)
    run = SimpleNamespace(
        config=load_config({"run": {"max_steps": 9}, "batch": {"micro_size": 2}}),
        learning_rate_of=lambda step: step / 10,
        progress=SimpleNamespace(log=[{"loss": 1.0, "step": 2}, {"loss": 0.5, "step": 3}]),
        model=SimpleNamespace(stepper=SimpleNamespace(scalars=scalars)),
    )
    inputs = SimpleNamespace(model=None, processing_class=None)
    given = {"model": "model", "processing_class": "words", "inputs": inputs, "config": run.config}
    return SimpleNamespace(run=run, state=now, added=added, **given)


def flags(control: Any) -> dict[str, bool]:
    return {name.removeprefix("should_"): True for name, flag in vars(control).items() if flag}


def test_only_those_that_handle_an_event_are_called() -> None:
    class Partly(Own):
        pass

    trainer, first, second = trainer_of(), Own(), Partly()
    dispatcher = CallbackDispatcher(trainer, [first, Callback(), Theirs, second])
    (theirs,) = dispatcher.of_transformers
    assert dispatcher.listeners("on_step_end") == [first, theirs, second]
    assert dispatcher.listeners("on_epoch_end") == [theirs]
    replaced = Callback()
    vars(replaced)["on_epoch_end"] = lambda *given: None
    dispatcher.add(replaced)
    assert dispatcher.listeners("on_epoch_end") == [theirs, replaced]
    dispatcher.call("on_train_begin")
    dispatcher.call("on_step_end", 3, {"loss": 0.5})
    assert first.seen == second.seen == [(trainer, 3, {"loss": 0.5})]
    assert theirs.seen == [(3, 0.3, 3)]  # type: ignore[attr-defined]
    assert bool(dispatcher)
    assert not CallbackDispatcher(trainer, [])


def test_a_callback_of_transformers_sees_the_run() -> None:
    trainer = trainer_of(best_metric=0.25, best_step=2, best_checkpoint="/runs/a/checkpoints/step-00000002")
    theirs = Theirs()
    dispatcher = CallbackDispatcher(trainer, [theirs])
    dispatcher.call("on_train_begin")
    state = dispatcher._state
    assert (state.global_step, state.max_steps, state.epoch, state.num_train_epochs) == (3, 9, 0.5, 2)
    assert (state.num_input_tokens_seen, state.train_batch_size, state.is_world_process_zero) == (64, 2, True)
    assert (state.best_metric, state.best_global_step) == (0.25, 2)
    assert str(state.best_model_checkpoint) == "/runs/a/checkpoint-2"
    trainer.state = trainer_of(step=4).state
    dispatcher.call("on_optimizer_step", 4)
    assert state.global_step == 3  # The step counts when it has ended.
    dispatcher.call("on_log", 4, {})
    assert state.global_step == 4
    assert theirs.seen == [{"loss": 0.5}]
    assert trainer.added == [{"own": 7}]


def test_callbacks_of_transformers_may_answer_with_a_control_of_their_own() -> None:
    stops = Theirs(answer=lambda control: TrainerControl(should_training_stop=True))
    dispatcher = CallbackDispatcher(trainer_of(), [stops, Theirs()])
    dispatcher.call("on_train_begin")
    dispatcher.call("on_step_end", 3, {})
    assert flags(dispatcher.control) == {"training_stop": True}


def test_requests_add_up_and_hold_for_one_step_but_for_the_end() -> None:
    dispatcher = CallbackDispatcher(trainer_of(), [])
    for name, flag in {"log": "log", "evaluate": "evaluate", "save": "save", "stop": "training_stop"}.items():
        dispatcher.forget_requests()
        dispatcher.control.should_training_stop = False
        dispatcher.request(**{name: True})
        assert flags(dispatcher.control) == {flag: True}
    dispatcher.request(log=True)
    dispatcher.request(save=True)
    assert flags(dispatcher.control) == {"training_stop": True, "log": True, "save": True}
    dispatcher.forget_requests()
    assert flags(dispatcher.control) == {"training_stop": True}
    dispatcher.forget_requests(stop_epoch=True)
    assert flags(dispatcher.control) == {"training_stop": True, "epoch_stop": True}


@pytest.mark.parametrize(("callbacks", "size", "asked"), [([Callback()], 2, 1), ([], 2, 0), ([Callback()], 1, 0)])
def test_ranks_agree_on_requests_where_there_are_several(callbacks: list[Any], size: int, asked: int) -> None:
    seen: list[list[int]] = []

    def highest(own: torch.Tensor, what: str) -> torch.Tensor:
        seen.append(own.tolist())
        return torch.tensor([0, 0, 1, 0, 0]) | own

    dispatcher = CallbackDispatcher(trainer_of(), callbacks)
    dispatcher.request(log=True)
    mesh: Any = SimpleNamespace(world_size=size, world=SimpleNamespace(all_reduce_max=highest))
    dispatcher.agree(mesh)
    assert seen == [[0, 0, 0, 0, 1]] * asked
    assert flags(dispatcher.control) == ({"log": True, "save": True} if asked else {"log": True})


def test_states_come_back_to_callbacks_of_the_same_class() -> None:
    class Other(Own):
        pass

    first = CallbackDispatcher(trainer_of(), [Own({"a": 1}), Own({"a": 2}), Other(), Theirs(3), Saves()])
    states, later = first.states(), first.states()
    later["Own"]["a"] = 2
    assert states == {"Own": {"a": 1}, "Other": {}, "TransformersCallbacks": {"Theirs": {"args": {"count": 3}, "attributes": {}}}}
    assert CallbackDispatcher(trainer_of(), [Own()]).states() == {"Own": {}}
    own, other = Own(), Other({"kept": 0})
    second = CallbackDispatcher(trainer_of(), [other, Theirs(), own, Saves()])
    second.restore(states)
    assert (own.state, other.state) == ({"a": 1}, {"kept": 0})
    assert [type(each) for each in second.of_transformers] == [Theirs, Saves]
    assert second.of_transformers[0].count == 3  # type: ignore[attr-defined]
    second.restore({})
    assert own.state == {"a": 1}


def test_callbacks_begin_again_with_the_states_that_they_had() -> None:
    """Also those of one class, and those whose state was empty; a request to stop is one of the steps that are made again."""
    own = [Own({"kept": 0}), Own(), Own({"kept": [1]})]
    dispatcher = CallbackDispatcher(trainer_of(), [*own, Theirs(3)])
    for _ in range(2):
        dispatcher.note_first()
        for each in own:
            each.state = {**(each.state or {}), "more": 1}
        own[2].state["kept"].append(2)
        dispatcher.of_transformers[0].count = 9  # type: ignore[attr-defined]
        dispatcher.request(stop=True)
        dispatcher.restore({"Own": {"a": 1}}, lost=0)
        assert dispatcher.control.should_training_stop
        assert [each.state for each in own] == [{"a": 1}] * 3
        dispatcher.restore({}, lost=3)
        assert not dispatcher.control.should_training_stop
        assert [each.state for each in own] == [{"kept": 0}, {}, {"kept": [1]}]
        assert dispatcher.of_transformers[0].count == 3  # type: ignore[attr-defined]


def test_a_checkpoint_is_waited_for_where_a_callback_may_read_it() -> None:
    for callbacks, reads in (([Own()], False), ([Theirs()], False), ([Theirs(), Saves], True)):
        assert CallbackDispatcher(trainer_of(), callbacks).reads_checkpoints is reads


@pytest.mark.parametrize(("wrong", "said"), [(Own, "the class Own"), (3, "a int"), (dict, "the class dict")])
def test_what_is_no_callback_is_refused(wrong: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"callbacks holds {said}; give objects of subclasses of"):
        CallbackDispatcher(trainer_of(), [wrong])


def test_arguments_of_transformers_say_what_the_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_environment", lambda: SimpleNamespace(world_size=8, rank=0))
    config = {
        "run": {
            "name": "a",
            "output_dir": "runs",
            "max_steps": 30,
            "eval_every": 5,
            "seed": 2**32 + 5,
            "metric": "accuracy",
            "load_best": True,
        },
        "batch": {"micro_size": 2, "global_size": 10, "eval_micro_size": 3},
        "schedule": {"name": "linear", "warmup_ratio": 0.1},
        "parallel": {"tensor": 2, "pipeline": 2},
        "hub": {"push": True, "repository": "me/a", "private": True, "revision": "dev"},
    }
    given = arguments_of(load_config(config))
    assert (given.output_dir, given.run_name, given.max_steps, given.seed) == ("runs/a", "a", 30, 5)
    assert (given.per_device_train_batch_size, given.per_device_eval_batch_size) == (2, 3)
    assert given.gradient_accumulation_steps == 3  # 10 samples of 2 data ranks, 2 at a time
    assert (given.lr_scheduler_type, given.warmup_steps, given.num_train_epochs) == ("linear", 3, 1)
    assert (given.metric_for_best_model, given.greater_is_better, given.load_best_model_at_end) == ("accuracy", True, True)
    hub = (given.push_to_hub, given.hub_model_id, given.hub_private_repo, given.hub_revision)
    assert hub == (True, "me/a", True, "dev")
    assert (given.report_to, given.disable_tqdm) == ([], False)
    plain = arguments_of(load_config({"batch": {"micro_size": 4, "global_size": 4}}))
    assert (plain.per_device_eval_batch_size, plain.greater_is_better, plain.load_best_model_at_end) == (4, False, False)
    assert (plain.gradient_accumulation_steps, plain.push_to_hub) == (1, False)
