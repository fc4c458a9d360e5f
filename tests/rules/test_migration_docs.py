"""docs/coming-from.md: its tables are the code's. test_docs.py tries its examples."""

import re
import runpy
from pathlib import Path

from zeromesh.trainer.config.deepspeed_table import TABLE
from zeromesh.trainer.config.foreign_names import BY_NAME

ROOT = Path(__file__).resolve().parents[2]
TEXT: str = runpy.run_path(str(ROOT / "scripts/pages/migration_tables.py"))["page"]()


def test_the_page_is_current() -> None:
    page = ROOT / "docs" / "coming-from.md"
    assert page.read_text(encoding="utf-8") == TEXT, "run: python scripts/pages/migration_tables.py"


def test_every_setting_is_on_the_page_once() -> None:
    of_deepspeed, names_of_others = TEXT.partition("<!-- What follows")[2].split("## Names of other trainers")
    rows = [line for line in of_deepspeed.splitlines() if line.startswith("| `")]
    names = [name for line in rows for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])]
    assert sorted(names) == sorted(row.name for row in TABLE)
    assert all(line.count(" | ") == 2 for line in rows)
    assert all(f"`{name}`" in names_of_others for name in BY_NAME)
