"""Validated request bodies of OpenAI's completions and chat completions, and responses and errors in the form that its clients
read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zeromesh.errors import PhaseError, QueueFullError, ZeromeshError, printable

_Stop = Annotated[str, Field(min_length=1, max_length=256)]


class RequestError(ZeromeshError):
    """A refused request: the HTTP status, the message, and the field of the body that is wrong."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @classmethod
    def of(cls, error: ZeromeshError, param: str | None = None) -> RequestError:
        """Convert an error of the library into the error that the client receives; `param` names the field of the body."""
        if isinstance(error, cls):
            return error
        full, stops = isinstance(error, QueueFullError), isinstance(error, PhaseError)
        status, code = (429, "queue_full") if full else (503, "stopping") if stops else (400, None)
        return cls(status, str(error), param=param, code=code)

    @classmethod
    @contextmanager
    def about(cls, param: str) -> Iterator[None]:
        """Name the field `param` in errors that are raised inside the block."""
        try:
            yield
        except ZeromeshError as error:
            raise cls.of(error, param) from error

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the error response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


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
    user: str | None = None
    """Accepted and ignored, as in OpenAI's own service."""

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    def fields(self, most: int) -> dict[str, Any]:
        """Return fields of `GenerationConfig`; `most` is the default of `max_new_tokens`."""
        found: dict[str, Any] = {"max_new_tokens": self.most_tokens or most}
        if self.temperature is not None and self.temperature < _GREEDY_BELOW:
            return found | {"do_sample": False}
        draws = {"temperature": self.temperature, "top_p": self.top_p}
        draws = {name: value for name, value in draws.items() if value is not None}
        return found | ({"do_sample": True, **draws} if draws else {})


_GREEDY_BELOW = 1e-5
"""Temperatures below this decode greedily: dividing logits by a lower one may overflow, and the best token is drawn in any case."""


class CompletionRequest(_Options):
    """The body of `/v1/completions`."""

    prompt: str | list[int]
    logprobs: Literal[0] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")
    role: Annotated[str, Field(max_length=64)]
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(_Options):
    """The body of `/v1/chat/completions`."""

    most_messages: ClassVar[int] = 4096
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=most_messages)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto"] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


# Bodies of responses, with the keys of OpenAI's service.


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Any]


class ChoiceLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class ChoiceMessage(TypedDict, total=False):
    content: str | None
    refusal: None
    role: str
    reasoning_content: str
    tool_calls: list[dict[str, Any]]


class Choice(TypedDict):
    index: int
    text: NotRequired[str]
    message: NotRequired[ChoiceMessage]
    delta: NotRequired[ChoiceMessage]
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None


Body = TypeVar("Body", bound=_Options)


def parse_body(content: bytes, kind: type[Body]) -> Body:
    """Parse and validate a JSON body. Raises `RequestError` 400 that names the wrong field."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or None
        raise RequestError(
            400, printable(f"{where or 'body'}: {first['msg']}"), param=where and printable(where)
        ) from error
