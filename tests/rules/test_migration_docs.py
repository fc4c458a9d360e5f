"""docs/from-hf-trainer.md and docs/from-deepspeed.md: their tables are the code's. test_docs.py tries their examples."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from zeromesh.trainer.config.migration.deepspeed_table import TABLE as DEEPSPEED
from zeromesh.trainer.config.migration.training_arguments_table import TABLE as ARGUMENTS

ROOT = Path(__file__).resolve().parents[2]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "migration_tables.py"))
HF, DS = (path.read_text(encoding="utf-8") for path in SCRIPT["pages"]())


def test_the_pages_are_current() -> None:
    for path, text in SCRIPT["pages"]().items():
        assert path.read_text(encoding="utf-8") == text, "run: python scripts/migration_tables.py"


@pytest.mark.parametrize(("page", "table"), [(HF, ARGUMENTS), (DS, DEEPSPEED)], ids=["hf", "deepspeed"])
def test_every_setting_is_on_its_page_once(page: str, table: tuple[Any, ...]) -> None:
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    names = [name for line in rows for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])]
    assert sorted(names) == sorted(row.name for row in table)
    assert all(line.count(" | ") == 2 for line in rows)
