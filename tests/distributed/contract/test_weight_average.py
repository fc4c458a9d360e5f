"""Averaged weights (`ema`): as torch's AveragedModel, in every layout and over processes."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.contract.harness import Layout
from tests.support.plain import distance
from tests.support.workers import Workers
from zeromesh.errors import ConfigError
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.tools.checkpoint.export import export_checkpoint
from zeromesh.trainer.tools.checkpoint.reading import checkpoint_at

FILES = {"offload": {"optimizer": "file"}}
RUNS = [
    pytest.param(Layout(stage=3, kept=False, transport="gloo"), {"decay": 0.8}, {}, id="released"),
    pytest.param(
        Layout(stage=1), {"decay": 0.5, "every_steps": 2, "start_step": 3}, {}, id="every second from the third"
    ),
    pytest.param(Layout(stage=3), {"decay": 0.9}, FILES, id="files"),
    pytest.param(Layout(stage=0, transport="gloo"), {"decay": 0.7}, {}, id="replicated", marks=pytest.mark.full),
    pytest.param(Layout(stage=2), {"decay": 0.7, "every_steps": 3}, {}, id="every third", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "ema", "sections"), RUNS)
def test_averages_are_those_of_torch(
    workers: Workers, tmp_path: Path, layout: Layout, ema: dict[str, Any], sections: dict[str, Any]
) -> None:
    arguments = {"layout": asdict(layout), "folder": str(tmp_path), "ema": ema, "stop": 6, **sections}
    for found in workers.run(2, "average_cases:averaged", **arguments):
        assert {name: value for name, value in found.items() if not value < 1e-9} == {}


@pytest.mark.parametrize("flagged", [False, True], ids=["plain", "flags change"])
def test_averages_go_on_in_another_layout(workers: Workers, tmp_path: Path, flagged: bool) -> None:
    layouts = (Layout(stage=3, kept=False), 2), (Layout(stage=1, ranks=1), 4), (Layout(stage=2, transport="gloo"), 6)
    for layout, stop in layouts:
        arguments = {"layout": asdict(layout), "folder": str(tmp_path), "ema": {"decay": 0.8}, "flagged": flagged}
        for found in workers.run(layout.ranks, "average_cases:averaged", stop=stop, **arguments):
            assert {name: value for name, value in found.items() if not value < 1e-9} == {}


@pytest.mark.parametrize("axis", [pytest.param("replicate", marks=pytest.mark.full), "tensor", "pipeline"])
def test_averages_are_saved(workers: Workers, tmp_path: Path, axis: str) -> None:
    for found in workers.run(2, "average_cases:averaged_models", folder=str(tmp_path), **{axis: 2}):
        assert {name: value for name, value in found.items() if not value < 1e-9} == {}
    export_checkpoint(checkpoint_at(tmp_path / "runFalse"), tmp_path / "exported", "keep", Console(), ema=True)
    exported, saved = (load_file(tmp_path / each / "model.safetensors") for each in ("exported", "savedFalse"))
    assert distance(exported, saved) == 0


def test_skipped_steps_and_runs_without_averages_before(workers: Workers, tmp_path: Path) -> None:
    assert max(workers.run(2, "average_cases:skipped", folder=str(tmp_path / "skipped"))) < 1e-9
    assert max(workers.run(2, "average_cases:begun_later", folder=str(tmp_path / "later"))) < 1e-9


def test_evaluation_with_no_average_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"ema\.evaluate: true needs averaged weights; set ema\.decay, such as 0\.999"
    ):
        load_config({"ema": {"evaluate": True}})
