"""The structure of the source as a table with a column for each ROOT: `scripts/structure_report.py [--trace] [--json] [ROOT ...]`.

A room is a file or a folder; two rooms of the same folder are connected by the imports of everything inside them, imports inside
functions and for type checkers included. Towards a subfolder, the files of a folder are one room. `--trace`
also runs a small training step, a save and a load on one rank, and counts the files and the Python calls that each goes through.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

FLOORS = ("offload", "zeromesh", "trainer")
"""From the lowest to the highest: a floor imports itself and those before it."""
DOORS = (
    *("zeromesh/__init__.py", "zeromesh/__main__.py"),
    *("zeromesh/accelerate.py", "zeromesh/lightning.py", "zeromesh/losses.py", "zeromesh/transformers.py"),
)
"""These hand the highest floor on, lazily or by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file: its path from the root, the module that it is, its number of lines, and its tree."""

    path: str
    module: str
    lines: int
    tree: ast.Module

    @property
    def floor(self) -> str:
        return self.path.partition("/")[0]

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")


def sources(root: Path) -> list[Source]:
    """Every Python file of the three floors, each once: links are not followed."""
    found = []
    for floor in FLOORS:
        for folder, folders, files in os.walk(root / floor, followlinks=False):
            folders[:] = [name for name in folders if name != "__pycache__"]
            paths = [Path(folder, name) for name in files if name.endswith(".py")]
            found += [_source(root, path) for path in paths if not path.is_symlink()]
    return sorted(found, key=lambda source: source.path)


def _source(root: Path, path: Path) -> Source:
    relative = path.relative_to(root)
    parts = relative.with_suffix("").parts
    parts = parts if parts[0] == "zeromesh" else ("zeromesh", *parts)
    text = path.read_text(encoding="utf-8")
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Source(path=relative.as_posix(), module=module, lines=text.count("\n"), tree=ast.parse(text))


def imported(source: Source, modules: Mapping[str, Source]) -> set[str]:
    """Paths of the project's files that a file imports anywhere, type-checking and lazy imports included."""
    names: list[str] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [
                f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in modules else node.module for alias in node.names
            ]
    return {modules[name].path for name in names if name in modules and modules[name] is not source}


def rooms(files: list[Source]) -> dict[str, dict[str, set[str]]]:
    """For each folder, its rooms and which other rooms of the folder each one imports; `.` are all of its own files.

    The files of a floor's root are no such room: some stand above all of its folders, and some below.
    """
    modules = {source.module: source for source in files}
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for source in files:
        if source.is_package or source.path in DOORS:
            continue
        for target in imported(source, modules):
            here, there = source.path.split("/"), target.removesuffix("/__init__.py").split("/")
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(here, there, strict=False)))
            if not 0 < common < min(len(here), len(there)):
                continue
            folder, room, other = "/".join(here[:common]), here[common], there[common]
            found[folder][room].add(other)
            if common > 1 and room.endswith(".py") != other.endswith(".py"):
                own = [name if not name.endswith(".py") else "." for name in (room, other)]
                found[folder][own[0]].add(own[1])
    return found


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of rooms that reach each other, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(room: str) -> None:
        index[room] = low[room] = len(index)
        stack.append(room)
        for other in sorted(graph.get(room, ())):
            if other not in index:
                visit(other)
                low[room] = min(low[room], low[other])
            elif other in stack:
                low[room] = min(low[room], index[other])
        if low[room] == index[room]:
            group = []
            while not group or group[-1] != room:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for room in sorted(graph):
        if room not in index:
            visit(room)
    return found


def folder_circles(files: list[Source]) -> list[str]:
    """Circles of rooms, each as `folder: room <-> room`."""
    return [f"{folder}: {' <-> '.join(group)}" for folder, graph in sorted(rooms(files).items()) for group in circles(graph)]


def crowded(files: list[Source], most: int = 12) -> dict[str, int]:
    """Folders that hold more than `most` modules, `__init__.py` and doors apart."""
    inner = [source.path for source in files if not source.is_package and source.path not in DOORS]
    counts = Counter(path.rpartition("/")[0] for path in inner)
    return {folder: count for folder, count in sorted(counts.items()) if count > most}


def long_functions(files: list[Source], most: int = 60) -> list[str]:
    """Functions of more than `most` lines, each as `path: name (lines)`."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [(source.path, node) for source in files for node in ast.walk(source.tree) if isinstance(node, kinds)]
    lengths = [(path, node.name, (node.end_lineno or 0) - node.lineno + 1) for path, node in found]
    return [f"{path}: {name} ({length})" for path, name, length in lengths if length > most]


def docstring_lines(source: Source) -> int:
    """Count the lines of the docstrings of a module, its classes and its functions; attributes have none for Python."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    described = [node for node in ast.walk(source.tree) if isinstance(node, kinds) and ast.get_docstring(node) is not None]
    return sum((node.body[0].end_lineno or 0) - node.body[0].lineno + 1 for node in described)


def duplicate_classes(files: list[Source]) -> dict[str, list[str]]:
    """Class names that several files define, private ones included."""
    found: dict[str, list[str]] = defaultdict(list)
    for source in files:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(source.path)
    return {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}


def single_importers(files: list[Source]) -> list[str]:
    """Modules that one other module alone imports."""
    modules = {source.module: source for source in files}
    counts = Counter(path for source in files for path in imported(source, modules))
    return sorted(path for path, count in counts.items() if count == 1 and not path.endswith("__init__.py"))


def short_modules(files: list[Source], least: int = 60) -> list[str]:
    """Modules of fewer than `least` lines that fewer than two others import."""
    alone = set(single_importers(files))
    return [source.path for source in files if source.lines < least and source.path in alone]


def figures(root: Path) -> dict[str, object]:
    """The table of one checkout."""
    files = sources(root)
    lengths = sorted(source.lines for source in files)
    per_folder = Counter(source.path.rpartition("/")[0] for source in files if not source.is_package and source.path not in DOORS)
    return {
        "files": len(files),
        "lines": sum(lengths),
        "longest file": lengths[-1],
        "folders": len(per_folder),
        "most files in a folder": max(per_folder.values()),
        "folders with more than 12 files": len(crowded(files)),
        "circles of folders": len(folder_circles(files)),
        "most files at the root of a floor": max(per_folder[floor] for floor in FLOORS),
        "lines of docstrings": sum(docstring_lines(source) for source in files),
        "functions": len(long_functions(files, most=0)),
        "functions above 60 lines": len(long_functions(files)),
        "modules with one importer": len(single_importers(files)),
        "of these, shorter than 60 lines": len(short_modules(files)),
        "duplicate class names": len(duplicate_classes(files)),
        "lines of tests": sum(
            path.read_text(encoding="utf-8").count("\n")
            for path in (root / "tests").rglob("*.py")
            if "__pycache__" not in path.parts
        ),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("roots", nargs="*", type=Path, default=[Path(__file__).resolve().parent.parent], metavar="ROOT")
    parser.add_argument("--trace", action="store_true", help="also count files and calls of a step, a save and a load")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--list", action="store_true", help="also list circles, crowded folders and duplicates")
    arguments = parser.parse_args()
    columns = [figures(root) | (_traced(root) if arguments.trace else {}) for root in arguments.roots]
    if arguments.json:
        print(json.dumps(columns, indent=2))
        return
    print("| | " + " | ".join(str(root) for root in arguments.roots) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(f"{column[name]:,}" for column in columns) + " |")
    if arguments.list:
        for root in arguments.roots:
            for line in _lists(sources(root)):
                print(line)


def _lists(files: list[Source]) -> Iterator[str]:
    yield from (f"circle in {circle}" for circle in folder_circles(files))
    yield from (f"{folder}/ has {count} files" for folder, count in crowded(files).items())
    yield from long_functions(files)
    yield from (f"class {name}: {', '.join(paths)}" for name, paths in duplicate_classes(files).items())
    yield from (f"{path} is short and has one importer" for path in short_modules(files))


def _traced(root: Path) -> dict[str, int]:
    """Counts of the checkout at `root`, from a process of its own that imports it."""
    command = [sys.executable, str(Path(__file__).resolve().parent / "trace_step.py")]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, check=True, timeout=300
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
