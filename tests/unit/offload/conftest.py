"""What the tests of offload share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.offload.file_cases import in_time, made_tiers
from zeromesh.offload import Tiers


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    found = made_tiers(tmp_path / "swap")
    yield found
    in_time(found.close)
