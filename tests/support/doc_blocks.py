"""Code blocks, commands and links of the documentation: found here, tried in test_docs.py.

A block says what it is by its language, which every block has. Its file's name is the fence's title, or stands in its first line:
`# train.py`, or `# divided.py: torchrun --nproc-per-node 2 divided.py`, which says on how many ranks too. A Python block without
one goes on where the one before it ends.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]
"""What a person reads, from the top of the repository."""
_FENCE = re.compile(r"( *)(`{3,}|~{3,})([^`]*)")
_HEAD = re.compile(r"# ([\w-]+\.\w+)(?:: (.*))?")
_TITLE = re.compile(r'title="([^"]*)"')
_RANKS = re.compile(r"--nproc-per-node (\d+)|(\d+) ranks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block of a page, without its indentation. `line` is that of its first line of text, from 1."""

    page: str
    line: int
    language: str
    info: str
    """What stands after the language."""
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def name(self) -> str:
        """Of its file; empty where it has none."""
        title, head = _TITLE.search(self.info), _HEAD.fullmatch(self._first)
        if title:
            return title[1]
        if self.language == "text":
            alone = re.fullmatch(r"# ([\w.-]+)", self._first)
            return alone[1] if alone else ""
        return head[1] if head else ""

    @property
    def ranks(self) -> int:
        """On how many ranks it is for, as its first line says; 1 where it says nothing."""
        head = _HEAD.fullmatch(self._first)
        found = _RANKS.search(head[2] or "") if head else None
        return int(found[1] or found[2]) if found else 1

    @property
    def _first(self) -> str:
        return self.text.partition("\n")[0].rstrip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A Python program of a page: its blocks, one after the other."""

    page: str
    name: str
    ranks: int
    code: str
    lines: frozenset[int]
    """Where its blocks begin."""


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """All fenced blocks, in order. `text` stands in for the page's own."""
    lines = ((ROOT / page).read_text(encoding="utf-8") if text is None else text).splitlines()
    found, open_fence, begin = [], None, 0
    for number, line in enumerate(lines):
        match = _FENCE.fullmatch(line)
        if open_fence is None:
            open_fence, begin = match, number + 1
        elif match and match[2].startswith(open_fence[2]) and not match[3].strip():
            language, _, info = open_fence[3].strip().partition(" ")
            inside = [each.removeprefix(open_fence[1]) for each in lines[begin:number]]
            content = "".join(f"{each}\n" for each in inside)
            found.append(Block(page=page, line=begin + 1, language=language, info=info, text=content))
            open_fence = None
    assert open_fence is None, f"{page}:{begin}: a block that does not end"
    return found


def scripts_of(page: str) -> list[Script]:
    """The Python programs of a page, in order."""
    found: list[Script] = []
    for block in blocks_of(page):
        if block.language != "python":
            continue
        if block.name or not found:
            lines = frozenset({block.line})
            found.append(Script(page=page, name=block.name, ranks=block.ranks, code=block.text, lines=lines))
        else:
            last = found.pop()
            code, lines = last.code + block.text, last.lines | {block.line}
            found.append(Script(page=page, name=last.name, ranks=last.ranks, code=code, lines=lines))
    return found


def script(page: str, name: str) -> Script:
    (found,) = (each for each in scripts_of(page) if each.name == name)
    return found


def prose(page: str) -> Iterator[tuple[int, str]]:
    """Line numbers and lines outside of blocks."""
    inside = False
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), start=1):
        if _FENCE.fullmatch(line):
            inside = not inside
        elif not inside:
            yield number, line


def spans(page: str) -> Iterator[tuple[int, str]]:
    """Line numbers and inline code, also where it goes on in the next line."""
    lines = dict(prose(page))
    starts, text = [], ""
    for number, line in lines.items():
        starts.append((len(text), number))
        # A blank line, a row of a table and an item of a list end what was begun.
        text += line + ("\n\n" if not line.strip() or line.startswith("|") else "\n")
    for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
        if "\n\n" not in match[1]:
            yield max(number for at, number in starts if at <= match.start()), " ".join(match[1].split())


def links(page: str) -> Iterator[tuple[int, str, str]]:
    """Line numbers, paths and anchors of links inside the repository."""
    for number, line in prose(page):
        for path, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", re.sub(r"`[^`]*`", "", line)):
            yield number, path, anchor


def anchors(page: str) -> set[str]:
    found: set[str] = set()
    for _, line in prose(page):
        if re.match(r"#+ ", line):
            words = re.sub(r"[^\w\s-]", "", line.lstrip("#").strip().lower())
            found.add(re.sub(r"\s", "-", words))
    return found
