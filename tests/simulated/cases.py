"""Cases of a worker on the simulated device: each is judged, and says what it has launched."""

import torch

from tests.simulated import collectives, device
from tests.simulated.launches import Launch

device.load()
collectives.register()


class RaceError(AssertionError):
    """Two accesses to the same bytes that nothing orders."""


def begin() -> int:
    """Before a case; returns what `end` is to get."""
    device.clear()
    return len(collectives.launched)


def end(begun: int) -> list[Launch]:
    """After a case: what it has launched.

    Raises:
        RaceError: where it has a race.
    """
    torch.accelerator.synchronize()
    if found := device.races():
        raise RaceError("\n".join(dict.fromkeys(found)))
    return collectives.launched[begun:]
