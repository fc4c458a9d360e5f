"""The storage and movement of bytes: the device's memory, the host's, files; and the ledger of bytes by tier and purpose. The
package has no notion of ranks or models, and is usable by itself (docs/offload.md)."""

from zeromesh.offload.io.durable_tier import DurableTier
from zeromesh.offload.io.file_tier import FileSlot, FileTier
from zeromesh.offload.io.transfer import DONE, Transfer, WaitTime
from zeromesh.offload.memory.allocation import ReleasableBuffer, SparePages, allocate_lasting, hex_digest, tensor_bytes
from zeromesh.offload.memory.glibc_malloc import prevent_fragmentation, reuse_freed_memory
from zeromesh.offload.memory.ledger import Ledger, Purpose, Tier, available_bytes, peak_bytes, resident_bytes
from zeromesh.offload.tiers import STAGING_BYTES, FileSettings, TierChoice, TieredPart, TieredTensor, Tiers
from zeromesh.offload.update_stream import Access, StreamOperand, StreamRow, UpdateStream, stream_bytes

__all__ = ["DONE", "DurableTier", "FileSlot", "FileTier", "Transfer", "WaitTime"]
__all__ += ["ReleasableBuffer", "SparePages", "allocate_lasting", "hex_digest", "tensor_bytes"]
__all__ += ["prevent_fragmentation", "reuse_freed_memory"]
__all__ += ["Ledger", "Purpose", "Tier", "available_bytes", "peak_bytes", "resident_bytes"]
__all__ += ["STAGING_BYTES", "FileSettings", "TierChoice", "TieredPart", "TieredTensor", "Tiers"]
__all__ += ["Access", "StreamOperand", "StreamRow", "UpdateStream", "stream_bytes"]
