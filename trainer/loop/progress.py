"""`RunProgress`: what the steps of a run change."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zeromesh.trainer.checkpoints.best_metric import Best
from zeromesh.trainer.data.feed import Feed
from zeromesh.trainer.monitoring.progress import FitReport, LogHistory, Progress

Values = dict[str, float]
"""Values of an evaluation or of a run by name, such as `eval_loss`."""


@dataclass(kw_only=True, slots=True)
class RunProgress:
    """How far a run is, and what has come of it. `totals` adds up its steps; `history` has the lines that it has logged."""

    totals: Progress
    history: LogHistory
    step: int = 0
    """Steps that were made."""
    passed_over: int = 0
    """Steps whose data was left out, because a callback ended an epoch early."""
    reached: int = 0
    """The number of steps, made or passed over, up to the last one that was made."""
    learning_rate: float = 0.0
    """The learning rate of the latest step."""
    best: Best = field(default_factory=Best)
    latest_metric: float = float("nan")
    """The value of `run.metric` in the latest evaluation."""
    evaluated_targets: int | None = None
    """Targets of the latest evaluation; None where it was of several sets."""
    evaluation_feed: Feed | None = None
    """The feed of the latest evaluation or prediction."""
    ignored_outputs: Sequence[str] | None = None
    """Outputs of the model that evaluations during training do not gather; None: those that its configuration names."""
    owes_evaluation: bool = False
    """Whether the run was stopped in the evaluation after its last step."""
    tracker: Mapping[str, str] = field(default_factory=dict)
    """What the checkpoint from which the run was resumed knows of its trackers."""
    began: tuple[float, int] = field(default_factory=lambda: (time.perf_counter(), 0))
    """When this process began to train, by `time.perf_counter`, and after how many samples."""
    summary: Values = field(default_factory=dict)
    """Values of the whole run, once it was trained."""
    report: FitReport | None = None

    @property
    def position(self) -> int:
        """The step whose data comes next: steps made and steps passed over."""
        return self.step + self.passed_over
