"""Groups of ranks that share states, for tests of buckets without a mesh."""

from types import SimpleNamespace
from typing import Any

from zeromesh.comm.transport import Reducer
from zeromesh.units.unit import StateGroup


def state_group(ranks: int = 1, reducer: Any = None, share: float = 1.0) -> StateGroup:
    transport: Any = SimpleNamespace(share=share, name="local", reducer=reducer or Reducer())
    members: Any = SimpleNamespace(size=ranks, index=0)
    return StateGroup(members, members, transport, transport, 0)
