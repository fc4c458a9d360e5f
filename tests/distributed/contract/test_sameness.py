"""Ranks that were given different things: compared at the start, named, and weights taken from rank 0."""

import re
from pathlib import Path

from tests.support.workers import Workers
from zeromesh.mesh.process_set import differences

WAYS = [
    ("run.max_steps", 2, 3, r"ConfigError: .*run\.max_steps is 2 on rank 0, 3 on rank 1"),
    ("run.log_every", 1, 0, r"ConfigError: .*run\.log_every is 1 on rank 0, 0 on rank 1"),
    ("run.epochs", 1, 2, r"ConfigError: .*run\.epochs is 1\.0 on rank 0, 2\.0 on rank 1"),
    ("data.shuffle", True, False, r"ConfigError: .*data\.shuffle is True on rank 0, False on rank 1"),
    ("schedule.name", "linear", "cosine", r"ConfigError: .*schedule\.name is linear on rank 0, cosine on rank 1"),
    ("optimizer.lr", 0.1, 0.2, r"ConfigError: .*optimizer\.lr is 0\.1 on rank 0, 0\.2 on rank 1"),
    ("zero.stage", 2, 3, r"ConfigError: .*zero\.stage is 2 on rank 0, 3 on rank 1"),
    ("parallel.tensor", 1, 2, r"ConfigError: .*different meshes: .*tensor is 1 on rank 0, 2 on rank 1"),
    ("parallel.order", "launch", "topology", r"ConfigError: .*different meshes: order is launch on rank 0"),
    ("train_dataset", 9, 10, r"DataError: .*train_dataset is 9 samples on rank 0, 10 samples on rank 1"),
    (
        "eval_dataset",
        {"a": 4},
        {"a": 5},
        r"DataError: .*eval_dataset\['a'\] is 4 samples on rank 0, 5 samples on rank 1",
    ),
    ("eval_dataset", {"a": 4}, {"b": 4}, r"DataError: .*eval_dataset\['b'\] is \(absent\) on rank 0"),
    ("eval_dataset", {"a": 4}, None, r"ConfigError: .*eval_dataset is given on rank 0, not given on rank 1"),
    ("lr_scheduler", 1, None, r"ConfigError: .*lr_scheduler is given on rank 0, not given on rank 1"),
    ("callbacks", 1, None, r"ConfigError: .*callbacks is some on rank 0, none on rank 1"),
    ("model", 6, 7, r"LayoutError: .*parameter head\.weight is \[6, 80\] torch\.float64 trained on rank 0, \[7, 80\]"),
    ("run.name", "run", "run", r"^$"),
]


def test_what_differs_is_named_with_its_ranks(workers: Workers, tmp_path: Path) -> None:
    ways = [way[:3] for way in WAYS]
    for found in workers.run(2, "sameness_cases:refused", folder=str(tmp_path), ways=ways):
        for (way, _, _, pattern), text in zip(WAYS, found, strict=True):
            assert re.search(pattern, text), (way, text)


def test_weights_given_built_are_those_of_the_first_rank(workers: Workers, tmp_path: Path) -> None:
    """Buffers too, at every stage and in copies of a model."""
    layouts = [{"zero": {"stage": stage}, "run": {"name": f"stage{stage}"}} for stage in (0, 2, 3)]
    layouts.append({"parallel": {"replicate": 2}, "run": {"name": "replicate"}})
    first, second = workers.run(2, "sameness_cases:weights", folder=str(tmp_path), layouts=layouts)
    assert all(each["parameters"] <= 1e-9 for each in (*first, *second))
    assert [each["shift"] for each in first] == [each["shift"] for each in second]


def test_differences_are_short() -> None:
    rows = [{"a": "1", "b": "x" * 500}, {"a": "2", "b": "y"}, {"a": "2", "b": "y", "c": "new"}]
    assert differences(rows, [4, 5, 6]) == [
        "a is 1 on rank 4, 2 on ranks 5, 6",
        f"b is {'x' * 97}... on rank 4, y on ranks 5, 6",
        "c is (absent) on ranks 4, 5, new on rank 6",
    ]
    assert differences(rows[:1] * 3, [0, 1, 2]) == []
    many = [{str(n): str(rank) for n in range(20)} for rank in range(2)]
    assert differences(many, [0, 1])[8:] == ["and 12 more"]
