"""`zeromesh doctor`: how it judges what a machine shows, and that it looks at this one."""

import ast
import inspect
import json
import math
import string
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from zeromesh.launch import self_test
from zeromesh.launch.self_test import Trial, try_exchange
from zeromesh.offload.accelerator import DeviceMemory
from zeromesh.offload.io import direct_io
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.tools.doctor import hardware, software
from zeromesh.trainer.tools.doctor.hardware import DiskTimes
from zeromesh.trainer.tools.doctor.software import Finding, Level, judge, report_lines

GIB = 1 << 30


def levels(findings: Iterable[Finding]) -> dict[str, str]:
    """The level of each finding that is not ok, by what was looked at; such a finding says what it means and what to do."""
    bad = [finding for finding in findings if finding.level is not Level.OK]
    assert all(finding.means and finding.do for finding in bad)
    return {finding.what: finding.level.value for finding in bad}


def texts(findings: Iterable[Finding]) -> str:
    return "\n".join(report_lines("part", list(findings)))


def test_what_is_not_ok_says_what_that_means_and_what_to_do() -> None:
    bad = judge("shared memory", "none")
    lines = list(report_lines("machine", [judge("cores", "2", when=False, threads=1), bad]))
    assert lines == [
        "machine",
        "  ok       cores          2",
        "  PROBLEM  shared memory  none",
        "                          Ranks of one host meet in anonymous shared memory.",
        "                          -> Allow the system call memfd_create in the container's seccomp profile.",
    ]


def test_the_code_and_the_file_name_the_same_findings_and_fields() -> None:
    # The names of these are in variables, and their texts have no fields.
    given: dict[str, set[str]] = {name: set() for name in (*software._DEBUGGING, "open files", "processes")}
    for module in (hardware, software):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "judge":
                names = {each.value for each in ast.walk(node.args[0]) if isinstance(each, ast.Constant)}
                given |= dict.fromkeys(names, {str(each.arg) for each in node.keywords} - {"when"})
    assert given == {
        name: {field for text in texts.values() for _, field, _, _ in string.Formatter().parse(text) if field is not None}
        for name, texts in software._TEXTS.items()
    }
    assert all(len(texts.keys() - {"what", "slow"}) == 2 and "do" in texts for texts in software._TEXTS.values())
    assert all(texts.keys() <= {"what", "do", "warning", "problem", "slow"} for texts in software._TEXTS.values())


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without a fault; a test breaks one thing of it."""
    for name, value in {"available_cores": 8, "available_bytes": 48 * GIB, "machine_bytes": 64 * GIB}.items():
        monkeypatch.setattr(hardware, name, lambda value=value: value)
    monkeypatch.setattr(hardware, "group_settings", lambda name: [])
    monkeypatch.setattr(hardware.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(hardware, "_limit", lambda which: math.inf)
    monkeypatch.setattr(hardware.os, "statvfs", lambda path: SimpleNamespace(f_frsize=GIB, f_blocks=32))
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("group_settings", {"cpu.max": ["150000 100000", "max 100000"]}.get, {"cores": "warning"}),
        ("group_settings", {"cpu.max": ["800000 100000"], "memory.max": ["max"]}.get, {}),
        ("group_settings", {"pids.max": ["512"]}.get, {"processes": "warning"}),
        ("group_settings", {"pids.max": ["max", "4096"]}.get, {}),
        ("available_bytes", lambda: GIB, {"memory": "warning"}),
        ("available_bytes", lambda: 2 * GIB, {}),
        ("_limit", lambda which: 1024, dict.fromkeys(("locked memory", "open files", "processes"), "warning")),
        ("_limit", lambda which: 4096, {"locked memory": "warning"}),
        ("_limit", lambda which: 64 << 20, {}),
        ("os.statvfs", lambda path: SimpleNamespace(f_frsize=4096, f_blocks=16384), {"/dev/shm": "warning"}),
        ("os.statvfs", lambda path: SimpleNamespace(f_frsize=4096, f_blocks=262144), {}),
        ("os.path.isdir", lambda path: False, {}),
        ("os.memfd_create", Mock(side_effect=TimeoutError("timed out")), {"shared memory": "problem"}),
    ],
)
def test_limits_of_a_machine(sound: pytest.MonkeyPatch, name: str, value: Any, found: dict[str, str]) -> None:
    if name == "group_settings":
        sound.setattr(hardware, name, lambda each: value(each, []))
    else:
        sound.setattr(f"zeromesh.trainer.tools.doctor.hardware.{name}", value)
    assert levels(hardware.machine()) == found


def test_a_control_group_that_allows_less_is_named(sound: pytest.MonkeyPatch) -> None:
    settings = {"memory.max": [str(8 * GIB)], "cpu.max": ["200000 100000"]}
    sound.setattr(hardware, "group_settings", lambda name: settings.get(name, []))
    found = texts(hardware.machine())
    assert "48.0 GiB free of 8.0 GiB by the control group, 64.0 GiB" in found
    assert "Set OMP_NUM_THREADS to 2 divided by --nproc" in found
    assert "8, and time of 2 by the control group" in found
    settings |= {"memory.max": [str(64 * GIB), "max"], "cpu.max": ["50000 100000", "400000 100000"], "pids.max": ["600"]}
    sound.setattr(hardware, "_limit", lambda which: 5000)
    sound.setattr(hardware.accelerator, "current_accelerator", lambda: None)
    found = texts(hardware.machine())
    assert "48.0 GiB free of 64.0 GiB\n" in found
    assert "time of 0.5 by" in found
    assert "Set OMP_NUM_THREADS to 1 divided by --nproc" in found
    assert "processes      up to 600\n" in found
    assert "ok       open files     up to 5,000\n" in found
    assert "ok       locked memory  4.9 KiB\n" in found, "without devices there is nothing to register"


def devices_of(*, count: int = 2, free: int = 79, broken: tuple[int, ...] = (), failure: str = "", built: str = "CUDA 12.8") -> Any:
    """GPUs as the seam shows them, of which `broken` compute nothing."""

    def initialize() -> list[torch.device]:
        if failure:
            raise RuntimeError(f"{failure}\nand more")
        return [torch.device("cuda", index) for index in range(count)]

    def ones(count: int, device: torch.device) -> torch.Tensor:
        if device.index in broken:
            raise RuntimeError("CUDA error: no kernel image is available")
        return torch.ones(count)

    memory = DeviceMemory(free=free * GIB, total=80 * GIB, allocated=0, reserved=0, peak=0)
    return SimpleNamespace(
        failure=failure,
        build_platform=lambda: built,
        initialize=initialize,
        ones=ones,
        device_name=lambda device: "H100",
        architecture=lambda device: "sm_90",
        device_memory=lambda device: memory,
        collectives_library=lambda: "NCCL 2.27.3",
    )


@pytest.mark.parametrize(
    ("driver", "devices", "found"),
    [
        ("575.51", devices_of(), {}),
        ("575.51", devices_of(built=""), {"torch": "problem"}),
        ("", devices_of(built=""), {}),
        ("520.61", devices_of(failure="the driver is too old"), {"devices": "problem"}),
        ("575.51", devices_of(count=0), {"devices": "problem"}),
        ("", devices_of(failure="no driver"), {}),
        ("575.51", devices_of(free=9), {"device 0": "warning", "device 1": "warning"}),
        ("575.51", devices_of(count=1, free=71), {"device 0": "warning"}),
        ("575.51", devices_of(count=1, free=72), {}),
        ("575.51", devices_of(broken=(1,)), {"device 1": "problem"}),
    ],
)
def test_torch_the_driver_and_devices_have_to_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str, devices: Any, found: dict[str, str]
) -> None:
    monkeypatch.setattr(hardware, "accelerator", devices)
    fake = SimpleNamespace(ones=devices.ones, device=torch.device, __version__="2.13")
    monkeypatch.setattr(hardware, "torch", fake)
    monkeypatch.setattr(hardware, "_DRIVER", tmp_path / "version")
    if driver:
        (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Wed\n")
    shown = list(hardware.accelerators())
    assert levels(shown) == found
    assert driver in texts(shown)
    assert devices.failure in texts(shown) or not driver


@pytest.mark.parametrize(
    ("conditions", "version", "level"),
    [
        (">=2.11", "2.13.0+cpu", "ok"),
        (">=2.11", "2.9.1", "problem"),
        (">=2.11", "2.11.0a0+vendor", "ok"),
        (">=5", "5.0.0", "ok"),
        (">=1.26,<3", "2.4.6", "ok"),
        (">=1.26,<3", "3.0", "problem"),
        ("==0.19.8", "0.19.8", "ok"),
        ("==0.19.8", "0.19.9", "problem"),
        ("", "1.0", "ok"),
    ],
)
def test_versions_that_are_needed(monkeypatch: pytest.MonkeyPatch, conditions: str, version: str, level: str) -> None:
    monkeypatch.setattr(software.metadata, "version", lambda name: version)
    found = software.requirement(f"torch{conditions}")
    assert found.level.value == level
    assert (f"pip install 'torch{conditions}'" in found.do) is (level != "ok")


def test_the_packages_here_are_those_that_the_project_names() -> None:
    missing = software.requirement("a-package-that-is-not-there>=1")
    assert (missing.what, missing.level) == ("a-package-that-is-not-there", Level.PROBLEM)
    assert missing.do == "pip install 'a-package-that-is-not-there>=1'"
    found = list(software.packages())
    assert {"python", "zeromesh", "torch", "numpy", "transformers", "wandb", "xxhash"} <= {each.what for each in found}
    assert not levels(found)


@pytest.mark.parametrize(
    ("present", "found"),
    [
        ({}, {}),
        ({"address": ""}, {"host name": "warning"}),
        ({"address": "10.0.0.7", "seconds": 5.0}, {"host name": "warning"}),
        ({"address": "10.0.0.7", "seconds": 1.0}, {}),
        ({"NCCL_SOCKET_IFNAME": "^eth"}, {}),
        ({"GLOO_SOCKET_IFNAME": "ib0", "addresses": {}}, {}),
        ({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth"}, {}),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, {"GLOO_SOCKET_IFNAME": "problem"}),
        ({"NCCL_SOCKET_IFNAME": "=ib0,ib1"}, {"NCCL_SOCKET_IFNAME": "problem"}),
        ({"trial": Trial(seconds=0.001)}, {"two processes": "warning"}),
        ({"trial": Trial(failure="rank 0 is gone")}, {"two processes": "problem"}),
    ],
)
def test_why_ranks_cannot_meet(monkeypatch: pytest.MonkeyPatch, present: dict[str, Any], found: dict[str, str]) -> None:
    address, times = present.get("address", "127.0.1.1"), iter([0.0, present.get("seconds", 0.001)])

    def getaddrinfo(*_: object, **__: object) -> list[Any]:
        if not address:
            raise OSError("no such name")
        return [(0, 0, 0, "", (address, 0))]

    monkeypatch.setattr(software.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(software.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(software, "setting", present.get)
    addresses = present.get("addresses", {"127.0.0.1": "lo", "10.0.0.7": "eth0", "fe80::7": "eth0"})
    monkeypatch.setattr(software, "by_address", lambda: addresses)
    monkeypatch.setattr(software, "try_exchange", lambda: present.get("trial", Trial(seconds=0.1, shares_memory=True)))
    assert levels(software.network()) == found


def test_two_processes_that_cannot_meet_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "the two were not done after 0.5 seconds"
    refuses = "import sys; sys.stderr.write('not today'); sys.exit(1)"
    for code, seconds, failure in ((refuses, 60.0, "not today"), ("import time; time.sleep(60)", 0.5, said)):
        monkeypatch.setattr(self_test, "python_arguments", lambda *_, code=code: ("-c", code))
        assert try_exchange(seconds).failure == failure


@pytest.mark.parametrize(
    ("present", "found"),
    [
        ({}, {}),
        ({"kind": "tmpfs"}, {"/": "warning"}),
        ({"kind": "nfs4"}, {"/": "warning"}),
        ({"kind": "fuse.sshfs"}, {"/": "warning"}),
        ({"free": 1 * GIB}, {"  room": "warning"}),
        ({"free": 10 * GIB, "inodes": 1000, "read": 2e8}, {}),
        ({"inodes": 5}, {"  room": "warning"}),
        ({"inodes": 0, "files": 0}, {}),  # A file system that has no limit says so.
        ({"direct": False}, {"  speed": "warning"}),
        ({"read": 9e7}, {"  speed": "warning"}),
        ({"written": 9e7}, {"  speed": "warning"}),
        ({"locks": False}, {"  locks": "problem"}),
    ],
)
def test_directories(monkeypatch: pytest.MonkeyPatch, present: dict[str, Any], found: dict[str, str]) -> None:
    times = DiskTimes(2e9, 3e9, 0.001, direct=True, locks=True)
    times = times._replace(**{name: value for name, value in present.items() if name in times._fields})
    status = SimpleNamespace(f_files=present.get("files", 10**9), f_favail=present.get("inodes", 10**6))
    monkeypatch.setattr(hardware, "measure", lambda path: times)
    monkeypatch.setattr(hardware, "mount_of", lambda path: ("", present.get("kind", "ext4")))
    monkeypatch.setattr(hardware, "free_bytes", lambda path: present.get("free", 500 * GIB))
    monkeypatch.setattr(hardware.os, "statvfs", lambda path: status)
    shown = list(hardware.directory(Path("/")))
    assert levels(shown) == found
    remedies = {"tmpfs": "Give a directory on a disk.", "nfs4": "Set offload.directory to a local disk"}
    assert all(remedy in shown[0].do for kind, remedy in remedies.items() if kind == present.get("kind"))
    assert ("a disk with ext4 or xfs" in shown[2].do) is ("direct" in present)


def test_a_directory_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    found = list(hardware.directory(tmp_path / "not" / "yet"))
    kind = direct_io.mount_of(tmp_path)[1]
    assert kind
    assert found[0].found == f"{kind} (not there yet; {tmp_path} is)"
    assert [each.what for each in found[1:]] == ["  room", "  speed"]
    assert list(tmp_path.iterdir()) == []
    assert levels(hardware.directory(Path("/proc/zeromesh"))) == {"/proc/zeromesh": "problem"}


def test_variables_that_slow_runs_down_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-very-secret-key")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    found = list(software.launch())
    assert levels(found) == {"TORCH_DISTRIBUTED_DEBUG": "warning"}
    assert "very-secret" not in texts(found)
    for name, value in {"TORCH_DISTRIBUTED_DEBUG": "INFO", "CUDA_LAUNCH_BLOCKING": "0", "PYTHONMALLOC": "debug"}.items():
        monkeypatch.setenv(name, value)
    assert levels(software.launch()) == {"PYTHONMALLOC": "warning"}


def test_a_launch_that_is_there_in_part_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert levels(software.launch()) == {"launcher": "problem"}
    for name, value in {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)
    assert levels(software.launch()) == {}
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for cores, threads in ((8, 4), (1, 1)):
        monkeypatch.setattr(software, "available_cores", lambda cores=cores: cores)
        (found,) = software.launch()
        assert (found.level, found.do) == (Level.WARNING, f"Set OMP_NUM_THREADS={threads} before the launch.")
    assert "rank 1 of 4, 2 on this host; they meet at 127.0.0.1:29400" in found.found
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert levels(software.launch()) == {}


def test_requirements_of_extras_and_of_a_folder_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software.metadata, "requires", lambda name: ["torch>=1", "none-such; extra == 'x'"])
    assert [each.what for each in software.packages()] == ["python", "zeromesh", "torch"]
    monkeypatch.setattr(software.metadata, "requires", Mock(side_effect=software.metadata.PackageNotFoundError))
    assert levels(software.packages()) == {"requirements": "warning"}


@pytest.mark.parametrize(
    ("bad", "code", "said"),
    [
        ([], 0, "no problems, no warnings"),
        ([Level.WARNING] * 2, 0, "no problems, 2 warnings"),
        ([Level.PROBLEM, Level.WARNING], 1, "1 problem, 1 warning"),
    ],
)
def test_warnings_alone_are_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: list[Level], code: int, said: str
) -> None:
    looked: list[Path] = []
    for module, name in ((software, "packages"), (hardware, "machine"), (hardware, "accelerators"), (software, "launch")):
        monkeypatch.setattr(module, name, list)
    monkeypatch.setattr(hardware, "directory", lambda path: looked.append(path) or [Finding(str(path), "there")])
    monkeypatch.setattr(software, "network", lambda: [Finding("x", "y", level, "Why.", "Do.") for level in bad])
    assert main(["doctor"]) == code
    assert capsys.readouterr().out.splitlines()[-1] == said
    assert main(["doctor", "--json", "--directory", "a", "--directory", "b"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["problems"], found["warnings"]) == (bad.count(Level.PROBLEM), bad.count(Level.WARNING))
    assert [(each["part"], each["what"]) for each in found["findings"]][:2] == [("disks", "a"), ("disks", "b")]
    assert looked == [Path("runs"), Path("a"), Path("b")]


def test_the_command_looks_at_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "--directory", str(tmp_path)])
    said = capsys.readouterr()
    assert said.err == ""
    found = json.loads(said.out)
    parts = dict.fromkeys(each["part"] for each in found["findings"])
    assert list(parts) == ["packages", "machine", "accelerators", "launch", "disks", "network"]
    assert code == (1 if found["problems"] else 0)
    (exchange,) = [each for each in found["findings"] if each["what"] == "two processes"]
    assert exchange["level"] == "ok", exchange
    assert "they share memory" in exchange["found"]


def test_a_problem_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(software, "try_exchange", lambda: Trial(seconds=0.001, shares_memory=True))
    assert main(["doctor", "--directory", "/proc/zeromesh"]) == 1
    said = capsys.readouterr().out
    assert "PROBLEM  /proc/zeromesh  cannot be written" in said
    assert said.splitlines()[-1].startswith("1 problem, ")
