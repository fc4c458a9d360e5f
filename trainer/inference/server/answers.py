"""`Answer`: one client's request, from its submission to the last piece of text.

transformers' serving code separates tool calls and reasoning from text for the models whose output format it knows. Its request
handlers are not used: they ignore fields silently, answer some bad requests with a traceback, and seed all requests together."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from zeromesh.errors import ConfigError, errors_as
from zeromesh.trainer.data.tokenizer import TextStream
from zeromesh.trainer.generation.requests import Inbox, Progress
from zeromesh.trainer.inference.server.schema import ChatRequest, CompletionRequest, Piece, RequestError

if TYPE_CHECKING:
    from zeromesh.trainer.inference.generator import Generator


class Answer:
    """Submits a request and streams its text in pieces, within one event loop. `most` is the default of `max_new_tokens`; `parser`
    separates tool calls and reasoning from text, if given. Raises as `Generator.check_request` and `Inbox.submit`."""

    def __init__(
        self,
        inbox: Inbox,
        served: Generator,
        asked: CompletionRequest | ChatRequest,
        tokens: Sequence[int],
        *,
        most: int,
        parser: Any,
        adapter: str | None,
    ) -> None:
        self._inbox, self._served, self._stops, self._parser = inbox, served, asked.stops, parser
        self._pieces: asyncio.Queue[Progress | BaseException] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        positions, seed = served.positions, asked.seed
        fields = asked.fields(most if positions is None else max(1, min(most, positions - len(tokens))))
        served.check_request(tokens, fields)
        seed = secrets.randbits(62) if seed is None else seed
        self._number = inbox.submit(tokens, self.put, fields=fields, seed=seed, adapter=adapter)

    def put(self, progress: Progress | BaseException) -> None:
        """Take progress, or the error that ends the answer; any thread may call it."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, progress)

    def cancel(self) -> None:
        self._inbox.cancel(self._number)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces as they are generated, up to the one with `finish`. Raises `RequestError` when the generator has failed."""
        parser, tokenizer = self._parser, self._served.tokenizer
        stream = TextStream(self._served.decode if parser is None or tokenizer is None else tokenizer.decode_raw)
        held, calls, over = "", 0, False
        if parser is not None:
            yield _parsed(parser.initial_events, Piece(), calls)
        while not over:
            if isinstance(progress := await self._pieces.get(), BaseException):
                raise RequestError(500, f"the generator has failed: {progress}", code="generator_failed") from progress
            finish = progress.finish
            text = held + stream.add(progress.tokens, last=finish is not None)
            stopped = [index for stop in self._stops if (index := text.find(stop)) >= 0]
            if not stopped and finish == "not_finite":
                raise RequestError(500, "the model's logits for this prompt are NaN or infinite", code="not_finite")
            if not stopped and finish == "cancelled":
                raise RequestError(503, "the server stops, and the answer was not over", code="stopping")
            over = bool(stopped or finish)
            # An end of the text that may be the beginning of a stop sequence is held back.
            ends = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
            shown = min(stopped) if stopped else len(text) - (0 if over else max(ends, default=0))
            text, held = text[:shown], text[shown:]
            piece = Piece(text=text, tokens=progress.tokens, logprobs=progress.logprobs or [])
            if parser is not None:
                events = list(parser.feed(text)) if text else []
                with suppress(ValueError, RuntimeError):  # An answer that ends within a tool call has no whole one.
                    events += parser.finalize()[1] if over else ()
                piece = _parsed(events, piece, calls)
                calls += len(piece.tool_calls)
            if over:
                piece.finish = "tool_calls" if calls else "length" if not stopped and finish == "length" else "stop"
            yield piece


def _parsed(events: list[Any], piece: Piece, calls: int) -> Piece:
    """Return a piece with the text, the reasoning and the tool calls of a parser's events; `calls` came before."""
    from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks

    piece.text = ""
    for chunk in response_events_to_chunks(events):
        if isinstance(chunk, ToolCall):
            call = {"index": calls + len(piece.tool_calls), "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            piece.tool_calls.append({**call, "function": {"name": chunk.name, "arguments": chunk.arguments}})
        elif isinstance(chunk, ReasoningText):
            piece.reasoning += chunk
        else:
            piece.text += chunk
    return piece


def response_parser(served: Generator, tokens: Sequence[int], tools: Any) -> Any:
    """Return transformers' response parser for this model, None without one. Raises `ConfigError` for an unknown interface."""
    with errors_as(ConfigError, "serve needs another version of transformers, tested with 5.23: ", ImportError):
        from transformers.cli.serving.utils import build_response_parser
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type=served.model_type))
    return build_response_parser(getattr(served.tokenizer, "tokenizer", None), model, list(tokens), tools=tools)


def chat_tokens(served: Generator, asked: ChatRequest) -> list[int]:
    """Return the tokens of a conversation. Raises `RequestError` for messages that the chat template refuses."""
    messages, tokenizer = [message.model_dump(exclude_none=True) for message in asked.messages], served.tokenizer
    if tokenizer is None:
        raise RequestError(400, "the model has no tokenizer")
    with RequestError.about("messages"):
        tokens = tokenizer.encode_messages(messages, tools=asked.tools)
        if asked.tools and tokens == tokenizer.encode_messages(messages):
            raise RequestError(400, "the model's chat template knows no tools", param="tools")
    return tokens
