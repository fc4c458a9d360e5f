"""Code blocks of the documentation do what the text says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from workers import Workers

from zeromesh.mesh.axes import MeshShape
from zeromesh.trainer.config_file import load_config

DOCS = Path(__file__).resolve().parent.parent / "docs"


def blocks(page: str) -> dict[str, str]:
    """The code of a page, by the file name in its first line."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"```(?:python|yaml)\n# ([\w.]+)(.*?)```", text, re.DOTALL)
    return dict(found)


def test_a_mesh_of_eight_ranks_is_what_its_file_says(tmp_path: Path) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text("#" + blocks("parallel.md")["mesh.yaml"], encoding="utf-8")
    config = load_config(path)
    parallel = config.parallel
    shape = MeshShape.resolve(8, tensor=parallel.tensor, pipeline=parallel.pipeline, shard=parallel.shard)
    assert (shape.pipeline, shape.shard, shape.tensor) == (2, 2, 2)


@pytest.mark.parametrize("name", ["digits.py", "adapters.py"])
def test_a_script_about_models(workers: Workers, tmp_path: Path, name: str) -> None:
    found = blocks("models.md")
    for file, text in found.items():
        (tmp_path / file).write_text(f"#{text}", encoding="utf-8")
    said = workers.run(1, "doc_cases:printed", code=f"#{found[name]}", folder=str(tmp_path))[0].splitlines()[-1]
    assert said == "True" if name == "adapters.py" else 0.5 < float(said) < 3


def test_configurations_about_models_are_valid(tmp_path: Path) -> None:
    for name, text in blocks("models.md").items():
        if name.endswith(".yaml"):
            (tmp_path / name).write_text(f"#{text}", encoding="utf-8")
            load_config(tmp_path / name)


def test_schedules_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile("#" + blocks("parallel.md")["schedules.py"], "schedules.py", "exec"), {})
    said = capsys.readouterr().out
    assert re.search(r"^1f1b: 20% of the time ranks stand still$", said, re.MULTILINE)
    assert re.search(r"^zero_bubble: \d+% of the time ranks stand still$", said, re.MULTILINE)


def test_an_engine_over_a_divided_model(workers: Workers) -> None:
    said = workers.run(2, "doc_cases:printed", code="#" + blocks("parallel.md")["divided.py"])
    rows = [line.split() for line in said]
    assert [row[0] for row in rows] == ["0", "1"]
    assert rows[0][1:] == rows[1][1:]
