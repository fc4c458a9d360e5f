"""`python -m zeromesh` is the `zeromesh` command."""

import sys

from zeromesh.trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
