"""The description of a machine for a plan: its rates in numbers, read from a file, and the seconds that they predict.

Every prediction has one form: a formula of published figures, times how far from it measurements were nearby. At a measured point
the prediction is the measurement; between points it is interpolated, and beyond them the formula goes on from the nearest. So a
file with two figures for a link is enough, and a file with many is exact where it has been measured.

Bytes are bytes (not bits), rates are a second, times are seconds.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from pydantic.fields import FieldInfo

from zeromesh.environment import setting
from zeromesh.errors import ConfigError
from zeromesh.files import read_whole, write_whole
from zeromesh.telemetry.step_recorder import Collective
from zeromesh.trainer.config.messages import allowed, known_paths, nearest_path, section_of, shown
from zeromesh.trainer.config.sections.base import (
    Allowed,
    Bytes,
    Count,
    NotNegative,
    Positive,
    Section,
    Text,
    Texts,
    tuple_from_list,
)
from zeromesh.trainer.config.trainer_config import CoreDumper
from zeromesh.trainer.config.yaml_reader import MAX_BYTES, parse_yaml
from zeromesh.trainer.planning.work import Product, Work

SHIPPED = Path(__file__).resolve().parent.parent / "machines"
"""Files of machines that many have, from public data."""
Place = Literal["device", "host"]
Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "point to point", "agreement"]
"""The values of `Collective`."""

_ADAMW_FIXED, _ADAMW_MOMENT = 12, 8
"""Bytes of an element that an update moves in float32: the parameter is read and written and its gradient read; each moment is read
and written."""


_Row = BeforeValidator(tuple_from_list)
"""Files hold lists."""


def _table(text: str) -> Any:
    """Describe the rows that such a table allows, in words."""
    return Allowed(f"at least one row {text}")


ProductRow = Annotated[tuple[Count, Count, Count, Count, Positive], _Row]
SizeRow = Annotated[tuple[Count, Positive], _Row]
WaitRow = Annotated[tuple[Count, Positive, NotNegative], _Row]
CollectiveRow = Annotated[tuple[Kind, Count, Count, Positive], _Row]
ProductRows = Annotated[
    tuple[ProductRow, ...], _Row, Field(min_length=1), _table("[batch, rows, inner, columns, operations a second]")
]
SizeRows = Annotated[tuple[SizeRow, ...], _Row, Field(min_length=1), _table("[bytes, bytes a second]")]
CrowdRows = Annotated[tuple[SizeRow, ...], _Row, Field(min_length=1), _table("[ranks, factor]")]
WaitRows = Annotated[
    tuple[WaitRow, ...], _Row, Field(min_length=1), _table("[ranks, seconds of computing, seconds of waiting]")
]
CollectiveRows = Annotated[
    tuple[CollectiveRow, ...], _Row, Field(min_length=1), _table("[kind, ranks, bytes, seconds]")
]


class ProductRates(Section):
    """How fast a device multiplies matrices of one dtype."""

    peak: Positive
    """Floating-point operations a second that the device cannot exceed."""
    measured: ProductRows
    """`[batch, rows, inner, columns, operations a second]` of `batch` products `[rows, inner] x [inner, columns]`."""


class HostCopies(Section):
    """Copies between the memory of a device and that of its host, through pinned memory."""

    to_device: Positive
    """Bytes a second."""
    to_host: Positive
    """Bytes a second."""
    latency_seconds: NotNegative = 0.0


class DeviceRates(Section):
    """The rates of what one rank computes on: an accelerator, or its part of the processor."""

    kind: Text
    """As torch calls it, `cpu` for a processor."""
    memory_bytes: Annotated[Bytes, Field(gt=0)]
    """Bytes that torch can use; of a CPU, the host's memory."""
    memory_bandwidth: Positive
    """Bytes a second that a large addition reads and writes."""
    launch_seconds: NotNegative
    """Seconds that launching one operation takes, with what Python and autograd do around it."""
    products: Annotated[dict[Text, ProductRates], Field(min_length=1)]
    """By dtype, as in `precision.compute`."""
    elementwise: dict[Text, SizeRows] = Field(default_factory=dict)
    """By dtype: `[bytes that an operation reads and writes, bytes a second]`, of operations that are no products, in the mix of a
    transformer and without their launch."""
    copies: HostCopies | None = None


class HostRates(Section):
    """The resources that the ranks of one host share."""

    devices: Count
    """Ranks of a host."""
    cores: Count
    memory_bytes: Annotated[Bytes, Field(gt=0)]
    memory_bandwidth: Positive
    """Bytes a second, of all cores together."""
    crowding: CrowdRows | None = None
    """`[ranks, factor]`: how many times longer computing takes when so many ranks compute on a host at once."""
    waiting: WaitRows | None = None
    """`[ranks, seconds, seconds]`: how long so many ranks of a host wait for each other at an exchange, after how much
    computing since the one before, which is the first of the two."""


class LinkRates(Section):
    """How ranks reach each other by one transport."""

    latency_seconds: NotNegative
    """Seconds of a message of no bytes."""
    bandwidth: Positive
    """Bytes a second that each rank sends and receives while all do; between hosts, a rank's share of its host's network."""
    measured: CollectiveRows | None = None
    """`[kind, ranks, bytes, seconds]`; bytes are those of the whole tensor, gathered or to be summed."""


class TransportRates(Section):
    """Links by transport, as `parallel.transport` names them."""

    shared: LinkRates | None = None
    gloo: LinkRates | None = None
    nccl: LinkRates | None = None


class LinkSet(Section):
    """Links between ranks of one host, and between hosts."""

    inside: TransportRates = Field(default_factory=TransportRates)
    between: TransportRates = Field(default_factory=TransportRates)


class DiskRates(Section):
    """The disk of `offload.directory`, which the ranks of a host share, past the page cache."""

    read: Positive
    """Bytes a second."""
    written: Positive
    """Bytes a second."""
    latency_seconds: NotNegative = 0.0


class UpdateRates(Section):
    """Seconds in which AdamW updates one element in float32 by two moments, on one rank; null: as its memory allows."""

    device: Positive | None = None
    host: Positive | None = None


class LibraryBytes(Section):
    """The memory that torch and the communicators of a rank take before a model is there."""

    device: Bytes = 0
    """Bytes of an accelerator."""
    host: Bytes = 0
    """Bytes of the host for each rank, buffers and holes of the heap among them."""
    shared: Bytes = 0
    """Bytes of files that all ranks of a host map together."""


class Machine(Section):
    """A machine of equal hosts with equal devices. `read_machine` reads one from a file, `find_machine` by name."""

    name: Text
    sources: Texts
    """The sources of the figures."""
    device: DeviceRates
    host: HostRates
    links: LinkSet = Field(default_factory=LinkSet)
    disk: DiskRates | None = None
    update: UpdateRates = Field(default_factory=UpdateRates)
    library: LibraryBytes = Field(default_factory=LibraryBytes)

    @property
    def is_cpu(self) -> bool:
        """True if ranks compute on the host's cores: then operations are not launched ahead, and device and host share memory."""
        return self.device.kind == "cpu"

    def product_seconds(self, product: Product) -> float:
        """Seconds of one product, alone on its host.

        The formula is the roofline of Williams, Waterman and Patterson (2009), operations over the peak rate or bytes over the
        memory's, whichever is longer, as far as the best measured shape reaches it, after the seconds of the shortest product.
        Measured shapes say how far from that a product of nearly that shape is (inverse-distance weighting by Shepard (1968), in
        logarithms of batch, rows, inner and columns).

        Raises `ConfigError` for a dtype that the machine file has no rates of.
        """
        rates = self._rates(product.dtype)
        first, reached, known = _fitted(self.device.memory_bandwidth, product.dtype, rates.peak, rates.measured)
        formula = first + _roof(product, rates.peak, self.device.memory_bandwidth) / reached
        sought = _logarithms(product[1:])
        weights = total = 0.0
        for place, ratio in known:
            distance = sum((a - b) ** 2 for a, b in zip(sought, place, strict=True))
            if distance == 0.0:
                return formula * math.exp(ratio)
            weight = distance**-2
            weights, total = weights + weight, total + weight * ratio
        return max(formula * math.exp(total / weights), product.flops / rates.peak)

    def _rates(self, dtype: str) -> ProductRates:
        rates = self.device.products.get(dtype)
        if rates is None:
            known = ", ".join(self.device.products)
            raise ConfigError(
                f"the machine {self.name} has no rates of {dtype} products, only of {known}; set precision.compute to one of them, "
                f"add device.products.{dtype} to its file, or measure it (zeromesh plan --measure)"
            )
        return rates

    def moved_seconds(self, nbytes: float, *, operations: int = 1, dtype: str = "float32") -> float:
        """Seconds in which `operations` that are no products read and write `nbytes` altogether, without their launches."""
        if not nbytes:
            return 0.0
        table = self.device.elementwise.get(dtype, ())
        each = nbytes / max(1, operations)
        ratios = [(float(size), self.device.memory_bandwidth / rate) for size, rate in table]
        return nbytes / self.device.memory_bandwidth * _interpolated(ratios, each)

    def work_seconds(self, work: Work, *, ranks_on_host: int = 1, dtype: str | None = None) -> float:
        """Seconds of one pass through a part of a model, without what its ranks exchange, when `ranks_on_host` compute at once.

        On a CPU products, moves and launches follow each other. On an accelerator the host launches ahead, so that the longer of
        launching and computing counts. `dtype` is that of all but products; by default that of most of the products' operations.
        """
        flops: dict[str, float] = {}
        for product, count in work.products:
            flops[product.dtype] = flops.get(product.dtype, 0.0) + count * product.flops
        dtype = dtype or max(flops, key=lambda name: flops[name], default="float32")
        slower = self.crowding(ranks_on_host)
        products = sum(count * self.product_seconds(product) for product, count in work.products)
        others = max(1, work.operations - sum(count for _, count in work.products))
        moves = self.moved_seconds(work.moved, operations=others, dtype=dtype)
        launches = work.operations * self.device.launch_seconds
        if self.is_cpu:
            return slower * (products + moves + launches)
        return max(slower * (products + moves), launches)

    def crowding(self, ranks_on_host: int) -> float:
        """How many times longer computing takes when so many ranks of a host compute at once.

        Without a table it is 1 on accelerators, and on a CPU the ranks that share a core. Beyond the last row, the ranks of a CPU
        share what there is.
        """
        rows = sorted(self.host.crowding or ((1, 1.0),))
        share = max(1.0, ranks_on_host / max(rows[-1][0], self.host.cores)) if self.is_cpu else 1.0
        return share * _interpolated([(float(ranks), factor) for ranks, factor in rows], ranks_on_host)

    def waiting_seconds(self, ranks_on_host: int, between: float) -> float:
        """How long ranks of a host, of which so many compute, wait for each other at an exchange, after `between` seconds of
        computing since the one before. Where more ranks than cores compute, a rank waits for one that has no core."""
        rows = self.host.waiting or ()
        most = max((ranks for ranks, *_ in rows if ranks <= ranks_on_host), default=0)
        parts = [
            (computing, waited / computing) for ranks, computing, waited in sorted(rows) if ranks == most and waited
        ]
        return between * _interpolated(parts, between) if parts and between else 0.0

    def transport(self, hosts: int = 1) -> str:
        """The transport that `parallel.transport: auto` takes for ranks of so many hosts."""
        if not self.is_cpu:
            return "nccl"
        return "shared" if hosts == 1 else "gloo"

    def collective_seconds(
        self, kind: str, nbytes: float, *, ranks: int, hosts: int = 1, transport: str | None = None
    ) -> float:
        """Seconds in which `ranks` ranks, evenly on `hosts` hosts, exchange a tensor of `nbytes` bytes as a whole.

        `nbytes` is what each rank has after an all-gather, and before a reduce-scatter, an all-reduce or an all-to-all. The formula
        is Hockney's (1994), latency + bytes / bandwidth for each message, of rings: n-1 messages of 1/n of the bytes, twice as
        many for an all-reduce (Thakur, Rabenseifner and Gropp 2005). A ring's bandwidth between hosts is that of all networks
        which its ranks of one host have. All-reduces and agreements may have the latency of a tree instead, as NCCL chooses.

        Raises `ConfigError` where the machine file has no such link.
        """
        if ranks == 1:
            return 0.0
        kind = Collective(kind).value
        name = transport or self.transport(hosts)
        rates = self._link("inside" if hosts == 1 else "between", name)
        latency, per_byte = self._message(name, ranks, hosts)
        formula = _collective(kind, nbytes, ranks, hosts, latency, per_byte)
        known: dict[int, list[tuple[float, float]]] = {}
        for of, size, measured_bytes, seconds in rates.measured or ():
            if of == kind:
                known.setdefault(size, []).append((float(measured_bytes), seconds))
        ratios = []
        for size, rows in sorted(known.items()):
            on = min(hosts, size)  # Between hosts, one rank of each was measured.
            there = self._message(name, size, on)
            rows.sort()
            end = min(max(float(nbytes), rows[0][0]), rows[-1][0])
            ratios.append((float(size), _interpolated(rows, end) / _collective(kind, end, size, on, *there)))
        return formula * _interpolated(ratios, ranks)

    def _link(self, where: Literal["inside", "between"], transport: str) -> LinkRates:
        rates: LinkRates | None = getattr(getattr(self.links, where), transport, None)
        if rates is None:
            what = "inside a host" if where == "inside" else "between hosts"
            raise ConfigError(
                f"the machine {self.name} has no figures of {transport} {what}; add links.{where}.{transport} with latency_seconds "
                "and bandwidth to its file, or measure them there (zeromesh plan --measure)"
            )
        return rates

    def _message(self, transport: str, ranks: int, hosts: int) -> tuple[tuple[float, float], float]:
        """Seconds of a message without bytes (inside, between), and seconds of a byte around a ring of all ranks."""
        if hosts == 1:
            inside = self._link("inside", transport)
            return (inside.latency_seconds, 0.0), 1.0 / inside.bandwidth
        between, on_host = self._link("between", transport), math.ceil(ranks / hosts)
        near: LinkRates = getattr(self.links.inside, transport) or between
        bandwidth = between.bandwidth * on_host
        if on_host > 1 and near is not between:
            bandwidth = min(bandwidth, near.bandwidth)
        return (near.latency_seconds, between.latency_seconds), 1.0 / bandwidth

    def copy_seconds(self, nbytes: float, *, to: Place = "host") -> float:
        """Seconds of a copy of `nbytes` between an accelerator and its host; on a CPU, of one within memory."""
        if not nbytes:
            return 0.0
        if self.device.copies is None:
            return 2 * nbytes / self.device.memory_bandwidth
        rate = self.device.copies.to_host if to == "host" else self.device.copies.to_device
        return self.device.copies.latency_seconds + nbytes / rate

    def disk_seconds(self, read: float, written: float, *, ranks_on_host: int = 1) -> float:
        """Seconds in which each of `ranks_on_host` ranks reads and writes so many bytes of the disk that they share.

        Raises `ConfigError` where the machine file has no disk.
        """
        if not read and not written:
            return 0.0
        if self.disk is None:
            raise ConfigError(
                f"the machine {self.name} has no disk; add disk with read and written (bytes a second) to its file, or measure it "
                "(zeromesh plan --measure)"
            )
        moved = read / self.disk.read + written / self.disk.written
        return self.disk.latency_seconds * (bool(read) + bool(written)) + ranks_on_host * moved

    def update_seconds(
        self, elements: float, *, moments: int = 2, on: Place = "device", ranks_on_host: int | None = None
    ) -> float:
        """Seconds in which one rank updates `elements` of float32 by as many moments, 2 for AdamW, where they lie.

        An update is limited by memory: it moves 12 bytes and 8 for each moment. Where its rate is not measured, the memory of the
        device, or its share of the host's (`ranks_on_host`, by default all of a host), says how fast that is.
        """
        per_element = self.update.device if on == "device" else self.update.host
        nbytes = _ADAMW_FIXED + _ADAMW_MOMENT * moments
        ranks = self.host.devices if ranks_on_host is None else ranks_on_host
        if per_element is not None:
            crowded = self.crowding(ranks) if on == "host" or self.is_cpu else 1.0
            return elements * per_element * crowded * nbytes / (_ADAMW_FIXED + 2 * _ADAMW_MOMENT)
        shared = self.host.memory_bandwidth / max(1, ranks)
        return elements * nbytes / (self.device.memory_bandwidth if on == "device" else shared)

    def to_yaml(self) -> str:
        """The text of a machine file that `read_machine` reads back to an equal machine."""
        data = self.model_dump(mode="json", exclude_defaults=True)
        return yaml.dump(
            data, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120
        )


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name as in `precision.compute`. Raises `ConfigError` for a name that is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{name} is no dtype of torch; allowed is a name such as bfloat16")
    return dtype


def _roof(product: Product, peak: float, bandwidth: float) -> float:
    """The least seconds of a product: of its operations, or of its bytes."""
    _, batch, rows, inner, columns = product
    elements = batch * (rows * inner + inner * columns + rows * columns)
    return max(product.flops / peak, elements * torch_dtype(product.dtype).itemsize / bandwidth)


@lru_cache(maxsize=64)
def _fitted(
    bandwidth: float, dtype: str, peak: float, measured: Sequence[tuple[int, int, int, int, float]]
) -> tuple[float, float, list[tuple[tuple[float, ...], float]]]:
    """Return the figures that measured products give: seconds of the shortest beyond its roof, the part of the roof that the best
    one reaches, and for each shape, in logarithms, the logarithm of its seconds over those by formula."""
    found = []
    for *shape, rate in measured:
        product = Product(dtype, *shape)
        found.append((_logarithms(shape), _roof(product, peak, bandwidth), product.flops / rate))
    reached = max(roof / seconds for _, roof, seconds in found)
    _, roof, least = min(found, key=lambda each: each[2])
    first = max(0.0, least - roof / reached)
    return first, reached, [(place, math.log(seconds / (first + roof / reached))) for place, roof, seconds in found]


def _logarithms(sizes: Sequence[int]) -> tuple[float, ...]:
    return tuple(math.log2(max(1, size)) for size in sizes)


def _interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value at `at`, straight between `points` in logarithms of both, and as at the nearest end beyond; 1 without points."""
    if not points:
        return 1.0
    place = bisect_left(points, at, key=lambda point: point[0])
    if place < len(points) and points[place][0] == at:
        return points[place][1]
    if place in (0, len(points)):
        return points[max(0, place - 1)][1]
    (low, first), (high, second) = points[place - 1], points[place]
    part = math.log(at / low) / math.log(high / low)
    return math.exp((1 - part) * math.log(first) + part * math.log(second))


def _collective(
    kind: str, nbytes: float, ranks: int, hosts: int, latency: tuple[float, float], per_byte: float
) -> float:
    """Seconds by formula; `latency` is that of a message inside a host and between hosts."""
    inside, between = latency
    ring = (ranks - hosts) * inside + (hosts - 1 if hosts > 1 else 0) * between
    if hosts == 1:
        ring = (ranks - 1) * inside
    on_host = math.ceil(ranks / hosts)
    # Trees between hosts, and chains inside, as NCCL builds them.
    tree = (on_host - 1) * inside + math.ceil(math.log2(hosts)) * between
    part = (ranks - 1) / ranks * nbytes * per_byte
    if kind in (Collective.ALL_REDUCE, Collective.AGREEMENT):
        return 2 * (min(ring, tree) + part)
    if kind == Collective.POINT_TO_POINT:
        return (between if hosts > 1 else inside) + nbytes * per_byte
    if kind == Collective.BROADCAST:
        return tree + nbytes * per_byte
    return ring + part


def machine_file() -> Path:
    """Return the path to which `zeromesh plan --measure` writes, and where plans look first."""
    return Path(setting("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zeromesh" / "machine.yaml"


def shipped() -> tuple[str, ...]:
    """The names of the machines that zeromesh knows."""
    return tuple(sorted({*(path.stem for path in SHIPPED.glob("*.yaml")), *_cards()} - {"cards"}))


def named_in(text: str) -> str | None:
    """The known machine whose name is most of `text`, such as `NVIDIA GeForce RTX 4090`; None where there is none."""
    words = _words(text)
    parts = {"".join(words[start:end]) for start, end in combinations(range(len(words) + 1), 2)}
    return max((name for name in shipped() if _plain(name) in parts), key=len, default=None)


def find_machine(given: str | None = None, *, devices: int = 1) -> Machine:
    """The machine of a name (`h100`), a size (`24GB`) or a file, or, for None, the one that was measured here. `devices` are the
    cards of a host, where a name or a size says nothing of hosts. Raises `ConfigError` for what describes no machine.
    """
    if given in (None, "cpu") and machine_file().exists():
        return read_machine(machine_file())
    wanted = _plain("laptop" if given == "cpu" else given or "")
    name = next((each for each in shipped() if _plain(each) == wanted), None)
    if name is not None:
        own = SHIPPED / f"{name}.yaml"
        return read_machine(own) if own.exists() else _of_card(name, devices)
    if given is not None and (given.endswith((".yaml", ".yml", ".json")) or Path(given).expanduser().exists()):
        return read_machine(Path(given).expanduser())
    if given is not None and (size := re.fullmatch(r"(\d+(?:\.\d+)?) ?gi?b?", given.lower())):
        return _of_size(float(size[1]), devices)
    known = f"{', '.join(shipped())}, a size such as 24GB, or the path of a machine file"
    missing = f"no machine was measured here ({machine_file()}): run zeromesh plan --measure, or name"
    raise ConfigError(f"{missing if given is None else f'no machine is called {given!r}; allowed are'} {known}")


def _words(name: str) -> list[str]:
    """A name without what people write or leave out: `NVIDIA GeForce RTX 4090` is `4090`."""
    left_out = r"nvidia|geforce|rtx|tesla|amd|instinct|sxm\d?|(?<=\d) ?gb"
    return re.findall("[a-z0-9]+", re.sub(left_out, " ", name.lower()))


def _plain(name: str) -> str:
    return "".join(_words(name))


@cache
def _cards() -> dict[str, Any]:
    table: dict[str, Any] = parse_yaml((SHIPPED / "cards.yaml").read_text(encoding="utf-8"), where="cards.yaml")
    return table


def _of_card(name: str, devices: int) -> Machine:
    """The card of a name in the table, with so many of them in a host."""
    card = Machine.model_validate(_cards()[name])
    host = {key: devices * getattr(card.host, key) for key in ("devices", "cores", "memory_bytes", "memory_bandwidth")}
    return card.model_copy(update={"host": card.host.model_copy(update=host)})


def _of_size(gigabytes: float, devices: int) -> Machine:
    """The slowest card of the table of about that size that multiplies bfloat16, with no more memory than that."""
    seen = int(0.97 * gigabytes * 2**30)
    every = (_of_card(name, devices) for name in _cards())

    def place(card: Machine) -> tuple[float, float]:
        return round(max(0.0, abs(card.device.memory_bytes / seen - 1) - 0.1), 1), card.device.memory_bandwidth

    card = min((each for each in every if "bfloat16" in each.device.products), key=place)
    device = card.device.model_copy(update={"memory_bytes": min(card.device.memory_bytes, seen)})
    return card.model_copy(
        update={"device": device, "name": f"a card of {gigabytes:g} GB with the rates of {card.name}"}
    )


def read_machine(path: Path) -> Machine:
    """Read a machine file. Raises one `ConfigError` with all that is wrong in it."""
    where = str(path)
    try:
        text = read_whole(path, MAX_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError("no such machine file; zeromesh plan --measure writes one", where=where) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", where=where) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text (byte {error.start})", where=where) from None
    data = parse_yaml(text, where=where)
    if not isinstance(data, dict):
        raise ConfigError(
            f"holds {shown('', data)}; allowed is a mapping of {', '.join(Machine.model_fields)}", where=where
        )
    try:
        return Machine.model_validate(data)
    except ValidationError as error:
        found = {problem: None for detail in error.errors(include_url=False) for problem in [_problem(detail, data)]}
        raise ConfigError(list(found), where=where) from None


def write_machine(machine: Machine, path: Path) -> None:
    """Write a machine file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, machine.to_yaml().encode())


def _problem(detail: Any, data: Any) -> str:
    """Describe what is wrong at one place of a machine file, what is allowed there, and what may have been meant."""
    steps, field, value = list(detail["loc"]), FieldInfo(annotation=Machine), data
    holder: type[BaseModel] | None = Machine
    if isinstance(steps[-1], int) and detail["type"] == "missing":
        steps.pop()  # A row that is too short.
    path: list[str] = []
    for step in steps:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            break
        path.append(str(step))
        if holder is not None and step in holder.model_fields:
            field = holder.model_fields[step]
            holder = section_of(field)
        elif holder is None and path[-2:-1] == ["products"]:
            holder = ProductRates  # The one mapping of sections.
    name = ".".join(path)
    if detail["type"] == "extra_forbidden":
        near = nearest_path(name, known_paths(Machine))
        beside = ", ".join((holder or Machine).model_fields)
        return f"{name}: unknown key; " + (f"did you mean {near}?" if near else f"allowed are {beside}")
    if detail["type"] == "missing" and isinstance(steps[-1], str):
        return f"{name}: is missing; allowed is {allowed(field)}"
    return f"{name}: got {shown('', value)}; allowed is {allowed(field)}"
