"""docs/from-hf-trainer.md and docs/from-deepspeed.md: their tables are the code's, and their examples do what they say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from workers import Workers

from zeromesh.trainer.cli import main
from zeromesh.trainer.config_file import load_config
from zeromesh.trainer.deepspeed_rows import TABLE as DEEPSPEED
from zeromesh.trainer.hf.argument_rows import TABLE as ARGUMENTS

ROOT = Path(__file__).resolve().parent.parent
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


def test_the_report_on_the_page_is_what_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = re.findall(r"```json\n(.*?)```", DS, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", DS, re.DOTALL)
    (tmp_path / "ds.json").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    command, *lines = shown.splitlines()
    assert main(command.removeprefix("$ zeromesh ").split()) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[: len(lines) - 1] == lines[:-1]
    assert lines[-1] == "..."
    assert load_config("ds.json", ranks=2).run.name == "from-deepspeed"


def test_the_program_on_the_page_trains(workers: Workers, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n# finetune.py\n(.*?)```", HF, re.DOTALL)
    one = workers.run(1, "migration_cases:finetuned", code=code, folder=str(tmp_path))[0]
    two = workers.run(2, "migration_cases:finetuned", code=code, folder=str(tmp_path))
    assert "TrainingArguments: learning_rate: 0.001 -> optimizer.lr: 0.001" in one
    assert "TrainingArguments: dataloader_num_workers: no effect:" in one
    assert "batch: global 8 = micro 4 x accumulation 2 x data-parallel 1" in one
    assert "batch: global 16 = micro 4 x accumulation 2 x data-parallel 2" in two[0]
    losses = re.findall(r"\(([\d., ]+)\)", one)[-1].split(", ")
    assert len(losses) == 10
