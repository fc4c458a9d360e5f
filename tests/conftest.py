"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from workers import Workers


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Pools of worker processes, kept for the session."""
    pools = Workers(tmp_path_factory.mktemp("workers"))
    yield pools
    pools.close()
