"""Small runs with checkpoints for the tests of `zeromesh checkpoint`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.tools.checkpoint_runs import Copied, Trained, trained_runs


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    yield from trained_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def copied(trained: Trained, tmp_path: Path) -> Copied:
    return lambda name: trained.copy(name, tmp_path)
