"""Writes the tables of docs/coming-from.md from those of settings: `python scripts/pages/migration_tables.py [--check]`."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from zeromesh.trainer.config.foreign_names import NAMES, SECTIONS, Fate, SettingRow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from.md"

BEGIN = "<!-- What follows is written by `python scripts/pages/migration_tables.py`, from the tables in `trainer/config`. -->"


def page() -> str:
    """The text of the page: what is written by hand, and below it the tables."""
    above = PAGE.read_text(encoding="utf-8").partition(BEGIN)[0]
    return "\n".join([f"{above}{BEGIN}\n", *_tables()])


def _tables() -> Iterator[str]:
    for title, rows in SECTIONS.items():
        yield f"### {title}\n\n| key | here | how, or why |\n|---|---|---|"
        yield from _lines(rows)
        yield ""
    yield "## Names of other trainers\n\nThe words of transformers, TRL, axolotl, LLaMA-Factory and others.\n"
    yield "| there | here |\n|---|---|"
    for key, names in NAMES.items():
        yield f"| {', '.join(f'`{name}`' for name in names)} | {f'`{key}`' if ' ' not in key else key} |"
    yield ""


def _lines(rows: tuple[SettingRow, ...]) -> Iterator[str]:
    """A line for each row, but one for neighbours that share a reason."""
    names: list[str] = []
    for number, row in enumerate(rows):
        names.append(f"`{row.name}`")
        after = rows[number + 1] if number + 1 < len(rows) else None
        if after is not None and (after.fate, after.text, after.keys) == (row.fate, row.text, row.keys):
            continue
        keys = ", ".join(f"`{key}`" for key in row.keys)
        where = keys or str(row.fate) if row.fate is not Fate.REFUSED else "refused"
        yield f"| {', '.join(names)} | {where} | {row.text.replace('|', chr(92) + '|')} |"
        names = []


def main() -> int:
    """Write the page, or with --check compare it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 when the page is out of date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        print(f"wrote {PAGE}")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        print(f"{PAGE.name} is out of date; run: python scripts/pages/migration_tables.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
