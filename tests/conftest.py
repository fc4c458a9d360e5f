"""Fixtures of all tests."""

import atexit
import gc
import locale
import os
import shutil
import signal
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

_KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TMPDIR", "USER", "LOGNAME", "SHELL", "CC", "CXX")
"""Variables of the person who starts the tests that tests see."""
_KEPT_FAMILIES = ("PYTEST", "COV_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_")
_LONGEST_FOLDER = 60
"""Letters: a socket's path has at most 107, and stands in folders below this one."""


def _tests_own_environment() -> None:
    """Leave of a person's environment what finds programs and folders: a test sets all else that it needs.

    HOME is a new folder, the locale is that of plain UTF-8. It comes before anything is imported that reads these variables.
    """
    for name in os.environ:
        if name not in _KEPT and not name.startswith(_KEPT_FAMILIES):
            del os.environ[name]
    if len(tempfile.gettempdir()) > _LONGEST_FOLDER:
        del os.environ["TMPDIR"]
        tempfile.tempdir = None
    home = tempfile.mkdtemp(prefix="zeromesh-home-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    os.environ |= {"HOME": home, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
    locale.setlocale(locale.LC_ALL, "C.UTF-8")


_tests_own_environment()

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests.support.programs import Programs  # noqa: E402
from tests.support.workers import Workers  # noqa: E402
from tests.unit.offload.file_cases import in_time, made_tiers  # noqa: E402
from zeromesh.offload import Tiers  # noqa: E402

pytest.register_assert_rewrite("tests.support.doc_pages")
# A machine that does other things as well makes any example slow.
settings.register_profile("zeromesh", deadline=None)
settings.load_profile("zeromesh")
# Threads of torch turn while they wait for each other: where other processes have the cores, that is most of a test's time.
torch.set_num_threads(1)

# A shell starts what runs in the background with SIGINT ignored, and nohup with SIGHUP; a run would leave them ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

_WORKERS = pytest.StashKey[Workers]()
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that hide all accelerators from a process and its children where they are empty."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many steps conformance tests take, which give most of their time to them, and where tests compute."""
    parser.addoption("--steps", type=int, default=10, help="steps of conformance tests that do not say how many (10)")
    parser.addoption(
        "--device",
        choices=["cpu", "sim", "accelerator"],
        default="cpu",
        help="where tests compute: cpu, the simulated device, or the machine's own accelerator",
    )
    parser.addoption("--share", type=int, default=1, help="run one test in so many, always the same ones (1: all)")


def pytest_configure(config: pytest.Config) -> None:
    """Before modules are read: the device that tests compute on. Ranks of tests are more than a machine has accelerators."""
    if config.getoption("--device") != "accelerator":
        os.environ.update(dict.fromkeys(_VISIBLE, ""))
    if config.getoption("--device") == "sim":
        from tests.simulated import device

        if device.compiler() is None:
            pytest.exit("the simulated device needs a C++ compiler (g++ or clang++), and there is none", returncode=0)
        device.load()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is there once all modules are read stays: looking for garbage in it takes more than a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need no workers run first: meanwhile the process that workers are forked from imports what it needs."""
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None and zlib.crc32(item.name.encode()) % sampled.args[0]:
            item.add_marker(pytest.mark.full)
    share = config.getoption("--share")
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % share == 0]
    items.sort(key=_uses_workers)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start that process when a test will want it."""
    if any(map(_uses_workers, session.items)) and not session.config.option.collectonly:
        folder = Path(tempfile.mkdtemp(prefix="zeromesh-workers-"))
        session.config.stash[_WORKERS] = Workers(folder, session.config.getoption("--device"))
        if any(item.path.parent.name == "device" for item in session.items):
            from tests.simulated import device

            if device.compiler():  # Meanwhile tests run that need no such device.
                threading.Thread(target=device.build, daemon=True).start()


def _uses_workers(item: pytest.Item) -> bool:
    return "workers" in getattr(item, "fixturenames", ())


@pytest.fixture(autouse=True)
def judged(request: pytest.FixtureRequest) -> Iterator[None]:
    """On the simulated device a test has no race."""
    if request.config.getoption("--device") != "sim":
        yield
        return
    from tests.simulated import device

    with device.judged():
        yield


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint, not to be changed but for a moment."""
    from tests.support.damage_cases import made

    return made(tmp_path_factory.mktemp("original"), 7, 1)


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "step-00000007"))


@pytest.fixture(scope="session")
def programs(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Commands that import nothing: they are forked from a process that has imported all."""
    found = Programs(tmp_path_factory.mktemp("programs"), workers)
    yield found
    found.close()


@pytest.fixture
def at_once(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `sys.executable` be such a command for a test that starts Python with `-m zeromesh`, a script or `-c`."""
    monkeypatch.setattr(sys, "executable", str(programs.bin / "python"))


@pytest.fixture(scope="session")
def workers(pytestconfig: pytest.Config) -> Iterator[Workers]:
    """Pools of worker processes, kept for the session."""
    pools = pytestconfig.stash[_WORKERS]
    yield pools
    pools.close()
    shutil.rmtree(pools.folder, ignore_errors=True)


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    """Memory of this process, with a file tier in the test's folder."""
    found = made_tiers(tmp_path / "swap")
    yield found
    in_time(found.close)
