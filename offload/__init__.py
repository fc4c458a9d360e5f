"""Where bytes rest: the ledger of bytes by tier and purpose, and what the process and the system have.

Useful by itself; knows no rank and no model.
"""

from zeromesh.offload.device import PassingMemory, allocate_lasting
from zeromesh.offload.heap import heap_variables, reuse_freed_memory, settle_heap
from zeromesh.offload.ledger import Entry, Ledger, Purpose, Tier
from zeromesh.offload.process import (
    available_bytes,
    peak_bytes,
    proportional_bytes,
    resident_bytes,
    swap_bytes,
)

__all__ = [
    "Entry",
    "Ledger",
    "PassingMemory",
    "Purpose",
    "Tier",
    "allocate_lasting",
    "available_bytes",
    "heap_variables",
    "peak_bytes",
    "proportional_bytes",
    "resident_bytes",
    "reuse_freed_memory",
    "settle_heap",
    "swap_bytes",
]
