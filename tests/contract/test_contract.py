"""Every case of the contract, in a diagonal of the layouts; in all of them under `full`."""

from dataclasses import asdict
from typing import Any

import pytest

from tests.contract.harness import LAYOUTS, Layout, cases, check, short
from tests.support.workers import Workers

ALIKE = {
    *("DeBERTa", "Pvt", "spectral norm in bfloat16", "spectral norm in float64", "a scripted part of a block"),
    *("blocks return a object", "frozen blocks return a dataclass", "lists in a list", "sparse embedding bag"),
    *("blocks recomputed together", "weights clamped in forward"),
}
"""What others show as well: DeBERTa-v2, with the same head, and DeBERTa with its first head; GLPN, of the same stages; the other
dtype or the other kind of the norm; all scripted, objects with slots, lists in lists, embeddings, gated blocks, rolled weights."""


def _parameters() -> list[Any]:
    found = []
    for number, name in enumerate(cases()):
        for layout in LAYOUTS:
            marks = () if layout in short(number) and name not in ALIKE else (pytest.mark.full,)
            found.append(pytest.param(name, layout, id=f"{name.replace(' ', '_')}-{layout.name}", marks=marks))
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "layout"), _parameters())
def test_contract(workers: Workers, name: str, layout: Layout) -> None:
    results = workers.run(layout.ranks, "tests.contract.harness:run", name=name, layout=asdict(layout))
    check(results, cases()[name].refusal(layout))
