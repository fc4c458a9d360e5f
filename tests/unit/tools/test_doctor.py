"""`zeromesh doctor`: what it makes of what a machine says, and that it says it of this one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zeromesh.launch import self_test
from zeromesh.launch.self_test import Trial, try_exchange
from zeromesh.offload.io import swap_file
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.tools.doctor import accelerators, disks, launches, machine, network, packages
from zeromesh.trainer.tools.doctor.findings import Finding, Level, MachinePart

GIB = 1 << 30


def levels(findings: Iterable[Finding]) -> dict[str, str]:
    """What is not ok, by what was looked at."""
    return {finding.what: finding.level.value for finding in findings if finding.level is not Level.OK}


def texts(findings: Iterable[Finding]) -> str:
    return "\n".join(MachinePart(name="part", findings=list(findings)).lines())


# Findings


def test_what_is_not_ok_says_what_that_means_and_what_to_do() -> None:
    with pytest.raises(ValueError, match="without what it means"):
        Finding(what="x", found="y", level=Level.WARNING, means="something")
    good = Finding(what="cores", found="2")
    bad = Finding(what="memory", found="none", level=Level.PROBLEM, means="It is bad.", do="Buy some.")
    lines = list(MachinePart(name="machine", findings=[good, bad]).lines())
    assert lines == [
        "machine",
        "  ok       cores   2",
        "  PROBLEM  memory  none",
        "                   It is bad.",
        "                   -> Buy some.",
    ]


# Machine

MACHINE = machine.Machine(
    architecture="x86_64",
    cores=8,
    quota=None,
    memory=64 * GIB,
    available=48 * GIB,
    limit=None,
    swap=0,
    shared=32 * GIB,
    locked=8 << 20,
    files=65536,
    processes=None,
    overcommit="0",
    memfd=True,
    has_cuda=False,
)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, {}),
        ({"quota": 8.0, "limit": 128 * GIB}, {}),
        ({"quota": 1.5}, {"cores": "warning"}),
        ({"architecture": "aarch64"}, {"architecture": "warning"}),
        ({"architecture": "aarch64", "has_cuda": True, "locked": None}, {}),
        ({"available": 1 * GIB}, {"memory": "warning"}),
        ({"overcommit": "2"}, {"overcommit": "warning"}),
        ({"shared": 64 << 20}, {"/dev/shm": "warning"}),
        ({"shared": None}, {}),
        ({"memfd": False}, {"shared memory": "problem"}),
        ({"has_cuda": True}, {"locked memory": "warning"}),
        ({"files": 1024, "processes": 512}, {"open files": "warning", "processes": "warning"}),
    ],
)
def test_limits_of_a_machine(changes: dict[str, Any], found: dict[str, str]) -> None:
    assert levels(machine.judge(replace(MACHINE, **changes))) == found


def test_a_control_group_that_allows_less_is_named() -> None:
    said = texts(machine.judge(replace(MACHINE, limit=8 * GIB, quota=2.0)))
    assert "48.0 GiB free of 8.0 GiB by the control group, 64.0 GiB" in said
    assert "Set OMP_NUM_THREADS to 2 divided by --nproc" in said


# Accelerators

DEVICE = accelerators.Device(name="H100", memory=80 * GIB, free=79 * GIB, architecture="sm_90", supported=True)
CUDA = accelerators.Cuda(
    torch="2.13.0", built="12.8", driver=(12, 9), module="575.51", devices=[DEVICE, DEVICE], nccl="2.27.3"
)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, {}),
        ({"driver": (13, 0)}, {}),
        ({"driver": (11, 8)}, {"CUDA": "problem"}),
        ({"built": None}, {"CUDA": "problem"}),
        ({"built": None, "module": "", "driver": None}, {}),
        ({"devices": (), "error": "no CUDA-capable device is detected"}, {"devices": "problem"}),
        ({"devices": (), "module": "", "driver": None}, {}),
        ({"devices": [replace(DEVICE, supported=False)]}, {"device 0": "problem"}),
        ({"devices": [replace(DEVICE, free=9 * GIB)]}, {"device 0": "warning"}),
        ({"apart": [(0, 1)]}, {"peer access": "warning"}),
    ],
)
def test_torch_driver_and_devices_have_to_fit(changes: dict[str, Any], found: dict[str, str]) -> None:
    assert levels(accelerators.judge(replace(CUDA, **changes))) == found


def test_kernels_run_on_the_same_major_version_or_are_compiled_for_a_newer_one() -> None:
    assert accelerators.has_kernels(["sm_80", "sm_90a"], 9, 0)
    assert accelerators.has_kernels(["sm_80"], 8, 6)
    assert not accelerators.has_kernels(["sm_86"], 8, 0)
    assert not accelerators.has_kernels(["sm_80"], 9, 0)
    assert accelerators.has_kernels(["sm_80", "compute_80"], 9, 0)
    assert accelerators.has_kernels(["sm_100"], 10, 0)


# Packages


@pytest.mark.parametrize(
    ("conditions", "version", "level"),
    [
        (">=2.11", "2.13.0+cpu", "ok"),
        (">=2.11", "2.9.1", "problem"),
        (">=5", "5.0.0", "ok"),
        (">=1.26,<3", "2.4.6", "ok"),
        (">=1.26,<3", "3.0", "problem"),
        ("==0.19.8", "0.19.8", "ok"),
        ("==0.19.8", "0.19.9", "problem"),
        ("", "1.0", "ok"),
        (">=2.11", None, "problem"),
    ],
)
def test_versions_against_what_is_needed(conditions: str, version: str | None, level: str) -> None:
    found = packages.judge("torch", conditions, version)
    assert found.level.value == level
    assert (f"pip install 'torch{conditions}'" in found.do) is (level != "ok")


def test_the_packages_here_are_those_that_the_project_names() -> None:
    found = list(packages.look())
    assert {"python", "zeromesh", "torch", "numpy", "transformers", "wandb", "xxhash"} <= {each.what for each in found}
    assert not levels(found)


# Network

NETWORK = network.Network(
    name="node-a",
    address="10.0.0.7",
    asked_seconds=0.001,
    interfaces={"lo": ["127.0.0.1"], "eth0": ["10.0.0.7"]},
    trial=Trial(seconds=0.001, shares_memory=True),
)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, {}),
        ({"address": "127.0.1.1", "gloo": "eth0", "nccl": "eth"}, {}),
        ({"address": ""}, {"host name": "warning"}),
        ({"asked_seconds": 5.0}, {"host name": "warning"}),
        ({"gloo": "ib0"}, {"GLOO_SOCKET_IFNAME": "problem"}),
        ({"nccl": "=ib0,ib1"}, {"NCCL_SOCKET_IFNAME": "problem"}),
        ({"loopback": "cannot be connected: timed out"}, {"loopback": "problem"}),
        ({"port_is_free": False}, {"port 29500": "warning"}),
        ({"trial": Trial(seconds=0.001)}, {"two processes": "warning"}),
        ({"trial": Trial(failure="rank 0 is gone")}, {"two processes": "problem"}),
    ],
)
def test_names_and_interfaces(changes: dict[str, Any], found: dict[str, str]) -> None:
    assert levels(network.judge(replace(NETWORK, **changes))) == found


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

DISK = disks.Disk(
    directory=Path("/data/runs"),
    used=Path("/data/runs"),
    kind="ext4",
    free=500 * GIB,
    inodes=-1,
    direct=True,
    written=2e9,
    read=3e9,
    sync_seconds=0.001,
)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, {}),
        ({"error": "permission denied"}, {"/data/runs": "problem"}),
        ({"kind": "tmpfs"}, {"/data/runs": "warning"}),
        ({"kind": "nfs4"}, {"/data/runs": "warning"}),
        ({"free": 1 * GIB}, {"  room": "warning"}),
        ({"inodes": 5}, {"  room": "warning"}),
        ({"direct": False}, {"  speed": "warning"}),
        ({"read": 9e7}, {"  speed": "warning"}),
        ({"sync_seconds": 0.4}, {"  fsync": "warning"}),
        ({"locks": False}, {"  locks": "problem"}),
    ],
)
def test_directories(changes: dict[str, Any], found: dict[str, str]) -> None:
    assert levels(disks.judge(replace(DISK, **changes))) == found


def test_a_directory_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    found = disks.look(tmp_path / "not" / "yet")
    assert not found.error
    assert found.used == tmp_path
    assert found.kind == swap_file.file_system_of(tmp_path) != ""
    assert min(found.written, found.read, found.sync_seconds, found.free) > 0
    assert found.locks
    assert list(tmp_path.iterdir()) == []
    assert "not there yet" in texts(disks.judge(found))


def test_a_directory_that_cannot_be_written_is_a_problem() -> None:
    assert levels(disks.judge(disks.look(Path("/proc/zeromesh")))) == {"/proc/zeromesh": "problem"}


# Launch


def test_variables_that_slow_runs_down_and_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-very-secret-key")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setenv("ZEROMESH_FAULT", "kill@step")
    found = list(launches.look())
    assert levels(found) == {"TORCH_DISTRIBUTED_DEBUG": "warning", "ZEROMESH_FAULT": "warning"}
    assert "WANDB_API_KEY" in texts(found)
    assert "very-secret" not in texts(found)


def test_a_launch_that_is_there_in_part_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert levels(launches.look()) == {"launcher": "problem"}
    for name, value in {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)
    assert levels(launches.look()) == {}
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert levels(launches.look()) == {"launcher": "warning"}


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
    monkeypatch.setattr(network, "try_exchange", lambda: Trial(seconds=0.001, shares_memory=True))
    assert main(["doctor", "--directory", "/proc/zeromesh"]) == 1
    said = capsys.readouterr().out
    assert "PROBLEM  /proc/zeromesh  cannot be written" in said
    assert said.splitlines()[-1].startswith("1 problem, ")
