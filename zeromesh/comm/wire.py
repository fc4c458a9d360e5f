"""The exchange of ranks with the same shard, once a step, where they divide its states: sums of gradients go to the rank with a
part, and new parameters come back. On the way between hosts both may be encoded.

    bfloat16      two bytes for each element
    int8, int4    codes of all elements, in blocks of `BLOCK`, and a float32 scale of each block after them

Of parameters a rank encodes what its master weights differ by from what all others hold. What a code leaves out is in the next
difference, so the error stays that of one update (error compensation as in DIANA: Mishchenko et al. 2019, arXiv:1901.09269)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zeromesh.comm.transport import Reduction, sum_in_order
from zeromesh.intervals import Interval, round_up
from zeromesh.mesh.collectives import CollectiveCall
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.telemetry.step_recorder import Collective

BLOCK = 256
_CHUNK = 1 << 16  # elements that are encoded or decoded at a time, whole blocks
LEVELS = {"int8": 127, "int4": 7}
"""The codecs in blocks, with the number of codes on each side of zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireCodec:
    """The codec `bfloat16`, `int8` or `int4` of flat tensors, as uint8 `[nbytes(numel)]`, on any device."""

    name: str

    @property
    def error(self) -> str:
        """The most by which a value changes."""
        if self.name in LEVELS:
            return f"{0.5 / LEVELS[self.name]:.2%} of the largest of {BLOCK}"
        return f"{2.0**-8:.2%} of itself"

    def nbytes(self, numel: int) -> int:
        if self.name not in LEVELS:
            return 2 * numel
        return self._code_bytes(numel) + -(-numel // BLOCK) * 4

    def _code_bytes(self, numel: int) -> int:
        return round_up(numel, BLOCK) // (2 if self.name == "int4" else 1)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        data = torch.empty(self.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
        self.encode_into(data, values, 0, values.numel())
        return data

    def encode_into(self, data: torch.Tensor, values: torch.Tensor, start: int, numel: int) -> None:
        """Encode `values`, 1-D, as elements from `start` on, a multiple of `BLOCK`, of the `numel` that `data` has. Raises
        `RuntimeError` for another start of a codec in blocks."""
        if self.name not in LEVELS:
            data.view(torch.bfloat16)[start : start + values.numel()].copy_(values)
            return
        if start % BLOCK:
            raise RuntimeError(f"{self.name} encodes whole blocks of {BLOCK} elements, and element {start} begins none")
        codes, scales, levels = *self._parts(data, numel), LEVELS[self.name]
        for first in range(0, values.numel(), _CHUNK):
            part, at = values[first : first + _CHUNK].float(), start + first
            blocks = torch.nn.functional.pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
            scale = blocks.abs().amax(1) / levels  # Not finite where a value is not, and so are then all of the block.
            found = (blocks / scale.clamp(min=1e-38)[:, None]).round_().to(torch.int8).view(-1)
            if self.name == "int4":
                found = (found[::2] << 4) | (found[1::2] & 15)
            codes[self._code_bytes(at) :][: found.numel()].copy_(found)
            scales[at // BLOCK : at // BLOCK + scale.numel()].copy_(scale)

    def add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Add the values of `data` to `out`, `[numel]` of any floating dtype."""
        if self.name not in LEVELS:
            out.add_(data.view(torch.bfloat16))
            return
        codes, scales = self._parts(data, out.numel())
        for first in range(0, out.numel(), _CHUNK):
            part = out[first : first + _CHUNK]
            found, length = codes[self._code_bytes(first) :][: self._code_bytes(part.numel())], part.numel()
            if self.name == "int4":
                found = torch.stack([found >> 4, (found << 4) >> 4], 1)  # Shifts of signed numbers keep their signs.
            scale = scales[first // BLOCK : -(-(first + length) // BLOCK)]
            part.add_((found.view(-1, BLOCK) * scale[:, None]).view(-1)[:length])

    def _parts(self, data: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        cut = self._code_bytes(numel)
        return data[:cut].view(torch.int8), data[cut:].view(torch.float32)


Wire = WireCodec | None  # None: values are sent as they are.


def sum_parts(ranks: ProcessSet, grads: torch.Tensor, order: Sequence[int], out: torch.Tensor, wire: Wire) -> Reduction:
    """Start to send each rank a part of `grads`, 1-D, as long as `out`: that with the number which `order` has at the rank's
    position. The sum of what this rank receives, and of its own part, which no codec touches unless others make the same sum, is
    made in `out`, which may be in the memory of `grads`, in rank order."""
    split, kind = torch.split(grads, out.numel()), Collective.REDUCE_SCATTER
    parts, given = [split[each] for each in order], grads
    own, exact = parts[ranks.index], ranks.index if [*order].count(order[ranks.index]) == 1 else None
    if wire is not None:
        kept = own.new_empty(wire.nbytes(own.numel()), dtype=torch.uint8)  # This rank sends itself nothing.
        given = torch.cat([kept if n == exact else wire.encode(part) for n, part in enumerate(parts)])
    elif list(order) != [*range(len(parts))]:
        given = torch.cat(parts)
    received = torch.empty_like(given)
    launched = ranks.start(Collective.ALL_TO_ALL, CollectiveCall(received, given, "sum of gradients over replicas", counts_as=kind))

    def finish() -> None:
        launched.wait()
        with ranks.traffic.timed(kind):
            found = received.chunk(ranks.size)
            if wire is None:
                sum_in_order(out, found, add=False)
                return
            total = torch.zeros_like(out)
            for n, each in enumerate(found):
                if n == exact:
                    total.add_(own)
                else:
                    wire.add(each, total)
            out.copy_(total)

    return Reduction(launched.done, finish)


def gather_parts(
    ranks: ProcessSet, whole: torch.Tensor, own: Interval, wire: Wire, encoded: torch.Tensor | None
) -> Callable[[], None]:
    """Start to gather equal parts of `whole`, 1-D, from the ranks, of which this one has `own`, or with a codec to add to each part
    what its rank has `encoded`. Returns a call that waits for it."""
    what = "gather of parameters from replicas"
    if wire is None or encoded is None:
        return ranks.start(Collective.ALL_GATHER, CollectiveCall(whole, whole[own.start : own.end], what)).wait
    received = encoded.new_empty(ranks.size * encoded.numel())
    launched = ranks.start(Collective.ALL_GATHER, CollectiveCall(received, encoded, what))

    def finish() -> None:
        launched.wait()
        with ranks.traffic.timed(Collective.ALL_GATHER):
            for data, part in zip(received.chunk(ranks.size), whole.chunk(ranks.size), strict=True):
                wire.add(data, part)

    return finish
