"""Parameters outside of passes: reading them whole, following their flags, averaging them."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from contract.harness import Layout
from workers import Workers

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
