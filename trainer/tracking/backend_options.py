"""What each of accelerate's trackers is given at its beginning, beside the project: name, tags, place, and what it may not look at.

Nothing of the machine, the command line, the code, the repository or the output goes to a tracker. Most look at all of that unless
they are told not to, each in words of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """What trackers know about a run. `config` holds no secrets; `step` is the one after which this process goes on."""

    ident: str
    name: str
    project: str
    tags: tuple[str, ...]
    online: bool
    directory: Path
    step: int
    config: Mapping[str, Any]


_FRAMEWORKS = (
    "detect_repository matplotlib tensorflow tensorboard pytorch xgboost scikit fastai lightgbm hydra tfdefines joblib megengine "
    "catboost gradio jsonargparse"
)
"""What ClearML would watch; only all of their names keep it from the repository and from files that are saved."""


_COMET_WATCHES = (
    "log_code log_graph parse_args log_git_metadata log_git_patch log_env_details auto_output_logging auto_param_logging "
    "auto_metric_logging auto_log_co2"
)


def arguments_of(name: str, run: TrackedRun) -> dict[str, Any]:
    """Keyword arguments for the tracker `name` of accelerate; none for one that a user has registered."""
    return _ARGUMENTS[name](run) if name in _ARGUMENTS else {}


def _aim(run: TrackedRun) -> dict[str, Any]:
    return {"experiment": run.name, "system_tracking_interval": None, "capture_terminal_logs": False}


def _clearml(run: TrackedRun) -> dict[str, Any]:
    if not run.online:
        from clearml import Task

        Task.set_offline(True)
    return {
        "task_name": run.name,
        "tags": list(run.tags),
        "reuse_last_task_id": False,
        "auto_connect_arg_parser": False,
        "auto_connect_frameworks": dict.fromkeys(_FRAMEWORKS.split(), False),
        "auto_resource_monitoring": False,
        "auto_connect_streams": False,
    }


def _comet_ml(run: TrackedRun) -> dict[str, Any]:
    from comet_ml import ExperimentConfig

    settings = ExperimentConfig(
        name=run.name,
        tags=list(run.tags),
        offline_directory=str(run.directory / "comet_ml"),
        display_summary_level=0,
        **dict.fromkeys(_COMET_WATCHES.split(), False),
    )
    # A key has 32 characters at least.
    key = hashlib.sha256(run.ident.encode()).hexdigest()[:32]
    where = {} if run.online else {"online": False}
    return {"experiment_key": key, "mode": "get_or_create", "experiment_config": settings, **where}


def _dvclive(run: TrackedRun) -> dict[str, Any]:
    # An experiment of DVC's would be a commit of all that is in the repository. In a directory of its own, `dvc.yaml` would name
    # each file once more with every step.
    paths = {"dir": str(run.directory / "dvclive"), "dvcyaml": str(run.directory / "dvc.yaml")}
    return {**paths, "resume": run.step > 0, "save_dvc_exp": False}


def _mlflow(run: TrackedRun) -> dict[str, Any]:
    # Its tags have names, of few characters.
    return {"run_name": run.name, "tags": {"tags": ", ".join(run.tags)} if run.tags else None}


def _swanlab(run: TrackedRun) -> dict[str, Any]:
    from swanlab import Settings

    hidden = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "monitor"), False)
    where = {} if run.online else {"mode": "offline"}
    return {
        "name": run.name,
        "tags": list(run.tags),
        "id": run.ident,
        "resume": "allow",
        "log_dir": str(run.directory / "swanlab"),
        "settings": Settings(probe=hidden, terminal={"proxy_type": "none"}),
        **where,
    }


def _trackio(run: TrackedRun) -> dict[str, Any]:
    # It knows runs by their names alone.
    return {"name": f"{run.name}-{run.ident}", "resume": "allow", "auto_log_gpu": False, "auto_log_cpu": False}


_ARGUMENTS: dict[str, Callable[[TrackedRun], dict[str, Any]]] = {
    "aim": _aim,
    "clearml": _clearml,
    "comet_ml": _comet_ml,
    "dvclive": _dvclive,
    "mlflow": _mlflow,
    "swanlab": _swanlab,
    "trackio": _trackio,
}
