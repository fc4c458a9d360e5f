"""Kinds of command line options that the scripts share."""

import argparse
from collections.abc import Callable


def list_of(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    """A type for `argparse`: some of `allowed`, separated by commas."""

    def parse(text: str) -> list[str]:
        values = text.split(",")
        wrong = [value for value in values if value not in allowed]
        if wrong:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: allowed are {', '.join(allowed)}, separated by commas")
        return values

    return parse
