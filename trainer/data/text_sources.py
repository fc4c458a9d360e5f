"""The sources of text: Python's own standard library, text files, directories, JSON lines, Parquet, CSV and saved datasets.

A source is found first (`find_text`), in an order that depends on names alone, and read after, one document
(`TextSource.documents`) or row (`TextSource.rows`) at a time. Files may be compressed, and are in the encoding that their byte
order mark says, or else in `data.encoding`; bytes that are not in it are an error.
"""

import bz2
import codecs
import csv
import glob
import gzip
import json
import lzma
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from zeromesh.errors import DataError, counted, summary

STDLIB = "stdlib"
HUB = "hub:"
HUB_FORM = "hub:OWNER/NAME, hub:OWNER/NAME/CONFIG or either with :SPLIT (train), as the Hub has them"
_PROBE_BYTES = 8192

_STDLIB_SKIPPED = frozenset(
    {
        *("site-packages", "dist-packages", "__pycache__"),  # not the standard library
        *("test", "tests", "idle_test"),  # twice the rest, often repeated
        *("encodings", "pydoc_data"),  # generated tables, alike enough to tell held-out ones from the others
    }
)
Form = Literal["text", "json", "parquet", "csv", "tsv", "arrow"]
_ROW_FORMATS: dict[str, Form] = dict.fromkeys((".json", ".jsonl", ".ndjson"), "json")
_ROW_FORMATS |= {".parquet": "parquet", ".csv": "csv", ".tsv": "tsv", ".arrow": "arrow"}
_BOMS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # before that of UTF-16, with which it begins
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def _open_zstd(path: Path, _: str) -> Any:
    import pyarrow

    return pyarrow.input_stream(str(path), compression="zstd")


_UNPACKED: dict[str, Callable[[Path, Any], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".zst": _open_zstd}
_UNPACKED |= {".xz": lzma.open, ".lzma": lzma.open}
"""By a name's last suffix, what opens a compressed file, of which one file is made."""
_PIECE_BYTES = 1 << 20
_CURE = "set data.encoding to what it is in, such as cp1252, koi8-r or shift_jis, or save it as UTF-8"
_HALF_CHARACTER = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
_ROWS_AT_ONCE = 1000
_LONGEST_FIELD = (1 << 31) - 1
"""Characters of a field of CSV; the default of 131,072 is less than some documents have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text and a name for it that is the same on every machine, such as a relative path."""

    key: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Columns of a row. `key` is as that of a document, and `where` names the row in error messages."""

    key: str
    where: str
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file of one document (`form` is `text`) or of one per row."""

    path: Path
    key: str
    form: Form
    encoding: str = "utf-8"
    named: bool = False
    """True if its own path was given, and not that of a directory above it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """Files to read, in order. Those that were found in a directory may turn out not to be text, and are left out then."""

    name: str
    files: tuple[SourceFile, ...]
    text_field: str
    notes: tuple[str, ...] = ()
    """Lines that say how many files patterns have found."""

    def documents(self, skipped: list[str] | None = None) -> Iterator[Document]:
        """Yield every document, file by file; names of files that are not text are added to `skipped`.

        Raises `DataError` where a file cannot be read as what its name says, and where none is text.
        """
        read = 0
        for file in self.files:
            if file.form == "text" and not _is_text(file):
                if file.named:
                    raise DataError(
                        f"{str(file.path)!r} is not text (its start holds NUL bytes); UTF-16 without a byte order mark needs "
                        "data.encoding: utf-16-le"
                    )
                if skipped is not None:
                    skipped.append(file.key)
                continue
            read += 1
            if file.form == "text":
                yield Document(key=file.key, text=read_text(file.path, file.encoding))
                continue
            for row in _rows(file, [self.text_field], cure="set data.text_field"):
                text = row.values[self.text_field]
                if not isinstance(text, str):
                    raise DataError(
                        f"{row.where}: field {self.text_field!r} is {type(text).__name__}, not text; set data.text_field or "
                        "remove the row"
                    )
                yield Document(key=row.key, text=text)
        if not read:
            raise DataError(f"no text file in {self.name!r}")

    def rows(self, wanted: Sequence[str], optional: Sequence[str], skipped: list[str]) -> Iterator[Row]:
        """Yield every row, file by file, with the `wanted` columns and those of the `optional` ones that there are; names of files
        without rows are added to `skipped`.

        Raises `DataError` as `documents` does, and where a wanted column is missing.
        """
        skipped += [file.key for file in self.files if file.form == "text" and not file.named]
        files = [file for file in self.files if file.form != "text" or file.named]
        if not files:
            raise DataError(f"no file with rows in {self.name!r}; give {', '.join(_ROW_FORMATS)} files")
        for file in files:
            if file.form == "text":
                raise DataError(
                    f"{str(file.path)!r} has no rows; give {', '.join(_ROW_FORMATS)}, or set data.format: text"
                )
            yield from _rows(file, wanted, optional, cure="set data.columns")

    def description(self) -> list[Any]:
        """Return JSON values that differ between sources, and change when a file of this one does."""
        stats = [(file, file.path.stat()) for file in self.files]
        return [
            self.text_field,
            [[os.path.abspath(file.path), file.key, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for file, s in stats],
            [file.encoding for file in self.files],
        ]


def find_text(
    spec: str | Path | Sequence[str | Path], *, text_field: str, where: str, encoding: str = "utf-8"
) -> TextSource:
    """Find the source that a config key (`where`: `data.train`) names: `stdlib`, a path, a pattern, a dataset of the Hub, or a list
    of those, in an `encoding`.

    A directory is searched for all files that are text, hidden ones left out, and a pattern (`data/*.jsonl`) is the paths that fit
    it, sorted. A dataset that is not in the cache of datasets is downloaded. Raises `DataError` for a path that does not exist, a
    file that is not text, and a source without files.
    """
    paths = [spec] if isinstance(spec, str | Path) else list(spec)
    if paths == [STDLIB]:
        return stdlib_source()
    try:
        "".encode(encoding)
    except (LookupError, UnicodeError) as error:
        raise DataError(
            f"data.encoding: {error}; give one that Python knows, such as utf-8, cp1252 or koi8-r"
        ) from error
    if not paths:
        raise DataError(f"{where} is an empty list; give 'stdlib', a file, a directory or a list of those")
    files: list[SourceFile] = []
    expanded: list[tuple[Path, str]] = []
    notes = []
    for path in (Path(each).expanduser() for each in paths):
        if path.exists() or not glob.has_magic(str(path)):
            expanded.append((path, path.name))
            continue
        every = "**" in path.parts  # Else a folder would be found beside its own files.
        fitting = sorted(each for each in glob.glob(str(path), recursive=True) if not every or Path(each).is_file())
        expanded += [(Path(each), each) for each in fitting]
        notes.append(f"{where} {str(path)!r}: {counted(len(fitting), 'file', ',')}")
    for path, name in expanded:
        if str(path).startswith(HUB):
            files += _hub_files(str(path), where)
            continue
        saved = _saved_files(path, where)
        if saved:
            files += [SourceFile(path=path / key, key=key, form="arrow", named=True) for key in saved]
        elif path.is_dir():
            keys = files_below(path)
            files += [SourceFile(path=path / key, key=key, form=_form(key), encoding=encoding) for key in keys]
        elif path.is_file():
            files.append(SourceFile(path=path, key=name, form=_form(name), encoding=encoding, named=True))
        else:
            raise DataError(
                f"{where}: no file or directory {str(path)!r}; give 'stdlib', a path on this machine, or {HUB_FORM}"
            )
    name = ", ".join(str(path) for path in paths)
    if not files:
        raise DataError(f"{where}: no text file in {name!r}")
    return TextSource(name=name, files=tuple(files), text_field=text_field, notes=tuple(notes))


def picture_endings() -> tuple[str, ...]:
    """Return the ends of the names of files that datasets takes for pictures, such as `.png`, in lower case."""
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    return tuple(ImageFolder.EXTENSIONS)


def holds_pictures(folder: Path) -> bool:
    """Return True if one of the first files in sub-folders is named as a picture is."""
    names, endings = [each.name.lower() for each in islice(folder.glob("*/*"), 1000)], picture_endings()
    return any(name.endswith(endings) for name in names)


def format_of(columns: Collection[str]) -> str:
    """Return the `data.format` of rows by a column that they alone have; text where there is none."""
    by_column = {"messages": "chat", "conversations": "sharegpt", "instruction": "alpaca", "completion": "pairs"}
    return next((form for column, form in by_column.items() if column in columns), "text")


def first_columns(paths: Sequence[str]) -> frozenset[str]:
    """Return the names of the columns of the first row of some files; none of text, and none where there is no such row."""
    with suppress(DataError):
        files = (file for file in find_text(paths, text_field="", where="data.train").files if file.form != "text")
        return frozenset(next(chain.from_iterable(map(_batches, files)), {}))
    return frozenset()


def stdlib_source(root: Path | None = None) -> TextSource:
    """Find the Python source of the standard library: real text that every machine with Python has.

    Tests and generated tables are left out, and so are files that differ between machines of one Python version. Raises `DataError`
    where Python was installed without its source.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    keys = filter(_is_portable_source, files_below(root, _STDLIB_SKIPPED))
    files = tuple(SourceFile(path=root / key, key=key, form="text") for key in keys)
    if not files:
        raise DataError(f"data.train 'stdlib': no Python source in {str(root)!r}; give a text file instead")
    return TextSource(name=STDLIB, files=files, text_field="")


def read_text(path: Path, encoding: str = "utf-8", *, cure: str = _CURE) -> str:
    """Read the text of a file. Raises `DataError` where it cannot be read, or is in another encoding; `cure` is what to do then."""
    return "".join(_pieces(path, encoding, cure))


def _pieces(path: Path, encoding: str, cure: str = _CURE) -> Iterator[str]:
    """Yield the text of a file, unpacked, in the encoding that its byte order mark says, or else in `encoding`."""
    place = kept = 0
    with _opened(path) as file:
        piece = file.read(_PIECE_BYTES)
        encoding = _encoding_of(piece, encoding)
        decoder = codecs.getincrementaldecoder(encoding)()
        try:
            while piece:
                kept = len(decoder.getstate()[0])
                yield decoder.decode(piece)
                place, piece = place + len(piece), file.read(_PIECE_BYTES)
            kept = len(decoder.getstate()[0])
            yield decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            wrong = error.object[error.start : error.end][:4].hex(" ")
            raise DataError(
                f"{str(path)!r} is not {encoding}: byte {place - kept + error.start:,} of its text is {wrong} "
                f"({error.reason}); {cure}"
            ) from error


def _lines(file: SourceFile) -> Iterator[str]:
    rest: list[str] = []
    for piece in _pieces(file.path, file.encoding):
        *whole, last = piece.split("\n")
        if whole:
            yield "".join(rest) + whole[0] + "\n"
            yield from (f"{line}\n" for line in whole[1:])
            rest = []
        rest.append(last)
    yield "".join(rest)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file to read its bytes, or those that it unpacks to. Raises `DataError`."""
    try:
        with _UNPACKED.get(path.suffix.lower(), Path.open)(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or summary(error)
        raise DataError(f"{str(path)!r} cannot be read: {reason}") from error


def _encoding_of(head: bytes, encoding: str) -> str:
    return next((name for mark, name in _BOMS.items() if head.startswith(mark)), encoding)


def files_below(root: Path, skipped: frozenset[str] = frozenset()) -> list[str]:
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
    """Return True if a file is source, and the same wherever this version of Python is installed."""
    *folders, name = key.split("/")
    if any(folder.startswith("config-") for folder in folders):
        return False
    return name.endswith(".py") and not name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize"))


def _is_text(file: SourceFile) -> bool:
    """Return True if a file holds text: NUL characters at the start are what tells other files apart."""
    with _opened(file.path) as opened:
        head = opened.read(_PROBE_BYTES)
    return "\0" not in head.decode(_encoding_of(head, file.encoding), errors="ignore")


def _form(name: str) -> Form:
    inside = name[: -len(Path(name).suffix)] if Path(name).suffix.lower() in _UNPACKED else name
    return _ROW_FORMATS.get(Path(inside).suffix.lower(), "text")


def _hub_files(spec: str, where: str) -> list[SourceFile]:
    """The files that datasets has made of a dataset of the Hub, in its own cache. Raises `DataError`."""
    match = re.fullmatch(rf"{HUB}([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?::(\w[\w.-]*))?", spec)
    if match is None:
        raise DataError(f"{where}: {spec!r} is no dataset of the Hub; give {HUB_FORM}")
    import datasets

    name, config, split = match.groups()
    try:
        found = datasets.load_dataset(name, config, split=split or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{where}: {spec!r} cannot be had: {summary(error)}") from error
    paths = [Path(each["filename"]) for each in found.cache_files]
    return [SourceFile(path=path, key=f"{spec}/{path.name}", form="arrow", named=True) for path in paths]


def _saved_files(path: Path, where: str) -> list[str]:
    """The files of a directory that `save_to_disk` of datasets wrote; none of any other path. Raises `DataError` for splits."""
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(
            repr(str(path / name)) for name in json.loads(read_text(path / "dataset_dict.json"))["splits"]
        )
        raise DataError(f"{where}: {str(path)!r} holds several splits; give one of them: {splits}")
    if not ((path / "state.json").is_file() and (path / "dataset_info.json").is_file()):
        return []
    return [each["filename"] for each in json.loads(read_text(path / "state.json"))["_data_files"]]


def _rows(file: SourceFile, wanted: Sequence[str], optional: Sequence[str] = (), *, cure: str) -> Iterator[Row]:
    """Yield the rows of a file, streamed: no copy in a cache folder, and memory for a few rows."""
    number = 0
    for batch in _batches(file):
        if missing := [name for name in wanted if name not in batch]:
            only = ", ".join(map(repr, batch))
            where = f"{str(file.path)!r} row {number}"
            raise DataError(f"{where} has no field {missing[0]!r}, only {only}; {_cure(batch, cure)}")
        there = [*wanted, *(name for name in optional if name in batch)]
        for values in zip(*(batch[name] for name in there), strict=True):
            where = f"{str(file.path)!r} row {number}"
            yield Row(key=f"{file.key}:{number}", where=where, values=dict(zip(there, values, strict=True)))
            number += 1


def _batches(file: SourceFile) -> Iterator[dict[str, list[Any]]]:
    """Yield a few rows at a time as columns. Raises `DataError` where the file cannot be read as what its name says."""
    if file.path.stat().st_size == 0:  # the library gives up on a file without a first row
        return
    try:
        if file.form in ("arrow", "parquet"):
            import datasets

            # Not load_dataset: it reports each use of a format to a server, with no argument that stops it.
            if file.form == "arrow":
                found: Any = datasets.Dataset.from_file(str(file.path))
            else:  # The library reads it as a pattern. Its own size of a batch is that of the first group of rows, maybe 0.
                found = datasets.IterableDataset.from_parquet(glob.escape(str(file.path)), batch_size=_ROWS_AT_ONCE)
            yield from found.iter(_ROWS_AT_ONCE)
        else:
            yield from _json_rows(file) if file.form == "json" else _csv_rows(file)
    except DataError:
        raise
    except Exception as error:  # whatever libraries make of a damaged file
        raise DataError(f"{str(file.path)!r} cannot be read as {file.form}: {summary(error)}") from error


def _cure(columns: Collection[str], cure: str) -> str:
    """Return the advice about a missing column by the `columns` that are there; `cure` if they suggest nothing."""
    form = format_of(columns)
    return cure if form == "text" else f"set data.format: {form}"


def _csv_rows(file: SourceFile) -> Iterator[dict[str, list[Any]]]:
    """Yield each row of CSV by the names in the first one. Values stay text: no numbers, and nothing is missing for NA."""
    csv.field_size_limit(_LONGEST_FIELD)
    lines = _lines(file)
    names = next(lines)
    # Spreadsheets of many countries write semicolons.
    mark = "\t" if file.form == "tsv" else next((mark for mark in ",;\t|" if mark in names), ",")
    reader = csv.DictReader(chain([names], lines), delimiter=mark, strict=True)
    for row in reader:
        if None in row:
            where = f"{str(file.path)!r} line {reader.line_num}"
            raise DataError(f"{where} has more fields than the first one has names; quote a text that holds {mark!r}")
        yield {name: [value] for name, value in row.items()}


def _json_rows(file: SourceFile) -> Iterator[dict[str, list[Any]]]:
    """Yield each row of JSON lines, or of one list. Halves of characters, which have no bytes, become '?'."""
    lines = _lines(file)
    for number, line in enumerate(lines, 1):
        text = line + "".join(lines) if line.lstrip().startswith("[") else line
        if not text or text.isspace():
            continue
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{str(file.path)!r} cannot be read as json: line {number}: {error}") from error
        if _HALF_CHARACTER.search(text):
            found = json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
        for row in found if isinstance(found, list) else [found]:
            if not isinstance(row, dict):
                raise DataError(
                    f"{str(file.path)!r} line {number} is a {type(row).__name__}; rows are objects of columns"
                )
            yield {name: [value] for name, value in row.items()}
