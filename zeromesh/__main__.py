"""`python -m zeromesh` is the `zeromesh` command."""

from __future__ import annotations

import sys

from zeromesh.trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
