"""Codecs of what replicas send each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.comm.wire import BLOCK, LEVELS, WireCodec

CODECS = [WireCodec(name=name) for name in ("bfloat16", *LEVELS)]


def _decoded(codec: WireCodec, data: torch.Tensor, numel: int) -> torch.Tensor:
    out = torch.zeros(numel)
    codec.add(data, out)
    return out


@given(
    codec=st.sampled_from(CODECS), numel=st.sampled_from([1, 63, 64, 255, 256, 257, 3000, (1 << 16) + 320]), seed=st.integers(0, 9)
)
def test_a_value_is_off_by_half_a_code_at_most(codec: WireCodec, numel: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-6, 6, (numel,), generator=generator)
    data = codec.encode(values)
    assert data.numel() == codec.nbytes(numel)
    blocks = torch.nn.functional.pad(values, (0, -numel % BLOCK)).view(-1, BLOCK)
    most = blocks.abs().amax(1).repeat_interleave(BLOCK)[:numel]
    bound = 0.5 / LEVELS[codec.name] * most if codec.name in LEVELS else 2.0**-8 * values.abs()
    assert bool(((_decoded(codec, data, numel) - values).abs() <= bound * (1 + 1e-5)).all())


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_parts_are_encoded_as_the_whole_and_added(codec: WireCodec) -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    whole, data = codec.encode(values), torch.empty(codec.nbytes(5000), dtype=torch.uint8)
    for start, end in ((2048, 5000), (0, 2048)):
        codec.encode_into(data, values[start:end], start, 5000)
    assert torch.equal(data, whole)
    out = torch.ones(5000, dtype=torch.bfloat16)
    codec.add(data, out)
    assert torch.equal(out, torch.ones(5000).add(_decoded(codec, whole, 5000)).bfloat16())


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_zeros_stay_and_what_is_not_finite_is_told(codec: WireCodec) -> None:
    assert not _decoded(codec, codec.encode(torch.zeros(300)), 300).any()
    for bad in (float("inf"), float("-inf"), float("nan")):
        values = torch.ones(300)
        values[7] = bad
        assert not bool(_decoded(codec, codec.encode(values), 300).norm().isfinite())


@pytest.mark.parametrize("name", LEVELS)
def test_a_start_inside_a_block_is_refused(name: str) -> None:
    codec = WireCodec(name=name)
    data = torch.empty(codec.nbytes(512), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="element 64 begins none"):
        codec.encode_into(data, torch.ones(256), 64, 512)


def test_bytes_of_codecs() -> None:
    assert [codec.nbytes(1024) for codec in CODECS] == [2048, 1024 + 16, 512 + 16]
