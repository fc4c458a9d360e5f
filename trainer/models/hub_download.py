"""Models of the Hub by name: fetched once for each host before a run begins, at one commit on all ranks.

A name that is a directory on this machine is that directory. Any other is a repository, found by `huggingface_hub` in its cache or,
unless `HF_HUB_OFFLINE` is set, on the Hub.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import huggingface_hub
from huggingface_hub import constants
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from zeromesh.errors import ConfigError, summary
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.telemetry.watchdog import Activity
from zeromesh.trainer.config.sections.base import REPOSITORY
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.tokenizer import BYTES

T = TypeVar("T")
TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
MODEL_FILES = ("*.safetensors", "*.py", *TOKENIZER_FILES)
"""Patterns of the files that are fetched of a repository, from its root alone."""


def pin_sources(config: TrainerConfig, mesh: Mesh, *, model_given: bool) -> TrainerConfig:
    """Fetch what the configuration names on the Hub; all ranks call it, and all get the same.

    A model that is given to the trainer (`model_given`) needs no source. Returns the configuration with `model.revision` as the
    commit that was fetched, and `data.tokenizer` as a directory.

    Raises:
        ConfigError: for what is neither a directory nor a repository that can be reached, with what was tried.
    """
    model, data = config.model, config.data
    if model.source is not None and not model_given:
        commit = _fetch(model.source, model.revision, MODEL_FILES, mesh, where="model.source")
        model = model.model_copy(update={"revision": commit})
        if model.trust_remote_code:
            _load_code_in_turn(directory_of(model.source or "", commit), mesh)
    if data.tokenizer != BYTES:
        wanted = model.revision if data.tokenizer == model.source else None
        commit = _fetch(data.tokenizer, wanted, TOKENIZER_FILES, mesh, where="data.tokenizer")
        found = directory_of(data.tokenizer, commit, TOKENIZER_FILES, where="data.tokenizer")
        data = data.model_copy(update={"tokenizer": str(found)})
    return config.model_copy(update={"model": model, "data": data})


def directory_of(
    source: str, revision: str | None, files: Sequence[str] = MODEL_FILES, *, where: str = "model.source"
) -> Path:
    """Return the directory of this machine that has `source`; nothing is downloaded.

    Raises:
        ConfigError: where there is none, with what was tried.
    """
    directory = Path(source).expanduser()
    return directory if directory.is_dir() else _snapshot(source, revision, files, where=where, download=False)


def _fetch(source: str, revision: str | None, files: Sequence[str], mesh: Mesh, *, where: str) -> str | None:
    """Have a repository in the cache of every host; returns its commit, or None for a directory."""
    here = Path(source).expanduser().is_dir()
    rows = [row[0] for row in mesh.world.gather_integers([int(here)])]
    if all(rows):
        if revision is not None:
            problem = f"{revision!r} is of a repository, and {source!r} is a directory; leave it out"
            raise ConfigError(problem, where="model.revision")
        return None
    if any(rows):
        lacking = ", ".join(str(rank) for rank, found in enumerate(rows) if not found)
        raise ConfigError(f"{source!r} is a directory on some hosts and not on those of ranks {lacking}", where=where)

    def download(commit: str | None) -> str:
        return _snapshot(source, commit or revision, files, where=where, download=True).name

    first = while_posting(mesh, lambda: download(None)) if mesh.rank == 0 else ""
    commit = mesh.world.gather_bytes(first.encode(), f"commit of {source}")[0].decode()
    if mesh.rank and mesh.environment.local_rank == 0:
        while_posting(mesh, lambda: download(commit))
    mesh.meet(f"download of {source}")
    return commit


def _load_code_in_turn(directory: Path, mesh: Mesh) -> None:
    """Have transformers copy a model's code to where it imports it from, one rank first: others would read half a file."""
    turn = 0 if mesh.rank == 0 else 1 if mesh.environment.local_rank == 0 else 2
    for number in range(3):
        if number == turn and (directory / "config.json").is_file():
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=True)
            for reference in (getattr(config, "auto_map", None) or {}).values():
                get_class_from_dynamic_module(reference, directory, local_files_only=True)
        mesh.meet(f"code of {directory}")


def _snapshot(source: str, revision: str | None, files: Sequence[str], *, where: str, download: bool) -> Path:
    if not REPOSITORY.fullmatch(source):
        raise ConfigError(
            f"{Path(source).expanduser()} is not a directory on this machine, and cannot be the name of a model on the Hub",
            where=where,
        )
    try:
        found = huggingface_hub.snapshot_download(
            source,
            revision=revision,
            allow_patterns=list(files),
            ignore_patterns=["*/*"],
            local_files_only=not download,
        )
    except Exception as error:
        at = f" at {revision}" if revision else ""
        offline = " (HF_HUB_OFFLINE is set, so that it was not asked)" if constants.HF_HUB_OFFLINE else ""
        raise ConfigError(
            f"{source!r} is neither a directory here ({Path(source).expanduser().absolute()}) nor a model{at} that can be had from "
            f"the cache {constants.HF_HUB_CACHE} or from the Hub{offline}: {summary(error)}",
            where=where,
        ) from error
    return Path(found)


def while_posting(mesh: Mesh, call: Callable[[], T]) -> T:
    """Return what `call` returns, and let the other ranks, which wait for it, see that this one goes on."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(call)
        while not wait([future], timeout=1.0).done:
            mesh.post(Activity.IDLE)
        return future.result()
