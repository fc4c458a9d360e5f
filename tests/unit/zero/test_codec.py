"""Codecs of frozen weights: the bits are those of bitsandbytes, with it and without it, whole and in parts."""

import runpy
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zeromesh.errors import LayoutError
from zeromesh.flat import codec as codecs
from zeromesh.flat.codec import CODECS, Codec, EncodedParameter
from zeromesh.flat.encoded_shard import EncodedShard, EncodedTensor, codec_of_part, encoded_part
from zeromesh.flat.layout import BucketLayout, ParameterPart, ParameterSpec, Region, build_layout
from zeromesh.intervals import Interval
from zeromesh.offload import TieredTensor
from zeromesh.settings.keys import CodecName

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (64, 64 * 257 + 17, 4096 * 40, 1)
NAMES: tuple[CodecName, ...] = ("nf4", "fp4", "int8", "fp8")


def values(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal values, with a block of zeros, outliers, and the smallest numbers."""
    found = torch.randn(count, generator=torch.Generator().manual_seed(count))
    found[128:192] = 0
    found[300:310] *= 50
    found[700:764] *= 1e-38
    return found.to(dtype)


def encode(codec: Codec, given: torch.Tensor) -> EncodedParameter:
    return codec.encode(lambda start, end: given[start:end], given.numel())


def decode(codec: Codec, encoded: EncodedParameter, count: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(count, dtype=dtype)
    codec.decode(encoded.codes, codec.scale_values(encoded.scales, encoded.tables), out)
    return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_four_bits_are_those_of_bitsandbytes(name: CodecName, nested: bool, dtype: torch.dtype) -> None:
    functional: Any = pytest.importorskip("bitsandbytes.functional")
    for count in SIZES:
        given, codec = values(count, dtype), Codec(name=name, block=64, nested=nested)
        with torch.compiler.set_stance("force_eager"):  # It would compile for each size, ten times as long as the rest takes.
            codes, state = functional.quantize_4bit(given, blocksize=64, compress_statistics=nested, quant_type=name)
            decoded = functional.dequantize_4bit(codes, state).view(-1)
        found = encode(codec, given)
        assert torch.equal(found.codes, codes.view(-1))
        assert torch.equal(found.scales, state.absmax)
        assert torch.equal(decode(codec, found, count, dtype), decoded)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eight_bits_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    functional: Any = pytest.importorskip("bitsandbytes.functional")
    for count in SIZES:
        given, codec = values(count, dtype), Codec(name="int8", block=256)
        codes, state = functional.quantize_blockwise(given, blocksize=256)
        found = encode(codec, given)
        assert torch.equal(found.codes, codes)
        assert torch.equal(decode(codec, found, count, dtype), functional.dequantize_blockwise(codes, state))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_torch_alone_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, name: CodecName, dtype: torch.dtype) -> None:
    pytest.importorskip("bitsandbytes")
    for count in SIZES:
        given, codec, both = values(count, dtype), Codec(name=name, block=CODECS[name].block, nested=name != "fp8"), []
        for kernels in (codecs._bitsandbytes(), None):
            with monkeypatch.context() as patched:
                patched.setattr(codecs, "_bitsandbytes", lambda kernels=kernels: kernels)
                found = encode(codec, given)
                both.append((found.codes, found.scales, found.tables, decode(codec, found, count, dtype)))
        for one, other in zip(*both, strict=True):
            assert torch.equal(one, other), (count, one, other)


def test_values_that_codes_stand_for_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_bitsandbytes", lambda: None)
    for name, levels in (("nf4", 16), ("fp4", 15)):
        codec = Codec(name=name, block=64)
        given = Codec(name=name, block=64).values().repeat(8) * 3
        assert given.unique().numel() == levels
        assert torch.equal(decode(codec, encode(codec, given), 128, torch.float32), given)
    powers = 2.0 ** torch.arange(-6, 9).repeat(128)[:128]
    codec = Codec(name="fp8", block=128)
    assert torch.equal(decode(codec, encode(codec, powers * 1.75), 128, torch.float32), powers * 1.75)


@pytest.mark.parametrize("name", NAMES)
def test_errors_are_those_of_the_bits(name: CodecName) -> None:
    given, codec = values(1 << 16), Codec(name=name, block=64)
    error = (decode(codec, encode(codec, given), given.numel(), torch.float32) - given).norm() / given.norm()
    least, most = {"nf4": (0.05, 0.11), "fp4": (0.05, 0.14), "int8": (0.001, 0.02), "fp8": (0.01, 0.04)}[name]
    assert least < error < most


def bucket(codec: Codec, shapes: Sequence[tuple[int, ...]], parts: int) -> BucketLayout:
    specs = [
        ParameterSpec(fqn=f"p{n}", shape=shape, dtype=torch.float32, requires_grad=False, group=0, codec=codec)
        for n, shape in enumerate(shapes)
    ]
    return build_layout("bucket", specs, parts, 64)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_shards_hold_the_blocks_of_whole_parameters(name: CodecName, parts: int) -> None:
    codec = Codec(name=name, block=CODECS[name].block, nested=name != "fp8")
    shapes = [(31, 33), (7, 64), (1, 1), (300, 257)]
    given = {f"p{n}": values(prod(shape)) for n, shape in enumerate(shapes)}
    layout = bucket(codec, shapes, parts)
    encoded = [encode(codec, each) for each in given.values()]
    whole = {name: decode(codec, each, given[name].numel(), torch.float32) for name, each in zip(given, encoded, strict=True)}
    for index in range(parts):
        interval = layout.shard(index)
        shard = EncodedShard.of(layout, interval, [each.tables for each in encoded])
        data = torch.full((shard.nbytes,), 255, dtype=torch.uint8)
        for piece in layout.pieces(interval):
            number = int(piece.spec.fqn[1:])
            for begin, part in shard.stored(piece, encoded[number]):
                data[begin : begin + part.numel()] = part
        wanted = torch.zeros(interval.length)
        for piece in layout.pieces(interval):
            inside, here = piece.in_parameter, piece.in_shard
            wanted[here.start : here.end] = whole[piece.spec.fqn][inside.start : inside.end]
        tensor = EncodedTensor(torch.float32, shard, TieredTensor.of(data))
        assert torch.equal(tensor.load(torch.device("cpu")), wanted)
        for start, end in pairwise([0, 1, 65, 190, interval.length // 2, interval.length]):
            if start < end <= interval.length:
                assert torch.equal(tensor.slice(start, end).load(torch.device("cpu")), wanted[start:end])
        tensor.write(0, wanted).wait()
        with pytest.raises(LayoutError, match="frozen weights that are kept encoded differ from those to load"):
            tensor.write(0, wanted + 1)


def region_of(shape: tuple[int, int], dimension: int, rows: Sequence[tuple[int, int]]) -> Region:
    dims = [(Interval(start=0, end=size),) for size in shape]
    dims[dimension] = tuple(Interval(start=start, end=end) for start, end in rows)
    return Region(shape=shape, dims=tuple(dims))


@pytest.mark.parametrize(
    ("dimension", "rows"), [(0, [(0, 24)]), (0, [(24, 48)]), (1, [(0, 48)]), (1, [(48, 96)]), (1, [(16, 32), (80, 96)])]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_part_has_the_codes_of_the_whole(name: CodecName, dimension: int, rows: list[tuple[int, int]]) -> None:
    shape, codec = (48, 96), Codec(name=name, block=CODECS[name].block, nested=name != "fp8")
    given = values(prod(shape))
    whole = decode(codec, encode(codec, given), given.numel(), torch.float32).view(shape)
    region = region_of(shape, dimension, rows)
    wanted = torch.cat([whole.narrow(dimension, a, b - a) for a, b in rows], dimension)
    part = codec_of_part(codec, region, "layer.weight")
    assert part.block <= codec.block
    spec = ParameterSpec(
        fqn="p",
        shape=tuple(wanted.shape),
        dtype=torch.float32,
        requires_grad=False,
        group=0,
        part=ParameterPart(region=region, holders=(0,)),
        codec=part,
    )
    found = encoded_part(spec, codec, lambda name, start, end: given[start:end])
    assert torch.equal(decode(part, found, wanted.numel(), torch.float32).view(wanted.shape), wanted)


def test_parts_that_are_cut_inside_small_blocks_are_refused() -> None:
    region = region_of((5, 14), 1, [(0, 7)])
    with pytest.raises(LayoutError, match=r"layer\.weight of \[5, 14\] is cut inside blocks of 64 elements"):
        codec_of_part(Codec(name="nf4", block=64), region, "layer.weight")
    with pytest.raises(LayoutError, match="blocks of an even number of elements, not of 7"):
        Codec(name="nf4", block=7)


@pytest.mark.parametrize("mode", [torch.device("meta"), FakeTensorMode()], ids=["meta", "fake"])
def test_reading_the_module_computes_nothing(mode: Any) -> None:
    """A user's script may import the package where tensors have no values."""
    with mode:
        runpy.run_path(str(codecs.__file__))
    codecs._int8_levels.cache_clear()
    with torch.device("meta"):
        assert len(codecs._int8_levels()) == 256
