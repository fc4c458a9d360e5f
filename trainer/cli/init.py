"""`zeromesh init`: lists the example configurations of the package, and writes one into the current folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from zeromesh.errors import StorageError

_EXAMPLES = Path(__file__).resolve().parent.parent / "configs"


def add_init_command(commands: Any) -> None:
    """Add `init` to the subparsers of `zeromesh`."""
    parser = commands.add_parser("init", help="write an example configuration here; without a name, list them")
    parser.set_defaults(worker=False)
    parser.add_argument("name", nargs="?", choices=sorted(_examples()), metavar="NAME", help="the name of an example")


def run_init(options: argparse.Namespace) -> int:
    """List the examples, or write one; returns the exit code.

    Raises:
        StorageError: when the file exists or cannot be written; an existing file is never replaced.
    """
    examples = _examples()
    if options.name is None:
        width = max(map(len, examples))
        sys.stdout.writelines(f"{name:{width}}  {_about(path)}\n" for name, path in sorted(examples.items()))
        sys.stdout.write("zeromesh init NAME writes one of them here\n")
        return 0
    path = Path(examples[options.name].name)
    text = examples[options.name].read_text(encoding="utf-8").replace("configs/", "")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"{str(path)!r} was not written: {error.strerror or error}; move it away first") from error
    sys.stdout.write(f"wrote {path}; train it with: zeromesh train {path}\n")
    return 0


def _examples() -> dict[str, Path]:
    """The example files by their names without the suffix."""
    return {path.stem: path for path in _EXAMPLES.iterdir()}


def _about(path: Path) -> str:
    """The comment in the first line of an example. JSON has no comments."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("# ") if first.startswith("# ") else f"in JSON: {path.name}"
