"""`Channels`: sends tensors of any dtype and shape from a rank of a process set to its neighbours, in order.

Each direction between two ranks is a process group of these two, so that no message is queued behind those of the other direction
(on NCCL, a receive would hold up a send behind it). A message is a broadcast, which unlike gloo's send and receive can be waited
for in slices, so that `Watchdog` bounds the wait.

The first message of a kind is preceded by a header with its shapes, for which the host waits on a device; both ends remember them,
so that the next message of the kind needs no header and can travel while the receiver computes."""

import json
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from zeromesh.errors import CollectiveError
from zeromesh.mesh.collectives import CollectiveCall, Launched
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.mesh.process_groups import groups_in_turn, leave_group, make_group
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.telemetry.step_recorder import Collective

HEADER_BYTES = 2048
_TIMEOUT = 7 * 24 * 3600.0  # seconds; gloo posts receives long before their messages arrive; `Watchdog` bounds the waits.
_MOST_KINDS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageSpec:
    """The shape and dtype of a tensor that is sent. `differentiable`: its gradient is sent back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "MessageSpec":
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, differentiable=tensor.requires_grad)

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


_Specs = Sequence[MessageSpec]


class Incoming:
    def __init__(self, channel: "_Channel", kind: Hashable, specs: _Specs | None, what: str) -> None:
        self._channel, self._kind, self._specs, self.what = channel, kind, specs, what
        self._header: Launched | None = None
        self._tensors: list[torch.Tensor] = []
        self._receives: list[Launched] = []

    def advance(self, *, block: bool) -> bool:
        """Begin to receive if the shapes are known; returns True if it has begun, so that the next message may begin too."""
        channel = self._channel
        if self._specs is None:
            self._specs = channel.sent_specs.get(self._kind)
        if self._specs is None:
            if self._header is None:
                data = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=channel.device)
                self._header = channel.start(data, f"the shapes of {self.what}")
            if not block and not self._header.done():
                return False
            self._header.wait()
            self._specs = channel.sent_specs[self._kind] = read_header(self._header.call.out)
        self._tensors = [spec.empty(channel.device) for spec in self._specs]
        self._receives = [channel.start(tensor, self.what) for tensor in self._tensors]
        return True

    def wait(self) -> tuple[list[torch.Tensor], Sequence[MessageSpec]]:
        """Return the tensors and their specifications; may be called once."""
        self._channel.advance(self)
        for flight in self._receives:
            flight.wait()
        tensors, self._tensors, self._receives = self._tensors, [], []
        return tensors, self._specs or ()


class _Channel:
    """One direction between two ranks: `pair` is their process set, the sender first."""

    def __init__(self, pair: ProcessSet, device: torch.device) -> None:
        self.pair, self.device = pair, device
        self.sent_specs: dict[Hashable, _Specs] = {}  # by kind of message; equal on both ends
        self.queue: deque[Incoming] = deque()  # messages that the receiver has requested, in the order of arrival
        self.sending: deque[Launched] = deque()

    def start(self, tensor: torch.Tensor, what: str) -> Launched:
        # Bytes suit every backend, unlike dtypes; at least one, since an empty message could not be waited for.
        flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_zeros(1, dtype=torch.uint8)
        index, received, counts_as = self.pair.index, (len(flat), 0), Collective.POINT_TO_POINT
        call = CollectiveCall(flat, flat[: received[index]], what, received, counts_as=counts_as, times=1.0 - index)
        return self.pair.start(Collective.BROADCAST, call)

    def advance(self, until: Incoming | None = None) -> None:
        """Begin to receive messages of known shapes, in order; wait for the shapes of `until` and of the messages before it."""
        while self.queue and self.queue[0].advance(block=self.pair.on_stream or until in self.queue):
            self.queue.popleft()

    def send(self, tensor: torch.Tensor, what: str) -> None:
        while self.sending and self.sending[0].done():
            self.sending.popleft().wait()  # This raises the error of a failed send.
        self.sending.append(self.start(tensor, what))


class Channels:
    """This rank's channels to its neighbours in a process set: the ranks before and after it and, in a ring, the other end."""

    def __init__(self, group: ProcessSet, device: torch.device, *, shape: MeshShape | None = None, ring: bool = True) -> None:
        """Open channels; all ranks make process groups together: of every pipeline of the mesh's `shape`, or of `group` alone."""
        self.group, self.device = group, device
        self._out: dict[int, _Channel] = {}
        self._in: dict[int, _Channel] = {}
        rank = group.ranks[group.index]
        pairs = [(index, index + 1) for index in range(group.size - 1)]
        if ring and group.size > 2:
            pairs.insert(1, (0, group.size - 1))
        sets: Iterable[tuple[int, ...]] = [group.ranks]
        if shape is not None and pairs:
            sets = groups_in_turn(shape, rank, ["pipeline"], 2 * len(pairs))
        for ranks in sets:
            for both in pairs:
                ends = [ranks[index] for index in both]
                for source, target in (ends, ends[::-1]):
                    made = make_group(ends, group.works, group.watch, _TIMEOUT)
                    if rank not in ends:
                        continue
                    peer, channels = (target, self._out) if rank == source else (source, self._in)
                    pair = replace(group, ranks=(source, target), index=int(rank == target), groups={"data": made})
                    channels[group.ranks.index(peer)] = _Channel(pair, device)

    def send(self, target: int, kind: Hashable, tensors: Sequence[torch.Tensor], what: str, specs: _Specs | None = None) -> None:
        """Start to send to the neighbour at position `target` of the set; tensors are kept alive until they are sent. Messages of
        one `kind` have equal shapes and dtypes: `specs`, if the receiver expects them. Raises `CollectiveError` for others."""
        channel, found = self._out[target], [MessageSpec.of(tensor) for tensor in tensors]
        if specs is None:
            specs = channel.sent_specs.setdefault(kind, found)
            if specs is found:
                channel.send(write_header(found).to(self.device), what)
        if [(each.shape, each.dtype) for each in found] != [(each.shape, each.dtype) for each in specs]:
            was = f"{what} are {_describe(found)}, but for inputs of the same shapes they were {_describe(specs)}"
            rule = "what a pipeline stage returns may depend on the shapes of a batch alone"
            raise CollectiveError(f"{was}, which the receiver expects: {rule}")
        for tensor in tensors:
            channel.send(tensor.detach().contiguous(), what)

    def receive(self, source: int, kind: Hashable, what: str, specs: _Specs | None = None) -> Incoming:
        """Begin to receive the next message of the neighbour at position `source`; `kind` and `specs` equal the sender's."""
        channel = self._in[source]
        incoming = Incoming(channel, kind, specs, what)
        channel.queue.append(incoming)
        channel.advance()
        return incoming

    def advance(self) -> None:
        """Start receives that could not start before; called between two computations."""
        for channel in self._in.values():
            channel.advance()

    def wait_for_sends(self) -> None:
        """Wait until all messages are sent, and bound the number of remembered specifications; called at the end of a step."""
        for channel in (*self._out.values(), *self._in.values()):
            while channel.sending:
                channel.sending.popleft().wait()
            if len(channel.sent_specs) > _MOST_KINDS:
                channel.sent_specs.clear()

    def close(self) -> None:
        """Leave the groups, on all ranks alike, when nothing is in flight; after a failed wait they stay until the process ends."""
        if not self.group.watch.may_hang:
            for channel in (*self._out.values(), *self._in.values()):
                for group in channel.pair.groups.values() if channel.pair.groups else ():
                    leave_group(group, channel.pair.works)
        self._out, self._in = {}, {}


def write_header(specs: _Specs) -> torch.Tensor:
    """Return the header for `read_header`, `[HEADER_BYTES]` uint8 on the CPU. Raises `CollectiveError` for too many tensors."""
    data = json.dumps([(str(spec.dtype).removeprefix("torch."), spec.shape, spec.differentiable) for spec in specs]).encode()
    if len(data) > HEADER_BYTES:
        raise CollectiveError(f"{_describe(specs)} cannot be described in {HEADER_BYTES} bytes; send fewer tensors")
    return torch.frombuffer(bytearray(data.ljust(HEADER_BYTES)), dtype=torch.uint8)


def read_header(header: torch.Tensor) -> list[MessageSpec]:
    rows = json.loads(bytes(header.tolist()))
    return [MessageSpec(shape=tuple(shape), dtype=getattr(torch, kind), differentiable=grad) for kind, shape, grad in rows]


def _describe(specs: _Specs) -> str:
    return ", ".join(f"{spec.dtype} {list(spec.shape)}" for spec in specs)
