"""`digest`: a number of a parameter's values and of their order, by which writes in place are noticed."""

import pytest
import torch

from zeromesh.units import unit


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("on_device", [False, True])
def test_values_and_their_order_count(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, on_device: bool) -> None:
    monkeypatch.setattr(unit, "on_accelerator", lambda values: on_device)
    monkeypatch.setattr(unit, "_DIGEST_WORDS", 64)
    values = torch.randn(40, 25, generator=torch.Generator().manual_seed(0)).to(dtype)
    swapped, changed = values.clone(), values.clone()
    swapped[[3, 7]] = swapped[[7, 3]]
    changed[-1, -1] += 1
    found = [int(unit.digest(each)) for each in (values, swapped, changed, values.flatten().roll(64), -values)]
    assert len(set(found)) == len(found)
    assert int(unit.digest(values.clone())) == found[0]
    assert int(unit.digest(values[:0])) == int(unit.digest(values[:0].clone()))
