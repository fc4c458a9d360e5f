"""Parts of tensors, addresses, and the way of every dtype to a receiver in this process."""

import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeromesh import receive_weights
from zeromesh.errors import ConfigError, TransferError, ZeromeshError
from zeromesh.trainer.weights import handoff
from zeromesh.trainer.weights.handoff import _host_of, cut_part, send_weights

WHOLE = torch.arange(15).reshape(5, 3)


@pytest.mark.parametrize(
    ("part", "found"),
    [
        (None, WHOLE),
        ((0, 0, 2), WHOLE[:3]),
        ((0, 1, 2), WHOLE[3:]),
        ((1, 2, 3), WHOLE[:, 2:]),
        ((0, 4, 5), WHOLE[4:]),
        ((0, 0, 1), WHOLE),
    ],
)
def test_a_part_is_that_of_a_tensor_that_is_split(part: Any, found: torch.Tensor) -> None:
    assert torch.equal(cut_part("w", WHOLE, part), found)
    assert cut_part("w", torch.empty(0, 2), (0, 0, 1)).shape == (0, 2)


@pytest.mark.parametrize("part", [(2, 0, 1), (-1, 0, 1), (0, 2, 2), (0, -1, 2), (0, 0, 6), (0, 0, 0)])
def test_parts_that_a_tensor_does_not_have(part: Any) -> None:
    dim, index, parts = part
    said = rf"^w of shape \[5, 3\] has no part {index} of {parts} along dim {dim}; parts are counted from 0"
    with pytest.raises(ConfigError, match=said):
        cut_part("w", WHOLE, part)


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("/tmp/a.sock", ("/tmp/a.sock", None)),
        ("a.sock", ("a.sock", None)),
        ("/tmp/a:1", ("/tmp/a:1", None)),
        ("host:65535", ("host", 65535)),
        ("[::1]:80", ("::1", 80)),
        ("host:0", ("host", 0)),
        *((wrong, None) for wrong in ("host:65536", ":80", "host:", "host:-1", "", "a\0b", "host:8\0")),
    ],
)
def test_an_address_is_a_path_or_a_host_with_a_port(address: str, found: Any) -> None:
    if found is not None:
        assert _host_of(address) == found
        return
    with pytest.raises(ConfigError, match=r"is no address: give a socket's path"):
        _host_of(address)


class Mesh:
    """Rank 0 of one rank; notes its patience, and the pieces that went out."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.beats = 0
        self.world = SimpleNamespace(all_or_raise=self._all_or_raise)
        self.watch = SimpleNamespace(board=SimpleNamespace(beat=self._beat), patience=self._patience)

    def _beat(self) -> None:
        self.beats += 1

    def _all_or_raise(self, what: str, work: Any, error: Any, *, first: bool) -> None:
        assert first
        work()

    @contextmanager
    def _patience(self, seconds: float) -> Iterator[None]:
        self.waits.append(seconds)
        yield


TENSORS = {
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "none": torch.empty(0, 4),
    "half": torch.randn(3, 5).bfloat16(),
    "flags": torch.tensor([True, False]),
    "eighth": torch.randn(4).to(torch.float8_e4m3fn),
    "a.weight": torch.randn(6, 4).t(),
    "long": torch.zeros(300_000),
}


def listening(address: Path, **options: Any) -> tuple[threading.Thread, dict[str, Any]]:
    """A thread that receives, once it listens, and what it has received."""
    found: dict[str, Any] = {}

    def receive() -> None:
        try:
            found.update(receive_weights(str(address), timeout_seconds=5, **options))
        except ZeromeshError as error:
            found["error"] = str(error)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    while thread.is_alive() and not address.exists():
        threading.Event().wait(0.002)
    return thread, found


def test_each_receiver_gets_the_parts_that_it_asks_for(tmp_path: Path) -> None:
    mesh: Any = Mesh()
    parts = {"*.weight": (1, 1, 2), "a*": (0, 0, 2), "half": (0, 0, 3)}
    (tmp_path / "whole~").write_text("left by one that was killed")
    ends = [listening(tmp_path / "whole"), listening(tmp_path / "parts", parts=parts)]
    for name in ("whole", "parts"):
        mode = (tmp_path / name).stat().st_mode
        assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)
    addresses = [str(tmp_path / name) for name in ("whole", "parts")]
    assert send_weights(iter(TENSORS.items()), mesh, addresses, timeout_seconds=4) == len(TENSORS)
    for thread, _ in ends:
        thread.join(5)
    cut = {"a.weight": TENSORS["a.weight"][:, 3:], "half": TENSORS["half"][:1]}
    for (_, found), wanted in zip(ends, (TENSORS, {**TENSORS, **cut}), strict=True):
        assert list(found) == list(wanted)
        for name, tensor in wanted.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found[name].double(), tensor.double())
    assert mesh.waits == [8]
    assert mesh.beats == 2 * (len(TENSORS) + 1 - 1)  # A piece each, none of an empty tensor, and two of 1.2 MB.
    assert list(tmp_path.iterdir()) == []


def test_a_token_is_that_of_both_ends(tmp_path: Path) -> None:
    for token, said in (("a", ""), (None, "another token"), ("b", "another token")):
        thread, found = listening(tmp_path / "s.sock", token="a")
        if said:
            with pytest.raises(TransferError, match=r"weights were not handed over: the receiver at .* has another token"):
                send_weights(iter(TENSORS.items()), Mesh(), [str(tmp_path / "s.sock")], token=token)  # type: ignore[arg-type]
        else:
            send_weights(iter(TENSORS.items()), Mesh(), [str(tmp_path / "s.sock")], token=token)  # type: ignore[arg-type]
        thread.join(5)
        assert said in found.get("error", "")
    with pytest.raises(TransferError, match=r"nobody sent weights to 0\.0\.0\.0:0 within 0\.01 seconds"):
        next(receive_weights("0.0.0.0:0", token="a", timeout_seconds=0.01))
    with pytest.raises(TransferError, match="nobody sent weights"):
        next(receive_weights("127.0.0.1:0", timeout_seconds=0.01))
    with pytest.raises(TransferError, match=r"nobody receives weights at .*none: No such file"):
        send_weights(iter(()), Mesh(), [str(tmp_path / "none")])  # type: ignore[arg-type]


def test_a_receiver_that_has_not_got_all_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    class Receiver:
        peer = "the receiver"

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def send(self, header: Any, content: Any = b"") -> None:
            sent.append(header)

        def header(self) -> Any:
            return {"received": 1}

    monkeypatch.setattr(handoff, "_connect", lambda *_: Receiver())
    monkeypatch.setattr(handoff, "_handshake", lambda receiver, token: {})
    with pytest.raises(TransferError, match="the receiver has not received all of 2 tensors"):
        send_weights(iter({"a": torch.ones(1), "b": torch.ones(1)}.items()), Mesh(), ["x"])  # type: ignore[arg-type]
    assert [header.get("name", header.get("count")) for header in sent] == ["a", "b", 2]
