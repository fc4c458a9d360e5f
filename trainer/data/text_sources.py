"""Sources of text: Python's standard library, text files, directories, JSON lines, Parquet, CSV and saved datasets. Files may be
compressed, and are in the encoding of their byte order mark, or else in `data.encoding`; other bytes are an error."""

import bz2
import codecs
import csv
import glob
import gzip
import io
import json
import lzma
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from zeromesh.errors import DataError, counted, errors_as, library_errors, summary
from zeromesh.trainer.config.sections.formats import format_of

STDLIB = "stdlib"
HUB = "hub:"
HUB_FORM = "hub:OWNER/NAME, hub:OWNER/NAME/CONFIG or either with :SPLIT (train), as the Hub has them"
_PROBE_BYTES = 8192
_STDLIB_SKIPPED = (
    *("site-packages", "dist-packages", "__pycache__"),  # not the standard library
    *("test", "tests", "idle_test"),  # twice the rest, often repeated
    *("encodings", "pydoc_data"),  # generated tables, alike enough to tell held-out ones from the others
)
_MACHINE_FILES = re.compile(r"(^|/)(config-[^/]*/|(_sysconfigdata|sitecustomize|usercustomize)[^/]*$)")
_BOMS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, whose mark is a prefix of it
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_DECOMPRESSORS: dict[str, Callable[[Path, Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".zst": lambda path, _: import_module("pyarrow").input_stream(str(path), compression="zstd"),
    **dict.fromkeys((".xz", ".lzma"), lzma.open),
}
_ENCODING_ADVICE = "set data.encoding to what it is in, such as cp1252, koi8-r or shift_jis, or save it as UTF-8"
_SURROGATE_ESCAPE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
_ROWS_AT_ONCE = 1000
_LONGEST_FIELD = (1 << 31) - 1  # characters of CSV; the default of 131,072 is too small for some documents


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The columns of a row, or a text file. `key`, such as a relative path, is the same on every machine; messages say `where`."""

    key: str
    where: str
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A text file, or a file of rows that the function of `form` in `_READERS` reads, which was `named` or found in a directory."""

    path: Path
    key: str
    encoding: str = "utf-8"
    named: bool = False

    @property
    def form(self) -> str:
        name = self.path.stem if self.path.suffix.lower() in _DECOMPRESSORS else self.path.name
        form = Path(name).suffix.lower().removeprefix(".")
        return form if form in _READERS else "text"

    def is_text(self) -> bool:
        with _text(self.path, self.encoding) as opened:
            return "\0" not in bytes(opened.buffer.read(_PROBE_BYTES)).decode(opened.encoding, "ignore")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """Files to read, in order. Files that were found in a directory and are no text are skipped."""

    name: str
    files: tuple[SourceFile, ...]
    notes: tuple[str, ...] = ()

    def rows(self, required: Sequence[str], optional: Sequence[str], skipped: list[str], *, whole: bool = False) -> Iterator[Row]:
        """Yield every row with the `required` columns and `optional` ones; files without rows are added to `skipped`. With `whole`,
        a text file is a row of the first column. Raises `DataError` for unreadable files and absent columns, and without rows."""
        read = found = False
        for file in self.files:
            if file.form == "text":
                if whole and file.is_text():
                    read, text = True, read_text(file.path, file.encoding)
                    yield Row(key=file.key, where=repr(str(file.path)), values={required[0]: text})
                elif file.named:
                    raise DataError(f"{str(file.path)!r} {_NO_TEXT if whole else _NO_ROWS}")
                else:
                    skipped.append(file.key)
                continue
            read = True
            for number, values in enumerate(_records(file)):
                where = f"{str(file.path)!r} row {number}"
                if missing := [name for name in required if name not in values]:
                    form, only = format_of(values), ", ".join(map(repr, values))
                    pairs = "data.format: pairs and data.columns: {prompt: NAME, completion: NAME}"
                    cure = f"set data.text_field, or {pairs}" if whole else "set data.columns"
                    if {"chosen", "rejected"} <= values.keys():
                        cure = "set train.method: dpo"
                    elif form != "text":
                        part = f"make files of several formats parts of data.mixture: {{train: FILE, format: {form}}}"
                        cure = part if found else f"set data.format: {form}"
                    raise DataError(f"{where} has no field {missing[0]!r}, only {only}; {cure}")
                found = True
                there = {name: values[name] for name in (*required, *optional) if name in values}
                yield Row(key=f"{file.key}:{number}", where=where, values=there)
        if not read:
            kind = "text file" if whole else "file with rows"
            raise DataError(f"no {kind} in {self.name!r}; give {ROW_FILES} files{' or text' if whole else ''}")

    def columns(self) -> frozenset[str]:
        """Return the column names of the first row; empty for text, and without a row that can be read."""
        with suppress(DataError):
            rows = chain.from_iterable(_records(file) for file in self.files if file.form != "text")
            return frozenset(next(rows, {}))
        return frozenset()

    def description(self) -> list[Any]:
        """Return JSON values that identify this source and change when one of its files does."""
        described = []
        for file in self.files:
            stat, path = file.path.stat(), os.path.abspath(file.path)
            described.append([path, file.key, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, file.encoding])
        return described


def find_text(spec: str | Path | Sequence[str | Path], *, where: str, encoding: str = "utf-8") -> TextSource:
    """Find the source that a config key (`where`: `data.train`) names: `stdlib`, a path, a pattern, a dataset of the Hub, or a list
    of those. A directory is searched for all files, hidden ones left out, and a pattern (`data/*.jsonl`) is the paths that fit it,
    sorted. Raises `DataError` for a path that does not exist, and a source without files."""
    paths = [spec] if isinstance(spec, str | Path) else list(spec)
    if paths == [STDLIB]:
        return stdlib_source()
    cure = "; give one of Python's, such as utf-8, cp1252 or koi8-r"
    with errors_as(DataError, "data.encoding: ", LookupError, UnicodeError, after=cure):
        "".encode(encoding)
    if not paths:
        raise DataError(f"{where} is an empty list; give 'stdlib', a file, a directory or a list of those")
    files: list[SourceFile] = []
    notes = []
    for given in (Path(each).expanduser() for each in paths):
        found = [(given, given.name)]
        if not given.exists() and glob.has_magic(str(given)):
            every = "**" in given.parts  # `**` matches folders as well as their files.
            fitting = sorted(glob.glob(str(given), recursive=True))
            found = [(Path(each), each) for each in fitting if not every or Path(each).is_file()]
            notes.append(f"{where} {str(given)!r}: {counted(len(found), 'file', ',')}")
        for path, name in found:
            if str(path).startswith(HUB):
                files += _hub_files(str(path), where)
            elif (path / "dataset_dict.json").is_file():
                names = json.loads(read_text(path / "dataset_dict.json"))["splits"]
                splits = ", ".join(repr(str(path / name)) for name in names)
                raise DataError(f"{where}: {str(path)!r} holds several splits; give one of them: {splits}")
            elif (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
                saved = [each["filename"] for each in json.loads(read_text(path / "state.json"))["_data_files"]]
                files += [SourceFile(path=path / key, key=key, named=True) for key in saved]
            elif path.is_dir():
                files += [SourceFile(path=path / key, key=key, encoding=encoding) for key in files_below(path)]
            elif path.is_file():
                files.append(SourceFile(path=path, key=name, encoding=encoding, named=True))
            else:
                raise DataError(f"{where}: no file or directory {str(path)!r}; give 'stdlib', a local path, or {HUB_FORM}")
    name = ", ".join(map(str, paths))
    if not files:
        raise DataError(f"{where}: no text file in {name!r}")
    return TextSource(name=name, files=tuple(files), notes=tuple(notes))


def picture_suffixes() -> tuple[str, ...]:
    """Return the suffixes of files that datasets takes for pictures, such as `.png`, in lower case."""
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    return tuple(ImageFolder.EXTENSIONS)


def stdlib_source(root: Path | None = None) -> TextSource:
    """Find the standard library's source, without tests, tables and what machines have of their own. Raises `DataError`."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    keys = (key for key in files_below(root, _STDLIB_SKIPPED) if key.endswith(".py") and not _MACHINE_FILES.search(key))
    if not (files := tuple(SourceFile(path=root / key, key=key) for key in keys)):
        raise DataError(f"data.train 'stdlib': no Python source in {str(root)!r}; give a text file instead")
    return TextSource(name=STDLIB, files=files)


def read_text(path: Path, encoding: str = "utf-8", *, cure: str = _ENCODING_ADVICE) -> str:
    """Read the text of a file. Raises `DataError` with the advice `cure` if the file cannot be read or decoded."""
    with _text(path, encoding, cure) as text:
        return text.read()


@contextmanager
def _text(path: Path, encoding: str, cure: str = _ENCODING_ADVICE) -> Iterator[io.TextIOWrapper]:
    try:
        with _CountingReader(_DECOMPRESSORS.get(path.suffix.lower(), Path.open)(path, "rb")) as file:
            head = file.peek(_PROBE_BYTES)
            encoding = next((name for mark, name in _BOMS.items() if head.startswith(mark)), encoding)
            yield io.TextIOWrapper(file, encoding, newline="\n")
    except UnicodeError as error:
        what = str(error)  # For example, UTF-16 without a byte order mark.
        if isinstance(error, UnicodeDecodeError):
            # The undecodable object ends at the current read position.
            place = file.position - len(error.object) + error.start
            wrong = error.object[error.start : error.end][:4].hex(" ")
            what = f"byte {place:,} of its text is {wrong} ({error.reason})"
        raise DataError(f"{str(path)!r} is not {encoding}: {what}; {cure}") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or summary(error)
        raise DataError(f"{str(path)!r} cannot be read: {reason}") from error


class _CountingReader(io.BufferedReader):
    """A reader that counts the bytes read in `position`, since not all decompressors have a `tell`."""

    position = 0

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        self.position += len(found)
        return found

    def read1(self, size: int = -1, /) -> bytes:
        found = super().read1(size)
        self.position += len(found)
        return found


def files_below(root: Path, skipped: Sequence[str] = ()) -> list[str]:
    """Return the sorted relative POSIX paths of all files below `root`, except hidden and `skipped` folders."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skipped]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(path.relative_to(root).as_posix() for path in found if path.is_file())


def _hub_files(spec: str, where: str) -> list[SourceFile]:
    """Return the Arrow files of a Hub dataset in the cache of datasets, downloading it if needed."""
    if (match := re.fullmatch(rf"{HUB}([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?::(\w[\w.-]*))?", spec)) is None:
        raise DataError(f"{where}: {spec!r} is no dataset of the Hub; give {HUB_FORM}")
    import datasets

    name, config, split = match.groups()
    with library_errors(before=f"{where}: {spec!r} cannot be had: ", kind=DataError):
        found = datasets.load_dataset(name, config, split=split or "train")
    paths = [Path(each["filename"]) for each in found.cache_files]
    return [SourceFile(path=path, key=f"{spec}/{path.name}", named=True) for path in paths]


def _records(file: SourceFile) -> Iterator[dict[str, Any]]:
    if file.path.stat().st_size == 0:  # datasets raises for a file without a first row
        return
    with library_errors(before=f"{str(file.path)!r} cannot be read as {file.form}: ", kind=DataError):
        yield from _READERS[file.form](file)


def _arrow_rows(file: SourceFile) -> Iterator[dict[str, Any]]:
    """Yield each row of an Arrow or Parquet file without `load_dataset`, whose telemetry no argument stops."""
    import datasets

    if file.form == "arrow":
        found: Any = datasets.Dataset.from_file(str(file.path))
    else:  # The library takes patterns; its default batch size is that of the first row group, maybe 0.
        found = datasets.IterableDataset.from_parquet(glob.escape(str(file.path)), batch_size=_ROWS_AT_ONCE)
    for columns in found.iter(_ROWS_AT_ONCE):  # reading single rows is thirty times slower
        yield from (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def _csv_rows(file: SourceFile) -> Iterator[dict[str, Any]]:
    """Yield each row by the header's names. Values stay text, and the text NA is no missing value."""
    csv.field_size_limit(_LONGEST_FIELD)
    with _text(file.path, file.encoding) as lines:
        names = next(lines)
        # Spreadsheets write semicolons in many locales.
        mark = "\t" if file.form == "tsv" else next((mark for mark in ",;\t|" if mark in names), ",")
        reader = csv.DictReader(chain([names], lines), delimiter=mark, strict=True)
        for row in reader:
            if None in row:
                why = f"{str(file.path)!r} line {reader.line_num} has more fields than the first one has names"
                raise DataError(f"{why}; quote a text that holds {mark!r}")
            yield row


def _json_rows(file: SourceFile) -> Iterator[dict[str, Any]]:
    """Yield each row of JSON lines, or of one list. Lone surrogates become '?'."""
    with _text(file.path, file.encoding) as lines:
        for number, line in enumerate(lines, 1):
            text = line + lines.read() if line.lstrip().startswith("[") else line
            if not text or text.isspace():
                continue
            with errors_as(DataError, f"{str(file.path)!r} is not valid json: line {number}: ", json.JSONDecodeError):
                found = json.loads(text)
            if _SURROGATE_ESCAPE.search(text):
                found = json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
            for row in found if isinstance(found, list) else [found]:
                if not isinstance(row, dict):
                    raise DataError(f"{str(file.path)!r} line {number} is a {type(row).__name__}; a row is an object")
                yield row


_READERS: dict[str, Callable[[SourceFile], Iterator[dict[str, Any]]]] = {
    **dict.fromkeys(("json", "jsonl", "ndjson"), _json_rows),
    **dict.fromkeys(("csv", "tsv"), _csv_rows),
    **dict.fromkeys(("parquet", "arrow"), _arrow_rows),
}
ROW_FILES = ", ".join(f".{form}" for form in _READERS)
_NO_TEXT = "is not text (its start holds NUL bytes); UTF-16 without a byte order mark needs data.encoding: utf-16-le"
_NO_ROWS = f"has no rows; give {ROW_FILES}, or set data.format: text"
