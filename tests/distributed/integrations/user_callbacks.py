"""Callbacks as users of transformers write them, to its documentation alone. Each keeps in `seen` what it saw and did."""

import math
import time
from functools import partialmethod
from pathlib import Path
from typing import Any

import transformers as tf
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

EVENTS = (
    *("on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin"),
    *("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_step_end", "on_evaluate", "on_predict"),
    *("on_save", "on_log", "on_prediction_step"),
)
FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Seeing(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[Any] = []


class Recorder(Seeing):
    """Everything there is to see, in every event."""

    def note(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        scheduler, optimizer, history = kwargs["lr_scheduler"], kwargs["optimizer"], state.log_history or []
        best = state.best_model_checkpoint
        self.seen.append(
            {
                "event": event,
                "state": [state.global_step, state.max_steps, state.epoch, state.num_train_epochs],
                "every": [state.logging_steps, state.train_batch_size],
                "best": [state.best_metric, state.best_global_step, best and Path(best).name],
                "first": [state.is_world_process_zero, state.is_local_process_zero],
                "flags": [name for name in FLAGS if getattr(control, name)],
                "rate": None if scheduler is None else [scheduler.get_last_lr()[0], optimizer.param_groups[0]["lr"]],
                "model": type(kwargs["model"]).__name__,
                "processing": type(kwargs["processing_class"]).__name__,
                "history": [len(history), dict(sorted(timeless(history[-1]).items())) if history else {}],
                **{name: timeless(kwargs[name]) for name in ("logs", "metrics") if name in kwargs},
            }
        )


def timeless(values: dict[str, Any]) -> dict[str, Any]:
    """The same, with nothing in place of what another run would measure."""
    return {name: None if name.endswith(("runtime", "per_second")) else value for name, value in values.items()}


for _name in EVENTS:
    setattr(Recorder, _name, partialmethod(Recorder.note, _name))


class StopAtLoss(Seeing):
    def __init__(self, low: float) -> None:
        super().__init__()
        self.low = low

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and logs.get("loss", math.inf) < self.low:
            self.seen.append(state.global_step)
            control.should_training_stop = True


class EvaluateEarly(Seeing):
    """Evaluates after the first step, and says so by returning the control."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == 1:
            control.should_evaluate = True
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self.seen.append([state.global_step, math.exp(metrics["eval_loss"]), sorted(metrics)])


class SaveWhen(Seeing):
    """Saves after steps of its own, and looks at what was saved."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        super().__init__()
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save |= state.global_step in self.steps

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.seen.append([state.global_step, Path(get_last_checkpoint(args.output_dir) or "").name, norm_of(folder)])


class KeepEvaluated(Seeing):
    """Saves the model after each evaluation by the model's own method, and loads it again."""

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"evaluated-{state.global_step}"
        model.save_pretrained(folder)
        self.seen.append([state.global_step, norm_of(folder)])


def norm_of(folder: Path) -> float:
    """Of all parameters of a saved language model."""
    model = tf.AutoModelForCausalLM.from_pretrained(folder)
    return math.sqrt(sum(float(each.detach().double().square().sum()) for each in model.parameters()))


class CutEpochs(Seeing):
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.begun + 2:
            control.should_epoch_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append([state.global_step, state.epoch])


class CountTime(Seeing):
    """Counts what a step is made of, and guesses how long it still takes."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began, self.parts = time.monotonic(), 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.parts += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        each = (time.monotonic() - self.began) / state.global_step
        left = each * (state.max_steps - state.global_step)
        self.seen.append([self.parts, args.gradient_accumulation_steps, left >= 0, round(left / each)])


class Summary(Seeing):
    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        losses = [(line["step"], line["loss"]) for line in state.log_history if "loss" in line]
        judged = [(line["step"], line["eval_loss"]) for line in state.log_history if "eval_loss" in line]
        best = state.best_model_checkpoint
        self.seen += [losses, judged, state.best_metric, state.best_global_step, best and Path(best).name]
        self.seen += [args.output_dir.endswith("run"), args.learning_rate, model.config.model_type, state.total_flos]
        self.seen += [state.log_history[-1]["train_loss"], sorted(state.log_history[-1])]


class Annotate(Seeing):
    """Adds a value to what is logged, for the callbacks after it, and remembers across a resume how often."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        logs["samples"] = state.global_step * args.train_batch_size * args.gradient_accumulation_steps
        self.seen.append(logs["samples"])
