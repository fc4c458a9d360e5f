"""Commands of `zeromesh` in this process."""

from collections.abc import Sequence

import pytest
from _pytest.capture import CaptureResult

from zeromesh.trainer.cli.main import main


def ended(capsys: pytest.CaptureFixture[str], words: Sequence[str], code: int = 0) -> CaptureResult[str]:
    """What has been printed when the command has ended with `code`."""
    assert main(words) == code
    return capsys.readouterr()
