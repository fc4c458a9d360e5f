"""`DecodingBuffer`: gathers the bytes of encoded shards, and decodes them into memory that lives around a unit's use: ahead of
it in a thread on a single rank, else at the wait, since ranks of a host compute on all of its cores."""

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from zeromesh.comm.transport import GatherBuffer, Transport
from zeromesh.flat.encoded_shard import EncodedShard, EncodedTensor
from zeromesh.offload import ReleasableBuffer, TieredTensor


class DecodingBuffer(GatherBuffer):
    """A buffer for a frozen bucket of `dtype` whose `shards`, those of all ranks, `gathered` gathers as bytes."""

    def __init__(
        self, gathered: GatherBuffer, shards: Sequence[EncodedShard], dtype: torch.dtype, transport: Transport
    ) -> None:
        self._gathered, self._shards, self._ahead = gathered, shards, transport.ahead
        length = sum(each.length for each in shards)
        self._decoded = self._memory = ReleasableBuffer(
            length, dtype, gathered.full.device, spare=transport.spare_pages
        )
        self.full = self._decoded.full
        self.persistent = False
        self._has_memory = self._is_current = False
        self._decoding: Future[None] | None = None

    def transient_nbytes(self, share: float) -> int:
        return self.full.nbytes + self._gathered.transient_nbytes(share)

    def end_write(self) -> None:
        self._gathered.end_write()

    def begin_write(self) -> None:
        self._gathered.begin_write()

    def gather(self, shard: TieredTensor) -> None:
        if not self._has_memory:
            self._decoded.take()
            self._has_memory = True
        if isinstance(shard, EncodedTensor) and not self._is_current and self._decoding is None:
            self._gathered.gather(shard.encoded)
            if self._ahead is not None:
                self._decoding = self._ahead.submit(self._decode)

    def _decode(self) -> None:
        self._gathered.wait()
        values = torch.split(self.full, [each.length for each in self._shards])
        encoded = torch.split(self._gathered.full, [each.nbytes for each in self._shards])
        for shard, data, out in zip(self._shards, encoded, values, strict=True):
            shard.decode(data, out)

    def wait(self) -> None:
        if not self._has_memory or self._is_current:
            self._gathered.wait()
            return
        decoding, self._decoding = self._decoding, None
        if decoding is None:
            self._decode()
        else:
            decoding.result()
        self._is_current = True
        self._gathered.end_read()
        self._gathered.release()

    def release(self) -> None:
        if self._has_memory:
            self.wait()
            self._decoded.give_back()
            self._has_memory = self._is_current = False

    def end_read(self) -> None:
        self._gathered.end_read()
