"""Objects of Python code that a configuration names as `package.module:function`."""

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeromesh.errors import ConfigError, summary


def find_object(name: str, where: str, folders: Sequence[str] = ()) -> Any:
    """Import the object of a name such as `package.module:function`, from `folders`, the current folder or the import path. Raises
    `ConfigError` for key `where`."""
    module, _, path = name.partition(":")
    places = list(dict.fromkeys((*folders, os.getcwd())))
    sys.path[:0] = places
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        text = f"{name}: {module} cannot be imported ({summary(error)}"
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            names = [each.stem for place in places for each in Path(place).glob("*.py")]
            text += f"); it was looked for in {', '.join(places)} and on the import path{_suggestion(str(error.name), names)}"
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
            raise ConfigError(f"{name}: {module} ({file}) has no {part}{_suggestion(part, own)}", where=where)
        found = getattr(found, part)
    return found


def _suggestion(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or sorted(known)[:8]
    return f"; nearest: {', '.join(near)}" if near else ""
