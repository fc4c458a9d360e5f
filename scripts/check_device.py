"""One command for a new machine with an accelerator: is everything right there, and as fast as it should be?

    python scripts/check_device.py                       one device, at most 9 minutes
    torchrun --nproc-per-node 8 scripts/check_device.py  several; the same as --ranks 8
    python scripts/check_device.py --dry-run             the logic of it on a CPU, with tiny models; `--device sim` for the
                                                         simulated device of the tests, which finds mistakes about devices

It runs part after part, each in processes of its own and within a share of the budget. What does not end in its time is ended and
named, and what there is no time for is named too. Every row has a figure, what is expected of it, and a verdict: `ok`, `out of
line`, `not run` with its reason, or nothing for a figure that is just told. All that was found so far is always in the JSON file.
The exit code is 1 if anything is out of line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.device import rows
from bench.device.budget import ALONE, TOGETHER, Budget, Part, Settings, allowance, run_part
from bench.options import list_of
from bench.processes import python_path

from zeromesh.environment import read_environment
from zeromesh.errors import ConfigError

_SECONDS = 520.0
_SIMULATED = int(os.environ.get("SIM_DEVICES", "8"))
"""How many simulated devices there are."""
_NAMES = tuple(dict.fromkeys(part.name for part in (*ALONE, *TOGETHER)))


def main() -> int:
    """Run what the command line asks for."""
    options = _arguments()
    try:
        launch = read_environment()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    launched = launch.world_size
    if launched > 1:
        if launch.local_world_size != launched:
            print("this check is for the devices of one host, and it was started on several", file=sys.stderr)
            return 2
        if launch.rank:  # Rank 0 starts a process per device itself, part after part.
            return 0
    device = options.device if options.device != "auto" else "cpu" if options.dry_run else "auto"
    ranks = options.ranks or (launched if launched > 1 else 1)
    machine = _machine() if device == "auto" else {"device": device, "devices": ranks}
    if not machine["devices"]:
        print("there is no accelerator here; --dry-run tries the script's logic without one", file=sys.stderr)
        return 2
    if ranks > machine["devices"]:
        print(f"{ranks} ranks were asked for, and there are {machine['devices']} devices", file=sys.stderr)
        return 2
    if device == "sim" and ranks > _SIMULATED:
        print(f"{ranks} ranks were asked for, and the simulated device has {_SIMULATED}", file=sys.stderr)
        return 2
    settings = Settings(device=device, ranks=ranks, dry=options.dry_run, folder=str(options.folder or ""))
    parts = [part for part in (TOGETHER if ranks > 1 else ALONE) if part.name in options.parts]
    if not parts:
        print(f"{', '.join(options.parts)}: not for {ranks} device{'s' * (ranks > 1)}", file=sys.stderr)
        return 2
    # Ended by a scheduler or a timeout, it ends its processes and takes its files away as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(parts, settings, options, {"machine": machine, "ranks": ranks, "dry_run": options.dry_run})
    except KeyboardInterrupt:
        print(f"\ninterrupted; the parts that were done are in {options.json}, if there were any", file=sys.stderr)
        return 130
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"the check cannot write its files{where}: {error.strerror}; see --folder and --json", file=sys.stderr)
        return 2


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=list_of(_NAMES), default=list(_NAMES), metavar="A,B,...", help=", ".join(_NAMES))
    parser.add_argument("--ranks", type=int, default=0, help="devices to use; by default one, or as many as torchrun has started")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help=f"the budget of all parts ({_SECONDS:.0f})")
    parser.add_argument("--json", type=Path, default=Path("runs/check_device.json"), help="where the rows go as JSON")
    parser.add_argument("--folder", type=Path, default=None, help="a directory on a fast disk for swap files and a checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="tiny models, no judgement of times")
    parser.add_argument("--device", choices=("auto", "cpu", "sim"), default="auto", help="cpu and sim are for a dry run")
    options = parser.parse_args()
    if options.device != "auto" and not options.dry_run:
        parser.error("--device is for a dry run: give --dry-run too")
    if options.ranks < 0:
        parser.error(f"--ranks {options.ranks}: give a number of devices")
    if not options.seconds > 0:
        parser.error(f"--seconds {options.seconds:g}: give a number above 0")
    return options


def _machine() -> dict[str, Any]:
    """Describe the devices and versions here, in a process of its own: this one keeps no memory of the device."""
    code = "import json; from bench.device.machine import describe; print(json.dumps(describe()))"
    variables = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"zeromesh cannot be imported here, or torch cannot use the devices:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _run(parts: list[Part], settings: Settings, options: argparse.Namespace, about: dict[str, Any]) -> int:
    budget = Budget(options.seconds)
    if settings.folder:
        Path(settings.folder).mkdir(parents=True, exist_ok=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    print(", ".join(f"{name}: {value}" for name, value in about["machine"].items()), flush=True)
    found: dict[str, tuple[list[rows.Row], float]] = {}
    for number, part in enumerate(parts):
        began = time.monotonic()
        seconds = allowance(parts, number, budget.left)
        print(f"\n{part.name}: {part.title} (at most {seconds:.0f} s)", flush=True)
        here = run_part(part, settings, seconds)
        found[part.name] = (here, time.monotonic() - began)
        print(rows.table(here), flush=True)
        options.json.write_text(rows.record(found, python=platform.python_version(), **about), encoding="utf-8")
    everything = [row for here, _ in found.values() for row in here]
    print(f"\n{rows.summary(everything)}\nwritten: {options.json}")
    return 1 if any(row.verdict == "out of line" for row in everything) else 0


if __name__ == "__main__":
    sys.exit(main())
