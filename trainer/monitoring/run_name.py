"""What a run is called that nobody has named: after its configuration file, or after the script that makes it."""

from __future__ import annotations

import re
import sys
from datetime import datetime
from os import PathLike
from pathlib import Path

from zeromesh.environment import read_environment

PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def name_of_file(path: str | PathLike[str]) -> str:
    """The stem of a file's name, with '-' for characters that names of runs do not have."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).stem).lstrip("._-")[:128]
    return stem or "run"


def name_of_script() -> str:
    """The stem of the script of this process; of `python -m package` the package's name.

    A notebook or another interactive session has no script. There each run gets a name with the time, so that a cell that is run
    again trains again.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file:
        path = Path(file)
        return name_of_file(path.resolve().parent.name if path.stem == "__main__" else path)
    alone = read_environment().world_size == 1  # The clocks of several ranks would give several names.
    return f"interactive-{datetime.now():%Y%m%d-%H%M%S-%f}" if alone else "interactive"
