"""`ResultJournal`: generated results on disk as they come, so that a killed generation continues with the missing ones.

`results.jsonl.part`, beside the file of results, has a head line that identifies the generation, and one line for each result in
the order of completion. Every line begins with a digest of its rest. After the last result `.results.jsonl.done` identifies the
generation, so that the same command does nothing a second time."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from zeromesh.errors import ConfigError
from zeromesh.files import open_regular, read_whole, refusals, try_lock, write_whole

SUFFIX = ".part"


class ResultJournal:
    """The results so far of one generation, which `content` identifies, of `count` prompts; `out` is the file of all results.
    Raises `ConfigError` for an impossible path, another generation's results or another writer, `StorageError` for bad files."""

    def __init__(self, out: Path, content: str, count: int) -> None:
        # The final rename would replace anything at this path, even a device.
        if out.exists() and not out.is_file():
            raise ConfigError(f"--out {str(out)!r} is no regular file; name one, or leave it out for standard output")
        self.out, self.count = out, count
        self.path, self._done = out.with_name(out.name + SUFFIX), out.with_name(f".{out.name}.done")
        self.rows: dict[int, dict[str, Any]] = {}  # The results so far, by the index of the prompt.
        self._head = {"generates": content, "prompts": count}
        self.finished = out.exists() and bool(out.stat().st_size) and not self.path.exists()  # All results were there.
        if self.finished:
            with refusals(out, "read"):
                content_there, done = read_whole(out), read_whole(self._done) if self._done.is_file() else b""
            if done != self._line({**self._head, "results": xxhash.xxh3_64_hexdigest(content_there)}):
                raise ConfigError(f"--out {str(out)!r} has content; name another file, or delete that one")
            self.rows = dict(enumerate(map(json.loads, content_there.splitlines())))
            return
        with refusals(self.path, "written"):
            self._file = os.fdopen(open_regular(self.path, os.O_RDWR | os.O_CREAT), "r+b")
            try:
                # A locked file without a link belonged to a command that has just ended.
                if not try_lock(self._file.fileno()) or not os.fstat(self._file.fileno()).st_nlink:
                    raise ConfigError(f"another command is writing {self.path}; wait for it, or give another --out")
                self._resume()
            except BaseException:
                self.close()
                raise

    def _resume(self) -> None:
        """Read the results of the lines that are whole, and go on after them: a torn last line is overwritten."""
        kept = 0
        for line in self._file:
            digest, _, body = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or digest.decode(errors="replace") != xxhash.xxh3_64_hexdigest(body):
                break
            row = json.loads(body)
            if kept:
                self.rows[row["number"]] = row
            elif row != self._head:
                raise ConfigError(f"{self.path} has results of other prompts or settings; give another --out, or delete it")
            kept += len(line)
        self._file.truncate(kept)
        self._file.seek(kept)
        if not kept:
            self._write(self._head)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a result, which has the `number` of its prompt. Raises `StorageError`."""
        if row["number"] not in self.rows:
            self.rows[row["number"]] = dict(row)
            with refusals(self.path, "written"):
                self._write(row)

    @staticmethod
    def _line(row: Mapping[str, Any]) -> bytes:
        body = json.dumps(row, ensure_ascii=False).encode("utf-8", errors="surrogatepass")
        return xxhash.xxh3_64_hexdigest(body).encode() + b" " + body + b"\n"

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(self._line(row))
        self._file.flush()

    def missing(self) -> list[int]:
        return [number for number in range(self.count) if number not in self.rows]

    def finish(self) -> None:
        """Write all results atomically in the order of their prompts, and remove the journal. Raises `StorageError`."""
        if self.finished:
            return
        lines = [json.dumps(self.rows[number], ensure_ascii=False) + "\n" for number in range(self.count)]
        content = "".join(lines).encode("utf-8", errors="surrogatepass")
        with refusals(self.out, "written"):
            write_whole(self.out, content)
            write_whole(self._done, self._line({**self._head, "results": xxhash.xxh3_64_hexdigest(content)}))
            self._file.close()
            self.path.unlink()

    def close(self) -> None:
        """Close the journal and keep its contents for the next start."""
        # Data that a full disk refuses twice is missing, and the next start generates it again.
        with suppress(OSError):
            if not self.finished:
                self._file.close()
