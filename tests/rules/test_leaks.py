"""What is left in a process after several engines."""

import pytest

from tests.support.workers import Workers


@pytest.mark.parametrize(("stage", "transport"), [(3, "shared"), (2, "gloo"), pytest.param(0, "shared", marks=pytest.mark.full)])
def test_engines_leave_nothing_behind(workers: Workers, stage: int, transport: str) -> None:
    """Neither files nor mappings nor memory, after several engines on one mesh."""
    for found in workers.run(2, "tests.conformance.cases:leaks", stage=stage, transport=transport, runs=12):
        assert len(set(found["files"][1:])) == 1, found["files"]
        assert len(set(found["mappings"][1:])) == 1, found["mappings"]
        assert found["resident"][-1] - found["resident"][3] < 4 << 20, found["resident"]
