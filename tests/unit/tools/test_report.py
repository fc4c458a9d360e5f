"""`zeromesh report`: a page that shows what is there, whatever that is, and runs nothing but its own script."""

import json
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.report_runs import HOSTILE, write_lines, write_run
from tests.support.trainer_cases import llama, seeded, sentences, settings
from tests.unit.tools.browser import Browser, find_browser, looks_of
from zeromesh import Trainer
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.monitoring.step_metrics import read_metrics
from zeromesh.trainer.tools.html_report import page
from zeromesh.trainer.tools.html_report.charts import MOST_POINTS, charts_of, moving_average, thinned_indices
from zeromesh.trainer.tools.html_report.page import Table, document, markup, page_of
from zeromesh.trainer.tools.html_report.runs import read_runs

ALL_CHARTS = {
    *("loss", "eval_accuracy", "lr", "grad_norm", "tokens_per_second", "step_seconds", "mfu", "peak_memory_bytes"),
    *("bubble", "_wait_seconds", "phases", "memory-device", "memory-file", "step-memory-device", "communication"),
}


class Elements(HTMLParser):
    """The elements of a page: their names with their attributes, and all text outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._code = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._code = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._code = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._code else f"{data} "

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.found if tag == name]

    @property
    def charts(self) -> set[str]:
        return {str(each["id"]).removeprefix("chart-") for each in self.named("figure")}


@pytest.fixture(autouse=True)
def plotly_left_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five megabytes of a script that is not run need not be parsed again and again."""
    if "browser" not in request.fixturenames:
        monkeypatch.setattr(page, "get_plotlyjs", lambda: "plotly()")


def shown(*paths: Path) -> Elements:
    return Elements(page_of(read_runs(list(paths))))


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=2000), st.integers(4, 300))
def test_fewer_points_have_the_same_ends_and_extremes(values: list[float], most: int) -> None:
    places = thinned_indices(values, most)
    assert len(places) <= max(most, 4)
    assert places == sorted(set(places))
    few = [values[place] for place in places]
    assert (few[0], few[-1], min(few), max(few)) == (values[0], values[-1], min(values), max(values))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 50))
def test_a_smooth_curve_stays_between_the_extremes_and_on_a_straight_line(values: list[float], window: int) -> None:
    smooth = moving_average(values, window)
    assert len(smooth) == len(values)
    assert min(values) - 1e-3 <= min(smooth) <= max(smooth) <= max(values) + 1e-3
    line = [3.0 * place for place in range(len(values))]
    assert moving_average(line, window) == pytest.approx(line)


def test_texts_become_no_markup() -> None:
    """What cannot be seen or written is replaced."""
    table = Table(["<b>&", markup('<i title="{}">{}</i>', '"><script>', 'a"b\x00')], [["a\x00b\u202ec\ud800d", None]])
    made = document('"><script>', {"": [("<", "table", table)]}, [], "")
    assert '<th>&lt;b&gt;&amp;</th><th><i title="&#34;&gt;&lt;script&gt;">a&#34;b\ufffd</i></th>' in made
    assert "<td>a\ufffdb\ufffdc\ufffdd</td><td></td>" in made
    assert "<title>&#34;&gt;&lt;script&gt; - zeromesh</title>" in made
    assert "<h3>&lt;</h3>" in made


def test_a_run_has_a_chart_of_everything_that_its_lines_have(tmp_path: Path) -> None:
    seen = shown(write_run(tmp_path / "run"))
    assert seen.charts == ALL_CHARTS
    assert "200 / 200" in seen.text
    assert {"shard", "all-gather", "all-reduce"} <= set(re.findall(r"[\w-]+", seen.text))
    # Nothing is loaded, from anywhere.
    addresses = [value for _, each in seen.found for key, value in each.items() if key in ("src", "href", "action")]
    assert addresses == ["data:,"]
    assert "http" not in re.sub(r"http-equiv", "", page_of(read_runs([tmp_path / "run"])))


def test_what_is_not_there_has_no_chart(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ranks=1)
    write_lines(run, [{"step": step, "loss": 3.0 / step, "lr": 1e-3} for step in (1, 2, 3)])
    (run / "ranks.json").unlink()
    (run / "step_memory.json").unlink()
    (run / "evaluations.jsonl").unlink()
    seen = shown(run)
    assert seen.charts == {"loss", "lr"}
    assert "Mesh" not in seen.text


def test_a_long_run_is_thinned_out_and_keeps_its_extremes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=5)
    lines = [{"step": step, "loss": math.sin(step), "grad_norm": 1.0} for step in range(1, 20_001)]
    lines[7_776]["grad_norm"], lines[13_131]["grad_norm"] = 31.5, 0.25
    write_lines(run, lines)
    loss, norm, *_ = charts_of(read_runs([run]))
    assert all(len(each.x) <= MOST_POINTS for chart in (loss, norm) for each in chart.figure.data)
    (line,) = norm.figure.data
    values = dict(zip(line.x, line.y, strict=True))
    assert (values[7_777], values[13_132]) == (31.5, 0.25)
    assert norm.figure.layout.yaxis.type == "log"
    assert len(page_of(read_runs([run]))) < 400_000


def test_a_run_that_went_on_has_each_step_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=30)
    lines = [{"step": step, "loss": float(step)} for step in [*range(1, 21), *range(11, 31)]]
    lines[-1]["loss"] = 77.0
    write_lines(run, lines)
    starts = [{"time": 1.79e9, "step": 0, "host": "node-a"}, {"time": 1.79e9 + 60, "step": 10, "host": "node-b"}]
    write_lines(run, starts, "starts.jsonl")
    (record,) = read_runs([run])
    assert [line["step"] for line in record.lines] == list(range(1, 31))
    assert record.lines[-1]["loss"] == 77.0
    text = shown(run).text
    assert "has 10 steps more than once" in text
    assert "2026-09-21 14:14 UTC: resumed after step 10 on node-b" in text


def test_a_run_says_how_large_how_long_and_on_what(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4)
    times = {1: 5, 2: 30, 3: 70, 4: 95}
    write_lines(run, [{"step": step, "loss": 1.0, "time": 1.79e9 + at} for step, at in times.items()])
    facts = {"parameters": 8_030_000_000, "hardware": "8 ranks on Abacus 9000", "versions": {"torch": "2.13.0"}}
    starts = [{"step": 0, "time": 1.79e9, **facts}, {"step": 2, "time": 1.79e9 + 60, **facts}]
    write_lines(run, starts, "starts.jsonl")
    parts = {"imports": 3.5, "data": 0.01, "odd": "x", "first step": 1.0}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "loss": 1.0, "start": parts}) + "\n")
    text = shown(run).text
    assert "start: 4.5 s (imports 3.5, first step 1.0)" in text
    assert "8.0G" in text
    assert "1:05" in text, "30 seconds of the first start and 35 of the second"
    assert "hardware: 8 ranks on Abacus 9000" in text
    assert "versions: torch 2.13.0" in text


def test_values_of_another_kind_than_is_written_are_left_out(tmp_path: Path) -> None:
    odd = {"phases": 3, "memory": {"device": 1}, "communication": {"shard": 5}, "bubble": [], "start": 1, "loss": "inf"}
    run = write_run(tmp_path / "run", steps=9, changes=dict.fromkeys(range(1, 10), odd | {"step_seconds": -1.0}))
    starts = [{"step": 0, "time": 9}, {"step": 2, "time": 5}, {"step": 3, "time": "nan", "hardware": [], "versions": 1}]
    write_lines(run, starts, "starts.jsonl")
    assert {"loss", "lr"} <= shown(run).charts


def test_a_plan_is_beside_what_was_measured(tmp_path: Path) -> None:
    phases, memory = {"forward": [0.2, 0.4]}, {"device": {"uncounted": [5 << 20, 5 << 20]}, "host": {HOSTILE: [1, 2]}}
    whole = {"seconds": [0.2, 0.4], "peak": [7 << 20, 7 << 20]}
    plan = {"layout": "shard 2, stage 1", "phases": phases, "memory": memory, **whole}
    run = write_run(tmp_path / "run", steps=4, changes={2: {"plan": 7}, 4: {"plan": plan}})
    seen = shown(run)
    assert re.search(r"Plan\s+shard 2, stage 1\s+predicted\s+measured\s+off\s+step\s+200 ms\s+400 ms\s+-50%", seen.text)
    assert re.search(r"device: activations and libraries\s+5.0 MiB\s+5.0 MiB", seen.text)
    assert not seen.named("img")
    assert "cannot be read" not in seen.text
    # What is broken is a remark, and the rest is shown.
    for broken in (7, {**plan, "phases": {"forward": 3}}, {**plan, "peak": ["x", 1]}):
        write_lines(run, [{"step": 1, "loss": 1.0, "plan": broken}])
        seen = shown(run)
        assert "metrics.jsonl cannot be read: it is not as zeromesh writes it" in seen.text
        assert seen.charts == {"loss", "step-memory-device"}


def test_many_evaluations_are_a_line_and_their_speed_comes_last(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=75)
    lines = [{"step": step, "eval_loss": 1.0, "eval_f1": 0.5, "eval_runtime": 2.0} for step in range(1, 76)]
    write_lines(run, lines, "evaluations.jsonl")
    charts = charts_of(read_runs([run]))
    names = [chart.name for chart in charts]
    assert names.index("eval_f1") < names.index("lr") < names.index("eval_runtime")
    (evaluation,) = [each for each in charts[0].figure.data if each.name.startswith("evaluation")]
    assert evaluation.mode == "lines"


def test_losses_that_are_not_finite_break_the_line(tmp_path: Path) -> None:
    bad = {"loss": "nan", "grad_norm": "inf", "skipped": True, "cause": "the gradient of unit layers.1 on rank 3"}
    seen = shown(write_run(tmp_path / "run", steps=20, changes={7: bad, 8: bad}))
    assert "No update in steps 7, 8: the gradient of unit layers.1 on rank 3" in seen.text
    assert "not finite in 2 steps" in seen.text
    line = next(chart for chart in charts_of(read_runs([tmp_path / "run"])) if chart.name == "loss").figure.data[0]
    assert [step for step, value in zip(line.x, line.y, strict=True) if math.isnan(value)] == [7, 8]
    assert '"y":[' in page_of(read_runs([tmp_path / "run"]))
    assert "NaN" not in page_of(read_runs([tmp_path / "run"]))


def test_changed_keys_are_marked_and_secrets_are_not_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with (run / "config.resolved.yaml").open("a") as file:
        file.write(
            "extra: {api_key: sk_very_secret, hub_token: hf_very_secret, pin: {password: 4711}, size: 3, num_key_value_heads: 77}\n"
        )
    seen = shown(run)
    assert not re.search(r"very_secret|\b4711\b", page_of(read_runs([run])))
    assert "77" in seen.text
    assert re.search(r"parallel\.tensor\s+2\s+1", seen.text)
    assert re.search(r"extra\.size\s+3\s+\(none\)", seen.text)
    places = [seen.text.index(each) for each in ("parallel.tensor", "keys at their defaults", "zero.stage")]
    assert places == sorted(places)


BAD = {"skipped": True, "cause": HOSTILE, "phases": {HOSTILE: 0.1}, "memory": {HOSTILE: {HOSTILE: 5}}}


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)<"
    more = {"eval_<b>": 1.0, "communication": {HOSTILE: {HOSTILE: {"seconds": 1.0}}}}
    run = write_run(folder, steps=9, changes={3: BAD | more})
    with (run / "config.resolved.yaml").open("a") as file:
        file.write(f"more: {{{json.dumps(HOSTILE)}: {json.dumps(HOSTILE)}}}\n")
    ranks = [{"rank": 0, "failure": HOSTILE, "step": HOSTILE, "doing": HOSTILE}]
    (run / "ranks.json").write_text(json.dumps({"ranks": ranks}))
    seen = shown(run)
    assert not seen.named("img")
    assert not seen.named("b") or all(not each for each in seen.named("b"))
    assert [each.get("type") for each in seen.named("script")] == ["application/json", None, None]
    assert not [key for _, each in seen.found for key in each if key.startswith("on")]
    assert seen.text.count("onerror") >= 3
    names = [each.name for chart in charts_of(read_runs([run])) for each in chart.figure.data]
    assert any("&lt;/script&gt;" in name for name in names)
    assert not any("<" in name for name in names)


@pytest.mark.parametrize(
    ("name", "content", "remark"),
    [
        (
            "metrics.jsonl",
            b'{"step": 1, "loss": 2.0}\n[1]\n{broken\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo',
            "line 2 is not a JSON object",
        ),
        ("metrics.jsonl", b"", "has no step yet"),
        ("metrics.jsonl", b"\xff\xfe\n" * 9, "6 more lines of metrics.jsonl cannot be read"),
        ("metrics.jsonl", b"[" * 100_000 + b"\n", "line 1 is not JSON"),
        ("config.resolved.yaml", b"run: [", "the text ends where something is still open"),
        ("config.resolved.yaml", b"\xff", "cannot be read"),
        ("config.resolved.yaml", b"- 1", "holds no mapping"),
        ("ranks.json", b"{", "ranks.json cannot be read"),
        ("ranks.json", b'{"ranks": [{"rank": "x"}]}', "ranks.json cannot be read"),
        ("ranks.json", b'{"ranks": [{"rank": 0, "waits": 3}]}', "ranks.json cannot be read"),
        ("starts.jsonl", b"{}\n[]\n", None),
        ("step_memory.json", b"{}", "step_memory.json cannot be read"),
        ("step_memory.json", b'{"step": 1, "seconds": 1, "events": [[0, "a", "b", NaN]]}', "times or sizes that cannot be"),
    ],
)
def test_a_broken_file_is_a_remark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, remark: str | None
) -> None:
    run = write_run(tmp_path / "run", steps=5)
    (run / name).write_bytes(content)
    assert main(["report", str(run)]) == 0
    seen = Elements((run / "report.html").read_text())
    if remark is not None:
        assert remark in " ".join(seen.text.split())
        assert remark in capsys.readouterr().err
    if name != "metrics.jsonl":
        assert seen.charts


def test_what_is_no_run_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "one", steps=2)
    (tmp_path / "file").write_text("")
    assert main(["report", str(tmp_path / "gone"), str(tmp_path / "file"), str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert "gone is not there" in said
    assert "file is no directory" in said
    assert "runs holds no run: there is neither metrics.jsonl nor config.resolved.yaml; runs in it are one" in said
    assert main(["report", str(tmp_path / "runs" / "one"), "--out", str(tmp_path / "file" / "x.html")]) == 1
    assert "give another place with --out" in capsys.readouterr().err


def test_several_runs_lie_on_top_of_each_other(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    one, two = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", seed=1, steps=150)
    assert main(["report", str(one), str(two), "--out", "-"]) == 0
    seen = Elements(capsysbinary.readouterr().out.decode())
    assert {"loss", "phases-0", "phases-1", "memory-device-0"} <= seen.charts
    lines = [each for each in charts_of(read_runs([one, two]))[0].figure.data if each.mode == "lines"]
    names = {each.legendgroup: each.name for each in lines}
    assert [name.partition(" ")[0] for name in names.values()] == ["a/run,", "b/run,"]
    assert re.search(r"optimizer.lr\s*0.0006\s*0.001", seen.text)
    assert "zero.stage" not in seen.text.partition("Over the steps")[0]


def test_a_run_that_was_trained_here_and_went_on(tmp_path: Path) -> None:
    for steps in (2, 4):
        config = settings(
            str(tmp_path),
            run={"max_steps": steps, "eval_every": 1},
            schedule={"name": "constant_with_warmup"},
            checkpoint={"every_steps": 1},
        )
        with Trainer(seeded(llama), config, sentences(), sentences(4)) as trainer:
            trainer.fit()
        with (tmp_path / "run" / "evaluations.jsonl").open("a") as file:
            file.write('{"step": 3, "eval_loss": 9.0}\n' * (steps == 2))  # of a step that was lost, and is done again
    run = tmp_path / "run"
    assert main(["report", str(run)]) == 0
    seen = Elements((run / "report.html").read_text())
    assert {"loss", "lr", "grad_norm", "tokens_per_second", "step_seconds", "peak_memory_bytes"} <= seen.charts
    assert "resumed after step 2" in seen.text
    assert seen.text.partition("Checkpoints")[2].partition("zero.")[0].count("whole") == 3
    assert "4 / 4" in seen.text
    assert "1 rank" in seen.text
    evaluated = [line["step"] for line in read_metrics(run / "evaluations.jsonl")]
    assert evaluated == [1, 2, 3, 4]
    (record,) = read_runs([run])
    assert record.step_memory is not None
    step, _, events = record.step_memory
    assert step == 4  # the second one of the second process
    assert {"parameters", "moments"} <= {purpose for _, _, purpose, _ in events}


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("there is no Chromium on this machine (Debian: apt-get install chromium)")
    with Browser(path, tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def written(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("report") / "run")
    assert main(["report", str(run)]) == 0
    browser.complaints.clear()
    return run / "report.html"


def drawn(browser: Browser) -> dict[str, int]:
    """How many lines, areas and dots of each chart cover some of the screen."""
    script = """[...document.querySelectorAll("figure")].map((chart) => [chart.id,
        [...chart.querySelectorAll("path.js-line, path.js-fill, path.point")]
        .map((path) => path.getBoundingClientRect()).filter((box) => Math.max(box.width, box.height) > 3).length])"""
    found: list[list[Any]] = browser.ask(script)
    return {identifier.removeprefix("chart-"): count for identifier, count in found}


def test_every_chart_is_drawn_and_the_console_stays_empty(browser: Browser, written: Path) -> None:
    browser.open(written)
    found = drawn(browser)
    assert set(found) == ALL_CHARTS
    assert all(found.values()), found
    # Narrow screens scroll tables, not the page.
    for width in (360, 1280):
        browser.size(width, 800, phone=width < 500)
        assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.complaints == []


def test_it_fits_a_phone_and_a_wide_screen(browser: Browser, written: Path) -> None:
    assert looks_of(browser, written) == []


def test_the_pointer_shows_values_and_drags_open_a_closer_look(browser: Browser, written: Path) -> None:
    browser.open(written)
    browser.ask("document.querySelector('#chart-loss').scrollIntoView()")
    left, top, width, height = browser.ask(
        "(({x, y, width, height}) => [x, y, width, height])"
        "(document.querySelector('#chart-loss .nsewdrag').getBoundingClientRect())"
    )

    def move(kind: str, part: float) -> None:
        browser.mouse(kind, left + part * width, top + height / 2)
        browser.ask("new Promise((done) => setTimeout(done, 150))")

    def steps(name: str) -> list[float]:
        found: list[float] = browser.ask(f"document.getElementById('plot-{name}')._fullLayout.xaxis.range")
        return found

    move("mouseMoved", 0.4)
    move("mouseMoved", 0.5)
    for name, word in (("loss", "training"), ("phases", "forward")):
        text = browser.ask(f"document.querySelector('#chart-{name} .hoverlayer').textContent")
        assert re.match(r"step 10[01]", text), name
        assert word in text
    move("mousePressed", 0.5)
    move("mouseMoved", 0.75)
    move("mouseReleased", 0.75)
    for name in ("loss", "phases", "lr"):
        assert steps(name) == pytest.approx([100, 150], abs=3)
    assert steps("step-memory-device")[0] == 0
    for count in (1, 2):
        browser.mouse("mousePressed", left + width / 2, top + height / 2, count)
        browser.mouse("mouseReleased", left + width / 2, top + height / 2, count)
    browser.ask("new Promise((done) => setTimeout(done, 600))")
    assert steps("loss") == steps("lr") == [1, 200]
    # A series that is left out of a stack leaves no hole in it.
    browser.ask("document.querySelector('#chart-phases .legendtoggle').dispatchEvent(new MouseEvent('mousedown'))")
    browser.ask("document.querySelector('#chart-phases .legendtoggle').dispatchEvent(new MouseEvent('mouseup'))")
    browser.ask("new Promise((done) => setTimeout(done, 600))")
    assert browser.ask("document.getElementById('plot-phases')._fullData[0].visible") == "legendonly"
    browser.ask("document.querySelector('#chart-loss button').click()")
    assert browser.ask("document.getElementById('plot-loss')._fullLayout.yaxis.type") == "log"
    assert browser.complaints == []


def test_nothing_of_a_hostile_run_runs(browser: Browser, tmp_path: Path) -> None:
    browser.complaints.clear()
    run = write_run(tmp_path / "<img src=x>", steps=9, changes={3: BAD})
    main(["report", str(run)])
    browser.open(run / "report.html")
    assert "taken" not in browser.ask("document.title")
    browser.ask("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')")
    browser.ask("new Promise((done) => setTimeout(done, 100))")
    assert browser.ask("document.title") != "1"  # what would come in after all is stopped by the page's policy
    assert any("Content Security Policy" in each for each in browser.complaints)
