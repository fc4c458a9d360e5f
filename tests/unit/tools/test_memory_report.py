"""The arithmetic of `scripts/benchmarks/memory_report.py` on given numbers, and its prediction for a model that is not built."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import memory_report
import pytest
from bench import measure, timeline
from bench.account import Case, Growth, Line, Measured, Prediction
from bench.activations import Activations
from bench.launch import Run
from bench.predict import predict
from bench.workload import Workload

from zeromesh.offload import Transfer

MIB = 1 << 20
FAR = "more than 10% from the system's figure"
REFERENCE = Case(dtype="bf16", transport="shared", stage=3, layers=8, width=1)
PREDICTED = Prediction(staying={"PARAMETERS": 30 * MIB, "MASTER": 60 * MIB}, passing=10 * MIB, activations=50 * MIB)
"""150 MiB, of which 100 are states."""


def line(*, constant: int = 50, system: int = 200, ledger: dict[str, int] | None = None, passed: int = 8) -> Line:
    """MiB."""
    counted = dict(PREDICTED.staying) if ledger is None else ledger
    measured = Measured(ledger=counted, ledger_peak=sum(counted.values()) + passed * MIB, peak=system * MIB)
    return Line(case=REFERENCE, predicted=PREDICTED, measured=measured, constant=constant * MIB)


class TestLine:
    def test_what_is_as_predicted_has_no_problem(self) -> None:
        found = line()
        assert found.total == 200 * MIB
        assert found.difference == 0
        assert found.problems == ()

    @pytest.mark.parametrize(("system", "far"), [(182, False), (181, True), (222, False), (223, True)])
    def test_ten_per_cent_of_the_systems_figure_are_allowed(self, system: int, far: bool) -> None:
        found = line(system=system)
        assert found.difference == pytest.approx(200 / system - 1)
        assert bool(found.problems) is far

    def test_the_ledger_must_be_the_formula(self) -> None:
        other = {"PARAMETERS": 30 * MIB, "MASTER": 60 * MIB + 1}
        assert line(ledger=other).problems == ("the ledger is not the formula",)

    def test_no_more_may_come_and_go_than_the_formula_says(self) -> None:
        assert line(passed=10).problems == ()
        assert line(passed=11).problems == ("more came and went than the formula allows",)


@pytest.mark.parametrize(("system", "far"), [(280, False), (290, True), (281, True), (272, True)])
def test_growth_is_that_of_states_and_activations(system: int, far: bool) -> None:
    """By 70 and 10 MiB; the constant does not matter."""
    few = line(constant=1000)
    more = {name: nbytes + 35 * MIB for name, nbytes in PREDICTED.staying.items()}
    predicted = replace(PREDICTED, staying=more, activations=60 * MIB)
    many = replace(few, predicted=predicted, measured=replace(few.measured, peak=system * MIB))
    found = Growth(few=few, many=many)
    assert (found.states, found.activations) == (70 * MIB, 10 * MIB)
    assert found.difference == pytest.approx(80 / (system - 200) - 1)
    assert bool(found.problems) is far


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """No process is started: peaks in MiB by stage, of the rank that needs most, where 150 are predicted."""
    peaks = {3: 200, 2: 205}

    def run_system(system: str, workload: Workload) -> Run:
        peak = peaks[int(system.removeprefix("zeromesh-"))] * MIB
        notes = {"ledger": dict(PREDICTED.staying), "ledger_peak": 95 * MIB}
        ranks = ({"peak_bytes": peak - MIB, "notes": notes}, {"peak_bytes": peak, "notes": notes})
        return Run(system=system, step_seconds=(), cpu_seconds=(), peak_bytes=peak, losses=(), ranks=ranks)

    monkeypatch.setattr(measure, "run_system", run_system)
    monkeypatch.setattr(measure, "measure_activations", lambda workload: Activations(saved=40 * MIB, peak=50 * MIB))
    monkeypatch.setattr(measure, "predict", lambda workload, stage, activations: PREDICTED)
    monkeypatch.setattr(memory_report.memory_tables, "draw", lambda groups, path: None)
    return peaks


@pytest.mark.parametrize(
    ("peak", "code", "row", "told"),
    [
        # The constant is that of the reference.
        (205, 0, "| stage 2, 16 layers, width x1 | 90.0 | 10.0 | 50.0 | 50.0 | 200.0 | 205.0 | -2.4% |", ""),
        (230, 1, f"-13.0%; {FAR} |", f"bf16, gloo, stage 2, 16 layers, width x1: {FAR}"),
    ],
)
def test_a_report_ends_with_1_where_a_line_is_far_off(
    canned: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    peak: int,
    code: int,
    row: str,
    told: str,
) -> None:
    canned[2] = peak
    words = ["--dtype", "bf16", "--transport", "gloo", "--stages", "2", "--sizes", "16x1", "--no-growth", "--no-peers"]
    monkeypatch.setattr(sys, "argv", ["memory_report.py", *words, "--out", str(tmp_path)])
    assert memory_report.main() == code
    (found,) = json.loads((tmp_path / "memory.json").read_text())["lines"]
    assert (found["constant"], found["measured"]["peak"]) == (50 * MIB, peak * MIB)
    said = capsys.readouterr()
    assert row in said.out
    assert told in said.err


def test_the_prediction_for_the_default_workload() -> None:
    """34,087,424 elements on two ranks: parameters 2 bytes, master weights 4, moments 8; two slots of the embedding's gradient."""
    count, embedding = 34_087_424, 8192 * 512
    block = 4 * 512 * 512 + 3 * 512 * 1408 + 2 * 512
    gathered = 2 * (embedding + block) // 2  # Two units that follow each other, of which each rank counts a half.
    found = predict(Workload(transport="shared"), 3, activations=7)
    assert found.staying == {
        "PARAMETERS": 512,  # of the root
        "MASTER": 2 * count,
        "MOMENTS": 4 * count,
        "GRADIENT_BUCKETS": 2 * 2 * embedding,
    }
    assert (found.passing, found.activations) == (2 * 4 * embedding // 2 + gathered, 7)
    after = predict(Workload(transport="shared", in_backward=False), 3, activations=7)
    assert "GRADIENTS" not in after.staying
    assert after.passing == 2 * count + gathered  # from reduction to update


def test_what_a_timeline_records_is_there() -> None:
    with timeline.Recorder().watching():
        assert Transfer.wait_for_end.__name__ == "call"
    assert Transfer.wait_for_end.__name__ == "wait_for_end"
