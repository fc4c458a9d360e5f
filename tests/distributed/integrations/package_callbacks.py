"""Cases of transformers' callbacks that need packages of their own: what each leaves on the disk under either trainer."""

import contextlib
import os
from pathlib import Path
from unittest.mock import patch

import transformers as tf
from callback_cases import quiet, run, whole
from tracker_rows import places
from transformers import integrations

from zeromesh import Trainer
from zeromesh.mesh.process_mesh import Mesh


def left(mesh: Mesh, folder: str, name: str, ours: bool) -> None:
    """A run with one such callback; `tracker_rows` reads what it leaves in `folder`."""
    fields = {"max_steps": 4, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    fields |= {"project": "zeromesh", "run_name": "named", "learning_rate": 0.01}
    home = Path(folder) / "run"
    home.mkdir()
    variables = {
        **places(Path(folder)),
        "MLFLOW_EXPERIMENT_NAME": "zeromesh",
        "COMET_START_ONLINE": "0",
        "COMET_OFFLINE_DIRECTORY": str(home / "comet_ml"),
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_LOG_MODEL": "FALSE",
    }
    with quiet(), patch.dict(os.environ, variables), contextlib.chdir(home):
        if name == "SwanLabCallback":  # It fails under either where nobody has begun a run before.
            import swanlab

            swanlab.init(project="zeromesh", mode="offline", log_dir=str(home / "swanlab"))
        if name == "ClearMLCallback":  # It would read the whole repository first.
            from clearml import Task

            task = Task.init(
                "zeromesh", "named", auto_connect_frameworks={"detect_repository": False}, auto_connect_streams=False
            )
        callback = getattr(integrations, name)()
        trainer = run(Trainer if ours else tf.Trainer, Path(folder), fields, [callback])
        trainer.predict(whole(3))
        if name == "CometCallback":
            callback._experiment.end()
        if name == "ClearMLCallback":
            task.close()
        if name == "SwanLabCallback":
            swanlab.finish()
