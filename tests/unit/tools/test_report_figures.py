"""The figures, notes and tables of a report, as exact values of small runs."""

import html
import json
import re
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from tests.support.report_runs import write_lines, write_run
from zeromesh.errors import ConfigError
from zeromesh.trainer.tools.html_report import page
from zeromesh.trainer.tools.html_report.charts import Chart, Line, chart_of, charts_of, moving_average, thinned_indices
from zeromesh.trainer.tools.html_report.page import Table, document, page_of
from zeromesh.trainer.tools.html_report.runs import RunRecord, as_number, read_runs, settings_of


@pytest.fixture(autouse=True)
def plotly_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "get_plotlyjs", lambda: "plotly()")


def run_of(path: Path, lines: list[dict[str, Any]], **files: list[dict[str, Any]]) -> Path:
    """A run with these lines of metrics, and of other files, alone."""
    write_run(path, steps=1, ranks=1)
    for name in ("ranks.json", "step_memory.json", "evaluations.jsonl"):
        (path / name).unlink()
    write_lines(path, lines)
    for name, content in files.items():
        write_lines(path, content, f"{name}.jsonl")
    return path


def text_of(*runs: Path) -> str:
    found = re.sub(r"<script.*?</script>|<style>.*?</style>", "", page_of(read_runs(list(runs))), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", found)).split())


def test_figures_of_a_run(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss": 5.0, "tokens": 10, "tokens_per_second": 100.0, "step_seconds": 9.0, "time": 1000.0},
        {"step": 2, "loss": "nan", "tokens": 20, "tokens_per_second": 300.0, "step_seconds": 2.0, "skipped": True},
        {"step": 3, "loss": 3.0, "tokens": 3000, "tokens_per_second": 200.0, "step_seconds": 1.0, "time": 1100.0},
    ]
    lines = [line | {"peak_memory_bytes": nbytes} for line, nbytes in zip(lines, (5 << 20, 9 << 20, 7 << 20), strict=True)]
    evaluations = [{"step": 1, "eval_loss": 4.0}, {"step": 2, "eval_loss": 2.5}, {"step": 3, "eval_loss": 2.75}]
    starts = [{"step": 0, "time": 990.0, "parameters": 1500}]
    run = run_of(tmp_path / "run", lines, evaluations=evaluations, starts=starts)
    cards = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page_of(read_runs([run]))))
    assert cards == {
        "steps": "3 / 1",
        "last loss": "3.0000",
        "best eval loss": "2.5000",
        "tokens": "3.0k",
        "tokens/s": "200",
        "step time": "2 s",
        "peak memory": "9.0 MiB",
        "parameters": "1.5k",
        "wall time": "1:50",
        "skipped steps": "1",
    }
    # The unit is that of its steps, whatever was evaluated after the last one that was logged.
    write_lines(run, [{"step": 1, "loss": 5.0, "tokens": 7, "unit": "samples"}])
    assert "<dt>samples</dt><dd>7</dd>" in page_of(read_runs([run]))


def test_notes_of_a_run(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1.0, "skipped": True, "cause": "A" if step > 1 else None} for step in range(1, 23)]
    run = run_of(tmp_path / "run", lines, starts=[{"step": 0, "time": "x"}])
    text = text_of(run)
    assert "No update in step 1: not finite" in text
    assert "No update in steps 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21 and 1 more: A" in text
    assert "began" not in text, "a run with one start is all there is"
    write_lines(run, [*lines[:1], *({**line, "cause": f"C{line['step']}"} for line in lines[1:])])
    write_lines(run, [{"step": 4, "time": 0, "host": "a"}], "starts.jsonl")
    assert "1970-01-01 00:00 UTC: resumed after step 4 on a" in text_of(run)
    write_lines(run, [{"step": 0}, {"step": 2, "time": 1e15}], "starts.jsonl")
    text = text_of(run)
    assert "at an unknown time: began on an unknown host at an unknown time: resumed after step 2 on" in text


def test_traffic_stands_in_the_order_of_its_time(tmp_path: Path) -> None:
    def line(step: int, seconds: float) -> dict[str, Any]:
        rows = {"calls": 4, "bytes": 2048, "seconds": seconds}
        return {"step": step, "loss": 1.0, "communication": {"data": {"sum": {"seconds": 0.5}}, "shard": {"all": rows}}}

    found = text_of(run_of(tmp_path / "run", [line(1, 1.0), line(2, 3.0), {"step": 3, "loss": 1.0}]))
    table = "axis collective calls bytes time shard all 4.0 2.0 KiB 2 s data sum 0.0 0 B 500 ms"
    assert table in found
    assert re.findall(r'<meter value="([\d.]+)">', page_of(read_runs([tmp_path / "run"]))) == ["1.000", "0.250"]


def test_a_mesh_has_its_ranks_and_what_failed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    rows = [{"rank": rank, "step": 4, "doing": "at work", "failure": "OSError: x" if rank == 3 else ""} for rank in range(8)]
    (run / "ranks.json").write_text(json.dumps({"ranks": rows}))
    made = page_of(read_runs([run]))
    assert "pipeline 2 x replicate 1 x shard 2 x context 1 x tensor 2: 8 ranks, beside each other along tensor" in made
    assert "rank 3 failed in step 4: OSError: x" in made
    boxes = re.findall(r'<div class="(rank[ a-z]*)" title="(.*?)">(\d+)</div>', made)
    assert [(kind, int(rank)) for kind, _, rank in boxes] == [("rank failed" if rank == 3 else "rank", rank) for rank in range(8)]
    assert [title for _, title, _ in boxes[2:4]] == ["rank 2: step 4, at work", "rank 3: step 4, OSError: x"]
    assert made.count('<div class="group">') == 6


def test_a_table_aligns_its_numbers() -> None:
    table = Table(["a", "b"], [["x", 1]], numbers=(1,))
    assert (
        '<div class="scroll"><table><thead><tr><th>a</th><th class="number">b</th></tr></thead>'
        '<tbody><tr><td>x</td><td class="number">1</td></tr></tbody></table></div>'
    ) in document("", {"": [("", "table", table)]}, [], "")


def test_keys_that_differ_between_runs(tmp_path: Path) -> None:
    one, two = (run_of(tmp_path / name, [{"step": 1, "loss": 1.0}]) for name in ("one", "two"))
    (one / "config.resolved.yaml").write_text("run: {seed: 1, name: x}\noptimizer: {lr: 0.5}\n")
    (two / "config.resolved.yaml").write_text("run: {seed: 2, name: x}\n")
    text = text_of(one, two)
    assert "What differs key one two run.seed 1 2 optimizer.lr 0.5 (none) Over the steps" in text
    assert "key value default run.seed 1 0 run.name x" in text
    (record,) = read_runs([two])
    assert settings_of(record)["run.seed"][0] == "2"
    assert text.startswith("2 runs: one, two - zeromesh")


@pytest.mark.parametrize(
    ("value", "number"),
    [(3, 3.0), (2.5, 2.5), ("inf", inf), ("-inf", -inf), (True, None), ("3", None), (None, None), (10**400, None)],
)
def test_values_that_are_numbers(value: Any, number: float | None) -> None:
    assert as_number(value) == number


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.resolved.yaml").write_text("{}")
    assert read_runs([run])[0].remarks == ["there is no metrics.jsonl: the run has logged no step (run.log_every)"]
    (run / "config.resolved.yaml").unlink()
    write_lines(run, [{"step": -1, "loss": 1.0}, {"step": True}, {"loss": 1.0}, {"step": 0, "loss": 2.0}])
    (record,) = read_runs([run])
    assert record.remarks == ["there is no config.resolved.yaml"]
    assert record.columns[("loss",)] == {0: 2.0}
    many = tmp_path / "many"
    for number in range(10):
        run_of(many / f"run{number}", [])
    with pytest.raises(ConfigError, match=r"runs in it are run0, .*, run7 and 2 more$"):
        read_runs([many])


@pytest.mark.parametrize(
    ("events", "seconds", "kept"),
    [
        ([[0.0, "a", "b", 0], [0.0, "a", "b", 1], [0.5, "a", "c", 2]], 1.0, True),
        ([[0.5, "a", "b", 1], [0.0, "a", "b", 1]], 1.0, False),
        ([[0.0, "a", "b", -1]], 1.0, False),
        ([[0.0, "a", "b", 1]], inf, False),
    ],
)
def test_memory_of_a_step_that_cannot_be_is_left_out(tmp_path: Path, events: list[Any], seconds: float, kept: bool) -> None:
    run = run_of(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    (run / "step_memory.json").write_text(json.dumps({"step": 2, "seconds": seconds, "events": events}))
    (record,) = read_runs([run])
    assert (record.step_memory is not None) is kept
    assert bool(record.remarks) is not kept


def record_of(**known: Any) -> RunRecord:
    return RunRecord(name="run", path=Path("run"), **known)


def test_a_mesh_is_known_by_its_ranks_or_its_newest_checkpoint() -> None:
    checkpoints = [{"layout": {"mesh": {"shard": size}}, "step": size, "eval_loss": size - 1.0} for size in (2, 4)]
    record = record_of(checkpoints=[*checkpoints, {"layout": {}, "step": 9, "eval_loss": None}])
    assert record.shape is None
    record.checkpoints.pop()
    assert record.shape is not None
    assert record.shape.shard == 4
    record.columns = {("eval_loss",): {3: 0.5, 2: 0.25, 1: nan}}
    assert list(record.evaluation_losses().items()) == [(2, 0.25), (3, 0.5), (4, 3.0)]


# Charts


def chart(values: dict[Any, float], unit: str = "plain", look: str = "line", name: str = "x") -> Chart:
    return chart_of(name, "Title", unit, "", [Line("a", values, 0, look)])


def test_seconds_far_above_the_others_are_cut_off() -> None:
    usual = dict.fromkeys(range(48), 2.0)
    cut = chart({**usual, 48: 30.0, 49: 6.0}, "seconds")
    assert cut.note == "2 values above the picture, the highest 30 s in step 48"
    assert cut.figure.layout.yaxis.range == pytest.approx((0, 2.12))
    for values in ({**usual, 48: 5.0}, {**usual, 48: 30.0, 49: 6.0, 50: 6.0}):  # 2.5 times as much, and too many.
        whole = chart(values, "seconds")
        assert (whole.note, whole.figure.layout.yaxis.range[1]) == ("", pytest.approx(1.06 * max(values.values())))
    assert chart({**usual, 48: 30.0}, "count").note == ""


def test_bytes_have_the_unit_of_the_highest() -> None:
    made = chart({1: 3.0 * 2**30, 2: 2.0**29}, "bytes").figure
    assert (made.data[0].y, made.layout.yaxis.ticksuffix) == ((3.0, 0.5), " GiB")
    assert made.data[0].name == "a  512.0 MiB"
    assert chart({1: 1023.0}, "bytes").figure.layout.yaxis.ticksuffix == " B"


@pytest.mark.parametrize(
    ("values", "name", "unit", "kind", "switch"),
    [
        ({1: 1.0, 2: 50.0}, "x", "plain", "log", True),
        ({1: 1.0, 2: 49.0}, "x", "plain", None, True),
        ({1: 0.0, 2: 49.0}, "x", "plain", None, False),
        ({1: 1.0, 2: 90.0}, "lr", "plain", None, False),
        ({1: 1.0, 2: 90.0}, "x", "percent", None, False),
    ],
)
def test_when_an_axis_is_logarithmic(values: dict[Any, float], name: str, unit: str, kind: str | None, switch: bool) -> None:
    made = chart(values, unit, name=name)
    assert (made.figure.layout.yaxis.type, made.log) == (kind, switch)
    assert (made.figure.layout.yaxis.range is None) is (name != "lr" and unit == "plain")


def test_stacks_say_their_shares_and_levels_their_most() -> None:
    parts = [Line("a", {1: 1.0, 2: 2.0}, 0, "stack"), Line("b", {2: 1.0}, 1, "stack")]
    made = chart_of("x", "Title", "seconds", "note", parts)
    assert [(each.name, each.y) for each in made.figure.data] == [("a  75%", (1.0, 2.0)), ("b  25%", (0.0, 1.0))]
    assert made.figure.layout.yaxis.range[1] == pytest.approx(1.06 * 3)
    assert (made.note, made.over_steps) == ("note", True)
    assert chart({1: 2.0, 2: 4.0}, "seconds").figure.data[0].name == "a  4 s"
    levels = chart({0.0: 2048.0, 0.5: 1024.0}, "bytes", "levels")
    assert (levels.figure.data[0].name, levels.over_steps) == ("a  up to 2.0 KiB", False)
    assert chart({7: 2.0}, "count", "stack").figure.data[0].x == (6.5, 7.5)


def test_averages_and_fewer_points_of_short_lines() -> None:
    assert moving_average([1.0, 2.0, 6.0, 4.0], 3) == [1.0, 3.0, 4.0, 4.0]
    assert thinned_indices([1.0, 5.0, 2.0, 0.0], 4) == [0, 1, 2, 3]
    assert thinned_indices([1.0, 5.0, 2.0, 0.0, 3.0], 4) == [0, 1, 3, 4]


def lines_of(charts: list[Chart], name: str) -> list[tuple[str, str]]:
    (found,) = [each for each in charts if each.name == name]
    return [(trace.name.partition("  ")[0], f"{trace.mode} {trace.line.dash or ''}".strip()) for trace in found.figure.data]


def test_a_loss_is_smoothed_and_evaluations_are_dots_by_their_numbers() -> None:
    def losses(steps: int, evaluations: int) -> tuple[list[tuple[str, str]], str]:
        columns = {("loss",): dict.fromkeys(range(steps), 1.0), ("eval_loss",): dict.fromkeys(range(evaluations), 2.0)}
        found = charts_of([record_of(columns=columns)])
        return lines_of(found, "loss"), found[0].note

    training, dots = ("training", "lines"), ("evaluation", "lines+markers dot")
    assert losses(59, 40) == ([training, dots], "mean over the targets of a step")
    assert losses(60, 41) == ([training, training, ("evaluation", "lines")], "mean over the targets of a step; bold: smoothed")


def test_parts_of_steps_and_what_was_predicted() -> None:
    columns = {
        ("step_seconds",): {1: 1.0, 2: 1.0, 3: 1.0},
        ("phases", "data"): {1: 0.5, 2: 0.995},
        ("bubble", "predicted"): {1: 0.1},
        ("bubble", "measured"): {1: 0.2},
        ("memory", "host", "master_weights"): {1: 1024.0},
        ("memory", "host", "moments"): {1: 0.0},
        ("host_wait_seconds",): {1: 0.25},
    }
    lines = [{"step": step} for step in (1, 3)]
    charts = charts_of([record_of(columns=columns, lines=lines)])
    assert lines_of(charts, "bubble") == [("predicted", "lines dash"), ("measured", "lines")]
    (phases,) = [each for each in charts if each.name == "phases"]
    # Less than a hundredth of a step is no part; a step without phases has none.
    assert [(each.name, each.x, each.y) for each in phases.figure.data] == [
        ("data  75%", (1, 2), (0.5, 0.995)),
        ("other  25%", (1, 2), (0.5, 0.0)),
    ]
    assert [name for name, _ in lines_of(charts, "memory-host")] == ["master weights"]
    assert [name for name, _ in lines_of(charts, "_wait_seconds")] == ["host"]
    assert (phases.figure.layout.xaxis.range, phases.figure.layout.xaxis.dtick) == ((1, 3), 1)
