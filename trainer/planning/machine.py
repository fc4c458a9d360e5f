"""Machines for a plan: their measured rates, the seconds that these predict, and machines by name, by size or from files. Every
prediction is a formula of a few figures, which docs/machine-files.md describes."""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from zeromesh.environment import setting
from zeromesh.errors import ConfigError
from zeromesh.files import write_whole
from zeromesh.settings.keys import Bytes, Count, NotNegative, Positive, Text
from zeromesh.telemetry.step_recorder import Collective
from zeromesh.trainer.config.messages import allowed, known_paths, quote, unknown_key
from zeromesh.trainer.config.sections.base import Section, Texts
from zeromesh.trainer.config.trainer_config import CoreDumper
from zeromesh.trainer.config.yaml_reader import read_yaml
from zeromesh.trainer.machines import cards
from zeromesh.trainer.planning.tracing.meter import Product, Work

DeviceOrHost = Literal["device", "host"]
_TIME_SLICE_SECONDS = 2e-3
"""Seconds that a CPU rank in a collective waits for a peer without a core: a time slice of Linux's scheduler."""
_ADAMW_FIXED, _ADAMW_MOMENT = 12, 8
"""Bytes per element that a float32 update moves: the parameter is read and written, its gradient read, a moment both."""


class HostCopies(Section):
    """Copies between the memory of a device and pinned host memory."""

    to_device: Positive
    to_host: Positive
    latency_seconds: NotNegative = 0.0


class DeviceRates(Section):
    """The rates of one rank's compute device: an accelerator, or its part of the processor."""

    kind: Text
    memory_bytes: Annotated[Bytes, Field(gt=0)]
    memory_bandwidth: Positive
    launch_seconds: NotNegative
    products: Annotated[dict[Text, Positive], Field(min_length=1)]
    copies: HostCopies | None = None


class HostRates(Section):
    """The resources that the ranks of one host share. Sizes are in bytes."""

    devices: Count
    cores: Count
    memory_bytes: Annotated[Bytes, Field(gt=0)]
    memory_bandwidth: Positive


class LinkRates(Section):
    """The latency and bandwidth between ranks by one transport."""

    latency_seconds: NotNegative
    bandwidth: Positive


class TransportRates(Section):
    """The links by transport, as `parallel.transport` names them."""

    shared: LinkRates | None = None
    gloo: LinkRates | None = None
    nccl: LinkRates | None = None


class LinkSet(Section):
    """The links between ranks of one host, and between hosts."""

    inside: TransportRates = Field(default_factory=TransportRates)
    between: TransportRates = Field(default_factory=TransportRates)


class DiskRates(Section):
    """The disk of `offload.directory`, which the ranks of a host share, without the page cache."""

    read: Positive
    written: Positive
    latency_seconds: NotNegative = 0.0


class UpdateRates(Section):
    """Seconds per element of one rank's float32 AdamW update; null: derived from the memory bandwidth."""

    device: Positive | None = None
    host: Positive | None = None


class LibraryBytes(Section):
    """The memory that torch and a rank's communicators take before a model is built."""

    device: Bytes = 0
    host: Bytes = 0
    """Bytes of the host per rank, buffers and fragmentation of the heap included."""
    shared: Bytes = 0
    """Bytes of files that all ranks of a host map together."""


class Machine(Section):
    """A machine of equal hosts with equal devices. `read_machine` reads one from a file, `find_machine` finds one by name."""

    name: Text
    sources: Texts
    device: DeviceRates
    host: HostRates
    links: LinkSet = Field(default_factory=LinkSet)
    disk: DiskRates | None = None
    update: UpdateRates = Field(default_factory=UpdateRates)
    library: LibraryBytes = Field(default_factory=LibraryBytes)

    @property
    def is_cpu(self) -> bool:
        """True if ranks compute on the host's cores: operators are then not launched ahead, and device and host share memory."""
        return self.device.kind == "cpu"

    def _lacks(self, what: str, cure: str) -> ConfigError:
        measure = "measure it there (zeromesh plan --measure)"
        return ConfigError(f"the machine {self.name} has no {what}; {cure} to its file, or {measure}")

    def product_seconds(self, product: Product) -> float:
        """Return the seconds of one matrix product, alone on its host, by the roofline of Williams, Waterman and Patterson (2009):
        operations over their rate, or bytes over the memory bandwidth. Raises `ConfigError` for a dtype without a rate."""
        if (rate := self.device.products.get(product.dtype)) is None:
            known = ", ".join(self.device.products)
            fused = self.is_cpu and product.dtype == "float32"
            what = "products, which fused attention takes in any precision" if fused else "products"
            added = f"add device.products.{product.dtype}"
            cure = added if fused else f"set precision.compute to one of them, {added}"
            raise self._lacks(f"rate of {product.dtype} {what}, only of {known}", cure)
        return max(product.flops / rate, product.nbytes / self.device.memory_bandwidth)

    def moved_seconds(self, nbytes: float, *, ranks_on_host: int = 1) -> float:
        """Return the seconds in which operators, products aside, move `nbytes`, on CPUs as `ranks_on_host` share the bandwidth."""
        rate = self.device.memory_bandwidth
        return nbytes / (min(rate, self.host.memory_bandwidth / ranks_on_host) if self.is_cpu else rate)

    def work_seconds(self, work: Work, *, ranks_on_host: int = 1) -> float:
        """Return the seconds of one pass through a part of a model, without exchanges, when `ranks_on_host` ranks compute at once.
        CPU ranks share cores. On an accelerator the host launches ahead, so the longer of launching and computing counts."""
        products = sum(map(self.product_seconds, work.products))
        moves = self.moved_seconds(work.moved, ranks_on_host=ranks_on_host)
        launches = work.operations * self.device.launch_seconds
        if self.is_cpu:
            return self.ranks_per_core(ranks_on_host) * (products + launches) + moves
        return max(products + moves, launches)

    def ranks_per_core(self, ranks_on_host: int) -> float:
        """Return the number of ranks that share a CPU core when `ranks_on_host` compute at once; 1 on accelerators."""
        return max(1.0, ranks_on_host / self.host.cores) if self.is_cpu else 1.0

    def transport(self, hosts: int = 1) -> str:
        """Return the transport that `parallel.transport: auto` selects for ranks on so many hosts."""
        return ("shared" if hosts == 1 else "gloo") if self.is_cpu else "nccl"

    def collective_seconds(self, kind: str, nbytes: float, *, ranks: int, hosts: int = 1, ranks_on_host: int = 1) -> float:
        """Return the seconds of a collective of `ranks` ranks, evenly on `hosts` hosts, over a tensor of `nbytes` bytes as a
        whole (after an all-gather, and before another), while `ranks_on_host` compute on each. Raises `ConfigError` without
        such a link. The formula is Hockney's (1994), latency + bytes / bandwidth for each message, of rings: n-1 messages of
        1/n of the bytes, twice as many for an all-reduce (Thakur, Rabenseifner and Gropp 2005). A ring's bandwidth between
        hosts is the sum over the networks of one host's ranks. All-reduces may have the latency of a tree, as NCCL chooses."""
        if ranks == 1:
            return 0.0
        transport, on_host = self.transport(hosts), math.ceil(ranks / hosts)
        far = self._link("between" if hosts > 1 else "inside", transport)
        near: LinkRates = getattr(self.links.inside, transport) or far
        bandwidth = far.bandwidth * (on_host if hosts > 1 else 1)
        if on_host > 1 and near is not far:
            bandwidth = min(bandwidth, near.bandwidth)
        inside, between, per_byte = near.latency_seconds, far.latency_seconds, 1.0 / bandwidth
        wait = _TIME_SLICE_SECONDS if self.ranks_per_core(ranks_on_host) > 1 else 0.0
        ring = (ranks - hosts) * inside + (hosts - 1) * between
        part = (ranks - 1) / ranks * nbytes * per_byte
        if kind == Collective.POINT_TO_POINT:
            return wait + (between if hosts > 1 else inside) + nbytes * per_byte
        if kind != Collective.ALL_REDUCE:
            return wait + ring + part
        # Trees between hosts, and chains inside, as in NCCL.
        return wait + 2 * (min(ring, (on_host - 1) * inside + math.ceil(math.log2(hosts)) * between) + part)

    def _link(self, where: Literal["inside", "between"], transport: str) -> LinkRates:
        rates: LinkRates | None = getattr(getattr(self.links, where), transport, None)
        if rates is None:
            what = f"figures of {transport} {'inside a host' if where == 'inside' else 'between hosts'}"
            raise self._lacks(what, f"add links.{where}.{transport} with latency_seconds and bandwidth")
        return rates

    def copy_seconds(self, nbytes: float, *, to: DeviceOrHost = "host") -> float:
        """Return the seconds of a copy of `nbytes` between an accelerator and its host; on a CPU, of a copy within memory."""
        if not nbytes:
            return 0.0
        if self.device.copies is None:
            return 2 * nbytes / self.device.memory_bandwidth
        rate = self.device.copies.to_host if to == "host" else self.device.copies.to_device
        return self.device.copies.latency_seconds + nbytes / rate

    def disk_seconds(self, read: float, written: float, *, ranks_on_host: int = 1) -> float:
        """Return the seconds in which `ranks_on_host` ranks each read and write so much. Raises `ConfigError` without a disk."""
        if not read and not written:
            return 0.0
        if self.disk is None:
            raise self._lacks("disk", "add disk with read and written (bytes a second)")
        moved = read / self.disk.read + written / self.disk.written
        return self.disk.latency_seconds * (bool(read) + bool(written)) + ranks_on_host * moved

    def update_seconds(
        self, elements: float, *, moments: int = 2, on: DeviceOrHost = "device", ranks_on_host: int | None = None
    ) -> float:
        """Return the seconds of one rank's update of `elements` float32 elements with so many moments (2 for AdamW). Where its rate
        is not measured, the memory limits it: of the device, or the share of `ranks_on_host` (by default all) of the host's."""
        per_element = self.update.device if on == "device" else self.update.host
        nbytes = _ADAMW_FIXED + _ADAMW_MOMENT * moments
        ranks = self.host.devices if ranks_on_host is None else ranks_on_host
        if per_element is not None:
            return elements * per_element * self.ranks_per_core(ranks) * nbytes / (_ADAMW_FIXED + 2 * _ADAMW_MOMENT)
        shared = self.host.memory_bandwidth / max(1, ranks)
        return elements * nbytes / (self.device.memory_bandwidth if on == "device" else shared)


def machine_file() -> Path:
    """Return the path that `zeromesh plan --measure` writes, and that plans read first."""
    return Path(setting("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zeromesh" / "machine.yaml"


def find_machine(given: str | None = None, *, devices: int = 1) -> Machine:
    """Return the machine with a name (`h100`), a size (`24GB`) or a file, or, for None, the one measured here. `devices` is the
    number of cards per host where the description has none. Raises `ConfigError` for an unknown machine."""
    if given in (None, "cpu") and machine_file().exists():
        return read_machine(machine_file())
    wanted = cards.normal_name("laptop" if given == "cpu" else given or "")
    name = next((each for each in cards.known_machines() if cards.normal_name(each) == wanted), None)
    if name is not None:
        own = cards.SHIPPED / f"{name}.yaml"
        return read_machine(own) if own.exists() else _machine_of_card(name, devices)
    if given is not None and (given.endswith((".yaml", ".yml", ".json")) or Path(given).expanduser().exists()):
        return read_machine(Path(given).expanduser())
    if given is not None and (size := re.fullmatch(r"(\d+(?:\.\d+)?) ?gi?b?", given.lower())):
        return _machine_of_size(float(size[1]), devices)
    known = f"{', '.join(cards.known_machines())}, a size such as 24GB, or the path of a machine file"
    missing = f"no machine was measured here ({machine_file()}): run zeromesh plan --measure, or name"
    raise ConfigError(f"{missing if given is None else f'no machine is called {given!r}; allowed are'} {known}")


def _machine_of_card(name: str, devices: int) -> Machine:
    """Return the machine of a row of the table, with `devices` cards per host; other fields are those of `every` in the table."""
    row, every = cards.card_table()["cards"][name], cards.card_table()["every"]
    products = {dtype: part * row[dtype] for dtype, part in every["parts_of_peak"].items() if dtype in row}
    memory = {"memory_bytes": row["memory"], "memory_bandwidth": row["bandwidth"]}
    copies = {"to_device": row["copies"], "to_host": row["copies"], **every["copies"]}
    found = {
        "name": row["name"],
        "device": {**every["device"], **memory, "products": products, "copies": copies},
        "host": {"devices": devices, **{key: devices * each for key, each in every["host"].items()}},
        "links": {"inside": {"nccl": every["link"] | {"bandwidth": row["link"]}}, "between": {"nccl": every["between"]}},
        **{name: every[name] for name in ("sources", "disk", "library")},
    }
    return Machine.model_validate(found)


def _machine_of_size(gigabytes: float, devices: int) -> Machine:
    """Return the slowest card of the table with bfloat16 products and about that much memory, limited to that size."""
    seen = int(0.97 * gigabytes * 2**30)
    every = (_machine_of_card(name, devices) for name in cards.card_table()["cards"])

    def order(card: Machine) -> tuple[float, float]:
        return round(max(0.0, abs(card.device.memory_bytes / seen - 1) - 0.1), 1), card.device.memory_bandwidth

    card = min((each for each in every if "bfloat16" in each.device.products), key=order)
    device = card.device.model_copy(update={"memory_bytes": min(card.device.memory_bytes, seen)})
    return card.model_copy(update={"device": device, "name": f"a card of {gigabytes:g} GB with the rates of {card.name}"})


def read_machine(path: Path) -> Machine:
    """Read a machine file. Raises one `ConfigError` with all errors of the file."""
    where = str(path)
    data = read_yaml(path, "no such machine file; zeromesh plan --measure writes one", where=where)
    if not isinstance(data, dict):
        raise ConfigError(f"holds {quote('', data)}; allowed is a mapping of {', '.join(Machine.model_fields)}", where=where)
    try:
        return Machine.model_validate(data)
    except ValidationError as error:
        raise ConfigError([*dict.fromkeys(map(_problem, error.errors(include_url=False)))], where=where) from None


def write_machine(machine: Machine, path: Path) -> None:
    data = machine.model_dump(mode="json", exclude_defaults=True)
    text = yaml.dump(data, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode())


def _problem(detail: Any) -> str:
    name = ".".join(map(str, detail["loc"]))
    section, known = name.rpartition(".")[0], known_paths(Machine)
    if detail["type"] == "extra_forbidden":
        return unknown_key(name, {}, known)
    given = "is missing" if detail["type"] == "missing" else f"got {quote('', detail['input'])}"
    return f"{name}: {given}; allowed is {allowed(known.get(name) or known[section])}"
