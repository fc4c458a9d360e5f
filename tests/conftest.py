"""Fixtures of all tests."""

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from workers import Workers

pytest.register_assert_rewrite("doc_pages")
# A machine that does other things as well makes any example slow.
settings.register_profile("zeromesh", deadline=None)
settings.load_profile("zeromesh")

# A shell starts what runs in the background with SIGINT ignored, and a run would leave it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

_WORKERS = pytest.StashKey[Workers]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Of the conformance tests, which give most of their time to steps."""
    parser.addoption("--steps", type=int, default=10, help="steps of conformance tests that do not say how many (10)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need no workers run first: meanwhile the process that workers are forked from imports what it needs."""
    items.sort(key=_uses_workers)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start that process when a test will want it."""
    if any(map(_uses_workers, session.items)) and not session.config.option.collectonly:
        session.config.stash[_WORKERS] = Workers(Path(tempfile.mkdtemp(prefix="zeromesh-workers-")))


def _uses_workers(item: pytest.Item) -> bool:
    return "workers" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint, not to be changed but for a moment."""
    from damage_cases import made

    return made(tmp_path_factory.mktemp("original"), 7, 1)


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "step-00000007"))


@pytest.fixture(scope="session")
def workers(pytestconfig: pytest.Config) -> Iterator[Workers]:
    """Pools of worker processes, kept for the session."""
    pools = pytestconfig.stash[_WORKERS]
    yield pools
    pools.close()
    shutil.rmtree(pools.folder, ignore_errors=True)
