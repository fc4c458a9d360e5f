"""HTML that cannot be broken by what it shows: every text is escaped where it becomes part of an element."""

from __future__ import annotations

import html
import json
from typing import Any

_VOID = frozenset({"meta", "link", "br"})


class Html(str):
    """Markup. Other text is escaped when it is put into an element."""

    __slots__ = ()


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """`<name attributes>children</name>`.

    A child is `Html`, any other value (as escaped text), a list of these, or None, which is nothing. `class_` is the attribute
    `class`, `_` stands for `-`. An attribute that is None or False is left out, one that is True has no value.
    """
    words = "".join(
        _attribute(key, value) for key, value in attributes.items() if value is not None and value is not False
    )
    if name in _VOID:
        return Html(f"<{name}{words}>")
    return Html(f"<{name}{words}>{join(*children)}</{name}>")


def join(*children: object) -> Html:
    """Children of an element, without one around them."""
    return Html("".join(map(_child, children)))


def _child(child: object) -> str:
    if child is None:
        return ""
    if isinstance(child, list | tuple):
        return "".join(map(_child, child))
    return child if isinstance(child, Html) else escaped(str(child))


def escaped(text: str) -> str:
    """`text` without markup, and without what would not be seen or could not be written in UTF-8."""
    seen = "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
    return html.escape(seen, quote=True)


def _attribute(name: str, value: object) -> str:
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escaped(str(value))}"'


def data_block(identifier: str, value: Any) -> Html:
    """A script element that holds `value` as JSON, to be read by the page's own script."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":  # JSON has them in texts alone, and there they may be written as escapes.
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Html(f'<script type="application/json" id="{escaped(identifier)}">{text}</script>')
