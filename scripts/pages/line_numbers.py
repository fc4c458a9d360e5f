"""Renew the line numbers of docs/architecture.md: `scripts/pages/line_numbers.py`.

The page follows a step and a prompt through the source: a row names a file with a line, and then what is defined there.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
_ROW = re.compile(r"`(?P<path>[\w/]+\.py):(?P<line>\d+)` \| `(?P<name>[\w.]+)`")


def renewed(text: str) -> str:
    """A page's text with the lines at which its names are defined today. Raises `LookupError` for a name that is not there."""
    return _ROW.sub(lambda row: f"`{row['path']}:{line_of(row['path'], row['name'])}` | `{row['name']}`", text)


def line_of(path: str, name: str) -> int:
    """The line at which a file defines a class, a function or a method, such as `Engine.step`."""
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    line = 0
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = next((node for node in body if isinstance(node, kinds) and node.name == part), None)
        if found is None:
            raise LookupError(f"{path} defines no {name}")
        line, body = found.lineno, found.body
    return line


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
