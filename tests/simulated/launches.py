"""What ranks have launched on their devices, compared: a device runs collectives in the order of launches, and waits in each."""

from collections.abc import Sequence

Launch = tuple[tuple[int, ...], str, int]
"""Ranks of the group, name of the collective, bytes."""


def launch_differences(logs: Sequence[Sequence[Launch]]) -> list[str]:
    """Where two ranks have launched the collectives that both take part in in different orders; one log for each rank."""
    found = []
    for one, first in enumerate(logs):
        for other, second in enumerate(logs[:one]):
            mine, theirs = ([each for each in log if one in each[0] and other in each[0]] for log in (first, second))
            if mine != theirs:
                pairs = enumerate(zip(mine, theirs, strict=False))
                at = next((number for number, (left, right) in pairs if left != right), min(len(mine), len(theirs)))
                both = f"rank {other} {theirs[at : at + 3]}, rank {one} {mine[at : at + 3]}"
                found.append(f"ranks {other} and {one} part at launch {at} of {len(theirs)} and {len(mine)}: {both}")
    return found
