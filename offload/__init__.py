"""Where bytes rest and how they move: the device's memory, the host's, files; and the ledger of bytes by tier and purpose.

    Tiers            hands out flat tensors that rest on a tier, or partly on one: `TieredTensor`
    Stream           goes through such tensors row by row: reads ahead, computes, writes behind
    Ledger           bytes by tier and purpose

Useful by itself; knows no rank and no model.
"""

from zeromesh.offload.device import PassingMemory, allocate_lasting
from zeromesh.offload.file import FileTier, Slot
from zeromesh.offload.heap import reuse_freed_memory, settle_heap
from zeromesh.offload.host import PinnedBudget, pinned_limit
from zeromesh.offload.ledger import Ledger, Purpose, Tier
from zeromesh.offload.process import (
    available_bytes,
    peak_bytes,
    proportional_bytes,
    resident_bytes,
    swap_bytes,
)
from zeromesh.offload.stream import Mode, Row, Stream, Use, stream_bytes
from zeromesh.offload.swapfile import remove_leftovers
from zeromesh.offload.tiered import TensorSlice, TierChoice, TieredTensor, TierName
from zeromesh.offload.tiers import STAGING_BYTES, FileSettings, Tiers
from zeromesh.offload.transfer import DONE, Transfer, Waits

__all__ = [
    "DONE",
    "STAGING_BYTES",
    "FileSettings",
    "FileTier",
    "Ledger",
    "Mode",
    "PassingMemory",
    "PinnedBudget",
    "Purpose",
    "Row",
    "Slot",
    "Stream",
    "TensorSlice",
    "Tier",
    "TierChoice",
    "TierName",
    "TieredTensor",
    "Tiers",
    "Transfer",
    "Use",
    "Waits",
    "allocate_lasting",
    "available_bytes",
    "peak_bytes",
    "pinned_limit",
    "proportional_bytes",
    "remove_leftovers",
    "resident_bytes",
    "reuse_freed_memory",
    "settle_heap",
    "stream_bytes",
    "swap_bytes",
]
