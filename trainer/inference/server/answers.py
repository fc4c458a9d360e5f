"""`Answer`: one client's request, from its submission to the last piece of text.

transformers' serving code (`transformers.cli.serving`) separates tool calls and reasoning from plain text for the models whose
output format it knows; the tokenizer's chat template turns messages into a prompt. Its request handlers are not used: they ignore
fields silently, answer some bad requests with a traceback, and seed one generator for all requests.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from zeromesh.errors import ConfigError
from zeromesh.trainer.data.tokenizer import TextStream
from zeromesh.trainer.inference.requests import Inbox, Progress
from zeromesh.trainer.inference.server.schema import ChatRequest, CompletionRequest, RequestError

if TYPE_CHECKING:
    from zeromesh.trainer.inference.generator import Generator


@dataclass(kw_only=True, slots=True)
class Piece:
    """A part of a streamed answer."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Tool calls in the form of OpenAI's streamed deltas."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    """The finish reason on the last piece: `stop`, `length` or `tool_calls`."""

    @property
    def shown(self) -> bool:
        """True if the piece has anything that a client sees."""
        return bool(self.text or self.reasoning or self.tool_calls or self.finish)

    def add(self, other: Piece) -> None:
        """Append the piece that follows this one."""
        for name in ("text", "reasoning", "tool_calls", "tokens", "logprobs"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.finish = other.finish


class Answer:
    """Submits a request and streams its text in pieces; one event loop creates and uses it.

    Args:
        tokens: the prompt.
        most: the default of `max_new_tokens`.
        parser: separates tool calls and reasoning from text; None: all is text.

    Raises:
        ConfigError, DataError: for a request that the model cannot continue.
        QueueFullError, PhaseError: for a full queue, and for a server that stops.
    """

    def __init__(
        self,
        inbox: Inbox,
        served: Generator,
        asked: CompletionRequest | ChatRequest,
        tokens: Sequence[int],
        *,
        most: int,
        parser: Any,
    ) -> None:
        self.prompt_tokens = len(tokens)
        self.new_tokens = 0
        self._inbox, self._stops, self._parser = inbox, asked.stops, parser
        self._pieces: asyncio.Queue[Progress | BaseException] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        raw = served.tokenizer.decode_all if parser is not None and served.tokenizer is not None else served.decode
        self._stream = TextStream(raw)
        self._held = ""
        """Text held back because it may be the beginning of a stop sequence."""
        self._tool_calls = 0
        self.over = False
        positions, seed = served.positions, asked.seed
        fields = asked.fields(most if positions is None else max(1, min(most, positions - len(tokens))))
        served.check_request(tokens, fields)
        seed = secrets.randbits(62) if seed is None else seed
        self.number = inbox.submit(tokens, self._arrived, fields=fields, seed=seed)

    def _arrived(self, progress: Progress | BaseException) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, progress)

    def fail(self, error: BaseException) -> None:
        """End the answer with an error; any thread may call it."""
        self._arrived(error)

    def cancel(self) -> None:
        """Cancel the request, which frees its row of the batch."""
        if not self.over:
            self._inbox.cancel(self.number)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces as they are generated, up to the one with `finish`. Raises `RequestError` when the generator has failed."""
        if self._parser is not None:
            yield self._parsed(self._parser.initial_events, Piece())
        while not self.over:
            progress = await self._pieces.get()
            if isinstance(progress, BaseException):
                self.over = True
                raise RequestError(500, f"the generator has failed: {progress}", code="generator_failed") from progress
            last = progress.finish is not None
            self.new_tokens += len(progress.tokens)
            text, stopped = self._until_stop(self._stream.add(progress.tokens, last=last), last=last)
            self.over = stopped or last
            piece = Piece(text=text, tokens=progress.tokens, logprobs=progress.logprobs or [])
            if self._parser is not None:
                events = list(self._parser.feed(text)) if text else []
                with suppress(ValueError, RuntimeError):  # An answer that ends within a tool call has no whole one.
                    events += self._parser.finalize()[1] if self.over else ()
                piece = self._parsed(events, piece)
            if stopped:
                self._inbox.cancel(self.number)
            elif progress.finish == "not_finite":
                raise RequestError(500, "the model's logits for this prompt are NaN or infinite", code="not_finite")
            elif progress.finish == "cancelled":
                raise RequestError(503, "the server stops, and the answer was not over", code="stopping")
            if self.over:
                length = not stopped and progress.finish == "length"
                piece.finish = "tool_calls" if self._tool_calls else "length" if length else "stop"
            yield piece

    def _until_stop(self, text: str, *, last: bool) -> tuple[str, bool]:
        """Return the text that can be shown, and True if a stop sequence followed it."""
        held = self._held + text
        places = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if places:
            return held[: min(places)], True
        kept = 0 if last else max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept], False

    def _parsed(self, events: list[Any], piece: Piece) -> Piece:
        from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks

        piece.text = ""
        for chunk in response_events_to_chunks(events):
            if isinstance(chunk, ToolCall):
                function = {"name": chunk.name, "arguments": chunk.arguments}
                call = {"index": self._tool_calls, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
                piece.tool_calls.append({**call, "function": function})
                self._tool_calls += 1
            elif isinstance(chunk, ReasoningText):
                piece.reasoning += chunk
            else:
                piece.text += chunk
        return piece


def response_parser(served: Generator, tokens: Sequence[int], tools: Any) -> Any:
    """Return the response parser of transformers' serving code for this kind of model; None where it knows none.

    Raises:
        ConfigError: where that code is not as it is expected to be.
    """
    try:
        from transformers.cli.serving.utils import build_response_parser
    except ImportError as error:
        raise ConfigError(f"serve needs another version of transformers, tested with 5.23: {error}") from error
    tokenizer = getattr(served.tokenizer, "tokenizer", None)
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type=served.model_type))
    return build_response_parser(tokenizer, model, list(tokens), tools=tools)


def chat_tokens(served: Generator, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]:
    """Return the tokens of a conversation. Raises `RequestError` for messages without text, or that the chat template refuses."""
    plain = [_plain(message, f"messages.{index}") for index, message in enumerate(messages)]
    tokenizer = served.tokenizer
    if tokenizer is None:
        raise RequestError(400, "the model has no tokenizer")
    with RequestError.about("messages"):
        tokens = tokenizer.encode_messages(plain, tools=tools)
        if tools and tokens == tokenizer.encode_messages(plain):
            raise RequestError(400, "the model's chat template knows no tools", param="tools")
    return tokens


def _plain(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a message with text alone and tool-call arguments as mappings, as chat templates expect them."""
    found = {name: value for name, value in message.items() if value is not None}
    content = found.get("content", "")
    if not isinstance(content, str):
        if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in content):
            raise RequestError(
                400, f"{where}.content: parts have type text and a text; others are not taken", param=where
            )
        found["content"] = " ".join(part["text"] for part in content)
    calls = found.get("tool_calls", [])
    try:
        for call in calls:
            function = call["function"]
            if isinstance(function["arguments"], str):
                call["function"] = {**function, "arguments": from_json(function["arguments"])}
    except (TypeError, KeyError, ValueError) as error:
        raise RequestError(
            400, f"{where}.tool_calls: calls have a function with name and arguments", param=where
        ) from error
    return found


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
