"""The server's HTTP side, with a generator that repeats a text: every answer and error is as OpenAI's clients expect it."""

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self

import httpx
import openai
import pytest

from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.data.tokenizer import ByteTokenizer, joined_text
from zeromesh.trainer.generation.requests import Inbox, Progress
from zeromesh.trainer.inference.server import app
from zeromesh.trainer.inference.server.app import HttpServer, ServerOptions

SAID = "naïve words, and a STOP sign after them. "


class Repeating:
    """Says one text again and again, a byte at a time, to all who ask; stands for a generator."""

    model_type, positions = "llama", 2048

    def __init__(self, inbox: Inbox, seconds: float) -> None:
        self.tokenizer = _Tokens()
        self.open: dict[int, int] = {}
        self.seen: list[dict[str, Any]] = []
        self.adapters: list[str | None] = []
        self.last: Any = "length"
        self._inbox, self._seconds = inbox, seconds
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def encode(self, prompt: Any) -> list[int]:
        return list(prompt.encode()) if isinstance(prompt, str) else list(prompt)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def check_request(self, tokens: Sequence[int], fields: Mapping[str, Any]) -> None:
        if len(tokens) + fields["max_new_tokens"] > self.positions:
            raise DataError(f"the prompt has {len(tokens)} tokens, which with the new ones are too many")

    def _run(self) -> None:
        text, stopping, most = SAID.encode() * 50, False, {}
        while not (stopping and not self.open):
            news = self._inbox.take(wait_seconds=0.0 if self.open else 0.02)
            stopping = stopping or news.stopping
            for request in news.requests:
                self.seen.append({"tokens": list(request.tokens), **request.fields, "seed": request.seed})
                self.adapters.append(request.adapter)
                self.open[request.number], most[request.number] = 0, request.fields["max_new_tokens"]
            for number, place in list(self.open.items()):
                finish: Any = "cancelled" if number in news.cancelled else None
                finish = finish or (self.last if place + 1 == most[number] else None)
                self.open[number] = place + 1
                if finish:
                    del self.open[number]
                self._inbox.deliver([Progress(number=number, tokens=[text[place]], logprobs=[-0.5], finish=finish)])
            time.sleep(self._seconds)


class _Tokens(ByteTokenizer):
    def encode_messages(self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None) -> list[int]:
        return list("".join(f"{message['role']}:{joined_text(message['content'])};" for message in messages).encode())


class Scene:
    """A server on a free port, and a client."""

    def __init__(self, *, seconds: float = 0.0, limit: int = 8, **options: Any) -> None:
        self.inbox = Inbox(limit=limit)
        self.generator = Repeating(self.inbox, seconds)
        self.server = HttpServer(self.inbox, ServerOptions(port=0, **options))
        served: Any = self.generator
        self.url = self.server.start(served, {"repeater": None, "styled": "style"})
        self.http = httpx.Client(base_url=self.url.removesuffix("/v1"), timeout=10)
        self.client = openai.OpenAI(base_url=self.url, api_key=options.get("token") or "none", max_retries=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.inbox.stop(abandon=True)
        self.http.close()
        self.client.close()
        self.server.close()

    def line(self) -> socket.socket:
        """A connection that speaks no HTTP by itself."""
        host, port = self.url.removeprefix("http://").removesuffix("/v1").split(":")
        return socket.create_connection((host, int(port)), timeout=10)

    def until(self, open_requests: int) -> None:
        end = time.monotonic() + 5
        while len(self.generator.open) != open_requests:
            assert time.monotonic() < end, self.generator.open
            time.sleep(0.01)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with Scene() as made:
        yield made


def test_completions(scene: Scene) -> None:
    made = scene.client.completions.create(model="repeater", prompt="Hi", max_tokens=12, temperature=0, seed=3)
    assert made.choices[0].text == "naïve words"
    assert made.choices[0].finish_reason == "length"
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (2, 12)
    assert scene.generator.seen[-1] == {"tokens": [72, 105], "max_new_tokens": 12, "do_sample": False, "seed": 3}
    parts = list(scene.client.completions.create(model="repeater", prompt=[72], max_tokens=13, stream=True, top_p=0.5))
    assert "".join(part.choices[0].text for part in parts) == "naïve words,"
    assert [part.choices[0].finish_reason for part in parts][-1] == "length"
    assert all("�" not in part.choices[0].text for part in parts)
    assert scene.generator.seen[-1]["top_p"] == 0.5


@pytest.mark.parametrize(("model", "adapter"), [("repeater", None), ("styled", "style"), (None, None)])
def test_a_model_is_a_name_of_an_adapter(scene: Scene, model: str | None, adapter: str | None) -> None:
    for path, prompt in (("completions", {"prompt": "Hi"}), ("chat/completions", {"messages": [{**USER, "content": "Hi"}]})):
        for stream in (False, True):
            asked = {**prompt, "max_tokens": 2, "stream": stream, **({} if model is None else {"model": model})}
            found = scene.http.post(f"/v1/{path}", json=asked)
            whole = json.loads(found.text.split("\n")[0].removeprefix("data: "))
            assert (whole["model"], scene.generator.adapters[-1]) == (model or "repeater", adapter)
    assert scene.client.models.retrieve("styled").id == "styled"


def test_chat(scene: Scene) -> None:
    messages: Any = [USER | {"content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "content": "x"}]
    made = scene.client.chat.completions.create(model="repeater", messages=messages, max_tokens=6, logprobs=True)
    assert made.choices[0].message.content == "naïve"
    assert len(made.choices[0].logprobs.content or []) == 6
    assert bytes(scene.generator.seen[-1]["tokens"]).decode() == "user:Hi;assistant:x;"
    options: Any = {"stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 5}
    parts = list(scene.client.chat.completions.create(model="repeater", messages=messages, **options))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == "naïv"
    assert parts[-2].choices[0].finish_reason == "length"
    assert parts[-1].usage.completion_tokens == 5


def test_an_answer_ends_before_a_text(scene: Scene) -> None:
    for stop in ("STOP", ["nothing of this", "a STOP"]):
        made = scene.client.completions.create(model="repeater", prompt="Hi", max_tokens=200, stop=stop)
        assert made.choices[0].text == SAID[: SAID.index("STOP" if stop == "STOP" else "a STOP")]
        assert made.choices[0].finish_reason == "stop"
        parts = scene.client.completions.create(model="repeater", prompt="Hi", max_tokens=200, stop=stop, stream=True)
        assert "".join(part.choices[0].text for part in parts) == made.choices[0].text
        scene.until(0)
    # What only looks like the beginning of it is said.
    made = scene.client.completions.create(model="repeater", prompt="Hi", max_tokens=len(SAID.encode()), stop="them.X")
    assert made.choices[0].text == SAID


class _Thinking:
    """A parser of answers that begin with what the model thinks, up to a comma; it keeps a letter until the next one comes."""

    initial_events: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self._held, self._field = "", "thinking"

    def feed(self, text: str) -> list[Any]:
        events = []
        for letter in text:
            events.append({"type": "region_chunk", "field": self._field, "text": self._held})
            self._held = letter
            self._field = "content" if letter == "," else self._field
        return events

    def finalize(self) -> tuple[None, list[Any]]:
        return None, [{"type": "region_chunk", "field": self._field, "text": self._held}]


def test_a_parser_of_answers_loses_nothing_at_the_end(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "response_parser", lambda served, tokens, tools: _Thinking())
    begin = SAID.encode().index(b"STOP")
    for stop, more in ((None, 2), ("STOP", 9)):
        options: Any = {**CHAT, "model": "repeater", "max_tokens": begin + more, "stop": stop}
        said = scene.client.chat.completions.create(**options).choices[0].message
        parts = scene.client.chat.completions.create(stream=True, **options)
        text = SAID[: SAID.index("STOP") + (0 if stop else 2)]
        found = "".join(part.choices[0].delta.content or "" for part in parts)
        assert said.content == found == text[text.index(",") :]
        assert said.model_extra["reasoning_content"] == text[: text.index(",")]


ASK, USER = {"prompt": "a"}, {"role": "user"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
NESTED: dict[str, Any] = {}
for _ in range(300):
    NESTED = {"x": NESTED}
CALLING = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("completions", b"{", 400, "Invalid JSON"),
        ("completions", b"[" * 100_000, 400, "Invalid JSON"),
        ("completions", b"\xff\xfe", 400, "Invalid JSON"),
        ("completions", rb'{"prompt": "\ud800"}', 400, "Invalid JSON"),
        ("completions", b'{"prompt": ["' + b"9" * 5000 + b"]}", 400, "Invalid JSON"),
        ("completions", b'{"prompt": "a", "temperature": NaN}', 400, "temperature: Input should be a finite number"),
        ("completions", b'{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
        ("completions", {}, 400, "prompt: Field required"),
        ("completions", {"prompt": 3}, 400, "prompt.str: Input should be a valid string"),
        ("completions", {"prompt": "a", "n": 2}, 400, "n: Input should be 1"),
        ("completions", {**ASK, "max_tokens": -1}, 400, "max_tokens: Input should be greater than or equal to 1"),
        ("completions", {"prompt": "a", "max_tokens": 10**30}, 400, "too many"),
        ("completions", {"prompt": "a", "max_tokens": "5"}, 400, "max_tokens: Input should be a valid integer"),
        ("completions", {"prompt": "a", "temperature": 3}, 400, "temperature: Input should be less than or equal to 2"),
        ("completions", {"prompt": "a", "generation_config": "{}"}, 400, "generation_config: Extra inputs"),
        ("completions", {"prompt": "a", "stop": ["x"] * 5}, 400, "stop"),
        ("completions", {"prompt": "a", "model": "other"}, 404, "the model other is not served; there are repeater, styled"),
        ("completions", {"prompt": "a" * 3000}, 400, "too many"),
        ("completions", {"prompt": "a" * (1 << 20)}, 413, "the body has more than 1048576 bytes"),
        ("chat/completions", {"messages": []}, 400, "messages: List should have at least 1 item"),
        ("chat/completions", {"messages": [{"content": "a"}]}, 400, "messages.0.role: Field required"),
        ("chat/completions", {"messages": [USER | {"content": [{"type": "image_url"}]}]}, 400, "list of other parts"),
        ("chat/completions", {**CHAT, "top_logprobs": 3}, 400, "top_logprobs: Input should be 0"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "tool_calls": [3]}]}, 400, "messages.0.tool_calls"),
        ("chat/completions", {**CHAT, "tools": [NESTED]}, 400, "Invalid JSON"),
        ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "chat template knows no tools"),
        ("chat/completions", {"messages": [CALLING]}, 400, "messages.0.tool_calls"),
        ("chat/completions", {**CHAT, "tool_choice": "required"}, 400, "tool_choice: Input should be 'auto'"),
        ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, 400, "should be 'text'"),
        ("load_model", {}, 404, "there is no such path; there are POST /v1/completions"),
    ],
)
def test_bad_requests_get_json(scene: Scene, path: str, body: Any, status: int, message: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = scene.http.post(f"/v1/{path}", content=content)
    error = found.json()["error"]
    assert (found.status_code, set(error)) == (status, {"message", "type", "param", "code"}), found.text
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert scene.http.get("/health").json() == {"status": "ok", "open_requests": 0}


def test_other_paths_and_methods(scene: Scene) -> None:
    assert [each.id for each in scene.client.models.list().data] == ["repeater", "styled"]
    assert scene.client.models.retrieve("repeater").id == "repeater"
    with pytest.raises(openai.NotFoundError, match="the model others/model is not served; there are repeater, styled"):
        scene.client.models.retrieve("others/model")
    assert scene.http.get("/v1/completions").status_code == 405
    assert scene.http.get("/docs").status_code == 404


def test_malformed_http_gets_json(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    chunked = "POST /v1/completions HTTP/1.1\r\nHost: {}\r\nTransfer-Encoding: chunked\r\n\r\n"
    heads = (b"\x16\x03\x01\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n", chunked.format("localhost").encode() + b"ZZ\r\n")
    for sent in heads:
        with scene.line() as line:
            line.sendall(sent)
            head, _, body = _all_of(line).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400")
            assert b"application/json" in head
            assert json.loads(body)["error"]["message"] == "Invalid HTTP request received"
    # One that was refused by its head is only left.
    with scene.line() as line:
        line.sendall(chunked.format("evil.example").encode() + b"1\r\na\r\n")
        assert line.recv(4096).startswith(b"HTTP/1.1 403")
        line.sendall(b"ZZ\r\n")
        assert b"HTTP" not in _all_of(line)
    assert scene.http.get("/health").status_code == 200
    assert not [record for record in caplog.records if record.exc_info]


def test_more_connections_than_allowed_get_json(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_CONNECTIONS", 0)
    with scene.line() as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head, _, body = _all_of(line).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert json.loads(body)["error"]["code"] == "connections"


def test_logits_that_are_no_numbers_end_an_answer_with_an_error(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene.generator, "last", "not_finite")
    found = scene.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    assert (found.status_code, found.json()["error"]["code"]) == (500, "not_finite")
    found = scene.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "stream": True})
    assert json.loads(found.text.split("data: ")[-1])["error"]["code"] == "not_finite"


def test_what_has_no_effect_is_taken(scene: Scene) -> None:
    options: Any = {"tool_choice": "auto", "response_format": {"type": "text"}, "stream": None, "max_tokens": 1}
    assert scene.http.post("/v1/chat/completions", json={**CHAT, **options}).status_code == 200


def test_a_temperature_that_logits_cannot_be_divided_by_takes_the_best(scene: Scene) -> None:
    scene.client.completions.create(model="repeater", prompt="Hi", max_tokens=1, temperature=5e-324)
    assert scene.generator.seen[-1]["do_sample"] is False
    assert "temperature" not in scene.generator.seen[-1]


def test_an_error_that_nobody_foresaw_is_json_too(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene.generator, "encode", lambda prompt: 1 / 0)
    found = scene.http.post("/v1/completions", json={"prompt": "a"})
    assert (found.status_code, found.json()["error"]["type"]) == (500, "server_error")
    assert found.headers["Connection"] == "close"


LONG = {"prompt": "a", "max_tokens": 2000}


def posted(more: int = 0, **fields: Any) -> bytes:
    """A request as it is sent, which promises so many bytes more."""
    body = json.dumps(LONG | fields)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body) + more}\r\n\r\n"
    return f"{head}{body}".encode()


def test_a_client_that_leaves_frees_its_slot() -> None:
    with Scene(seconds=0.01) as scene:
        with scene.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as got:
            next(got.iter_lines())
            scene.until(1)
        scene.until(0)
        with scene.line() as line:
            line.sendall(posted())
            scene.until(1)
        scene.until(0)


def _all_of(line: socket.socket) -> bytes:
    """What comes until the other end closes."""
    return b"".join(iter(lambda: line.recv(4096), b""))


def test_a_client_that_leaves_at_once_frees_its_slot(capfd: pytest.CaptureFixture[str]) -> None:
    with Scene(seconds=0.01) as scene:
        for sent in (posted(stream=True), posted(1, stream=True)):
            for _ in range(4):
                with scene.line() as line:
                    line.sendall(sent)
                    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(0.2)
        scene.until(0)
    assert "Traceback" not in "".join(capfd.readouterr())


def test_who_sends_slowly_is_not_waited_for() -> None:
    with Scene(receive_seconds=0.3) as scene:
        for sent, answer in (
            (b"", b""),
            (b"GET /health HTTP/1.1\r\nHost: local", b""),
            (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET", b"200 OK"),
            (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{", b"408 Request Timeout"),
        ):
            with scene.line() as line:
                line.sendall(sent)
                found = _all_of(line)
                assert answer in found
                assert bool(answer) == bool(found)
        # One that has said all is answered, however long that takes.
        scene.generator._seconds = 0.05
        made = scene.client.completions.create(model="repeater", prompt="a", max_tokens=15)
        assert made.usage.completion_tokens == 15


def test_a_full_queue_a_stop_and_a_failure() -> None:
    with Scene(seconds=0.01, limit=1, grace_seconds=2.0) as scene:
        stream = scene.client.completions.create(model="repeater", prompt="a", max_tokens=60, stream=True)
        scene.until(1)
        # What is refused in any case is not encoded before.
        full = scene.http.post("/v1/completions", json={"prompt": "a" * 3000, "max_tokens": 5})
        assert (full.status_code, full.json()["error"]["code"], full.headers["Retry-After"]) == (429, "queue_full", "1")
        scene.server.begin_stop()
        late = scene.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "stopping")
        assert "".join(part.choices[0].text for part in stream).startswith("naïve words, and a STOP sign")
    with Scene(seconds=0.01) as scene:
        stream = scene.client.completions.create(model="repeater", prompt="a", max_tokens=2000, stream=True)
        scene.until(1)
        scene.server.fail(ConfigError("rank 1 is gone"))
        with pytest.raises(openai.APIError, match="the generator has failed: rank 1 is gone"):
            list(stream)
        health = scene.http.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "generator_failed")


def test_others_need_a_token(capfd: pytest.CaptureFixture[str]) -> None:
    inbox = Inbox()
    for host in ("0.0.0.0", "::", "example.org"):
        with pytest.raises(ConfigError, match=f"--host {host} can be reached by others: set ZEROMESH_SERVE_TOKEN"):
            HttpServer(inbox, ServerOptions(host=host))
    inbox.stop()
    with Scene(token="s3cret-token") as scene:
        assert scene.client.completions.create(model="repeater", prompt="a", max_tokens=1).choices[0].text == "n"
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret-toke"}):
            found = scene.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
    assert "s3cret" not in "".join(capfd.readouterr())


def test_a_token_that_is_no_utf8() -> None:
    with Scene(token="s3\udcff") as scene:
        for token, status in ((b"s3\xff", 200), (b"s3", 401)):
            assert scene.http.get("/health", headers={b"Authorization": b"Bearer " + token}).status_code == status


HERE = ("LOCALHOST", "localhost:80", "localhost:8000", "127.0.0.1", "127.9.9.9:80", "[::1]", "[::1]:80", "[::1]:8000")
ELSEWHERE = (
    *("evil.example", "[::1]evil.example", "[::1]:evil", "evil.example[::1]", "::1", "[localhost]", "[127.0.0.1]"),
    *("localhost.evil.example", "localhost.evil.example:8000", "localhost:80:evil.example", "localhost@evil.example"),
    *("evil.example#localhost", "localhost:123456", "localhost ", ""),
)


@pytest.mark.parametrize("place", [*HERE, *ELSEWHERE])
def test_hosts_and_origins_are_parsed_strictly(scene: Scene, place: str) -> None:
    if place == place.strip():
        found = scene.http.get("/health", headers={"Host": place})
        assert (found.status_code == 200) == (place in HERE), place
        assert found.status_code in (200, 400, 403)
    found = scene.http.get("/health", headers={"Origin": f"http://{place}".strip()})
    assert (found.status_code == 200) == (place in HERE or place == "localhost "), place


ORIGINS = ("http://localhost", "http://evil.example")


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ([("Host", "evil.example")], 403, "wrong_host"),
        *(([("Origin", each)], 403, "wrong_origin") for each in ("https://evil.example", "null", "data://localhost")),
        *(
            ([(name, value) for value in values], 400, "repeated_header")
            for name in ("Origin", "Authorization")
            for values in (ORIGINS, ORIGINS[::-1])
        ),
    ],
)
def test_foreign_and_repeated_headers(scene: Scene, headers: list[tuple[str, str]], status: int, code: str) -> None:
    found = scene.http.post("/v1/completions", content=b"{}", headers=headers)
    error = found.json()["error"]
    assert (found.status_code, error["code"], "more than once" in error["message"]) == (status, code, status == 400)


def test_clients_beyond_the_descriptors_do_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_most_open", lambda: 3)
    monkeypatch.setattr(app, "_REFUSED", 4)
    with Scene() as scene, ExitStack() as stack:
        held = [stack.enter_context(scene.line()) for _ in range(12)]
        for each in held[7:]:  # Those for which there is no room are closed at once.
            with suppress(ConnectionError):
                assert each.recv(1) == b""
        for number, status in ((0, b"200"), (3, b"503")):
            held[number].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert held[number].recv(99).startswith(b"HTTP/1.1 " + status)


def test_the_soft_limit_of_descriptors_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    monkeypatch.setattr(app.resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(app.resource, "setrlimit", lambda kind, values: limits.append(values))
    assert 3000 < app._most_open() < 4096
    assert limits == [(4096, 4096)]
    monkeypatch.setattr(app.resource, "getrlimit", lambda kind: (1024, 1024))
    assert 512 < app._most_open() < 1024
