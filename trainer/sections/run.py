"""The section `run`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zeromesh.trainer.config_types import Allowed, Count, CountOrOff, Fraction, Number, Text
from zeromesh.trainer.run_name import PATTERN, name_of_script
from zeromesh.trainer.sections.section import Section


class RunSection(Section):
    """How long, how often and where to."""

    name: Annotated[
        str,
        Field(pattern=f"^{PATTERN.pattern}$"),
        Allowed("a name of letters, digits, '.', '_' and '-' that starts with a letter or digit"),
    ] = Field(
        default_factory=name_of_script,
        description="The run's directory inside `output_dir`; by default the name of the configuration file or of the script, "
        "without its ending.",
    )
    output_dir: Text = Field(default="runs", description="Where runs are written.")
    max_steps: Count = Field(default=200, description="Optimizer steps.")
    epochs: Annotated[Number, Field(gt=0.0)] | None = Field(
        default=None, description="Passes over the training data; they replace `max_steps`."
    )
    clip_norm: Annotated[Number, Field(ge=0.0)] = Field(
        default=1.0,
        description="Largest global norm of the gradients, as in torch's clip_grad_norm_. 0 = off.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63), Allowed("an integer >= 0 and < 2**63")] = Field(
        default=0, description="Seed of initial weights, data order and dropout."
    )
    log_every: CountOrOff | Literal["epoch"] = Field(
        default=1, description="Steps between lines of metrics.jsonl, or epoch: after each epoch. 0 = off."
    )
    log_first_step: bool = Field(default=False, description="A line after the first step too, whatever `log_every` is.")
    eval_every: CountOrOff | Literal["epoch"] = Field(
        default=0, description="Steps between evaluations, or epoch: after each epoch. 0 = off, but for `eval_at_end`."
    )
    eval_at_start: bool = Field(default=False, description="Evaluate before the first step too.")
    eval_at_end: bool = Field(default=True, description="Evaluate after the last step, whatever `eval_every` is.")
    metric: Text = Field(
        default="loss",
        description="The value of an evaluation that says which is best: loss, or one of `compute_metrics`.",
    )
    metric_goal: Literal["auto", "lowest", "highest"] = Field(
        default="auto",
        description="Which value of `metric` is best; auto: the lowest of what is a loss, the highest of others.",
    )
    patience: CountOrOff = Field(
        default=0, description="Evaluations in a row without a better `metric` after which the run ends. 0 = off."
    )
    min_improvement: Annotated[Number, Field(ge=0.0)] = Field(
        default=0.0, description="By how much `metric` has to change to be better, for `patience`."
    )
    load_best: bool = Field(
        default=False, description="End with the weights of the best evaluation, which is kept as a checkpoint."
    )
    label_smoothing: Fraction = Field(
        default=0.0, description="Part of each target that is spread over all classes, as in cross_entropy."
    )
    deterministic: bool = Field(
        default=False, description="Only kernels that give the same bits each time; an error where there is none."
    )
    on_nonfinite: Literal["skip", "stop"] = Field(
        default="skip",
        description="What a NaN or infinite gradient does: all ranks skip the step, or the run ends.",
    )
    max_nonfinite: CountOrOff = Field(
        default=20, description="Skipped steps in a row after which the run ends. 0 = never."
    )
