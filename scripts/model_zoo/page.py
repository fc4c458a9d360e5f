"""The page of what was trained: by type what is equal to plain PyTorch, and what is refused for which reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers as tf

from model_zoo.columns import ABSENT, COLUMNS, CRASHED, DIFFERENT, EQUAL, PLAIN, REFUSED

Line = Mapping[str, Any]
_SIGNS = {EQUAL: "=", DIFFERENT: "differs", CRASHED: "fails", ABSENT: ""}
_HEAD = """# Supported models

Every type of transformers {transformers} that can be built small was trained for two steps on two ranks, beside plain PyTorch
{torch} in one process with the same weights, in float64: the losses and every parameter by name are equal to 1e-7 of the way that
it went, or the layout is refused before the first step. {commits}.
One command makes this page, and trains what has no result yet:

```sh
python scripts/zoo.py
```

`=` is equal, and an empty cell means that the type has no such thing. A number is the reason below of a refusal, or of what plain
transformers does not do right either with its own `save_pretrained`. `differs` and `fails` are defects. Types that are fed with
pictures or sounds got some, but for those that say "text alone". Columns: stage 3, and its saved directory loaded by transformers;
two tensor ranks, without and with shares of the sequence; two pipeline stages; LoRA of all linear layers at stage 3; documents
packed into one sequence, beside each document alone; sequences that two context ranks share; experts that two ranks divide.


"""


def page(lines: Sequence[Line]) -> str:
    """The page, in Markdown, of the results in `lines`, of which none is `missing`."""
    built = sorted({line["type"] for line in lines if line["column"]})
    found = {(line["type"], line["column"]): line for line in lines}
    reasons: dict[str, int] = {}
    rows = []
    for kind in built:
        lines_of = [found[kind, column] for column in COLUMNS]
        about = lines_of[0]
        task = about.get("head", "").replace("_", " ") + (f", {about['note']}" if about.get("note") else "")
        rows.append(f"| {kind} | {task} | " + " | ".join(_sign(line, reasons) for line in lines_of) + " |")
    versions = {"transformers": tf.__version__, "torch": torch.__version__.partition("+")[0]}
    table = ["| type | task | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---|" * len(COLUMNS), *rows]
    parts = [
        _HEAD.format(**versions, commits=_commits(lines)),
        _totals(found, built),
        "\n".join(table),
        _reasons(reasons),
        _absent(lines, built),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def missing(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """Return each column and type that `lines` have no result of, of all columns."""
    found = {(line["type"], line["column"]) for line in lines}
    kinds = sorted({kind for kind, column in found if column})
    return [(column, kind) for column in COLUMNS for kind in kinds if (kind, column) not in found]


def _commits(lines: Sequence[Line]) -> str:
    """Which commits the results are of."""
    counts = Counter(line.get("commit") or "unknown" for line in lines)
    return "It was so at commit " + ", ".join(f"{name} ({count:,} results)" for name, count in counts.most_common())


def _sign(line: Line, reasons: dict[str, int]) -> str:
    if line["outcome"] not in (REFUSED, PLAIN):
        return _SIGNS[line["outcome"]]
    return str(reasons.setdefault(_general(line["reason"]), len(reasons) + 1))


_KINDS = (
    (
        r".*there is no tensor-parallel plan for .*?whose blocks hold (.*?); give rules.*",
        r"no tensor-parallel plan; its blocks hold \1",
    ),
    (r".*there is no tensor-parallel plan.*", "no tensor-parallel plan"),
    (r"\w+ cannot be cut into pipeline stages: ", ""),
    (r".*something else for a document .*?first in (.*?), an? (\w+),.*", r"documents are mixed by \1 (\2)"),
    (r".*something else on shares of sequences, first in (.*?), an? (\w+),.*", r"tokens of shares are mixed by \1 (\2)"),
    (r"parallel\.context: \w+ (.*); set parallel\.context: 1.*", r"\1"),
    (r"could not be run for a trial \((.*?)\)?$", r"could not be run for a trial (\1)"),
    (r"\.\d+(?=\.|\b)", ".*"),
    (r"\b[A-Z]\w+(For\w+|LMHeadModel\w*|Model|MTModel)\b", "the model"),
)
"""Patterns of the parts of a reason that differ between models, each with its replacement."""
_LONGEST = 160


def _general(reason: str) -> str:
    """The reason without the names of one model, so that types with the same one share it."""
    text = " ".join(reason.split())
    for pattern, general in _KINDS:
        text = re.sub(pattern, general, text)
    text = text.replace("|", "/").replace("<", "(").replace(">", ")")
    return text if len(text) <= _LONGEST else text[:_LONGEST].rpartition(" ")[0] + " ..."


def _totals(found: Mapping[tuple[str, str], Line], built: Sequence[str]) -> str:
    rows = ["| column | equal | refused | as plain transformers | differs | fails |", "|---|---|---|---|---|---|"]
    for column in COLUMNS:
        counts = Counter(found[kind, column]["outcome"] for kind in built)
        rows.append(f"| {column} | " + " | ".join(str(counts[each]) for each in (EQUAL, REFUSED, PLAIN, DIFFERENT, CRASHED)) + " |")
    return "\n".join(rows)


def _reasons(reasons: Mapping[str, int]) -> str:
    rows = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(["## Reasons", "", *rows])


def _absent(lines: Sequence[Line], built: Sequence[str]) -> str:
    names = sorted({line["type"] for line in lines if not line["column"]} - set(built))
    return f"## Not built\n\nNo small model of these was found by their numbers alone: {', '.join(names)}."
