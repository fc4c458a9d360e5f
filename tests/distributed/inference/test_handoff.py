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
from tests.support.workers import Workers
from zeromesh import receive_weights
from zeromesh.errors import ConfigError, TransferError
from zeromesh.trainer.weights.handoff import _greet, _WeightLine


@pytest.mark.parametrize(
    ("ranks", "sections", "model"),
    [
        (2, {"zero": {"stage": 3}}, "gpt2"),
        pytest.param(2, {"parallel": {"tensor": 2}}, "llama", marks=pytest.mark.full),
        pytest.param(2, {"parallel": {"pipeline": 2}}, "gpt2", marks=pytest.mark.full),
        pytest.param(4, {"parallel": {"tensor": 2}, "zero": {"stage": 3}}, "llama", marks=pytest.mark.full),
    ],
)
def test_weights_arrive(workers: Workers, tmp_path: Path, ranks: int, sections: dict[str, Any], model: str) -> None:
    for found in workers.run(ranks, "handoff_cases:arrive", folder=str(tmp_path), sections=sections, model=model):
        assert not found["wrong"]
        assert found["count"] > 10
        assert not found["left"], "sockets are removed"


@pytest.mark.parametrize(
    ("ranks", "sections", "model"),
    [
        (2, {"zero": {"stage": 3}}, "mixtral"),
        (2, {"zero": {"stage": 3}}, "lora"),
        pytest.param(2, {"parallel": {"tensor": 2}}, "mixtral", marks=pytest.mark.full),
        pytest.param(2, {"parallel": {"tensor": 2}}, "neox", marks=pytest.mark.full),
        pytest.param(2, {"parallel": {"pipeline": 2}}, "mixtral", marks=pytest.mark.full),
        pytest.param(2, {"zero": {"stage": 3}}, "dora", marks=pytest.mark.full),
        pytest.param(2, {"zero": {"stage": 3}}, "head", marks=pytest.mark.full),
        (2, {"zero": {"stage": 3}}, "embedding"),
        (2, {"zero": {"stage": 3}}, "tokens"),
        pytest.param(2, {"zero": {"stage": 1}}, "moe-lora", marks=pytest.mark.full),
    ],
)
def test_they_have_the_form_of_files(
    workers: Workers, tmp_path: Path, ranks: int, sections: dict[str, Any], model: str
) -> None:
    arguments = {"folder": str(tmp_path), "sections": sections, "model": model}
    for found in workers.run(ranks, "handoff_cases:has_the_form_of_files", **arguments):
        assert not found["wrong"]
        assert found["changed"] > 3
        if model == "mixtral":
            assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in found["names"]


def test_receivers_that_fail_end_nothing(workers: Workers, tmp_path: Path) -> None:
    for said in workers.run(2, "handoff_cases:fails", folder=str(tmp_path)):
        assert "nobody receives weights at" in said["nobody"]
        assert "weights were not handed over" in said["leaves"]
        assert "has another token" in said["token"]
        assert said["steps"] == 3
        assert "has another token" in said.get("token, receiver", "has another token")


@pytest.mark.full
def test_other_ranks_wait_while_a_receiver_rests(workers: Workers, tmp_path: Path) -> None:
    for found in workers.run(2, "handoff_cases:is_slow", folder=str(tmp_path)):
        assert found["found"] == found["count"] > 10
        assert found["steps"] == 1


@pytest.mark.parametrize("model", DIRECTORIES)
def test_a_generator_has_those_of_its_directory(workers: Workers, tmp_path: Path, model: str) -> None:
    for found in workers.run(2, "handoff_cases:from_generator", folder=str(tmp_path), model=model):
        assert not found["wrong"]


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
        (((9999).to_bytes(4, "big") + b"[" * 9999,), "sends no weights: maximum recursion depth exceeded"),
        ((_frame([1]),), "a header that is no object"),
        ((_frame({**good, "dtype": "object"}),), "sends no weights"),
        ((_frame({**good, "shape": [-1]}),), "sends no weights"),
        ((_frame({**good, "shape": [1 << 60]}),), "does not fit into memory"),
        ((_frame({**good, "shape": [1 << 62, 4]}),), "does not fit into memory"),
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


def _pair(seconds: float = 2.0) -> tuple[_WeightLine, Connection]:
    """A line to a receiver, and the receiver's end."""
    ours, theirs = socket.socketpair()
    return _WeightLine(ours, "the receiver", seconds), Connection(theirs.detach())


def test_one_who_takes_a_tensor_slowly_is_not_silent() -> None:
    line, theirs = _pair(0.5)
    content, found = memoryview(bytes(8 << 20)), 0

    def receive() -> None:
        nonlocal found
        theirs.recv_bytes()
        while found < len(content):
            threading.Event().wait(0.1)
            found += len(theirs.recv_bytes())

    thread = threading.Thread(target=receive)
    with theirs, line as sender:
        thread.start()
        sender.send({}, content)
        thread.join(20)
    assert found == len(content)


@pytest.mark.parametrize("parts", [None, [], {"*": [0, 1]}, {"*": ["a", 0, 1]}, {"*": 3}, {"*": [0, 0, float("inf")]}])
def test_parts_that_are_none_are_refused(parts: Any) -> None:
    line, theirs = _pair()

    def receive() -> None:
        deliver_challenge(theirs, b"")
        theirs.send_bytes(json.dumps({"format": "zeromesh-weights-2", "parts": parts}).encode())

    thread = threading.Thread(target=receive)
    with theirs, line as sender:
        thread.start()
        with pytest.raises(TransferError, match=r"the receiver asks for parts that are not \(dim, index, parts\)"):
            _greet(sender, None)
        thread.join(20)


def test_a_token_that_is_no_utf8_and_a_receiver_that_is_silent() -> None:
    line, theirs = _pair(0.2)
    with theirs, line as sender:
        theirs.send_bytes(b"#CHALLENGE#" + bytes(20))
        with pytest.raises(TransferError, match="the receiver was silent for too long"):
            _greet(sender, "\udcff")


def test_who_challenges_in_other_words_is_no_receiver() -> None:
    line, theirs = _pair()
    with theirs, line as sender:
        theirs.send_bytes(b"220 mail.example.org")
        with pytest.raises(TransferError, match="the receiver has another token"):
            _greet(sender, None)


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


def test_addresses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a token"):
        next(receive_weights("0.0.0.0:1234"))
    for none in ("host:x", "", "/tmp/a\0b"):
        with pytest.raises(ConfigError, match=r"is no address"):
            next(receive_weights(none))
    with pytest.raises(TransferError, match=r"nobody sent weights to .* within 0\.05 seconds"):
        next(receive_weights(str(tmp_path / "s.sock"), timeout_seconds=0.05))
    with pytest.raises(ConfigError, match="cannot listen at"):
        next(receive_weights(str(tmp_path / "none" / "s.sock")))
