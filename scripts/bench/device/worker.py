"""One process of a part: `python -m bench.device.worker PART SETTINGS`, started by `budget.py` with torchrun's variables."""

import importlib
import os
import sys

from bench.device.budget import Settings
from bench.worker import die_with_parent

_MODULES = {
    "tests": "suite",
    "parity": "parity",
    "train-1b": "training",
    "train-8b": "training",
    "offload": "offloading",
    "copies": "copies",
    "saving": "saving",
    "first": "first",
    "divided": "dividing",
}
"""The module of each part, which has a function `run(place)`."""


def main() -> None:
    """Run the part that the command line names."""
    die_with_parent()
    part, settings = sys.argv[1], Settings.from_json(sys.argv[2])
    from bench.device.place import Place

    module = importlib.import_module(f"bench.device.{_MODULES[part]}")
    place = Place(part, settings)
    module.run(place)
    place.leave()
    # All is said. Threads of other systems' process groups abort some processes that end in order.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
