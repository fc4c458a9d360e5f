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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import h11
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from zeromesh.errors import ConfigError, ZeromeshError
from zeromesh.mesh.network_interfaces import is_loopback
from zeromesh.trainer.inference.requests import Inbox
from zeromesh.trainer.inference.server import schema
from zeromesh.trainer.inference.server.answers import Answer, Piece, chat_tokens, response_parser
from zeromesh.trainer.inference.server.schema import Body, ChatRequest, CompletionRequest, RequestError, parse_body

if TYPE_CHECKING:
    from zeromesh.trainer.inference.generator import Generator

NEW_TOKENS = 1024
"""The default of `max_new_tokens` where neither the request nor the command gives one."""
_CONNECTIONS = 1024
"""The limit of open connections. Further ones are answered 503; while `_REFUSED` wait for that answer, new ones are closed."""
_REFUSED = 64
_BACKLOG = 128
_DESCRIPTORS = 1 << 16
_RETRY_SECONDS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """The address at which the server listens, and the limits of a request."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    """The bearer token of `Authorization: Bearer TOKEN`. None: no authentication, which is allowed on loopback alone."""
    new_tokens: int = NEW_TOKENS
    """The default of `max_new_tokens` for a request without one."""
    body_bytes: int = 1 << 20
    receive_seconds: float = 30.0
    """The seconds that a client may take to send the head of a request, and again for its body."""
    grace_seconds: float = 10.0


def _no_address(options: ServerOptions, error: OSError | UnicodeError) -> ConfigError:
    reason = getattr(error, "strerror", None) or error
    return ConfigError(f"--host {options.host} --port {options.port}: {reason}; give another one")


def _room() -> int:
    """Raise the limit of open files as far as the system allows, and return the number of connections that it leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if 0 <= hard < _DESCRIPTORS else _DESCRIPTORS
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return max(1, (soft if soft >= 0 else most) - len(os.listdir("/proc/self/fd")) - 2 * _BACKLOG - _REFUSED)


class HttpServer:
    """Serves completions over HTTP. The constructor binds the address, so that a bad one is reported before a model is loaded.

    Args:
        name: the model's name in requests.

    Raises:
        ConfigError: for a public address without a token, or one that cannot be bound.
    """

    _served: Generator

    def __init__(self, inbox: Inbox, name: str, options: ServerOptions) -> None:
        if not is_loopback(options.host) and not options.token:
            raise ConfigError(
                f"--host {options.host} can be reached by others: set ZEROMESH_SERVE_TOKEN to what clients are to send as their "
                "API key, or leave --host out"
            )
        self._socket = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((options.host, options.port))
        except (OSError, UnicodeError) as error:
            self._socket.close()
            raise _no_address(options, error) from error
        self.failure: BaseException | None = None
        """The error that ended the generator, if any."""
        self.name = name
        self._inbox, self._options = inbox, options
        self._answers: set[Answer] = set()
        self._stopping = False
        self._since = int(time.time())
        self.app = self._make_app()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self, served: Generator) -> str:
        """Start to listen, and return the address. Raises `ConfigError` where another process listens there."""
        options, self._served = self._options, served
        try:
            self._socket.listen(_BACKLOG)
        except OSError as error:
            raise _no_address(options, error) from error
        config = uvicorn.Config(
            self.app,
            http=type("Connection", (_Connection,), {"head_seconds": options.receive_seconds, "most": _room()}),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=max(1, round(options.grace_seconds)),
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="http", daemon=True
        )
        self._thread.start()
        host = f"[{options.host}]" if ":" in options.host else options.host
        return f"http://{host}:{self._socket.getsockname()[1]}/v1"

    def begin_stop(self) -> None:
        """Refuse new requests; open ones continue."""
        self._stopping = True
        self._inbox.stop()

    def fail(self, error: BaseException) -> None:
        """End all open answers with an error."""
        self.failure, self._stopping = error, True
        for answer in list(self._answers):
            answer.fail(error)

    def close(self) -> None:
        """Wait until open answers have reached their clients, then stop listening."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(self._options.grace_seconds + 2)

    def _make_app(self) -> FastAPI:
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        routes: dict[str, tuple[str, Callable[[Request], Awaitable[Response]]]] = {
            "/v1/completions": ("POST", self._completions),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/models": ("GET", self._models),
            "/v1/models/{name:path}": ("GET", self._models),
            "/health": ("GET", self._health),
        }
        for path, (method, handle) in routes.items():
            app.add_api_route(path, handle, methods=[method], response_model=None)

        @app.exception_handler(ZeromeshError)
        async def refuse(request: Request, error: ZeromeshError) -> Response:
            return _refusal(RequestError.of(error))

        @app.exception_handler(HTTPException)
        async def refuse_route(request: Request, error: HTTPException) -> Response:
            what = {404: "there is no such path", 405: "the path has another method"}
            served = ", ".join(f"{method} {path}" for path, (method, _) in routes.items())
            text = what.get(error.status_code, error.detail)
            return _refusal(RequestError(error.status_code, f"{text}; there are {served}"))

        @app.exception_handler(Exception)
        async def fail(request: Request, error: Exception) -> Response:
            refused = _refusal(RequestError(500, "the server has failed on this request; its log says why"))
            refused.headers["Connection"] = "close"  # As uvicorn does after it has written the log.
            return refused

        app.add_middleware(_Guard, options=self._options)
        return app

    # Routes

    async def _health(self, request: Request) -> Response:
        if self.failure is not None:
            raise RequestError(503, f"the generator has failed: {self.failure}", code="generator_failed")
        if self._stopping:
            raise RequestError(503, "the server stops", code="stopping")
        return JSONResponse({"status": "ok", "open_requests": len(self._inbox)})

    async def _models(self, request: Request) -> Response:
        model = {"id": self.name, "object": "model", "created": self._since, "owned_by": "zeromesh"}
        if "name" not in request.path_params:
            return JSONResponse({"object": "list", "data": [model]})
        self._require_model(request.path_params["name"])
        return JSONResponse(model)

    async def _completions(self, request: Request) -> Response:
        asked = await self._parsed_body(request, CompletionRequest)
        with RequestError.about("prompt"):
            tokens = await asyncio.to_thread(self._served.encode, asked.prompt)

        def choice(piece: Piece, *, first: bool) -> schema.Choice:
            return {"index": 0, "text": piece.text, "logprobs": None, "finish_reason": piece.finish}

        return await self._reply(request, asked, self._answer(asked, tokens, None), "cmpl", choice)

    async def _chat(self, request: Request) -> Response:
        asked = await self._parsed_body(request, ChatRequest)
        messages = [message.model_dump(exclude_none=True) for message in asked.messages]
        tokens = await asyncio.to_thread(chat_tokens, self._served, messages, asked.tools)
        answer = self._answer(asked, tokens, response_parser(self._served, tokens, asked.tools))

        def choice(piece: Piece, *, first: bool) -> schema.Choice:
            said: schema.ChoiceMessage = {"role": "assistant"} if first else {}
            if piece.text or (first and not piece.tool_calls):
                said["content"] = piece.text
            if piece.reasoning:
                said["reasoning_content"] = piece.reasoning
            if piece.tool_calls:
                said["tool_calls"] = piece.tool_calls
            if asked.stream:
                return {"index": 0, "delta": said, "logprobs": logprobs(piece), "finish_reason": piece.finish}
            for call in piece.tool_calls:
                del call["index"]
            whole: schema.ChoiceMessage = {"content": None, "refusal": None, **said}
            return {"index": 0, "message": whole, "logprobs": logprobs(piece), "finish_reason": piece.finish}

        def logprobs(piece: Piece) -> schema.ChoiceLogprobs | None:
            if not asked.logprobs:
                return None
            texts = [self._served.decode([token]) for token in piece.tokens]
            rows: list[schema.TokenLogprob] = [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(texts, piece.logprobs, strict=True)
            ]
            return {"content": rows, "refusal": None}

        return await self._reply(request, asked, answer, "chatcmpl", choice)

    # Shared by the routes

    async def _parsed_body(self, request: Request, kind: type[Body]) -> Body:
        """Return the validated body, which is within the size limit and names the served model."""
        if self.failure is not None or self._stopping:
            raise RequestError(503, "the server stops and takes no more requests", code="stopping")
        content, seconds = bytearray(), self._options.receive_seconds
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    content += part
                    if len(content) > self._options.body_bytes:
                        raise RequestError(
                            413, f"the body has more than {self._options.body_bytes} bytes, which are allowed"
                        )
        except TimeoutError as error:
            raise RequestError(408, f"the body was not there within {seconds:g} seconds") from error
        except ClientDisconnect as error:
            raise RequestError(499, "the client has left") from error
        # Encoding a long prompt takes a while, so a full queue is refused first.
        self._inbox.require_room()
        asked = parse_body(bytes(content), kind)
        self._require_model(asked.model)
        return asked

    def _require_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise RequestError(
                404, f"the model is {self.name}, and no other is served", param="model", code="model_not_found"
            )

    def _answer(self, asked: CompletionRequest | ChatRequest, tokens: list[int], parser: Any) -> Answer:
        answer = Answer(self._inbox, self._served, asked, tokens, most=self._options.new_tokens, parser=parser)
        self._answers.add(answer)
        if self.failure is not None:  # The generator has failed meanwhile.
            answer.fail(self.failure)
        return answer

    def _end(self, answer: Answer) -> None:
        answer.cancel()
        self._answers.discard(answer)

    async def _full_answer(self, request: Request, answer: Answer) -> Piece:
        gone, made = asyncio.ensure_future(_until_gone(request)), asyncio.ensure_future(_all_of(answer))
        try:
            await asyncio.wait({gone, made}, return_when=asyncio.FIRST_COMPLETED)
            if not made.done():
                raise RequestError(499, "the client has left")
            return made.result()
        finally:
            gone.cancel()
            made.cancel()
            self._end(answer)

    async def _reply(
        self,
        request: Request,
        asked: CompletionRequest | ChatRequest,
        answer: Answer,
        kind: Literal["cmpl", "chatcmpl"],
        choice: Callable[..., schema.Choice],
    ) -> Response:
        """`choice` converts a piece to a choice of the response."""
        names = {"cmpl": "text_completion", "chatcmpl": "chat.completion.chunk" if asked.stream else "chat.completion"}
        head = {
            "id": f"{kind}-{uuid.uuid4().hex}", "object": names[kind], "created": int(time.time()), "model": self.name,
        }  # fmt: skip
        if not asked.stream:
            whole = await self._full_answer(request, answer)
            return JSONResponse({**head, "choices": [choice(whole, first=True)], "usage": _usage(answer)})

        async def events() -> AsyncIterator[str]:
            first = True
            try:
                async for piece in answer.pieces():
                    made = choice(piece, first=first)
                    if first or piece.shown or made["logprobs"]:
                        yield _event({**head, "choices": [made]})
                    first = False
                if (asked.stream_options or {}).get("include_usage"):
                    yield _event({**head, "choices": [], "usage": _usage(answer)})
                yield "data: [DONE]\n\n"
            except RequestError as error:
                yield _event(error.body())

        return _EventStream(events(), on_end=lambda: self._end(answer))


class _EventStream(StreamingResponse):
    """A streaming response that calls `on_end` even if the client disconnects before the first event."""

    def __init__(self, events: AsyncIterator[str], *, on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


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
            self.app = _refusal(error)
            self.app.headers["Connection"] = "close"
        self._await_head(None)

    def on_response_complete(self) -> None:
        answered = self.cycle
        super().on_response_complete()
        self._await_head(answered)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # The request is answered already.
            self.transport.close()
            return
        refused = _refusal(RequestError(400, msg.rstrip(".")))
        head = h11.Response(status_code=400, headers=[*refused.raw_headers, (b"connection", b"close")])
        for event in (head, h11.Data(data=bytes(refused.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _await_head(self, answered: Any) -> None:
        self.loop.call_later(self.head_seconds, self._abandon, answered)

    def _abandon(self, answered: Any) -> None:
        if self.cycle is answered:
            self.transport.close()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _all_of(answer: Answer) -> Piece:
    whole = Piece()
    async for piece in answer.pieces():
        whole.add(piece)
    return whole


def _usage(answer: Answer) -> schema.Usage:
    prompt, new = answer.prompt_tokens, answer.new_tokens
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _refusal(error: RequestError) -> Response:
    later = {"Retry-After": str(_RETRY_SECONDS)} if error.status in (429, 503) else {}
    login = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    return JSONResponse(error.body(), status_code=error.status, headers={**later, **login})


class _Guard:
    """Middleware that requires the token or, without one, a Host header of this machine and no foreign Origin.
    A web page of another host could otherwise send requests, or read answers through DNS rebinding."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app, self._options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if problem is None else _refusal(problem))(scope, receive, send)

    def _problem(self, headers: Headers) -> RequestError | None:
        for name in ("host", "origin", "authorization"):
            if len(headers.getlist(name)) > 1:
                return RequestError(400, f"the header {name.title()} is there more than once", code="repeated_header")
        token = self._options.token
        if token is not None:
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode("latin-1"), token.encode(errors="surrogateescape")):
                return RequestError(401, "the API key is missing or wrong", code="invalid_api_key")
            return None
        if not _is_loopback(headers.get("host", "")):
            return RequestError(403, "the Host header names no address of this host", code="wrong_host")
        scheme, _, place = headers.get("origin", "http://localhost").partition("://")
        if scheme.lower() not in ("http", "https") or not _is_loopback(place):
            return RequestError(403, "web pages of other hosts are not answered", code="wrong_origin")
        return None


_PLACE = re.compile(r"(?:\[([0-9a-f:.]+)\]|([0-9a-z.-]+))(?::\d{1,5})?", re.IGNORECASE | re.ASCII)


def _is_loopback(place: str) -> bool:
    """Return True if `HOST:PORT` is loopback; a literal IPv6 address stands in brackets."""
    found = _PLACE.fullmatch(place)
    if found is None or (found[1] is not None) != (":" in (found[1] or found[2])):
        return False
    return is_loopback(found[1] or found[2])
