"""`TextStream`: the text of tokens that come one by one. Nothing here loads torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "�"
"""What stands in a text for bytes that are no whole character."""


class TextStream:
    """Turns new tokens into new text, which ends with a whole character.

    Args:
        decode: the text of tokens, without special ones.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._begin = self._told = 0
        """Tokens from the first are decoded anew with each; of their text so many letters were told."""

    def add(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Return the text that is new with these tokens; `last`: none come after, so that what is unfinished stays so."""
        self._tokens += tokens
        text = self._decode(self._tokens[self._begin :])
        end = len(text)
        if not last:
            end = len(text.rstrip(_UNFINISHED))
        new = text[self._told : end]
        self._told = max(self._told, end)
        # What stands before a line's end does not change how the rest is decoded, as far as is known of any tokenizer.
        if new.endswith("\n") and end == len(text):
            self._begin, self._told = len(self._tokens), 0
        return new
