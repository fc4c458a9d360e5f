"""`HttpServer`: OpenAI's completions over HTTP, in a thread beside the generator whose inbox receives the requests."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
import resource
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import h11
import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from zeromesh.errors import ConfigError, ZeromeshError, errors_as, printable
from zeromesh.mesh.network_interfaces import is_loopback
from zeromesh.trainer.generation.requests import Inbox
from zeromesh.trainer.inference.server.answers import Answer, chat_tokens, response_parser
from zeromesh.trainer.inference.server.schema import ChatRequest, CompletionRequest, Piece, RequestError

if TYPE_CHECKING:
    from zeromesh.trainer.inference.generator import Generator

_Body = TypeVar("_Body", CompletionRequest, ChatRequest)
NEW_TOKENS = 1024  # The default of `max_new_tokens` where neither the request nor the command gives one.
_CONNECTIONS = 1024  # The limit of open connections; further ones are answered 503.
_REFUSED = 64  # connections that wait for that answer; more are closed
_BACKLOG = 128  # connections that the system holds until they are accepted
_DESCRIPTORS = 1 << 16  # to which the limit of open files is raised
_RETRY_SECONDS = 1  # after which a refused client may try again


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None  # The bearer token of `Authorization`. None: no authentication, on loopback alone.
    new_tokens: int = NEW_TOKENS
    body_bytes: int = 1 << 20
    receive_seconds: float = 30.0  # in which a client sends the head of a request, and again its body
    grace_seconds: float = 10.0


def _address_errors(options: ServerOptions) -> AbstractContextManager[None]:
    where = f"--host {options.host} --port {options.port}: "
    return errors_as(ConfigError, where, OSError, UnicodeError, after="; give another one")


def _most_open() -> int:
    """Raise the limit of open files as far as the system allows, and return the number of connections that it leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if 0 <= hard < _DESCRIPTORS else _DESCRIPTORS
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return max(1, (soft if soft >= 0 else most) - len(os.listdir("/proc/self/fd")) - 2 * _BACKLOG - _REFUSED)


class HttpServer:
    """Serves completions over HTTP. The constructor binds the address, so that a bad one is reported before a model is loaded.
    Raises `ConfigError` for a public address without a token, or one that cannot be bound."""

    _served: Generator
    _models: Mapping[str, str | None]

    def __init__(self, inbox: Inbox, options: ServerOptions) -> None:
        if not is_loopback(options.host) and not options.token:
            why = f"--host {options.host} can be reached by others"
            raise ConfigError(f"{why}: set ZEROMESH_SERVE_TOKEN (clients' API key), or leave --host out")
        self._socket = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
        with _address_errors(options):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((options.host, options.port))
        self.failure: BaseException | None = None  # The error that ended the generator, if any.
        self._inbox, self._options = inbox, options
        self._answers: set[Answer] = set()
        self._stopping, self._since = False, int(time.time())
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self, served: Generator, models: Mapping[str, str | None]) -> str:
        """Listen; returns the address. `models` has adapters by name, the default first. Raises `ConfigError` if it is taken."""
        options, self._served, self._models = self._options, served, models
        with _address_errors(options):
            self._socket.listen(_BACKLOG)
        config = uvicorn.Config(
            self._make_app(),
            http=type("Connection", (_Connection,), {"head_seconds": options.receive_seconds, "most": _most_open()}),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=max(1, round(options.grace_seconds)),
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="http", daemon=True)
        self._thread.start()
        host = f"[{options.host}]" if ":" in options.host else options.host
        return f"http://{host}:{self._socket.getsockname()[1]}/v1"

    def begin_stop(self) -> None:
        """Refuse new requests; open ones continue."""
        self._stopping = True
        self._inbox.stop()

    def fail(self, error: BaseException) -> None:
        self.failure, self._stopping = error, True
        for answer in list(self._answers):
            answer.put(error)

    def close(self) -> None:
        """Wait until open answers have reached their clients, then stop listening."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(self._options.grace_seconds + 2)

    def _make_app(self) -> ASGIApp:
        served: dict[str, tuple[str, Callable[[Request], Awaitable[Any]]]] = {
            "/v1/completions": ("POST", self._completions),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/models": ("GET", self._cards),
            "/v1/models/{name:path}": ("GET", self._cards),
            "/health": ("GET", self._health),
        }

        async def refuse(request: Request, error: Exception) -> Response:
            if isinstance(error, ZeromeshError):
                return _refusal(RequestError.of(error))
            if isinstance(error, HTTPException):
                what = {404: "there is no such path", 405: "the path has another method"}
                paths = ", ".join(f"{method} {path}" for path, (method, _) in served.items())
                text = what.get(error.status_code, error.detail)
                return _refusal(RequestError(error.status_code, f"{text}; there are {paths}"))
            # uvicorn closes the connection after it has written the log.
            return _refusal(RequestError(500, "the server has failed on this request; its log says why"), close=True)

        app = Starlette(
            routes=[Route(path, handle, methods=[method]) for path, (method, handle) in served.items()],
            exception_handlers=dict.fromkeys((ZeromeshError, HTTPException, Exception), refuse),
        )

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            problem = _access_refusal(Headers(scope=scope), self._options.token) if scope["type"] == "http" else None
            await (app if problem is None else _refusal(problem))(scope, receive, send)

        return guarded

    async def _health(self, request: Request) -> Response:
        if self.failure is not None:
            raise RequestError(503, f"the generator has failed: {self.failure}", code="generator_failed")
        if self._stopping:
            raise RequestError(503, "the server stops", code="stopping")
        return JSONResponse({"status": "ok", "open_requests": len(self._inbox)})

    async def _cards(self, request: Request) -> Response:
        card = {"object": "model", "created": self._since, "owned_by": "zeromesh"}
        if "name" not in request.path_params:
            return JSONResponse({"object": "list", "data": [{"id": name, **card} for name in self._models]})
        return JSONResponse({"id": self._name_of(request.path_params["name"]), **card})

    async def _completions(self, request: Request) -> ASGIApp:
        asked = await self._parsed_body(request, CompletionRequest)
        with RequestError.about("prompt"):
            tokens = await asyncio.to_thread(self._served.encode, asked.prompt)
        return self._reply(asked, tokens, None)

    async def _chat(self, request: Request) -> ASGIApp:
        asked = await self._parsed_body(request, ChatRequest)
        tokens = await asyncio.to_thread(chat_tokens, self._served, asked)
        return self._reply(asked, tokens, response_parser(self._served, tokens, asked.tools))

    async def _parsed_body(self, request: Request, kind: type[_Body]) -> _Body:
        """Return the validated body, which is within the size limit and names the served model; an error names the wrong field."""
        if self.failure is not None or self._stopping:
            raise RequestError(503, "the server stops and takes no more requests", code="stopping")
        content, most, seconds = bytearray(), self._options.body_bytes, self._options.receive_seconds
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    content += part
                    if len(content) > most:
                        raise RequestError(413, f"the body has more than {most} bytes, which are allowed")
        except TimeoutError as error:
            raise RequestError(408, f"the body was not there within {seconds:g} seconds") from error
        except ClientDisconnect as error:
            raise RequestError(499, "the client has left") from error
        # Encoding a long prompt takes a while, so a full queue is refused first.
        self._inbox.require_room()
        try:
            asked = kind.model_validate_json(bytes(content))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or None
            text = printable(f"{where or 'body'}: {first['msg'].removeprefix('Value error, ')}")
            raise RequestError(400, text, param=where and printable(where)) from error
        asked.model = self._name_of(asked.model)
        return asked

    def _name_of(self, asked: str | None) -> str:
        if asked is not None and asked not in self._models:
            text = printable(f"the model {asked:.200} is not served; there are {', '.join(self._models)}")
            raise RequestError(404, text, param="model", code="model_not_found")
        return next(iter(self._models)) if asked is None else asked

    def _reply(self, asked: CompletionRequest | ChatRequest, tokens: list[int], parser: Any) -> ASGIApp:
        """Submit a request, and return the response that sends its answer, whole or in parts, until the client leaves."""
        name = asked.model or ""
        how = {"most": self._options.new_tokens, "parser": parser, "adapter": self._models[name]}
        answer = Answer(self._inbox, self._served, asked, tokens, **how)
        self._answers.add(answer)
        if self.failure is not None:  # The generator has failed meanwhile.
            answer.put(self.failure)
        head: dict[str, Any] = {"id": f"{asked.kind}-{uuid.uuid4().hex}", "object": asked.object}
        head |= {"created": int(time.time()), "model": name}

        def body(*pieces: Piece, first: bool = False, usage: int | None = None) -> dict[str, Any]:
            """Return the body with a choice of each piece, and the usage after `usage` new tokens."""
            choices = [asked.choice(piece, first=first, decode=self._served.decode) for piece in pieces]
            if usage is None:
                return {**head, "choices": choices}
            counts = {"prompt_tokens": len(tokens), "completion_tokens": usage, "total_tokens": len(tokens) + usage}
            return {**head, "choices": choices, "usage": counts}

        async def parts() -> AsyncIterator[str]:
            first, new = True, 0
            try:
                async for piece in answer.pieces():
                    new += len(piece.tokens)
                    has_content = piece.text or piece.reasoning or piece.tool_calls or piece.finish
                    if first or has_content or asked.logprobs:
                        yield _event(body(piece, first=first))
                    first = False
                if (asked.stream_options or {}).get("include_usage"):
                    yield _event(body(usage=new))
                yield "data: [DONE]\n\n"
            except RequestError as error:
                yield _event(error.body())

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            if asked.stream:
                headers = {"Cache-Control": "no-cache"}
                await StreamingResponse(parts(), media_type="text/event-stream", headers=headers).stream_response(send)
                return
            whole = Piece()
            async for piece in answer.pieces():
                whole.add(piece)
            await JSONResponse(body(whole, first=True, usage=len(whole.tokens)))(scope, receive, send)

        async def reply(scope: Scope, receive: Receive, send: Send) -> None:
            works = [asyncio.ensure_future(respond(scope, receive, send)), asyncio.ensure_future(_disconnect(receive))]
            try:
                done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
                if works[0] in done:
                    works[0].result()
            finally:
                for work in works:
                    work.cancel()
                answer.cancel()
                self._answers.discard(answer)

        return reply


class _Connection(H11Protocol):
    """A connection that closes when the whole head of a request is late; a slow sender would otherwise hold it for ever."""

    head_seconds: float
    most: int = _CONNECTIONS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = min(_CONNECTIONS, self.most)
        if len(self.connections) > most + _REFUSED:
            transport.abort()
        elif len(self.connections) > most:
            error = RequestError(503, f"{most} connections are open, as many as are allowed", code="connections")
            self.app = _refusal(error, close=True)
        self._start_head_timer(None)

    def on_response_complete(self) -> None:
        answered = self.cycle
        super().on_response_complete()
        self._start_head_timer(answered)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # The request is answered already.
            self.transport.close()
            return
        refused = _refusal(RequestError(400, msg.rstrip(".")), close=True)
        head = h11.Response(status_code=400, headers=refused.raw_headers)
        for event in (head, h11.Data(data=bytes(refused.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _start_head_timer(self, answered: Any) -> None:
        self.loop.call_later(self.head_seconds, self._close_if_late, answered)

    def _close_if_late(self, answered: Any) -> None:
        if self.cycle is answered:
            self.transport.close()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _refusal(error: RequestError, *, close: bool = False) -> Response:
    headers = {"Retry-After": str(_RETRY_SECONDS)} if error.status in (429, 503) else {}
    headers |= {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    headers |= {"Connection": "close"} if close else {}
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


def _access_refusal(headers: Headers, token: str | None) -> RequestError | None:
    """Return the refusal of a request without the token or, where there is none, without a Host header of this machine or with a
    foreign Origin: a web page of another host could otherwise send requests, or read answers through DNS rebinding."""
    for name in ("host", "origin", "authorization"):
        if len(headers.getlist(name)) > 1:
            return RequestError(400, f"the header {name.title()} is there more than once", code="repeated_header")
    if token is not None:
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode("latin-1"), token.encode(errors="surrogateescape")):
            return RequestError(401, "the API key is missing or wrong", code="invalid_api_key")
        return None
    if not _is_loopback(headers.get("host", "")):
        return RequestError(403, "the Host header names no address of this host", code="wrong_host")
    scheme, _, address = headers.get("origin", "http://localhost").partition("://")
    if scheme.lower() not in ("http", "https") or not _is_loopback(address):
        return RequestError(403, "web pages of other hosts are not answered", code="wrong_origin")
    return None


_HOST_PORT = re.compile(r"(?:\[([0-9a-f:.]*:[0-9a-f:.]*)\]|([0-9a-z.-]+))(?::\d{1,5})?", re.IGNORECASE | re.ASCII)


def _is_loopback(address: str) -> bool:
    """Return True if `HOST:PORT` is loopback; a literal IPv6 address stands in brackets."""
    return (match := _HOST_PORT.fullmatch(address)) is not None and is_loopback(match[1] or match[2])
