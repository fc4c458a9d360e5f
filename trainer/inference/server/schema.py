"""Bodies of OpenAI's completions and chat completions: requests, answers, and errors in the form that its clients read."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from zeromesh.errors import PhaseError, QueueFullError, ZeromeshError
from zeromesh.trainer.data.tokenizer import decoded_call

_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_GREEDY_BELOW = 1e-5  # dividing logits by a lower temperature may overflow, and the best token is drawn in any case


class RequestError(ZeromeshError):
    """A refused request: the HTTP status, the message, and the field of the body that is wrong."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @classmethod
    def of(cls, error: ZeromeshError, param: str | None = None) -> "RequestError":
        """Convert an error of the library into the error that the client receives; `param` names the field of the body."""
        if isinstance(error, cls):
            return error
        kinds = {QueueFullError: (429, "queue_full"), PhaseError: (503, "stopping"), ZeromeshError: (400, None)}
        status, code = next(answer for kind, answer in kinds.items() if isinstance(error, kind))
        return cls(status, str(error), param=param, code=code)

    @classmethod
    @contextmanager
    def about(cls, param: str) -> Iterator[None]:
        """Name the field `param` in errors that are raised inside the block."""
        try:
            yield
        except ZeromeshError as error:
            raise cls.of(error, param) from error

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the JSON body of the error response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(kw_only=True, slots=True)
class Piece:
    """A part of what a model answers."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # As OpenAI's streamed deltas.
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None  # The finish reason on the last piece: `stop`, `length` or `tool_calls`.

    def add(self, other: "Piece") -> None:
        for name in ("text", "reasoning", "tool_calls", "tokens", "logprobs"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.finish = other.finish


class _Options(BaseModel):
    """Fields that both endpoints share. Unknown fields and fields that would be ignored silently are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: dict[Literal["include_usage"], bool] | None = None
    n: Literal[1] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    user: str | None = None  # Accepted and ignored, as in OpenAI's own service.

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def fields(self, most: int) -> dict[str, Any]:
        """Return fields of `GenerationConfig`; `most` is the default of `max_new_tokens`."""
        fields = {"max_new_tokens": getattr(self, "max_completion_tokens", None) or self.max_tokens or most}
        draws = self.model_dump(include={"temperature", "top_p"}, exclude_none=True)
        if draws.get("temperature", 1.0) < _GREEDY_BELOW:
            return fields | {"do_sample": False}
        return fields | ({"do_sample": True, **draws} if draws else {})


class CompletionRequest(_Options):
    kind: ClassVar[str] = "cmpl"
    object: ClassVar[str] = "text_completion"
    prompt: str | list[int]
    logprobs: Literal[0] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None

    def choice(self, piece: Piece, *, first: bool, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """Return a piece as a choice of the answer."""
        return {"index": 0, "text": piece.text, "logprobs": None, "finish_reason": piece.finish}


class ChatMessage(BaseModel):
    """One message of a conversation, with text alone and tool-call arguments as mappings, as chat templates expect them."""

    model_config = ConfigDict(extra="allow")
    role: Annotated[str, Field(max_length=64)]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _arguments(cls, calls: Any) -> Any:
        try:
            return calls and [*map(decoded_call, calls)]
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError("calls have a function with name and arguments") from error


class ChatRequest(_Options):
    kind: ClassVar[str] = "chatcmpl"
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto"] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None

    @property
    def object(self) -> str:
        return "chat.completion.chunk" if self.stream else "chat.completion"

    def choice(self, piece: Piece, *, first: bool, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """Return a piece as a choice of the answer; `decode` gives the text of tokens."""
        message: dict[str, Any] = {"role": "assistant"} if first else {}
        if piece.text or (first and not piece.tool_calls):
            message["content"] = piece.text
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        calls = piece.tool_calls
        if not self.stream:
            message = {"content": None, "refusal": None, **message}
            calls = [{name: value for name, value in call.items() if name != "index"} for call in calls]
        if calls:
            message["tool_calls"] = calls
        logprobs = None
        if self.logprobs:
            rows = [
                {"token": (text := decode([token])), "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for token, value in zip(piece.tokens, piece.logprobs, strict=True)
            ]
            logprobs = {"content": rows, "refusal": None}
        name = "delta" if self.stream else "message"
        return {"index": 0, name: message, "logprobs": logprobs, "finish_reason": piece.finish}
