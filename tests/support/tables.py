"""Tables of cases that workers run: a test for each row, which holds what the case asserts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import PoolOptions, Workers


def row(ranks: int, case: str, *marks: pytest.MarkDecorator, **arguments: Any) -> Any:
    """A case on so many ranks, called after itself and those of its arguments that are short."""
    words = [str(value) for value in arguments.values() if isinstance(value, str | float | int)]
    return pytest.param(ranks, case, arguments, marks=marks, id=" ".join([f"{case} on {ranks}", *words]))


def tried(
    module: str, rows: Sequence[Any], *, folder: bool = True, fresh: bool = False, timeout: float = 60.0, device: str = ""
) -> Callable[..., None]:
    """A test of each row, a number of ranks, a case of `module` and its arguments, on kept workers, or on `fresh` ones.

    With `folder` cases are told one of their own.
    """

    @pytest.mark.parametrize(("ranks", "case", "arguments"), rows)
    def test(workers: Workers, tmp_path: Path, ranks: int, case: str, arguments: dict[str, Any]) -> None:
        given = {"timeout": timeout, **({"folder": str(tmp_path)} if folder else {}), **arguments}
        if not fresh:
            workers.run(ranks, f"{module}:{case}", **{"device": device, **given})
            return
        with workers.fresh(PoolOptions(size=ranks, timeout_seconds=5)) as pool:
            pool.run(f"{module}:{case}", **given)

    return test
