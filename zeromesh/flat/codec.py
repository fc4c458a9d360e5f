"""Codecs of frozen weights: how elements are held as codes with a scale for each block of them, and read again.

The values are those of bitsandbytes 0.50, bit by bit (QLoRA: Dettmers et al. 2023, arXiv:2305.14314; 8-bit blocks: Dettmers et al.
2022, arXiv:2110.02861). Its kernels decode 4 bits where it is installed; without it torch's operations give the same bits.

    elements    e e e e e e e e | ...          codes     one byte for two elements of nf4 and fp4, one for each of int8 and fp8
    blocks      one scale each  | ...          scales    float32, or nested: one byte, for which 256 blocks share a float32

The whole parameter is encoded at once, in the dtype that it is computed with, so a rank's part of it has the same codes in every
layout. Of a nested scale, `tables` has what the blocks share: a float32 for each 256 blocks, and the mean that was subtracted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from zeromesh.errors import LayoutError
from zeromesh.settings.keys import CodecName

_CPU = torch.device("cpu")
GROUP = 256  # blocks whose nested scales share a float32
_GRID = 65_535  # the steps between -1 and 1 to which bitsandbytes rounds a value before it looks up its 8-bit code
_CHUNK = 1 << 18  # elements that are encoded or decoded at a time
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NF4 = (
    (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334)
    + (-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
    + (0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
)
_FP4 = tuple(sign * twelfths / 12 for sign in (1.0, -1.0) for twelfths in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))


@contextmanager
def in_own_dtypes() -> Iterator[None]:
    """Compute in the dtypes that are named, also where a mode of torch functions widens those of a model; it also decorates."""
    with torch._C.DisableTorchFunction():
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedParameter:
    """A whole parameter, flattened: `codes` `[bytes]` and `scales` `[blocks]`, uint8 if nested, else float32; `tables` is float32
    `[groups + 1]`, of which the last is the subtracted mean, and empty if scales are not nested."""

    codes: torch.Tensor
    scales: torch.Tensor
    tables: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPlace:
    """A whole parameter in files: the file and the byte at which its codes begin, and its scales; and its `tables`."""

    codes: tuple[Path, int]
    scales: tuple[Path, int]
    tables: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecRow:
    """A code for blocks. `quantize(values, block)` returns a code, uint8, for each of `values`, float32
    1-D, and the float32 scale of each block, of which the last may be shorter; `dequantize(codes)` a float32 number for each."""

    block: int  # elements of a block by default
    quantize: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
    dequantize: Callable[[torch.Tensor], torch.Tensor]
    codes_in_byte: int = 1
    nests: bool = False  # True if scales may be kept in 8 bits too


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """A codec with `block` elements for each scale. Raises `LayoutError` for a block that codes do not fill in whole bytes."""

    name: CodecName
    block: int
    nested: bool = False

    def __post_init__(self) -> None:
        if self.block < 2 or self.block % 2:
            raise LayoutError(f"a codec has blocks of an even number of elements, not of {self.block}")

    @property
    def codes_in_byte(self) -> int:
        return CODECS[self.name].codes_in_byte

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.uint8 if self.nested else torch.float32

    def code_bytes(self, numel: int) -> int:
        return -(-numel // self.codes_in_byte)

    def blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the codes and the scales of `numel` elements, whole blocks."""
        return self.code_bytes(numel) + self.blocks(numel) * self.scale_dtype.itemsize

    def packed(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the bytes of codes, uint8 1-D, which fill whole bytes; the first code of a byte has the upper bits."""
        return codes if self.codes_in_byte == 1 else (codes[::2] << 4) | codes[1::2]

    def unpacked(self, packed: torch.Tensor, count: int) -> torch.Tensor:
        """Return the first `count` codes of bytes."""
        halves = packed if self.codes_in_byte == 1 else torch.stack([packed >> 4, packed & 15], dim=1).view(-1)
        return halves[:count]

    def values(self) -> torch.Tensor:
        """Return the float32 numbers of all codes, in their order."""
        return CODECS[self.name].dequantize(torch.arange(1 << 8 // self.codes_in_byte, dtype=torch.uint8))

    def encode(self, values: Callable[[int, int], torch.Tensor], numel: int) -> EncodedParameter:
        """Encode `numel` flat elements; `values(start, end)` returns whole blocks, 1-D on the CPU, in the dtype of computing."""
        codes = torch.empty(self.code_bytes(numel), dtype=torch.uint8)
        absmax = torch.empty(self.blocks(numel))
        step = max(_CHUNK // self.block, 1) * self.block
        for start in range(0, numel, step):
            end = min(start + step, numel)
            part = torch.nn.functional.pad(values(start, end).float(), (0, -(end - start) % self.codes_in_byte))
            found, most = CODECS[self.name].quantize(part, self.block)
            packed = self.packed(found)
            codes[start // self.codes_in_byte :][: packed.numel()] = packed
            absmax[start // self.block :][: most.numel()] = most
        if not self.nested:
            return EncodedParameter(codes=codes, scales=absmax, tables=torch.empty(0))
        mean = absmax.mean()
        scales, groups = _quantize_int8(absmax - mean, GROUP)
        return EncodedParameter(codes=codes, scales=scales, tables=torch.cat([groups, mean[None]]))

    @in_own_dtypes()
    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return a parameter as it is after encoding and decoding, of the same shape and dtype."""
        return self.decoded(self.encode_whole(values), values.shape, values.dtype)

    def encode_whole(self, values: torch.Tensor) -> EncodedParameter:
        """Encode a parameter of any shape that is in memory."""
        flat = values.detach().cpu().reshape(-1)
        return self.encode(lambda start, end: flat[start:end], flat.numel())

    @in_own_dtypes()
    def decoded(self, parameter: EncodedParameter, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        values = torch.empty(shape, dtype=dtype)
        self.decode(parameter.codes, self.scale_values(parameter.scales, parameter.tables), values.view(-1))
        return values

    def scale_values(self, scales: torch.Tensor, tables: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return the float32 scales of consecutive blocks of one parameter, of which the first is block `first`."""
        if not self.nested:
            return scales
        groups = torch.arange(first, first + scales.numel(), device=scales.device).div_(GROUP, rounding_mode="floor")
        return _decoded(_int8_levels(), scales) * tables[groups] + tables[-1]

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out`, 1-D of whole blocks but for the last, from codes and the float32 scales of its blocks."""
        step = max(_CHUNK // self.block, 1) * self.block
        for start in range(0, out.numel(), step):
            part = out[start : start + step]
            own = codes[start // self.codes_in_byte :][: self.code_bytes(part.numel())]
            self._decode_blocks(own, scales[start // self.block :][: self.blocks(part.numel())], part)

    def _decode_blocks(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        count, in_kernels = out.numel(), self.codes_in_byte == 2 and out.dtype in _KERNEL_DTYPES
        if in_kernels and not count % 2 and (bnb := _bitsandbytes()):
            out.copy_(bnb.dequantize_4bit.default(codes, scales, self.block, self.name, [count], out.dtype).view(-1))
            return
        values, whole = CODECS[self.name].dequantize(self.unpacked(codes, count)), count // self.block * self.block
        if whole:
            scaled = values[:whole].view(-1, self.block) * scales[: whole // self.block, None]
            out[:whole].view(-1, self.block).copy_(scaled)
        if whole < count:
            out[whole:].copy_(values[whole:] * scales[-1])


@cache
def _bitsandbytes() -> Any:
    """Return bitsandbytes' operators; None where it is not installed."""
    with suppress(ImportError):
        import_module("bitsandbytes")
        return torch.ops.bitsandbytes
    return None


@cache
def _levels(levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(levels, device=device)


def _decoded(levels: tuple[float, ...], codes: torch.Tensor) -> torch.Tensor:
    return _levels(levels, codes.device)[codes.int()]


@cache
def _bounds(levels: tuple[float, ...]) -> tuple[list[float], torch.Tensor]:
    """Return the midpoints between the values of codes, ascending, and the codes in the order of their values."""
    values = _levels(levels, _CPU)
    order = values.argsort()
    return ((values[order[:-1]] + values[order[1:]]) / 2).tolist(), order.to(torch.uint8)


def _coded(levels: tuple[float, ...], values: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = values.numel() // block * block
    blocks, rest = values[:whole].view(-1, block), values[whole:]
    absmax = blocks.abs().amax(1)
    scaled = [(blocks * (1.0 / absmax.clamp(min=1e-38))[:, None]).view(-1)]
    if rest.numel():
        absmax = torch.cat([absmax, rest.abs().amax()[None].clamp(min=1e-38)])
        scaled.append(rest / absmax[-1])
    bounds, order = _bounds(levels)
    together = torch.cat(scaled)
    places = torch.zeros(together.shape, dtype=torch.uint8)
    for bound in bounds:  # Three times as fast as torch.bucketize.
        places += together > bound
    return order[places.int()], absmax


def _four_bits(levels: tuple[float, ...]) -> CodecRow:
    return CodecRow(block=64, quantize=partial(_coded, levels), dequantize=partial(_decoded, levels), codes_in_byte=2, nests=True)


@cache
def _int8_levels() -> tuple[float, ...]:
    """Return the values of the 256 codes of bitsandbytes' dynamic 8-bit type, ascending: seven decades, each divided evenly by as
    many fractions as bits are left (Dettmers 2015, arXiv:1511.04561)."""
    values = [0.0, 1.0]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32, device=_CPU)
        means = (10.0 ** (decade - 6)) * ((bounds[:-1] + bounds[1:]) / 2.0)
        values += [*means.tolist(), *(-means).tolist()]
    return tuple(sorted(values))


@cache
def _int8_codes() -> torch.Tensor:
    """Return the nearest code of each of the values to which bitsandbytes rounds before, from -1 to 1."""
    levels = _levels(_int8_levels(), _CPU)
    grid = -1.0 + (2.0 * torch.arange(_GRID + 1, dtype=torch.float32, device=_CPU)) / _GRID
    return torch.bucketize(grid, 0.5 * (levels[:-1] + levels[1:])).to(torch.uint8)


def _quantize_int8(values: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of values, 1-D, and the largest magnitude of each block."""
    count = values.numel()
    blocks = torch.nn.functional.pad(values, (0, -count % block)).view(-1, block)
    absmax = blocks.abs().amax(1)
    scaled = (blocks * (1.0 / absmax)[:, None]).view(-1)[:count].clamp(-1, 1)
    # One rounding of the product and the sum, as of a fused multiply-add.
    places = (((scaled + 1.0) * 0.5).double() * _GRID + 0.5).float().nan_to_num(0.0).int()
    return torch.where(absmax.repeat_interleave(block)[:count] == 0, 0, _int8_codes()[places]), absmax


def _quantize_fp8(values: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    count = values.numel()
    absmax = torch.nn.functional.pad(values, (0, -count % block)).view(-1, block).abs().amax(1)
    scales = (absmax / torch.finfo(torch.float8_e4m3fn).max).clamp(min=torch.finfo(torch.float32).tiny)
    return (values / scales.repeat_interleave(block)[:count]).to(torch.float8_e4m3fn).view(torch.uint8), scales


CODECS: dict[CodecName, CodecRow] = {
    "nf4": _four_bits(_NF4),
    "fp4": _four_bits(_FP4),
    "int8": CodecRow(block=256, quantize=_quantize_int8, dequantize=lambda codes: _decoded(_int8_levels(), codes), nests=True),
    "fp8": CodecRow(block=128, quantize=_quantize_fp8, dequantize=lambda code: code.view(torch.float8_e4m3fn).float()),
}
"""The codecs, by the names of `model.weights`."""
