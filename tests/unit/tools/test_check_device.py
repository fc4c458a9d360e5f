"""The logic of `scripts/check_device.py`: verdicts, what a log tells, shares of the budget, and depths that fit."""

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import check_device
import pytest
from bench.device import budget, rows, sizes
from bench.device.budget import ALONE, TOGETHER, Part, Settings, allowance, run_part
from bench.device.rows import Row, broken, figure, heard, not_run
from bench.device.suite import files, outcome
from bench.workload import Workload

NAN = float("nan")
ONE = Settings(device="cpu", ranks=1, dry=True, folder="")


class TestRows:
    @pytest.mark.parametrize(
        ("value", "limits", "verdict"),
        [
            (1.04, {"most": 1.05}, "ok"),
            (1.06, {"most": 1.05}, "out of line"),
            (1.4, {"least": 1.5}, "out of line"),
            (1.5, {"least": 1.5}, "ok"),
            (NAN, {"most": 1.0}, "out of line"),
            (9.0, {}, ""),
            (9.0, {"most": 1.0, "judged": False}, "not judged"),
        ],
    )
    def test_a_verdict_follows_from_the_limits(self, value: float, limits: dict[str, Any], verdict: str) -> None:
        assert figure("a", value, **limits).verdict == verdict

    def test_a_log_tells_rows_and_what_was_begun_after_them(self, capsys: pytest.CaptureFixture[str]) -> None:
        rows.say_begin("first")
        rows.say(figure("time", 3.0, most=2))
        rows.say(figure("time", 1.0, most=2))
        print("a warning of a library")
        rows.say_begin("second")
        found, begun = heard([*capsys.readouterr().out.splitlines(), 'ROW {"what": "cut o'])
        assert [(row.what, row.value, row.verdict) for row in found] == [("time", 1.0, "ok")]
        assert begun == "second"

    def test_the_table_has_reasons_and_the_summary_names_what_is_out_of_line(self) -> None:
        found = [figure("speed", 1234.5, "a second"), not_run("DeepSpeed", "it is not installed"), broken("hang", "no end")]
        text = rows.table(found).splitlines()
        assert "1,234 a second" in text[1]
        assert text[3].strip() == "it is not installed"
        assert rows.summary(found).splitlines() == ["1 out of line, 1 not run", "out of line: hang"]


class TestBudget:
    def test_a_part_gets_its_share_and_what_is_left_over(self) -> None:
        parts = [Part(name=name, title="", seconds=100, least=10) for name in "abc"]
        assert allowance(parts, 0, 300) == 100
        assert allowance(parts, 0, 340) == 140
        assert allowance(parts, 1, 150) == 100
        assert allowance(parts, 2, 30) == 30

    @pytest.mark.parametrize("parts", [ALONE, TOGETHER])
    def test_all_parts_together_take_nine_minutes_at_most(self, parts: tuple[Part, ...]) -> None:
        assert sum(part.seconds for part in parts) <= check_device._SECONDS <= 530
        assert all(part.least < part.seconds for part in parts)

    def test_a_part_without_time_is_not_run(self) -> None:
        (row,) = run_part(ALONE[0], ONE, 3.0)
        assert (row.verdict, row.reason) == ("not run", "3 s are left of the budget, and it needs 20")

    @pytest.mark.parametrize(
        ("program", "reason"),
        [
            ("import time; rows.say_begin('late'); time.sleep(60)", "not come to an end after 2 s"),
            ("rows.say_begin('bad'); raise ValueError('wrong device')", "ValueError: wrong device"),
        ],
    )
    def test_what_hangs_or_dies_is_named_after_what_was_found(
        self, program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = f"from bench.device import rows\nrows.say(rows.figure('found', 1.0, most=2))\n{program}\n"
        (tmp_path / "part.py").write_text(source)
        start = budget.start_ranks
        command = [sys.executable, str(tmp_path / "part.py")]
        monkeypatch.setattr(budget, "start_ranks", lambda _, *rest: start(command, *rest))
        part = Part(name="part", title="", seconds=5, least=1)
        found, bad = run_part(part, replace(ONE, folder=str(tmp_path)), 5.0)
        assert found.verdict == "ok"
        assert bad.what in ("late", "bad")
        assert bad.verdict == "out of line"
        assert reason in bad.reason


class TestSizes:
    def test_parameters_are_those_of_the_models(self) -> None:
        tiny = sizes.workload(1, dry=True, ranks=1)
        assert sizes.parameters(tiny) == sum(each.numel() for each in tiny.build_model().parameters())
        assert sizes.parameters(sizes.workload(8, dry=False, ranks=1)) == 8_030_261_248

    def test_a_model_is_as_deep_as_memory_allows(self) -> None:
        whole = sizes.workload(8, dry=False, ranks=1)
        fits = sizes.on_device(whole, 78 << 30, 1)
        assert 0 < fits.layers < whole.layers
        assert 18 * sizes.parameters(fits) <= 64 << 30 < 18 * sizes.parameters(replace(fits, layers=fits.layers + 1))
        assert sizes.on_device(whole, 78 << 30, 8).layers == whole.layers
        assert sizes.on_device(whole, 20 << 30, 1).layers == 0
        assert sizes.on_host(whole, 58 * 10**9, 78 << 30, 20).layers == 8

    @pytest.mark.parametrize("billions", [1, 8])
    def test_a_step_has_8k_tokens(self, billions: int) -> None:
        made: Workload = sizes.workload(billions, dry=False, ranks=1)
        assert made.micro * made.sequence == 8192


def test_a_report_of_pytest_becomes_rows(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><skipped message="no"/></testcase>'
        '<testcase name="c"><failure message="a race"/></testcase></testsuite></testsuites>'
    )
    passed, failed, named = outcome(report)
    assert (passed.value, failed.value, failed.verdict) == (1, 1, "out of line")
    assert named == Row(what="c", verdict="out of line", expected="runs", reason="a race")
    assert "tests/unit/offload/test_copy_streams.py" in files()


def test_a_device_is_chosen_in_a_dry_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["check_device.py", "--device", "cpu"])
    with pytest.raises(SystemExit):
        check_device.main()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ranks", "-1"], "--ranks -1: give a number of devices"),
        (["--seconds", "nan"], "--seconds nan: give a number above 0"),
        (["--dry-run", "--device", "sim", "--ranks", "99"], "99 ranks were asked for, and the simulated device has"),
        (["--dry-run", "--parts", "copies", "--ranks", "2"], "copies: not for 2 devices"),
        (["--dry-run", "--parts", "tests", "--json", "/dev/null/rows.json"], "cannot write its files (/dev/null)"),
    ],
)
def test_a_command_that_cannot_be_meant(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["check_device.py", *words])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # The tests keep their own.
    try:
        code = check_device.main()
    except SystemExit as error:
        code = error.code  # type: ignore[assignment]
    assert code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "tasks", "code"), [("1", "2", 0), ("1", "1,1", 2)])
def test_tasks_of_slurm_are_devices_of_one_check(
    rank: str, tasks: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each task would else check one device, and all of them would write one file."""
    monkeypatch.setattr(sys, "argv", ["check_device.py", "--dry-run"])
    monkeypatch.setattr(check_device, "_run", lambda *_: pytest.fail("another task runs the check"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-2]")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
    for name, value in {"PROCID": rank, "LOCALID": "0", "NTASKS": "2", "NODEID": rank if "," in tasks else "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    if "," not in tasks:
        monkeypatch.setenv("SLURM_LOCALID", rank)
    assert check_device.main() == code
    assert ("several" in capsys.readouterr().err) == (code == 2)
