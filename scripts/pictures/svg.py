"""Small drawings: rectangles, lines and words as SVG that follows the reader's light or dark scheme. No text is measured."""

from html import escape

_STYLE = """\
svg { --ink: #1b1f24; --soft: #57606a; --rule: #c4ccd6; --paper: #fff; --a: #1769c9; --b: #c2570a; --c: #1f8a4d; --d: #9c3ba8; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6e9ee; --soft: #a3acb8; --rule: #4a525d; --paper: #1e2129; --a: #5aa7ff; --b: #ff9a4d; --c: #55cf8c;
    --d: #e07fe8; }
}
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; fill: var(--ink); }
.soft { fill: var(--soft); } .small { font-size: 11px; } .bold { font-weight: 600; } .on { fill: var(--paper); font-weight: 600; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12px; }
.box { fill: none; stroke: var(--rule); } .dashed { stroke-dasharray: 4 3; } .line { stroke: var(--rule); fill: none; }
.arrow { stroke: var(--soft); fill: none; marker-end: url(#tip); } .tip { fill: var(--soft); }
.gap { fill: url(#hatch); stroke: none; } .hatch { stroke: var(--soft); stroke-width: 1.2; }
.fa { fill: var(--a); } .fb { fill: var(--b); } .fc { fill: var(--c); } .fd { fill: var(--d); } .faint { opacity: 0.22; }
.la { stroke: var(--a); fill: none; } .lb { stroke: var(--b); fill: none; } .lc { stroke: var(--c); fill: none; }
.ld { stroke: var(--d); fill: none; } .thick { stroke-width: 3; }
"""
_MARKS = """\
<defs>
<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path class="tip" d="M0 0L8 4L0 8z"/></marker>
<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<path class="hatch" d="M0 0V5"/></pattern>
</defs>
"""


class Drawing:
    """A picture of `width` x `height` pixels. Coordinates grow to the right and down; `style` is a list of the classes above."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, style: str = "box", radius: float = 3) -> None:
        """A rectangle with its upper left corner at x, y."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{round(width, 2):g}" height="{height:g}" rx="{radius:g}" class="{style}"/>'
        )

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        """Words whose baseline begins at x, y; `middle` and `end` move them to the left."""
        chosen = f' class="{style}"' if style else ""
        self._parts.append(f'<text x="{round(x, 2):g}" y="{y:g}"{chosen}>{escape(words)}</text>')

    def path(self, points: list[tuple[float, float]], style: str = "line") -> None:
        """Straight lines from point to point."""
        along = "L".join(f"{round(x, 2):g} {round(y, 2):g}" for x, y in points)
        self._parts.append(f'<path d="M{along}" class="{style}"/>')

    def box(self, x: float, y: float, width: float, height: float, words: str, style: str = "fa", over: str = "on") -> None:
        """A rectangle with words in its middle."""
        self.rect(x, y, width, height, style)
        self.text(x + width / 2, y + height / 2 + 4.5, words, f"middle {over}".strip())

    def svg(self) -> str:
        """The file's text."""
        width, height = self._size
        title = escape(self._title)
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        body = "\n".join(self._parts)
        return f"{head}\n<title>{title}</title>\n<style>\n{_STYLE}</style>\n{_MARKS}{body}\n</svg>\n"
