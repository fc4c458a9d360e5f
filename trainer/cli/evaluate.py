"""`zeromesh evaluate`: the evaluation of a run's configuration, of a checkpoint, a run or a Hugging Face directory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeromesh.errors import ConfigError

EVALUATED = "evaluated.jsonl"
"""In a run's directory: a line for each time that this command evaluated it."""
_RESOLVED = "config.resolved.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is evaluated: the configuration, keys of it that are set, and the checkpoint whose weights are taken, if any."""

    config: Path | None
    keys: tuple[str, ...] = ()
    checkpoint: Path | None = None


def add_evaluate_command(commands: Any) -> Any:
    """Add `evaluate` to the subparsers of `zeromesh`, which takes a configuration and overrides as `train` does."""
    parser = commands.add_parser("evaluate", help="evaluate a run, a checkpoint or a Hugging Face model directory")
    parser.set_defaults(nnodes=(1, 1), node_rank=None, max_restarts=None, rdzv_endpoint=None, attached=None)
    return parser


def find_subject(source: str) -> Subject:
    """What `source` names: a run's directory, a checkpoint, a Hugging Face model directory, or a configuration.

    A run stands for its newest checkpoint.

    Raises:
        ConfigError: for a directory that is none of these.
        CheckpointError: for a run without a checkpoint.
    """
    path = Path(source).expanduser()
    if not path.is_dir():
        return Subject(config=path)
    run = path.parent.parent if (path / "manifest.json").is_file() else path
    if (run / _RESOLVED).is_file():
        from zeromesh.trainer.tools.checkpoint.paths import checkpoint_at

        # The run may have begun from a checkpoint that is gone.
        return Subject(config=run / _RESOLVED, keys=("checkpoint.resume=auto",), checkpoint=checkpoint_at(path))
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"a directory without {_RESOLVED} or config.json; give a configuration, a run, a checkpoint of a run, or a model "
            "directory that save_pretrained wrote",
            where=source,
        )
    keys = [f"model.source={path}"]
    if (path / "tokenizer_config.json").is_file():
        keys.append(f"data.tokenizer={path}")
    return Subject(config=None, keys=(*keys, f"run.name={path.resolve().name}"))


def evaluate(config: Any, checkpoint: Path | None) -> int:
    """Evaluate on the evaluation data of a configuration, print the values and append them to `evaluated.jsonl`; the exit code.

    Without `checkpoint` the newest one of the configuration's run is taken, or else the weights that a run would begin with.
    """
    from zeromesh.checkpoint.store import CheckpointStore
    from zeromesh.trainer import Trainer
    from zeromesh.trainer.checkpoints.manager import FOLDER
    from zeromesh.trainer.loop.evaluation import evaluation_line
    from zeromesh.trainer.monitoring.step_metrics import MetricsWriter

    with Trainer(config=config) as trainer:
        store = CheckpointStore(trainer.run_directory / FOLDER)
        steps = store.steps()
        if checkpoint is None and steps:
            checkpoint = store.path(steps[0])
        if checkpoint is not None:
            trainer.load_weights(checkpoint)
        trainer.note(f"evaluating {checkpoint or 'the weights that the run would begin with'}")
        values = trainer.evaluate()
        trainer.note(evaluation_line(trainer.run, values))
        if trainer.mesh.rank == 0:
            line = {"time": time.time(), "step": trainer.state.step, "checkpoint": checkpoint and str(checkpoint)}
            with MetricsWriter(trainer.run_directory / EVALUATED) as writer:
                writer.write({**line, **values})
    return 0
