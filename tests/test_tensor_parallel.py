"""Tensor parallelism: divided models against whole ones."""

from __future__ import annotations

import pytest
from workers import Workers

FIRST = ["llama", "llama-1kv", "llama-9-3", "gpt2"]


@pytest.mark.parametrize("size", [2])
def test_a_divided_model_is_the_whole_one(workers: Workers, size: int) -> None:
    for wrong in workers.run(size, "tensor_cases:equals", models=FIRST):
        assert not wrong
