"""Weights in other processes are those of the trainer, bit for bit, and nothing waits for ever for a process that is gone."""

import json
import os
import socket
import threading
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.inference.handoff_cases import DIRECTORIES
from tests.support.tables import row, tried
from zeromesh import receive_weights
from zeromesh.errors import ConfigError, TransferError
from zeromesh.trainer.weights.handoff import _handshake, _WeightConnection

FULL, FORM = pytest.mark.full, "has_the_form_of_files"
STAGE_1, STAGE_3 = ({"zero": {"stage": stage}} for stage in (1, 3))
TENSOR, PIPELINE = ({"parallel": {axis: 2}} for axis in ("tensor", "pipeline"))


test_weights_are_those_of_the_trainer = tried(
    "handoff_cases",
    [
        row(2, "arrive", model="gpt2", sections=STAGE_3),
        row(2, "arrive", FULL, model="llama", sections=TENSOR),
        row(2, "arrive", FULL, model="gpt2", sections=PIPELINE),
        row(4, "arrive", FULL, model="llama", sections={**TENSOR, **STAGE_3}),
        *(row(2, FORM, model=model, sections=STAGE_3) for model in ("mixtral", "lora", "embedding", "tokens")),
        *(row(2, FORM, FULL, model=model, sections=STAGE_3) for model in ("dora", "head")),
        *(row(2, FORM, FULL, model=model, sections=TENSOR) for model in ("mixtral", "neox")),
        row(2, FORM, FULL, model="mixtral", sections=PIPELINE),
        row(2, FORM, FULL, model="moe-lora", sections=STAGE_1),
        (2, "fails", {}),
        # Other ranks wait while a receiver rests.
        row(2, "is_slow", FULL),
        *((2, "from_generator", {"model": model}) for model in DIRECTORIES),
    ],
)


def _sent(address: Path, *frames: bytes) -> TransferError:
    """What a receiver says to a sender of these frames."""
    caught: list[TransferError] = []

    def receive() -> None:
        with pytest.raises(TransferError) as error:
            list(receive_weights(str(address), timeout_seconds=2))
        caught.append(error.value)

    thread = threading.Thread(target=receive)
    thread.start()
    while not address.exists():
        threading.Event().wait(0.005)
    with Client(str(address), family="AF_UNIX") as line:
        answer_challenge(line, b"")
        assert json.loads(line.recv_bytes())["format"] == "zeromesh-weights-2"
        os.write(line.fileno(), b"".join(frames))
        with socket.socket(fileno=os.dup(line.fileno())) as end:
            end.shutdown(socket.SHUT_WR)
        thread.join(10)
    return caught[0]


def _frame(header: Any) -> bytes:
    return _piece(json.dumps(header).encode())


def _piece(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


def test_what_is_no_weight_is_refused(tmp_path: Path) -> None:
    address = tmp_path / "s.sock"
    values = torch.ones(2)
    good = {"name": "w", "dtype": "float32", "shape": [2], "xxh3": "0"}
    for frames, message in (
        ((b"\x7f\xff\xff\xff",), "is gone: bad message length"),
        ((_piece(b"\x80\x04pickled"),), "sends no weights"),
        ((b"\0\0\0\2{x",), "sends no weights"),
        (((9999).to_bytes(4, "big") + b"[" * 9999,), "sends no weights: a header is not JSON (maximum recursion depth exceeded"),
        ((_frame([1]),), "a header is not a JSON object"),
        ((_frame({**good, "dtype": "object"}),), "sends no weights"),
        ((_frame({**good, "shape": [-1]}),), "sends no weights"),
        ((_frame({**good, "shape": [1 << 60]}),), "does not fit into memory"),
        ((_frame({**good, "shape": [(1 << 62) - 1, 4]}),), "does not fit into memory"),
        ((_frame({**good, "shape": [1 << 70, 0]}),), "sends no weights"),
        ((_frame(good), _piece(values.numpy().tobytes())), "w was damaged on the way"),
        ((_frame(good), _piece(b"")), "a piece without bytes"),
        ((_frame(good), _piece(bytes(9))), "is gone: bad message length"),
        ((_frame(good),), "is gone before all weights were there"),
        ((_frame(good), b"\0"), "is gone: got end of file during message"),
        ((_frame({"count": 3}),), "0 of 3 tensors were received"),
    ):
        assert message in str(_sent(address, *frames))
        assert not address.exists()


def _pair(seconds: float = 2.0) -> tuple[_WeightConnection, Connection]:
    """A connection to a receiver, and the receiver's end."""
    ours, theirs = socket.socketpair()
    return _WeightConnection(ours, "the receiver", seconds), Connection(theirs.detach())


def test_one_who_takes_a_tensor_slowly_is_not_silent() -> None:
    ours, theirs = _pair(0.5)
    content, found = memoryview(bytes(8 << 20)), 0

    def receive() -> None:
        nonlocal found
        theirs.recv_bytes()
        while found < len(content):
            threading.Event().wait(0.1)
            found += len(theirs.recv_bytes())

    thread = threading.Thread(target=receive)
    with theirs, ours as sender:
        thread.start()
        sender.send({}, content)
        thread.join(20)
    assert found == len(content)


PARTS: tuple[Any, ...] = (None, [], {"*": [0, 1]}, {"*": ["a", 0, 1]}, {"*": 3}, {"*": [0, 0, float("inf")]})
NO_PARTS = r"the receiver asks for parts that are not \(dim, index, parts\)"


@pytest.mark.parametrize(
    ("said", "token", "message"),
    [
        *(({"format": "zeromesh-weights-2", "parts": parts}, None, NO_PARTS) for parts in PARTS),
        # A token that is no UTF-8, and a receiver that is silent.
        (b"#CHALLENGE#" + bytes(20), "\udcff", "the receiver was silent for too long"),
        (b"220 mail.example.org", None, "the receiver has another token"),
    ],
)
def test_who_is_no_receiver_is_refused(said: Any, token: str | None, message: str) -> None:
    ours, theirs = _pair(2.0 if isinstance(said, dict) else 0.2)

    def receive() -> None:
        if isinstance(said, dict):
            deliver_challenge(theirs, b"")
        theirs.send_bytes(json.dumps(said).encode() if isinstance(said, dict) else said)

    thread = threading.Thread(target=receive)
    with theirs, ours as sender:
        thread.start()
        with pytest.raises(TransferError, match=message):
            _handshake(sender, token)
        thread.join(20)


def test_an_address_at_which_another_one_listens(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    with pytest.raises(TransferError, match="nobody sent weights"):
        next(receive_weights(str(path), timeout_seconds=0.05))
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigError, match=r"cannot listen at .*: Address already in use"):
            next(receive_weights(str(path)))
        assert path.exists()


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("0.0.0.0:1234", ConfigError, "give a token"),
        *((none, ConfigError, "is no address") for none in ("host:x", "", "/tmp/a\0b")),
        ("s.sock", TransferError, r"nobody sent weights to .* within 0\.05 seconds"),
        ("none/s.sock", ConfigError, "cannot listen at"),
    ],
)
def test_addresses(tmp_path: Path, address: str, error: type[Exception], message: str) -> None:
    place = str(tmp_path / address) if address.endswith(".sock") else address
    with pytest.raises(error, match=message):
        next(receive_weights(place, timeout_seconds=0.05))
