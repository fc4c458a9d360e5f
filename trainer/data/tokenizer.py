"""Tokenizers: UTF-8 bytes as token ids, or a Hugging Face tokenizer from a directory."""

import copy
import hashlib
import json
import os
import re
import resource
import signal
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from pydantic_core import from_json

from zeromesh.errors import DataError, errors_as, library_errors
from zeromesh.trainer.config.yaml_reader import read_texts

BYTES = "bytes"
_FILE_NAMES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_NO_TEMPLATE = "messages become a prompt by a chat template, and the tokenizer has none"

TokenArray = NDArray[Any]
Encoded = tuple[TokenArray, TokenArray | None]  # The ids of a text, and the offsets of its tokens, if known.


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteTokenizer:
    """Bytes of UTF-8 text as tokens. Byte 255, which UTF-8 never contains (RFC 3629), ends a text: the vocabulary stays 256."""

    vocab_size: int = 256
    end_of_text: int = 255
    padding: int = 255
    prefix_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict, hash=False)

    def encode(self, texts: Sequence[str], *, offsets: bool = False) -> list[Encoded]:
        """Return each text's UTF-8 bytes, uint8, lone surrogates as '?', and no offsets: pieces of a text give the same bytes."""
        return [(np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8), None) for text in texts]

    def encode_prompt(self, text: str, limit: int | None = None) -> list[int]:
        return list(text.encode("utf-8", errors="replace")[:limit])

    def encode_messages(self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None) -> list[int]:
        """Raise `DataError`, as bytes have no chat template."""
        raise DataError(f"{_NO_TEMPLATE}; this run's tokenizer is bytes: give text")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes without the end-of-text byte; invalid UTF-8 becomes U+FFFD."""
        return bytes(each for each in ids if each < self.end_of_text).decode("utf-8", errors="replace")

    decode_raw = decode

    def template(self, given: str | None, tools: Any) -> str | None:
        return given

    def digest(self) -> str | None:
        """Return a digest that is equal for tokenizers that give equal ids; None if unknown."""
        return BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainedTokenizer:
    """A transformers tokenizer with the methods of `ByteTokenizer`. Raises `DataError` for one without an end-of-text token."""

    tokenizer: Any

    def __post_init__(self) -> None:
        if not callable(self.tokenizer) or not hasattr(self.tokenizer, "eos_token_id"):
            cure = "give a tokenizer, such as AutoTokenizer.from_pretrained(DIR), or name its directory in the configuration"
            raise DataError(f"processing_class is a {type(self.tokenizer).__name__}; {cure}: data.tokenizer")
        if self.end_of_text is None:
            raise DataError("the tokenizer has neither eos_token nor sep_token to end texts: set and save eos_token")

    @property
    def vocab_size(self) -> int:
        """The number of ids, added tokens included."""
        return len(self.tokenizer)

    @property
    def end_of_text(self) -> int:
        """The id of `eos_token`, or else of `sep_token`."""
        end: int = self.tokenizer.sep_token_id if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id
        return end

    @property
    def padding(self) -> int:
        """The id of `pad_token`, or else of the end-of-text token."""
        pad = self.tokenizer.pad_token_id
        return self.end_of_text if pad is None else int(pad)

    def encode(self, texts: Sequence[str], *, offsets: bool = False) -> list[Encoded]:
        """Return each text's ids, int64, without special tokens, and the tokens' offsets `[tokens, 2]`, if asked and known."""
        if not texts:
            return []
        offsets = offsets and getattr(self.tokenizer, "is_fast", False)
        settings = {"add_special_tokens": False, "return_attention_mask": False, "return_offsets_mapping": offsets}
        found = self.tokenizer(list(texts), verbose=False, **settings)
        ids = [np.asarray(each, np.int64) for each in found["input_ids"]]
        if not offsets:
            return [(each, None) for each in ids]
        spans = [np.asarray(each, np.int64).reshape(-1, 2) for each in found["offset_mapping"]]
        return list(zip(ids, spans, strict=True))

    def encode_prompt(self, text: str, limit: int | None = None) -> list[int]:
        """Return the ids of a text with the tokenizer's special tokens, cut to `limit` tokens, if given."""
        return list(self.tokenizer(text, truncation=limit is not None, max_length=limit)["input_ids"])

    def encode_messages(self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None) -> list[int]:
        """Return the ids of a conversation rendered by the chat template, with the generation prompt. `tools` are JSON schemas of
        functions that the assistant may call. Raises `DataError` without a template, and for messages that it refuses."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise DataError(f"{_NO_TEMPLATE}; give text, or a model whose tokenizer has one (chat_template.jinja)")
        self.require_bounded_template()
        keys = {"tools": tools, "add_generation_prompt": True, "return_dict": False}
        apply = partial(self.tokenizer.apply_chat_template, **keys)
        with library_errors(before="the chat template refuses these messages: ", kind=DataError):
            return list(apply(readable(list(map(dict, messages)), partial(apply, tokenize=False))))

    def require_bounded_template(self) -> None:
        if getattr(self.tokenizer, "chat_template", None):
            apply = partial(self.tokenizer.apply_chat_template, tokenize=False)
            require_bounded(str(self.tokenizer.chat_template), lambda messages, tools: apply(messages, tools=tools))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def decode_raw(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens."""
        return str(self.tokenizer.decode(list(ids)))

    def template(self, given: str | None, tools: Any) -> str | None:
        """Return the Jinja chat template: `given` (text, or a name in the tokenizer), or else the tokenizer's; or None."""
        if given is None and not getattr(self.tokenizer, "chat_template", None):
            return None
        with errors_as(DataError, "data.chat_template: ", ValueError):  # It has several templates and no default.
            return str(self.tokenizer.get_chat_template(given, tools))

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens that chat templates may use, such as `bos_token` and `eos_token`."""
        return dict(self.tokenizer.special_tokens_map)

    @property
    def prefix_ids(self) -> list[int]:
        """The ids that the tokenizer adds before a text, such as that of `bos_token`."""
        plain, whole = (list(self.tokenizer("a", add_special_tokens=added)["input_ids"]) for added in (False, True))
        offsets = range(len(whole) - len(plain) + 1) if plain else ()
        begin = next((place for place in offsets if whole[place : place + len(plain)] == plain), None)
        if begin is not None:
            return whole[:begin]
        added = list(self.tokenizer("")["input_ids"])  # The vocabulary does not have the letter "a".
        return added[:-1] if added and added[-1] == self.end_of_text else added

    def with_template(self, given: str) -> "PretrainedTokenizer":
        """Return a copy with the `given` chat template, text or a name, so that a model is saved with the one it learnt."""
        own, named = copy.deepcopy(self.tokenizer), getattr(self.tokenizer, "chat_template", None)
        if "{" not in given and not (isinstance(named, Mapping) and given in named):
            raise DataError(f"data.chat_template: {given!r} is no template, file or name of the tokenizer's templates")
        own.chat_template = self.template(given, None)
        return PretrainedTokenizer(tokenizer=own)

    def digest(self) -> str | None:
        """Return a digest of the files of `save_pretrained` and the libraries' versions; None without that method."""
        if not hasattr(self.tokenizer, "save_pretrained"):
            return None
        versions = " ".join(version(package) for package in ("transformers", "tokenizers"))
        kind = f"{type(self.tokenizer).__qualname__} {versions} {self.end_of_text}"
        found = hashlib.blake2b(kind.encode(), digest_size=16)
        with tempfile.TemporaryDirectory(prefix="zeromesh-tokenizer-") as folder:
            self.tokenizer.save_pretrained(folder)
            for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                found.update(f"{path.relative_to(folder)} {path.stat().st_size} ".encode() + path.read_bytes())
        return found.hexdigest()


Tokenizer = ByteTokenizer | PretrainedTokenizer
_BOUNDED_TEMPLATES: set[str] = set()  # that this process has rendered within the limits, and does not try again
_TEMPLATE_SECONDS = 10.0
_TEMPLATE_BYTES, _TEMPLATE_CHARACTERS = 512 << 20, 1 << 24
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


def require_bounded(template: str, render: Callable[..., object], *conversations: list[dict[str, Any]]) -> None:
    """Call `render(messages, tools)` for `conversations` and samples, with and without tools, in a child process. Raises
    `DataError` if that takes too much time, memory or text; a `template` that has passed once is not rendered again."""
    if template in _BOUNDED_TEMPLATES:
        return
    samples = read_texts(Path(__file__).with_name("sample_conversations.yaml"))
    # Python warns of a fork beside threads; the child uses none of them.
    with warnings.catch_warnings(action="ignore"):
        child = os.fork()
    if not child:
        code = 0
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, _TEMPLATE_SECONDS)
            most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + _TEMPLATE_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            for messages, tools in product((*conversations, *samples["conversations"]), (None, [samples["tool"]])):
                with suppress(*_TEMPLATE_ERRORS):
                    code |= not code and len(str(render(messages, tools))) > _TEMPLATE_CHARACTERS
        except MemoryError:
            code = 1
        finally:  # The parent meets other errors itself when it renders, and reports them.
            os._exit(code)
    if status := os.waitpid(child, 0)[1]:
        late = f"comes to no end within {_TEMPLATE_SECONDS:g} seconds"
        what = "makes too much text" if os.WIFEXITED(status) else late
        raise DataError(f"the chat template {what}; give another one (chat_template.jinja beside the tokenizer)")
    _BOUNDED_TEMPLATES.add(template)


def joined_text(content: Any) -> Any:
    """Return the content of a message, a list of parts of text joined by spaces. Raises `DataError` for other parts."""
    if not isinstance(content, list):
        return content
    texts: list[Any] = [one.get("text") for one in content if isinstance(one, Mapping) and one.get("type") == "text"]
    if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
        raise DataError("content is a list of other parts than text; allowed are text and {type: text, text: ...}")
    return " ".join(texts)


def decoded_call(call: Any) -> Any:
    """Return the call of a function with arguments as a value, also where they are JSON in text, as OpenAI has them."""
    function = call["function"]
    is_text = isinstance(function["arguments"], str)
    return {**call, "function": {**function, "arguments": from_json(function["arguments"])}} if is_text else call


def readable(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> list[dict[str, Any]]:
    """Return messages with calls decoded, and parts of text joined unless the template reads parts: others leave their text out,
    write them as Python or JSON, or raise an error. Raises `DataError` as `joined_text`, and for arguments that are no JSON."""
    for number, each in enumerate(messages):
        # Some templates have calls of another form.
        with suppress(TypeError, KeyError), errors_as(DataError, "tool_calls: arguments are no JSON: ", ValueError):
            messages[number] = {**each, "tool_calls": [*map(decoded_call, each["tool_calls"])]}
    joined = [{**each, "content": joined_text(each["content"])} if "content" in each else each for each in messages]
    lists = [each["content"] for each in messages if isinstance(each.get("content"), list)]
    with suppress(DataError, *_TEMPLATE_ERRORS):
        written = render(messages) if lists else ""
        raw = any(form in written for parts in lists for form in (str(parts), json.dumps(parts, ensure_ascii=False)))
        if not raw and all(part["text"].strip() in written for parts in lists for part in parts):
            return messages
    return joined


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return the special ids of a new model. What ends texts may begin them, but is no padding, whose embedding is not learnt."""
    own, end = getattr(tokenizer, "tokenizer", None), tokenizer.end_of_text
    begin, pad = (getattr(own, name, None) for name in ("bos_token_id", "pad_token_id"))
    return {"bos_token_id": end if begin is None else begin, "eos_token_id": end, "pad_token_id": None if pad == end else pad}


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in _FILE_NAMES)


def load_tokenizer(spec: str | Path | None) -> Tokenizer:
    """Load the tokenizer of `data.tokenizer`, `bytes` for None, without downloads or code of the directory. Raises `DataError`."""
    if spec is None or spec == BYTES:
        return ByteTokenizer()
    if not (path := Path(spec).expanduser()).is_dir():
        why = f"data.tokenizer {str(spec)!r} is neither 'bytes' nor a directory on this machine; hub names are not looked up"
        raise DataError(f"{why}: save the tokenizer with save_pretrained and give that directory")
    if not has_tokenizer(path):
        why = f"data.tokenizer {str(spec)!r} holds no tokenizer ({', '.join(_FILE_NAMES)})"
        raise DataError(f"{why}; give one that save_pretrained of a tokenizer wrote, or bytes for a model of bytes")
    from transformers import AutoTokenizer

    with library_errors(before=f"data.tokenizer {str(spec)!r} cannot be loaded: ", kind=DataError):
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        found = PretrainedTokenizer(tokenizer=tokenizer)
        found.decode(found.encode_prompt("a"))  # Some damage in the files shows only in a call.
        return found


_UNFINISHED = re.compile(r"( (n'?|'[vr]?)?| ' )?�*$")  # a space that what follows may take away (" n't"), and half a character
_CONTEXT_TOKENS = 12  # decoded again before new ones; divisible by 1 to 4, the bytes of a UTF-8 character


class TextStream:
    """An incremental decoder: `add` takes new token ids, and returns whole new characters. `decode` maps ids to text."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._returned = 0  # characters of the text of `_tokens`

    def add(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Return the text that these tokens add; `last` also returns an incomplete character."""
        self._tokens += tokens
        text = self._decode(self._tokens)
        end = len(text if last else _UNFINISHED.sub("", text))
        new = text[self._returned : end]
        self._returned = max(self._returned, end)
        if len(self._tokens) > 2 * _CONTEXT_TOKENS and end == len(text):
            # Many decoders drop the first token's space, so some tokens stay as context, if these begin at a whole character.
            kept = self._decode(self._tokens[-_CONTEXT_TOKENS:])
            if kept and text.endswith(kept):
                self._tokens, self._returned = self._tokens[-_CONTEXT_TOKENS:], len(kept)
        return new
