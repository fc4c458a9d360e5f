"""Fixtures of the conformance tests."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.workers import Pool, PoolOptions, Workers

from .checks import Laboratory
from .recipe import Problem


def pytest_configure(config: pytest.Config) -> None:
    """Before modules are read, which make problems."""
    Problem.usual_steps = config.getoption("steps")


@pytest.fixture(scope="session")
def laboratory(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(workers, tmp_path_factory.mktemp("conformance"))


@pytest.fixture
def fresh_pool(workers: Workers) -> Iterator[Callable[..., Pool]]:
    """Makes pools of this test's own: for cases after which a board says that ranks have failed."""
    made: list[Pool] = []

    def make(size: int, **options: object) -> Pool:
        made.append(workers.fresh(PoolOptions(size=size, **options)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for pool in made:
        pool.close()
