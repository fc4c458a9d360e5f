"""Tiers of small files, moves that wait at a gate, and a bound on what may hang."""

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from zeromesh.errors import StorageError
from zeromesh.offload import FileSettings, FileTier, Ledger, Tiers
from zeromesh.offload import tiers as tiers_module
from zeromesh.offload.io import file_tier
from zeromesh.offload.io.direct_io import BLOCK

CPU = torch.device("cpu")
SECONDS = 30.0
"""After which something hangs."""


def in_time(call: Callable[[], object]) -> None:
    """Do what may hang: raises what `call` raises, or `TimeoutError`."""
    found: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - it is the test's
            found.set_exception(error)
        else:
            found.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    found.result(SECONDS)


def check_refused(said: str, *calls: Callable[[], object], error: type[Exception] = StorageError) -> None:
    """Each of the calls, which may hang, raises an error that says so."""
    for call in calls:
        with pytest.raises(error, match=said):
            in_time(call)


def values(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """`[count]`, more digits than any narrower dtype has."""
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made_tiers(folder: Path, *, stripes: int = 1, **settings: bool | str) -> Tiers:
    directories = tuple(folder / str(number) for number in range(stripes))
    return Tiers(device=CPU, ledger=Ledger(), files=FileSettings(directories=directories, **settings))  # type: ignore[arg-type]


@contextmanager
def small_tiers(stripes: int, *, checksums: bool, piece: int = 2 * BLOCK) -> Iterator[Tiers]:
    """Tiers whose pieces, stripes and conversions are small, so that there are many of each, in files that are gone afterwards."""
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_tier, "PIECE", piece)
        patch.setattr(file_tier, "_LARGE_PIECE", 2 * piece)
        patch.setattr(file_tier, "STRIPE", 3 * BLOCK)
        patch.setattr(tiers_module, "_CONVERTED", 1000)
        with closing(made_tiers(Path(root), stripes=stripes, checksums=checksums)) as tiers:
            yield tiers


def refusing(number: int) -> Callable[..., int]:
    def refused(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return refused


class Gate:
    """Holds reads or writes of a file tier back until it is opened, and notes where they begin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self._open = threading.Event()
        self.began: list[int] = []
        move = getattr(FileTier, name)

        def held(tier: FileTier, data: torch.Tensor, offset: int) -> None:
            self.began.append(offset)
            assert self._open.wait(SECONDS)
            move(tier, data, offset)

        monkeypatch.setattr(FileTier, name, held)

    def open(self) -> None:
        self._open.set()
