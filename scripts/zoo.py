"""Trains every type of transformers that can be built small beside plain PyTorch, in float64, and writes docs/supported-models.md.

    python scripts/zoo.py                            all that has no result yet
    python scripts/zoo.py --only llama,vit --again   two types, once more
    python scripts/zoo.py --columns tensor,pipeline
    python scripts/zoo.py --page                     only write the page, which needs the results of all

Results are lines of JSON in runs/zoo.jsonl, the last one of a type and column counts.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
_ROOT = Path(__file__).resolve().parent.parent
_RESULTS = _ROOT / "runs" / "zoo.jsonl"
_PAGE = _ROOT / "docs" / "supported-models.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="types, separated by commas")
    parser.add_argument("--columns", default="", help="columns, separated by commas")
    parser.add_argument("--again", action="store_true", help="run what has a result already")
    parser.add_argument("--page", action="store_true", help="run nothing, and write the page of what was run")
    parser.add_argument("--results", type=Path, default=_RESULTS)
    arguments = parser.parse_args()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    if not arguments.page:
        _run(arguments)
    from model_zoo.page import missing, page

    if not arguments.page and (arguments.only or arguments.columns):
        return
    lines = read_results(arguments.results)
    if left := missing(lines):
        # A page of these would say of what was shown before that it was not run.
        sys.exit(f"{_PAGE} stays as it is: {len(left)} results are missing, such as {' of '.join(left[0])}")
    _PAGE.write_text(page(lines))


def read_results(path: Path) -> list[dict[str, Any]]:
    """The lines of the file, without those that a later one of the same type and column stands for."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return list({(line["type"], line["column"]): line for line in lines}.values())


def _run(arguments: argparse.Namespace) -> None:
    from model_zoo.columns import COLUMNS
    from model_zoo.ranks import import_once, results_of
    from model_zoo.small_models import heads_of_types

    columns = arguments.columns.split(",") if arguments.columns else list(COLUMNS)
    kinds = arguments.only.split(",") if arguments.only else list(heads_of_types())
    known = {*columns, *kinds} - {*COLUMNS, *heads_of_types()}
    if known:
        sys.exit(f"no such type or column: {', '.join(sorted(known))}; columns are {', '.join(COLUMNS)}")
    done = set() if arguments.again else {(line["type"], line["column"]) for line in read_results(arguments.results)}
    named = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=_ROOT, capture_output=True, text=True, check=False)
    import_once()
    begun = time.monotonic()
    with arguments.results.open("a") as output:
        for kind in kinds:
            left = [column for column in columns if (kind, column) not in done and (kind, "") not in done]
            for line in results_of(kind, left):
                output.write(json.dumps({**line, "commit": named.stdout.strip()}) + "\n")
                output.flush()
                apart = f"{line['difference']:.1e}" if line.get("difference") else ""
                text = f"{line['column']:17} {line['outcome']:10} {apart} {line.get('reason', '')[:150]}"
                print(f"{time.monotonic() - begun:6.0f} {kind:28} {text}", flush=True)


if __name__ == "__main__":
    main()
