"""Parameters outside of passes: reading them whole, following their flags, averaging them."""

from dataclasses import asdict
from pathlib import Path

import pytest

from tests.contract.harness import Layout
from tests.support.workers import Workers

LAYOUTS = [
    Layout(stage=3, kept=False, transport="gloo"),
    Layout(stage=1, transport="shared"),
    pytest.param(Layout(stage=3, kept=True, transport="shared"), marks=pytest.mark.full),
    pytest.param(Layout(stage=0, transport="gloo"), marks=pytest.mark.full),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_an_error_in_gathered_that_is_caught_ends_nothing(workers: Workers, layout: Layout) -> None:
    first, second = workers.run(2, "parameter_cases:caught_in_gathered", layout=asdict(layout))
    assert first["difference"] < 1e-9
    assert first["seen"][0].startswith("ZeroDivisionError")
    for result in (first["seen"][1:], second["seen"]):
        assert result[0].startswith("RuntimeError: mat1 and mat2 shapes")
        assert result[1].startswith("PhaseError: stem.weight: written inside gathered()")
        assert result[2].startswith("PhaseError: blocks.1.up.weight: written inside gathered()")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_hooks_and_lists_of_parameters_survive_a_build_on_meta(workers: Workers, layout: Layout) -> None:
    first, second = workers.run(2, "parameter_cases:given_as_callables", layout=asdict(layout))
    for found in (first, second):
        assert {name: each["difference"] for name, each in found.items() if not each["difference"] < 1e-9} == {}
        assert found["Counted"]["seen"] == 4


def test_hooks_on_meta_are_refused(workers: Workers) -> None:
    (found,) = workers.run(1, "parameter_cases:hooks_refused")
    assert found.startswith("blocks.1.down.weight: the model was passed on the meta device with hooks on gradients")


@pytest.mark.parametrize("name", ["gradual", "resting", "adapters"])
def test_a_run_goes_on_with_the_flags_that_it_had(workers: Workers, tmp_path: Path, name: str) -> None:
    first, second, third = Layout(stage=3, kept=False), Layout(stage=1, ranks=1), Layout(stage=2, transport="gloo")
    for layout, stop in ((first, 3), (second, 5), (third, 6)):
        arguments = {"layout": asdict(layout), "folder": str(tmp_path), "name": name, "stop": stop}
        found = workers.run(layout.ranks, "parameter_cases:changed", **arguments)
        assert (max(found) < 1e-9) == (stop == 6)


def test_flags_change_inside_backward_and_on_files(workers: Workers, tmp_path: Path) -> None:
    assert max(workers.run(2, "parameter_cases:changed_inside_backward", folder=str(tmp_path))) < 1e-12


def test_weights_trained_later_get_master_weights(workers: Workers, tmp_path: Path) -> None:
    assert max(workers.run(2, "parameter_cases:changed_in_bfloat16", folder=str(tmp_path))) == 0


def test_flags_that_differ_between_ranks_are_refused(workers: Workers) -> None:
    found = workers.run(2, "parameter_cases:flags_that_differ")
    message = "given different things: requires_grad of head.bias, changed is (absent) on rank 0, False on rank 1"
    assert any(message in each for each in found), found


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "replicate"])
def test_flags_change_over_all_axes(workers: Workers, tmp_path: Path, axis: str) -> None:
    found = workers.run(2, "parameter_cases:changed_over_axes", folder=str(tmp_path), **{axis: 2})
    assert max(found) < 1e-9
