"""`zeromesh doctor`: how it judges what a machine shows, and that it looks at this one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from zeromesh.launch import self_test
from zeromesh.launch.self_test import Trial, try_exchange
from zeromesh.offload.io import direct_io
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.tools.doctor import hardware, software
from zeromesh.trainer.tools.doctor.findings import Finding, Level, report_lines
from zeromesh.trainer.tools.doctor.hardware import DiskTimes

GIB = 1 << 30


def levels(findings: Iterable[Finding]) -> dict[str, str]:
    """The level of each finding that is not ok, by what was looked at; such a finding says what it means and what to do."""
    bad = [finding for finding in findings if finding.level is not Level.OK]
    assert all(finding.means and finding.do for finding in bad)
    return {finding.what: finding.level.value for finding in bad}


def texts(findings: Iterable[Finding]) -> str:
    return "\n".join(report_lines("part", list(findings)))


def test_what_is_not_ok_says_what_that_means_and_what_to_do() -> None:
    bad = Finding.problem("memory", "none", "It is bad.", "Buy some.")
    lines = list(report_lines("machine", [Finding.warning("cores", "2", "It is bad.", "Buy.", when=False), bad]))
    assert lines == [
        "machine",
        "  ok       cores   2",
        "  PROBLEM  memory  none",
        "                   It is bad.",
        "                   -> Buy some.",
    ]


# Machine


@pytest.mark.parametrize(
    ("findings", "found"),
    [
        (hardware.cores(8, quota=8.0, architecture="x86_64", has_cuda=False), {}),
        (hardware.cores(8, quota=1.5, architecture="x86_64", has_cuda=False), {"cores": "warning"}),
        (hardware.cores(8, quota=None, architecture="aarch64", has_cuda=False), {"architecture": "warning"}),
        (hardware.cores(8, quota=None, architecture="aarch64", has_cuda=True), {}),
        (hardware.memory(48 * GIB, 64 * GIB, 128 * GIB, 0, "0"), {}),
        (hardware.memory(1 * GIB, 64 * GIB, None, 0, "2"), {"memory": "warning", "overcommit": "warning"}),
        (hardware.shared_memory(32 * GIB, memfd=True, has_cuda=False), {}),
        (hardware.shared_memory(None, memfd=True, has_cuda=False), {}),
        (hardware.shared_memory(64 << 20, memfd=True, has_cuda=False), {"/dev/shm": "warning"}),
        (hardware.shared_memory(None, memfd=False, has_cuda=False), {"shared memory": "problem"}),
        (hardware.limits(locked=8 << 20, files=65536, processes=None, has_cuda=False), {}),
        (hardware.limits(locked=8 << 20, files=None, processes=None, has_cuda=True), {"locked memory": "warning"}),
        (
            hardware.limits(locked=None, files=1024, processes=512, has_cuda=True),
            {"open files": "warning", "processes": "warning"},
        ),
    ],
)
def test_limits_of_a_machine(findings: Iterable[Finding], found: dict[str, str]) -> None:
    assert levels(findings) == found


def test_a_control_group_that_allows_less_is_named() -> None:
    assert "48.0 GiB free of 8.0 GiB by the control group, 64.0 GiB" in texts(
        hardware.memory(48 * GIB, 64 * GIB, 8 * GIB, 0, "0")
    )
    found = texts(hardware.cores(8, quota=2.0, architecture="x86_64", has_cuda=False))
    assert "Set OMP_NUM_THREADS to 2 divided by --nproc" in found


# Accelerators


@pytest.mark.parametrize(
    ("built", "driver", "module", "has_devices", "found"),
    [
        ("12.8", (12, 9), "575.51", True, {}),
        ("12.8", (13, 0), "580.65", True, {}),
        ("12.8", (11, 8), "520.61", True, {"CUDA": "problem"}),
        (None, (12, 9), "575.51", False, {"CUDA": "problem"}),
        (None, None, "", False, {}),
        ("12.8", (12, 9), "575.51", False, {"devices": "problem"}),
        ("12.8", None, "", False, {}),
    ],
)
def test_torch_and_the_driver_have_to_fit(
    built: str | None, driver: tuple[int, int] | None, module: str, has_devices: bool, found: dict[str, str]
) -> None:
    assert levels(hardware.cuda(built, driver, module, has_devices=has_devices)) == found


@pytest.mark.parametrize(
    ("free", "built", "level"), [(79, "sm_90", "ok"), (9, "sm_90", "warning"), (79, "sm_80", "problem")]
)
def test_a_device_has_kernels_and_free_memory(free: int, built: str, level: str) -> None:
    assert hardware.device(0, "H100", (9, 0), free * GIB, 80 * GIB, [built]).level.value == level


def test_devices_that_do_not_reach_each_other_are_named() -> None:
    assert hardware.peer_access([], 6).level is Level.OK
    found = hardware.peer_access([(0, 1)], 6)
    assert (found.level, found.found) == (Level.WARNING, "1 of 6 pairs do not reach each other (0-1)")


def test_kernels_run_on_the_same_major_version_or_are_compiled_for_a_newer_one() -> None:
    assert hardware.has_kernels(["sm_80", "sm_90a"], 9, 0)
    assert hardware.has_kernels(["sm_80"], 8, 6)
    assert not hardware.has_kernels(["sm_86"], 8, 0)
    assert not hardware.has_kernels(["sm_80"], 9, 0)
    assert hardware.has_kernels(["sm_80", "compute_80"], 9, 0)
    assert hardware.has_kernels(["sm_100"], 10, 0)


# Packages


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
def test_versions_against_what_is_needed(conditions: str, version: str, level: str) -> None:
    found = software.requirement(f"torch{conditions}", version)
    assert found.level.value == level
    assert (f"pip install 'torch{conditions}'" in found.do) is (level != "ok")


def test_a_package_that_is_missing_is_a_problem() -> None:
    found = software.requirement("a-package-that-is-not-there>=1")
    assert (found.what, found.level) == ("a-package-that-is-not-there", Level.PROBLEM)
    assert found.do == "pip install 'a-package-that-is-not-there>=1'"


def test_the_packages_here_are_those_that_the_project_names() -> None:
    found = list(software.packages())
    assert {"python", "zeromesh", "torch", "numpy", "transformers", "wandb", "xxhash"} <= {each.what for each in found}
    assert not levels(found)


# Network


@pytest.mark.parametrize(
    ("address", "seconds", "level"), [("127.0.1.1", 0.001, "ok"), ("", 0.001, "warning"), ("10.0.0.7", 5.0, "warning")]
)
def test_the_name_of_a_host_leads_somewhere_soon(address: str, seconds: float, level: str) -> None:
    assert software.host_name("node-a", address, seconds=seconds).level.value == level


@pytest.mark.parametrize(
    ("variable", "value", "found"),
    [
        ("GLOO_SOCKET_IFNAME", None, {}),
        ("GLOO_SOCKET_IFNAME", "eth0", {}),
        ("NCCL_SOCKET_IFNAME", "eth", {}),
        ("GLOO_SOCKET_IFNAME", "ib0", {"GLOO_SOCKET_IFNAME": "problem"}),
        ("NCCL_SOCKET_IFNAME", "=ib0,ib1", {"NCCL_SOCKET_IFNAME": "problem"}),
    ],
)
def test_interfaces_that_variables_name_have_to_be_there(
    variable: str, value: str | None, found: dict[str, str]
) -> None:
    assert levels(software.chosen_interfaces({variable: value}, ["lo", "eth0"])) == found


def test_two_processes_have_to_meet_and_should_share_memory() -> None:
    assert software.exchange(Trial(seconds=0.001, shares_memory=True)).level is Level.OK
    assert software.exchange(Trial(seconds=0.001)).level is Level.WARNING
    assert software.exchange(Trial(failure="rank 0 is gone")).level is Level.PROBLEM


def test_a_loopback_and_a_port_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(software.socket, "create_server", refuse)
    monkeypatch.setattr(software, "try_exchange", lambda: Trial(seconds=0.001, shares_memory=True))
    found = levels(software.network())
    assert {"loopback": "problem", "port 29500": "warning"}.items() <= found.items()


def test_two_processes_that_cannot_meet_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        self_test,
        "python_arguments",
        lambda module, words: ("-c", "import sys; sys.stderr.write('not today'); sys.exit(1)"),
    )
    assert try_exchange().failure == "not today"
    monkeypatch.setattr(self_test, "python_arguments", lambda module, words: ("-c", "import time; time.sleep(60)"))
    assert try_exchange(0.5).failure == "the two were not done after 0.5 seconds"


# Disks


@pytest.mark.parametrize(
    ("findings", "found"),
    [
        ([hardware.file_system("/runs", "ext4")], {}),
        ([hardware.file_system("/runs", "tmpfs")], {"/runs": "warning"}),
        ([hardware.file_system("/runs", "nfs4")], {"/runs": "warning"}),
        ([hardware.room(500 * GIB, None)], {}),
        ([hardware.room(1 * GIB, None)], {"  room": "warning"}),
        ([hardware.room(500 * GIB, 5)], {"  room": "warning"}),
        (hardware.disk(DiskTimes(2e9, 3e9, 0.001, direct=True, locks=True)), {}),
        (hardware.disk(DiskTimes(2e9, 3e9, 0.001, direct=False, locks=True)), {"  speed": "warning"}),
        (hardware.disk(DiskTimes(2e9, 9e7, 0.001, direct=True, locks=True)), {"  speed": "warning"}),
        (hardware.disk(DiskTimes(2e9, 3e9, 0.4, direct=True, locks=True)), {"  fsync": "warning"}),
        (hardware.disk(DiskTimes(2e9, 3e9, 0.001, direct=True, locks=False)), {"  locks": "problem"}),
    ],
)
def test_directories(findings: Iterable[Finding], found: dict[str, str]) -> None:
    assert levels(findings) == found


def test_a_directory_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    found = list(hardware.directory(tmp_path / "not" / "yet"))
    kind = direct_io.file_system_of(tmp_path)
    assert kind
    assert found[0].found == f"{kind} (not there yet; {tmp_path} is)"
    assert [each.what for each in found[1:]] == ["  room", "  speed", "  fsync"]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_a_problem() -> None:
    assert levels(hardware.directory(Path("/proc/zeromesh"))) == {"/proc/zeromesh": "problem"}


# Launch


def test_variables_that_slow_runs_down_and_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-very-secret-key")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setenv("ZEROMESH_FAULT", "kill@step")
    found = list(software.launch())
    assert levels(found) == {"TORCH_DISTRIBUTED_DEBUG": "warning", "ZEROMESH_FAULT": "warning"}
    assert "WANDB_API_KEY" in texts(found)
    assert "very-secret" not in texts(found)


def test_a_launch_that_is_there_in_part_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert levels(software.launch()) == {"launcher": "problem"}
    for name, value in {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)
    assert levels(software.launch()) == {}
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert levels(software.launch()) == {"launcher": "warning"}


# The command


def test_the_command_looks_at_this_machine(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zeromesh", "doctor", "--json", "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    parts = dict.fromkeys(each["part"] for each in found["findings"])
    assert list(parts) == ["packages", "machine", "accelerators", "launch", "disks", "network"]
    assert done.returncode == (1 if found["problems"] else 0)
    (exchange,) = [each for each in found["findings"] if each["what"] == "two processes"]
    assert exchange["level"] == "ok", exchange
    assert "they share memory" in exchange["found"]


def test_a_problem_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(software, "try_exchange", lambda: Trial(seconds=0.001, shares_memory=True))
    assert main(["doctor", "--directory", "/proc/zeromesh"]) == 1
    said = capsys.readouterr().out
    assert "PROBLEM  /proc/zeromesh  cannot be written" in said
    assert said.splitlines()[-1].startswith("1 problem, ")
