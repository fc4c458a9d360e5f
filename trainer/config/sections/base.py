"""The base of all sections of a configuration, types of values that the trainer alone reads, and Python objects that they name."""

import difflib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from zeromesh.errors import ConfigError, summary
from zeromesh.settings.keys import Allowed, Listed, Number, Text

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""The pattern of a model name on the Hub; existence is checked when a run begins."""
RepoName = Annotated[str, Field(pattern=f"^{REPOSITORY.pattern}$"), Allowed("a repository's name, such as me/model")]
Ratio = Annotated[Number, Field(ge=0.0, le=1.0)]
Seconds = Annotated[Number, Field(gt=0.0, le=86400.0)]
Texts = Annotated[Listed[tuple[Text, ...]], Field(min_length=1), Allowed("a list of at least one text")]
PythonName = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$"), Allowed("text such as package.module:function")]


class NamedFunction(BaseModel):
    """A function, a class or an object of Python code, by its name, with further keys as arguments of its call."""

    model_config = ConfigDict(frozen=True, extra="allow", hide_input_in_errors=True)
    python: PythonName


Named = Annotated[NamedFunction, Allowed("a mapping such as {python: package.module:function}")]
NamedList = Annotated[Listed[tuple[Named, ...]], Allowed("a list such as [{python: package.module:function}]")]


class Section(BaseModel):
    """A section of the configuration, frozen and strict: text is no number, a bool is no integer, and an unknown key is an error.
    Construction raises pydantic's `ValidationError`. The docstring below a field describes its key."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, validate_default=True
    )


def find_object(name: str, where: str, folders: Sequence[str] = ()) -> Any:
    """Import `package.module:function` from `folders`, this folder or the import path. Raises `ConfigError` for key `where`."""
    module, _, path = name.partition(":")
    places = list(dict.fromkeys((*folders, os.getcwd())))
    sys.path[:0] = places
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        text = f"{name}: {module} cannot be imported ({summary(error)}"
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            names = [each.stem for place in places for each in Path(place).glob("*.py")]
            text += f"); it was looked for in {', '.join(places)} and on the import path{nearest_of(str(error.name), names)}"
        else:
            *_, last = traceback.extract_tb(error.__traceback__)
            text += ")" if isinstance(error, SyntaxError) else f" in {last.filename}, line {last.lineno})"
        raise ConfigError(text, where=where) from error
    finally:
        for place in places:
            sys.path.remove(place)
        sys.path += [each for each in places if each not in sys.path]  # At the end of the path, for later imports.
    for part in path.split("."):
        if not hasattr(found, part):
            file = getattr(sys.modules[module], "__file__", "built in")
            own = [each for each in vars(found) if not each.startswith("_")] if hasattr(found, "__dict__") else []
            near = nearest_of(part, own, sorted(own)[:8], cutoff=0.5)
            raise ConfigError(f"{name}: {module} ({file}) has no {part}{near}", where=where)
        found = getattr(found, part)
    return found


def nearest(word: str, words: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the most similar of `words`, or None below the similarity `cutoff` (0 to 1)."""
    return next(iter(difflib.get_close_matches(word.lower(), words, n=1, cutoff=cutoff)), None)


def nearest_of(name: object, known: Iterable[str], otherwise: Sequence[str] = (), *, cutoff: float = 0.6) -> str:
    """Return the end of a message with the names nearest to an unknown one, or with those `otherwise`; empty without either."""
    near = difflib.get_close_matches(str(name), sorted(known), cutoff=cutoff) or otherwise
    return f"; nearest: {', '.join(near)}" if near else ""
