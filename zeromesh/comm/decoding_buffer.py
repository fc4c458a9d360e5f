"""`DecodingBuffer`: gathers the bytes of encoded shards, ahead of their use, and decodes them where the unit is used, so that only
one unit at a time is decoded: its values take four times the memory of its bytes, and decoding takes a small part of its use."""

from collections.abc import Sequence

import torch

from zeromesh.comm.transport import GatherBuffer
from zeromesh.flat.encoded_shard import EncodedShard, EncodedTensor
from zeromesh.offload import ReleasableBuffer, SparePages, TieredTensor


class DecodingBuffer(GatherBuffer):
    """A buffer for a frozen bucket of `dtype` whose `shards`, those of all ranks, `gathered` gathers as bytes."""

    def __init__(
        self, gathered: GatherBuffer, shards: Sequence[EncodedShard], dtype: torch.dtype, spare: SparePages
    ) -> None:
        self._gathered, self._shards = gathered, shards
        length = sum(each.length for each in shards)
        self._decoded = self._memory = ReleasableBuffer(length, dtype, gathered.full.device, spare=spare)
        self.full = self._decoded.full
        self.decoded_nbytes = self.full.nbytes
        # Bytes are due from `gather` to `wait`, values are there from `wait` to `release`.
        self.persistent = self._is_due = self._is_decoded = False

    def transient_nbytes(self, share: float) -> int:
        return self._gathered.transient_nbytes(share)

    def end_write(self) -> None:
        self._gathered.end_write()

    def begin_write(self) -> None:
        self._gathered.begin_write()

    def gather(self, shard: TieredTensor) -> None:
        if isinstance(shard, EncodedTensor) and not self._is_decoded:
            self._gathered.gather(shard.encoded)
            self._is_due = True

    def wait(self) -> None:
        """Wait for the bytes, decode those asked for since the last release, and release them. Raises `StorageError`."""
        self._gathered.wait()
        if not self._is_due:
            return
        self._decoded.take()
        values = torch.split(self.full, [each.length for each in self._shards])
        encoded = torch.split(self._gathered.full, [each.nbytes for each in self._shards])
        for shard, data, out in zip(self._shards, encoded, values, strict=True):
            shard.decode(data, out)
        self._is_due, self._is_decoded = False, True
        self._gathered.end_read()
        self._gathered.release()

    def release(self) -> None:
        if self._is_decoded:
            self._decoded.give_back()
            self._is_decoded = False

    def end_read(self) -> None:
        self._gathered.end_read()
