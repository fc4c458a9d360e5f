"""What a configuration names and this machine does not have: paths, and packages of trackers."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zeromesh.trainer.config.sections.base import REPOSITORY
from zeromesh.trainer.config.trainer_config import TrainerConfig

_PACKAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "aim": (("aim",), "aim"),
    "clearml": (("clearml",), "clearml"),
    "comet_ml": (("comet_ml",), "comet-ml"),
    "dvclive": (("dvclive",), "dvclive"),
    "mlflow": (("mlflow",), "mlflow"),
    "swanlab": (("swanlab",), "swanlab"),
    "tensorboard": (("tensorboard", "tensorboardX"), "tensorboard"),
    "trackio": (("trackio",), "trackio"),
    "wandb": (("wandb",), "wandb"),
}
"""By name: the modules, of which one is needed, and what pip installs."""


def missing_paths(config: TrainerConfig, *, wrong: frozenset[str] = frozenset()) -> list[str]:
    """The paths that `config` names and this machine does not have."""
    named = {
        "model.source": (config.model.source,),
        "data.train": _paths(config.data.train, builtin="stdlib"),
        "data.eval": _paths(config.data.eval, builtin="stdlib"),
        "data.tokenizer": _paths(config.data.tokenizer, builtin="bytes"),
        "checkpoint.resume": () if config.checkpoint.resume in ("auto", "never") else (config.checkpoint.resume,),
    }
    return [
        f"{key}: {path!r} does not exist{_looked_at(path)}; {_CURES[key]}"
        for key, paths in named.items()
        if key not in wrong
        for path in paths
        if path is not None and not Path(path).expanduser().exists()
        if not (key in _ON_THE_HUB and REPOSITORY.fullmatch(path))
    ]


def _looked_at(path: str) -> str:
    """Where a relative path was looked for, and what one with commas may mean."""
    found = "" if Path(path).expanduser().is_absolute() else f" in {Path.cwd()}"
    return found + (f", and several paths are a list: [{path}]" if "," in path else "")


_ON_THE_HUB = ("model.source", "data.tokenizer")
_CURES = {
    "checkpoint.resume": "give auto, never, or the directory of a run or of a checkpoint",
    "model.source": "give a local directory with config.json and *.safetensors, or the name of a model on the Hub",
    "data.train": "give stdlib, or files and directories of this machine (hub names are not looked up)",
    "data.eval": "give null, or files and directories of this machine (hub names are not looked up)",
    "data.tokenizer": "give bytes, a local directory that save_pretrained wrote, or the name of a model on the Hub",
}


def _paths(value: str | tuple[str, ...] | None, *, builtin: str) -> tuple[str, ...]:
    if value is None or value == builtin:
        return ()
    return (value,) if isinstance(value, str) else value


def tracker_problems(names: Sequence[str]) -> Iterator[str]:
    """What is wrong with these names of trackers: unknown ones, and those whose package is missing."""
    for name in names:
        if name in _PACKAGES:
            modules, package = _PACKAGES[name]
            if not any(map(_installed, modules)):
                yield f"tracking.backends: {name} needs a package that is not installed; run: pip install {package}"
        elif name not in _registered():
            near = difflib.get_close_matches(name.lower(), _PACKAGES, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield (
                f"tracking.backends: got {name!r}; allowed are {', '.join(_PACKAGES)}, and names of trackers that were given to "
                f"accelerate.tracking.register_tracker_class{hint}"
            )


def _installed(module: str) -> bool:
    spec = find_spec(module)
    # A folder of that name, such as the one that wandb makes for its runs, is no package.
    return spec is not None and spec.origin is not None


def _registered() -> Mapping[str, Any]:
    """Trackers that accelerate knows; its own, and those that were registered in this process."""
    module = sys.modules.get("accelerate.tracking")
    return module.LOGGER_TYPE_TO_CLASS if module is not None else {}
