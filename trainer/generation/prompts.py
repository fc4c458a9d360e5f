"""Forms of prompts, and files of prompts in JSON lines. Nothing here loads torch."""

import json
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeromesh.errors import DataError, errors_as, first_lines, printable
from zeromesh.files import json_object, read_whole
from zeromesh.trainer.data.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text, token ids, messages (`{"role": ..., "content": ...}`), or one of these under its key, with fields of `GenerationConfig`."""
KEYS = ("text", "messages", "input_ids")  # The keys of prompts, of which a line has exactly one.
_SHOWN = 60
_SHOWN_PROBLEMS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLine:
    prompt: Mapping[str, Any]  # The line's mapping with one of `KEYS`, and fields of `GenerationConfig`.
    id: str | int  # The `id` of its line, or else the index of the prompt, from 0.
    where: str


def read_prompts(path: Path) -> list[PromptLine]:
    """Read the prompts of a file of JSON lines, as `parse_prompts` does. Raises `DataError` for one that cannot be read, too."""
    cure = "; give a file, or - for standard input"
    with errors_as(DataError, f"--prompts {str(path)!r} cannot be read: ", OSError, after=cure):
        # Symbolic links may be followed, as nothing here writes to the file.
        content = read_whole(path.resolve() if path.is_file() else path)
    return parse_prompts(content, str(path))


def parse_prompts(content: bytes, where: str) -> list[PromptLine]:
    """Parse JSON lines, without empty ones. Raises `DataError` with the numbers of invalid lines, and where there is no prompt."""
    prompts: list[PromptLine] = []
    problems: list[str] = []
    for number, line in enumerate(content.removeprefix(BOM_UTF8).split(b"\n"), start=1):
        if line.strip():
            try:
                prompts.append(_parse_line(line, len(prompts), f"{where}, line {number}"))
            except DataError as error:
                problems.append(str(error))
    if problems:
        raise DataError("\n".join(first_lines(problems, _SHOWN_PROBLEMS)))
    if not prompts:
        raise DataError(f'{where} has no prompt; give a line for each, such as {{"text": "Once"}}')
    return prompts


def _parse_line(line: bytes, number: int, where: str) -> PromptLine:
    form, text = f"a prompt is an object with one of {', '.join(KEYS)}", _shorten(line.decode(errors="replace"))
    row = json_object(line, lambda why: DataError(f"{where}: {form}; it {why}: {text}"))
    with errors_as(DataError, f"{where}: it has half of a character, which is no text: ", UnicodeEncodeError):
        json.dumps(row, ensure_ascii=False).encode()
    if not isinstance(name := row.pop("id", number), str | int):
        raise DataError(f"{where}: id is text or a number, not {_shorten(json.dumps(name))}")
    split_prompt(row, where)
    return PromptLine(prompt=row, id=name, where=where)


def split_prompt(prompt: Any, where: str) -> tuple[Any, dict[str, Any]]:
    """Split a prompt into its content and its options: fields of `GenerationConfig`, and `seed`. Raises `DataError`."""
    if not isinstance(prompt, Mapping):
        return prompt, {}
    if len(given := [key for key in KEYS if key in prompt]) != 1:
        raise DataError(f"{where}: a prompt has one of {', '.join(KEYS)}; it has {' and '.join(given) or 'none'}")
    if problem := problem_of(prompt[given[0]], given[0]):
        raise DataError(f"{where}: {given[0]} {problem}, not {_shorten(json.dumps(prompt[given[0]], default=str))}")
    seed = prompt.get("seed", 0)
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise DataError(f"{where}: seed is an integer in [0, 2**63 - 1], not {_shorten(json.dumps(seed, default=str))}")
    return prompt[given[0]], {key: value for key, value in prompt.items() if key != given[0]}


def problem_of(prompt: Any, key: str | None = None) -> str:
    """Return the required form of an invalid prompt, or of an invalid value of its `key`, for an error; empty for a valid one."""
    if isinstance(prompt, str) and key in (None, "text"):
        return "" if prompt else "is text of at least one letter"
    items = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes) else []
    if key in (None, "input_ids") and items and all(type(each) is int and each >= 0 for each in items):
        return ""
    if key in (None, "messages") and items and all(isinstance(each, Mapping) and "role" in each for each in items):
        return ""
    forms = {
        "text": "is text",
        "input_ids": "is a list of token ids, integers of at least 0",
        "messages": "is a list of messages such as {role: user, content: text}",
    }
    return forms[key] if key else "is text, a list of token ids, or a list of messages, with something in it"


def tokens_of(prompt: Any, tokenizer: Tokenizer | None, where: str) -> list[int]:
    """Return the tokens of a prompt. Raises `DataError`, with its name `where`, for other values and half characters."""
    if problem := problem_of(prompt):
        raise DataError(f"{where} {problem}")
    if not isinstance(prompt, str) and not isinstance(prompt[0], Mapping):
        return list(prompt)
    if tokenizer is None:
        raise DataError(f"{where} is text, and the model has no tokenizer; give token ids, or set data.tokenizer")
    try:
        json.dumps(prompt, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where} has half of a character or bytes that are no UTF-8, which is no text") from error
    with errors_as(DataError, f"{where}: ", DataError):
        return tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else tokenizer.encode_messages(prompt)


def _shorten(text: str) -> str:
    text = printable(text.strip())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
