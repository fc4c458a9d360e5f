"""Where text comes from: Python's own standard library, text files, directories, JSON lines, Parquet and CSV.

A source is found first (`find_text`), in an order that depends on names alone, and read after
(`TextSource.documents`), one document at a time.
"""

from __future__ import annotations

import csv
import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zeromesh.errors import DataError

STDLIB = "stdlib"
STDLIB_BYTES = 16 << 20  # more than every CPython so far; a bound, should one grow
_PROBE_BYTES = 8192

_STDLIB_SKIPPED = frozenset(
    {
        *("site-packages", "dist-packages", "__pycache__"),  # not the standard library
        *("test", "tests", "idle_test"),  # twice the rest, often repeated
        *("encodings", "pydoc_data"),  # generated tables, alike enough to tell held-out ones from the others
    }
)
Form = Literal["text", "json", "parquet", "csv", "tsv"]
_ROW_FORMATS: dict[str, Form] = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
}
_ROWS_AT_ONCE = 1000
_LONGEST_FIELD = (1 << 31) - 1
"""Characters of a field of CSV; the default of 131,072 is less than some documents have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text and a name for it that is the same on every machine, such as a relative path."""

    key: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file of one document (`text`) or of one per row. `named`: its own path was given; `portable`: it is known to be text."""

    path: Path
    key: str
    form: Form
    named: bool = False
    portable: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """Files to read, in order. Those that were found in a directory may turn out not to be text, and are left out then."""

    name: str
    files: tuple[SourceFile, ...]
    text_field: str

    def documents(self, skipped: list[str] | None = None) -> Iterator[Document]:
        """Every document, file by file; names of files that are not text are added to `skipped`.

        Raises `DataError` where a file cannot be read as what its name says, and where none is text.
        """
        read = 0
        for file in self.files:
            if file.form == "text" and not file.portable and not _is_text(file.path):
                if file.named:
                    raise DataError(f"{str(file.path)!r} is not text (its start holds NUL bytes)")
                if skipped is not None:
                    skipped.append(file.key)
                continue
            read += 1
            if file.form == "text":
                yield Document(key=file.key, text=read_text(file.path))
            else:
                yield from _rows(file, self.text_field)
        if not read:
            raise DataError(f"no text file in {self.name!r}")

    def description(self) -> list[Any]:
        """What tells this source from others, and from itself before a file was changed, as JSON values."""
        files = []
        for file in self.files:
            stat = file.path.stat()
            files.append([os.path.abspath(file.path), file.key, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
        return [self.text_field, files]


def find_text(spec: str | Path | Sequence[str | Path], *, text_field: str, where: str) -> TextSource:
    """The source that a config key (`where`: `data.train`) names: `stdlib`, a path, or a list of paths.

    A directory is searched for all files that are text, hidden ones left out. Raises `DataError` for a path
    that does not exist, a file that is not text, and a source without files.
    """
    if spec == STDLIB:
        return stdlib_source()
    paths = [spec] if isinstance(spec, str | Path) else list(spec)
    if not paths:
        raise DataError(f"{where} is an empty list; give 'stdlib', a file, a directory or a list of those")
    files: list[SourceFile] = []
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            files += [_source_file(path / key, key) for key in _files_below(path)]
        elif path.is_file():
            files.append(_source_file(path, path.name, named=True))
        else:
            raise DataError(
                f"{where}: no file or directory {str(given)!r}; give 'stdlib' or a path on this machine "
                "(dataset names of a hub are not looked up)"
            )
    name = ", ".join(str(path) for path in paths)
    if not files:
        raise DataError(f"{where}: no text file in {name!r}")
    return TextSource(name=name, files=tuple(files), text_field=text_field)


def stdlib_source(root: Path | None = None) -> TextSource:
    """The Python source of the standard library: real text that every machine with Python has.

    Tests and generated tables are left out, and so are files that differ between machines of one Python
    version. Files are taken in order of their names up to `STDLIB_BYTES`. Raises `DataError` where Python was
    installed without its source.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files = []
    size = 0
    for key in _files_below(root, _STDLIB_SKIPPED):
        if _is_portable_source(key):
            size += (root / key).stat().st_size
            if size > STDLIB_BYTES:
                break
            files.append(SourceFile(path=root / key, key=key, form="text", portable=True))
    if not files:
        raise DataError(f"data.train 'stdlib': no Python source in {str(root)!r}; give a text file instead")
    return TextSource(name=STDLIB, files=tuple(files), text_field="")


def read_text(path: Path) -> str:
    """The text of a file: UTF-8, or Latin-1, which any bytes are, where it is not. Raises `DataError`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def _files_below(root: Path, skipped: frozenset[str] = frozenset()) -> list[str]:
    """Relative POSIX paths of all files below `root`, sorted, but for hidden and `skipped` folders."""
    keys: list[str] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skipped]
        inside = Path(folder).relative_to(root).as_posix()
        prefix = "" if inside == "." else f"{inside}/"
        keys += [
            prefix + name for name in names if not name.startswith(".") and os.path.isfile(os.path.join(folder, name))
        ]
    return sorted(keys)


def _is_portable_source(key: str) -> bool:
    """Whether a file is source, and the same wherever this version of Python is installed."""
    *folders, name = key.split("/")
    if any(folder.startswith("config-") for folder in folders):
        return False
    return name.endswith(".py") and not name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize"))


def _is_text(path: Path) -> bool:
    """Whether a file holds text: NUL bytes at the start are what tells other files apart."""
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(_PROBE_BYTES)
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error


def _source_file(path: Path, key: str, *, named: bool = False) -> SourceFile:
    return SourceFile(path=path, key=key, form=_ROW_FORMATS.get(path.suffix.lower(), "text"), named=named)


def _rows(file: SourceFile, text_field: str) -> Iterator[Document]:
    """The rows of a JSON, Parquet or CSV file.

    They are streamed: no copy in a cache folder, and memory for a few rows.
    """
    if file.path.stat().st_size == 0:  # the library gives up on a file without a first row
        return
    import datasets

    number = 0
    try:
        for batch in _csv_rows(file) if file.form in ("csv", "tsv") else _library_rows(file):
            for text in _column(batch, number, file, text_field):
                yield Document(key=f"{file.key}:{number}", text=text)
                number += 1
    except DataError:
        raise
    except (ValueError, TypeError, KeyError, OSError, csv.Error, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"{str(file.path)!r} cannot be read as {file.form}: {reason[0]}") from error


def _library_rows(file: SourceFile) -> Iterator[dict[str, list[Any]]]:
    """Columns of some rows after the other."""
    import datasets

    path = glob.escape(str(file.path))  # which the library takes for a pattern
    # Not load_dataset: it reports each use of a format to a server, with no argument that stops it.
    read = datasets.IterableDataset
    rows = read.from_json(path) if file.form == "json" else read.from_parquet(path)
    yield from rows.iter(_ROWS_AT_ONCE)


def _csv_rows(file: SourceFile) -> Iterator[dict[str, list[Any]]]:
    """The same of CSV, by the names in its first row. Values are text as they stand: no numbers, and nothing missing for NA."""
    csv.field_size_limit(_LONGEST_FIELD)
    with file.path.open(encoding="utf-8-sig", newline="") as lines:
        for row in csv.DictReader(lines, delimiter="," if file.form == "csv" else "\t", strict=True):
            yield {str(name): [value] for name, value in row.items()}


def _column(batch: dict[str, list[Any]], first: int, file: SourceFile, text_field: str) -> list[str]:
    """The texts of rows that begin with number `first`. Raises `DataError` where the field is missing or is not text."""
    if text_field not in batch:
        raise DataError(
            f"{str(file.path)!r} row {first} has no field {text_field!r}, only {', '.join(map(repr, batch))}; "
            "set data.text_field"
        )
    for number, text in enumerate(batch[text_field], start=first):
        if not isinstance(text, str):
            raise DataError(
                f"{str(file.path)!r} row {number}: field {text_field!r} is {type(text).__name__}, not text; set "
                "data.text_field or remove the row"
            )
    return batch[text_field]
