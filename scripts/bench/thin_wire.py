"""Runs one module as the ranks of emulated hosts, whose cables send only so much a second."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.hosts import Hosts

ROOT = Path(__file__).resolve().parents[2]
INTERFACE, RESULT = "wire0", "RESULT "


def sent() -> int:
    """The bytes that this host has sent."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    return next(int(row.split()[8]) for name, row in rows.items() if name.strip() == INTERFACE)


def slow_down(made: "Hosts", rate: str) -> None:
    """Let each host send at `rate`, as `tc` writes it, or as fast as it can (`none`)."""
    for name in made.names:
        inside = ["ip", "netns", "exec", f"{made.prefix}-{name}", "tc", "qdisc"]
        subprocess.run([*inside, "del", "dev", INTERFACE, "root"], capture_output=True, check=False)
        if rate != "none":
            limits = ["rate", rate, "burst", "256kb", "latency", "400ms"]
            subprocess.run([*inside, "add", "dev", INTERFACE, "root", "tbf", *limits], check=True)


def run_on(made: "Hosts", slots: int, port: int, module: str, words: Sequence[str]) -> list[dict[str, Any]]:
    """Run a module with `slots` ranks on each host; returns the lines of JSON that they have printed after `RESULT`."""
    started = []
    for host, name in enumerate(made.names):
        for local in range(slots):
            variables = {
                "RANK": host * slots + local,
                "LOCAL_RANK": local,
                "WORLD_SIZE": slots * len(made.names),
                "LOCAL_WORLD_SIZE": slots,
                "MASTER_ADDR": made.address(made.names[0]),
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": 1,
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}",
            }
            settings = " ".join(f"{key}={value}" for key, value in variables.items())
            command = f"cd {made.folder} && env {settings} {sys.executable} -m {module} {' '.join(words)}"
            line = [*made.middle, *made.ssh.split(), name, command]
            started.append(subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=1800) for process in started]
    for process, (_, errors) in zip(started, said, strict=True):
        if process.returncode:
            raise SystemExit(errors[-4000:])
    lines = [line for out, _ in said for line in out.splitlines() if line.startswith(RESULT)]
    return [json.loads(line.removeprefix(RESULT)) for line in lines]
