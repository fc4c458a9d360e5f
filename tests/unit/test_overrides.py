"""What is replaced for a while on an instance or cached in modules is as before afterwards."""

from typing import Any

import pytest
import torch
from torch import nn

from zeromesh.overrides import cached_tensors_removed, override


class Thing:
    shade = "of the class"


def test_an_attribute_is_as_it_was() -> None:
    thing = Thing()
    undo_first = override(thing, "shade", "first")
    undo_second = override(thing, "shade", "second")
    assert thing.shade == "second"
    undo_second()
    assert thing.shade == "first"
    undo_first()
    assert vars(thing) == {}
    assert thing.shade == "of the class"
    undo_first()  # Once more has no effect.


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state: torch.Tensor | None = None
        self.kept = torch.ones(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state, self.cache, self.kept, self.count = x, x, 2 * x, 3
        return x


def test_tensors_that_modules_have_cached_are_removed_and_others_are_not() -> None:
    model = nn.Sequential(Recurrent(), nn.Identity())
    with cached_tensors_removed(model) as found:
        assert found() == []
        model(torch.ones(2))
        assert sorted(found()) == ["0.cache", "0.state"]
    first: Any = model[0]
    assert [first.state] == [None]
    assert not hasattr(first, "cache")
    assert (first.kept.tolist(), first.count) == ([2.0, 2.0], 3)
    alone: Any = Recurrent()
    with pytest.raises(KeyError), cached_tensors_removed(alone) as found:  # noqa: PT012
        alone(torch.ones(2))
        assert sorted(found()) == ["cache", "state"]
        raise KeyError
    assert alone.state is None
