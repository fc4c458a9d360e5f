"""The sections `run`, `checkpoint`, `hub`, `profile` and `tracking`."""

import math
import re
import sys
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, SerializerFunctionWrapHandler, model_serializer, model_validator

from zeromesh.environment import read_environment
from zeromesh.settings import keys
from zeromesh.trainer.config.sections.base import NamedList, RepoName, Seconds, Section, Texts

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def name_of_file(path: str | PathLike[str]) -> str:
    """Return the stem of a file's name, with '-' for characters that run names lack."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).stem).lstrip("._-")[:128] or "run"


def name_of_script() -> str:
    """Return the stem of this process's script, or the package's name for `python -m package`. An interactive session has no
    script, so each run gets a name with the time, and a cell that is run again trains again."""
    if file := getattr(sys.modules.get("__main__"), "__file__", None):
        path = Path(file)
        return name_of_file(path.resolve().parent.name if path.stem == "__main__" else path)
    alone = read_environment().world_size == 1  # Several ranks' clocks would give different names.
    return f"interactive-{datetime.now():%Y%m%d-%H%M%S-%f}" if alone else "interactive"


class CheckpointSection(Section):
    """The checkpoints of a run: complete model directories that transformers loads, in `checkpoints`."""

    every_steps: keys.CountOrOff | Literal["epoch"] = 100
    """Steps between checkpoints, or epoch: after each one; the last is always saved. 0 = those of callbacks, then the last too."""
    keep_last: keys.CountOrOff = 3
    """The number of newest checkpoints to keep. 0 = all."""
    keep_best: keys.CountOrOff = 0
    """The number of best checkpoints, by `run.metric`, to keep besides. 0 = off."""
    asynchronous: bool = True
    """Write checkpoints in the background, straight from the live states, while training continues."""
    resume: Literal["auto", "never"] | keys.Text = "auto"
    """auto resumes from the newest complete checkpoint; never refuses a run with any; a path starts from that checkpoint or run."""
    frozen: Literal["auto", "reference", "whole"] = "auto"
    """Storage of frozen weights: reference stores the path and checksums of the model's source directory for weights that are
    unchanged there; whole writes them; auto is reference if adapters are trained, else whole."""
    max_failures: keys.CountOrOff = 3
    """Consecutive failed saves after which the run ends. 0 = never."""
    timeout_seconds: Seconds = 600.0
    """Seconds that ranks wait for one in a slow disk call, and that the end of a run waits for the removal of old checkpoints."""

    @property
    def kept_steps(self) -> float:
        """The steps between the oldest checkpoint that `keep_last` keeps and the newest; infinite where that is not known."""
        if self.every_steps == "epoch" or not self.keep_last:
            return math.inf if self.every_steps else 0
        return self.every_steps * (self.keep_last - 1)


class RecoverySection(Section):
    """The treatment of failed and lost ranks in a run whose ranks `zeromesh` has started."""

    survivors: Literal["keep", "restart", "end"] = "keep"
    """keep: the other ranks stay in their processes, and new ones replace the lost; restart: all start again; end: all end."""
    limit: keys.Count = 20
    """Recoveries in an hour; a further one ends the run."""
    grow: bool = True
    """Hosts that come later (`--nnodes MIN:MAX`) are taken in after the present step; false: when another host is lost."""
    memory: Literal["auto", "snapshots", "off"] = "auto"
    """auto: states in memory of CPUs outlive the ranks in that of the launcher, and a run goes on from the latest step; of states
    on devices there are snapshots: two copies in the host's memory, written in turn; off: only checkpoints."""
    copies: Literal[0, 1] = 0
    """1: each host also has copies of the snapshots of another one, so that a run goes on from them when a host is lost."""
    every_steps: Annotated[Literal["auto"] | keys.Count, keys.Allowed("auto, or a number of steps")] = "auto"
    """Steps between snapshots. auto: the fewest for which they take less than 2 % of the time."""
    spike_factor: keys.NotNegative = 0.0
    """Times the median of accepted steps, above which a step's loss or gradient norm is a spike. Spikes, and steps that are not
    finite, are then computed again on other ranks before the update. 0 = off."""
    spike_window: keys.Count = 100
    """Accepted steps that the median is taken of; before so many no step is a spike."""
    on_spike: Literal["pass_over", "accept", "stop"] = "pass_over"
    """The answer to a spike that all ranks compute alike: no update, and the data are passed over; the update; the run ends.
    A rank that computes something else is left out."""
    rewind_steps: keys.CountOrOff = 0
    """Steps that the run goes back, at least, to a checkpoint, after `run.max_nonfinite` spikes in a row: the data since then are
    passed over. At most three times; a further such spike ends the run. 0 = off: so does the first one."""
    audit_steps: keys.CountOrOff = 0
    """Steps between audits, in which each rank computes a microbatch of another again, and their bits are compared. 0 = off."""


class HubSection(Section):
    """The upload of the model to the Hub. The token comes from `HF_TOKEN` or `hf auth login`, never from a configuration."""

    push: bool = False
    """Upload the model when the training has ended."""
    repository: RepoName | None = None
    """The repository, which is created if missing; null: `run.name`."""
    private: bool | None = None
    """Make a new repository private; null: the owner's default."""
    revision: keys.Text | None = None
    """The branch to upload to; null: the main branch."""


class ProfileSection(Section):
    """The measurements of steps, and the steps of which torch's profiler writes traces into the run's directory."""

    steps: Annotated[keys.Listed[tuple[keys.Count, keys.Count]], keys.Allowed("a list of two steps")] | None = None
    """First and last step that are recorded on every rank; null: none."""
    memory: bool = False
    """Record allocations and shapes of operators too."""
    allocations: bool = False
    """Record stacks of GPU allocations, for the file that is written when memory runs out; costs a little time."""
    step_figures: bool = True
    """Measure each phase's seconds and the bytes sent at every step, for metrics.jsonl; small models are a bit faster without."""


class RunSection(Section, keys.StepKeys):  # type: ignore[misc]  # pydantic freezes it too
    """The name, length, logging, evaluation and seeds of a run."""

    name: Annotated[
        str,
        Field(pattern=f"^{RUN_NAME.pattern}$"),
        keys.Allowed("a name of letters, digits, '.', '_' and '-' that starts with a letter or digit"),
    ] = Field(default_factory=name_of_script)
    """The run's directory inside `output_dir`; by default the name of the configuration file or script without its ending."""
    output_dir: keys.Text = "runs"
    """Directory that runs are written to."""
    max_steps: keys.Count = 200
    """Optimizer steps; null: 200, or the steps of `epochs`."""
    epochs: Annotated[keys.Number, Field(gt=0.0, le=1e6)] | None = None
    """Passes over the training data. With `max_steps` too, the run has the smaller number of steps."""
    log_every: keys.CountOrOff | Literal["epoch"] = 1
    """Steps between lines of metrics.jsonl, or epoch: after each epoch. 0 = off."""
    log_first_step: bool = False
    """Log a line after the first step too, whatever `log_every` is."""
    verbose: bool = False
    """Show the log's further details on the terminal: data reading, the loss, dtypes, times and traffic."""
    eval_every: keys.CountOrOff | Literal["epoch"] = 0
    """Steps between evaluations, or epoch: after each epoch. 0 = off, but for `eval_at_end`."""
    eval_at_start: bool = False
    """Evaluate before the first step too."""
    eval_at_end: bool = True
    """Evaluate after the last step, whatever `eval_every` is."""
    predict_with_generate: bool = False
    """Give `compute_metrics` generated tokens in place of logits."""
    generation: Annotated[
        dict[str, JsonValue] | None, keys.Allowed("a mapping of fields of transformers' GenerationConfig, or null")
    ] = None
    """Generation settings, such as max_new_tokens, on top of the model's generation_config.json."""
    prompts: Annotated[keys.Text | Texts | None, keys.Allowed("a list of texts, a file of prompts, or null")] = None
    """Prompts that the model continues while it is trained, by `generation`: a list of texts, or a file of JSON lines as that of
    `zeromesh generate --prompts`. The texts go to the console, to samples.jsonl and to trackers. null: none."""
    prompts_every: keys.Count | None = None
    """Steps between continuations of `prompts`; null: at evaluations."""
    metric: keys.Text = "loss"
    """The evaluation value that ranks checkpoints: loss, or a value of `compute_metrics`."""
    metric_goal: Literal["auto", "lowest", "highest"] = "auto"
    """The better direction of `metric`; auto: the lowest for losses, errors and perplexities, the highest for others."""
    patience: keys.CountOrOff = 0
    """Evaluations in a row without a better `metric` after which the run ends. 0 = off."""
    min_improvement: keys.NotNegative = 0.0
    """The smallest change of `metric` that counts as better, for `patience`."""
    load_best: bool = False
    """End with the weights of the best evaluation, which is kept as a checkpoint."""
    label_smoothing: keys.Fraction = 0.0
    """Fraction of each target that is spread over all classes, as in torch's cross_entropy."""
    callbacks: NamedList = ()
    """Callbacks of Python code: classes, functions that return one, or objects. Further keys are arguments of the call."""
    deterministic: bool = False
    """Use deterministic kernels only; an operation without one raises an error."""
    max_nonfinite: keys.CountOrOff = 20
    """Skipped steps in a row after which the run ends. 0 = never."""

    @model_validator(mode="before")
    @classmethod
    def _drop_null_max_steps(cls, data: Any) -> Any:
        null = isinstance(data, dict) and "max_steps" in data and data["max_steps"] is None
        return {key: value for key, value in data.items() if key != "max_steps"} if null else data

    @model_serializer(mode="wrap")
    def _serialize_max_steps(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = plain(self)
        return values | {"max_steps": None} if self.most_steps is None and "max_steps" in values else values

    @property
    def directory(self) -> Path:
        """The directory that the run writes to."""
        return Path(self.output_dir).expanduser() / self.name

    @property
    def most_steps(self) -> int | None:
        """The limit of the run's steps; None if the data alone decides."""
        return self.max_steps if self.epochs is None or "max_steps" in self.model_fields_set else None


class TrackingSection(Section):
    """The trackers that receive a run's metrics beside its files. Their failures neither stop nor slow training."""

    backends: keys.Names = ()
    """Trackers: wandb, tensorboard, aim, clearml, comet_ml, dvclive, mlflow, swanlab, trackio, or one registered in accelerate."""
    project: keys.Text = "zeromesh"
    """The project that trackers file the run under."""
    name: keys.Text | None = None
    """Name of the run in trackers; null: `run.name`."""
    mode: Literal["offline", "online"] = "offline"
    """Mode of wandb, clearml, comet_ml and swanlab: online uploads, and needs a network and a key."""
    tags: keys.Names = ()
    """Labels of the run."""
