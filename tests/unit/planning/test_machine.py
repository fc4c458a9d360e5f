"""What a machine file says is what is predicted from it, and nonsense in one is an error that names it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from zeromesh.errors import ConfigError
from zeromesh.trainer.machines import cards
from zeromesh.trainer.machines.cards import find_name, known_machines, peak_of
from zeromesh.trainer.planning.machine import (
    HostCopies,
    LinkRates,
    LinkSet,
    Machine,
    TransportRates,
    find_machine,
    read_machine,
    write_machine,
)
from zeromesh.trainer.planning.tracing.meter import Product, Work

SMALL = {
    "name": "two",
    "sources": ["made up"],
    "device": {
        "kind": "cpu",
        "memory_bytes": 1 << 34,
        "memory_bandwidth": 1e10,
        "launch_seconds": 1e-5,
        "products": {"float32": 8e10},
    },
    "host": {"devices": 2, "cores": 2, "memory_bytes": 1 << 34, "memory_bandwidth": 1.5e10},
    "links": {
        "inside": {"shared": {"latency_seconds": 1e-5, "bandwidth": 4e9}},
        "between": {"gloo": {"latency_seconds": 5e-5, "bandwidth": 1e9}},
    },
    "disk": {"read": 1e9, "written": 5e8, "latency_seconds": 1e-4},
}
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MACHINE = Machine.model_validate(SMALL)
COPIES = HostCopies(to_device=2e9, to_host=1e9, latency_seconds=1e-4)
NEAR, FAR = TransportRates(nccl=MACHINE.links.inside.shared), TransportRates(nccl=MACHINE.links.between.gloo)
GPU = MACHINE.device.model_copy(update={"kind": "cuda", "copies": COPIES})
CARD = MACHINE.model_copy(update={"device": GPU, "links": LinkSet(inside=NEAR, between=FAR)})
SIXTEEN = MACHINE.device.model_copy(update={"products": {"bfloat16": 8e10}})
EVERY = [MACHINE, *map(find_machine, ("a100", "b200", "h100", "h200", "l4", "laptop", "t4"))]


def test_a_product_takes_as_long_as_its_operations_or_its_bytes() -> None:
    assert MACHINE.product_seconds(Product("float32", 4 * 512**3, 24 * 512**2)) == pytest.approx(4 * 512**3 / 8e10)
    nbytes = 4 * (4096**2 + 8192)
    assert MACHINE.product_seconds(Product("float32", 2 * 4096**2, nbytes)) == pytest.approx(nbytes / 1e10)


@pytest.mark.parametrize(
    ("machine", "kind", "ranks", "hosts", "on_host", "seconds"),
    [
        (CARD, "all-reduce", 1, 1, 1, 0.0),
        (CARD, "all-reduce", 5, 3, 2, 2 * (1e-5 + 2 * 5e-5 + 4 / 5 * 1e5 / 2e9)),
        (CARD, "reduce-scatter", 12, 2, 6, 10 * 1e-5 + 5e-5 + 11 / 12 * 1e5 / 4e9),
        (CARD, "all-reduce", 16, 8, 2, 2 * (1e-5 + 3 * 5e-5 + 15 / 16 * 1e5 / 2e9)),
        (CARD, "all-reduce", 5, 5, 1, 2 * (3 * 5e-5 + 4 / 5 * 1e5 / 1e9)),
        (CARD, "point to point", 2, 2, 2, 5e-5 + 1e5 / 1e9),
        (MACHINE, "all-gather", 2, 1, 3, 2e-3 + 1e-5 + 1e5 / 2 / 4e9),
        (MACHINE, "all-reduce", 2, 1, 3, 2e-3 + 2 * (1e-5 + 1e5 / 2 / 4e9)),
        (MACHINE, "point to point", 2, 1, 3, 2e-3 + 1e-5 + 1e5 / 4e9),
    ],
)
def test_messages_go_around_rings_and_up_trees_inside_hosts_and_between_them(
    machine: Machine, kind: str, ranks: int, hosts: int, on_host: int, seconds: float
) -> None:
    found = machine.collective_seconds(kind, 1e5, ranks=ranks, hosts=hosts, ranks_on_host=on_host)
    assert found == pytest.approx(seconds)


def test_work_on_a_cpu_follows_and_on_an_accelerator_overlaps_its_launches() -> None:
    product = Product("float32", 2 * 512**3, 3 * 4 * 512**2)
    work = Work(products=[product, product], moved=1 << 24, operations=3)
    computes, moves = 2 * MACHINE.product_seconds(product) + 3e-5, (1 << 24) / 1e10
    assert MACHINE.work_seconds(work) == pytest.approx(computes + moves)
    # Two ranks have a core each and share the host's memory; four share the cores too.
    assert MACHINE.work_seconds(work, ranks_on_host=2) == pytest.approx(computes + (1 << 24) / 0.75e10)
    assert MACHINE.work_seconds(work, ranks_on_host=4) == pytest.approx(2 * MACHINE.work_seconds(work, ranks_on_host=2))
    moves, computes = 2e7 / 1e10, 2 * 512**3 / 8e10
    for launches, seconds in ((400, moves + computes), (600, 6e-3)):
        many = Work(products=[product], moved=int(2e7), operations=launches)
        assert CARD.work_seconds(many, ranks_on_host=8) == pytest.approx(seconds)
    assert MACHINE.work_seconds(Work()) == 0.0


def test_updates_copies_and_disks_move_their_bytes() -> None:
    assert MACHINE.update_seconds(1e6) == pytest.approx(28e6 / 1e10)
    assert MACHINE.update_seconds(1e6, moments=0, on="host") == pytest.approx(12e6 / (1.5e10 / 2))
    measured = Machine.model_validate({**SMALL, "update": {"device": 1e-9}})
    assert measured.update_seconds(1e6, ranks_on_host=1) == pytest.approx(1e-3)
    assert measured.update_seconds(1e6, moments=1, ranks_on_host=4) == pytest.approx(2e-3 * 20 / 28)
    assert MACHINE.disk_seconds(1e9, 0.0) == pytest.approx(1.0001)
    assert MACHINE.disk_seconds(1e9, 5e8, ranks_on_host=2) == pytest.approx(4.0002)
    assert MACHINE.copy_seconds(5e9) == pytest.approx(1.0)
    assert [CARD.copy_seconds(1e9), CARD.copy_seconds(1e9, to="device"), CARD.copy_seconds(0)] == [1.0001, 0.5001, 0.0]


def test_a_file_is_read_back_equal(tmp_path: Path) -> None:
    for machine in EVERY:
        write_machine(machine, tmp_path / "below" / "m.yaml")
        assert read_machine(tmp_path / "below" / "m.yaml") == machine
    odd = MACHINE.model_copy(update={"name": "1e3", "sources": ("no", "a: b\n#c")})
    write_machine(odd, tmp_path / "m.yaml")
    assert find_machine(str(tmp_path / "m.yaml")) == odd


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("name: two", "nme: two", "nme: unknown key; did you mean name?"),
        ("kind: cpu", "kind: 3", "device.kind: got 3; allowed is text"),
        ("devices: 2", "devices: 0", "host.devices: got 0; allowed is an integer >= 1"),
        ("disk: {read: 1000000000.0", "disk: {read: -1", "disk.read: got -1; allowed is a number > 0"),
        ("bandwidth: 4000000000.0", "bandwidth: fast", "links.inside.shared.bandwidth: got 'fast'; allowed is a number > 0"),
        ("memory_bytes: 17179869184", "memory_bytes: .nan", "memory_bytes: got nan; allowed is a number of bytes"),
        ("float32: 80000000000.0", "float32: {}", "device.products.float32: got a mapping of 0 keys; allowed is a"),
        ("kind: cpu", "kind: [", "line "),
        ("host:", "hosts:", "hosts: unknown key; did you mean host?"),
    ],
)
def test_nonsense_is_one_error_that_says_where(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "m.yaml"
    write_machine(MACHINE, path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        read_machine(path)
    assert str(path) in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize("text", ["", "- a", "3", "{}", "\x00", "a: !!python/object b"])
def test_no_machine_at_all_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"m\.yaml"):
        read_machine(tmp_path / "m.yaml")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: MACHINE.product_seconds(Product("bfloat16", 16, 24)),
            r"no rate of bfloat16 .* of float32; set precision\.compute .*, add device\.products\.bf",
        ),
        (
            lambda: find_machine("t4").product_seconds(Product("bfloat16", 16, 24)),
            r"only of float16, float32; set precision\.compute",
        ),
        (
            lambda: MACHINE.model_copy(update={"device": SIXTEEN}).product_seconds(Product("float32", 16, 24)),
            r"float32 products, which fused attention takes in any precision, only of bfloat16; add device\.products\.float32",
        ),
        (
            lambda: find_machine("a100").model_copy(update={"links": LinkSet()}).collective_seconds("x", 10, ranks=2),
            r"no figures of nccl inside a host; add links\.inside\.nccl",
        ),
        (lambda: MACHINE.model_copy(update={"disk": None}).disk_seconds(1, 0), "add disk with read and written"),
        (
            lambda: find_machine("h1000"),
            r"no machine is called 'h1000'; allowed are a10, a100, .*, a size such as 24GB, or the path",
        ),
        (lambda: find_machine("gone.yaml"), "no such machine file"),
        (lambda: find_machine("gone.yml"), "no such machine file"),
        (find_machine, r"no machine was measured here .* run zeromesh plan --measure"),
    ],
)
def test_what_is_missing_is_an_error_that_says_what_to_add(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object], said: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=said):
        call()
    write_machine(MACHINE, tmp_path / "zeromesh" / "machine.yaml")
    assert find_machine() == find_machine("cpu") == MACHINE


def test_files_of_public_machines_say_where_their_figures_come_from() -> None:
    assert len(known_machines()) > 30
    for name in known_machines():
        machine = find_machine(name)
        assert len(machine.sources) >= 3
        assert 0 < machine.collective_seconds("all-gather", 1e6, ranks=2) < machine.collective_seconds("all-reduce", 1e6, ranks=2)
        dtype = "bfloat16" if "bfloat16" in machine.device.products else "float16"
        assert machine.device.products[dtype] >= machine.device.products["float32"]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("a10", "NVIDIA A10"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("A100-40GB", "NVIDIA A100 SXM4 40GB"),
        ("4060ti-16", "NVIDIA GeForce RTX 4060 Ti 16GB"),
        ("h100-sxm", "H100 SXM5 80GB, hosts of 8 with 8 x 400 Gb/s InfiniBand"),
        ("mi300x", "AMD Instinct MI300X"),
        ("24GB", "a card of 24 GB with the rates of NVIDIA L4"),
        ("12 gb", "a card of 12 GB with the rates of NVIDIA GeForce RTX 3060 12GB"),
        ("cpu", "a laptop of 8 cores and 16 GiB, without an accelerator"),
    ],
)
def test_a_card_as_people_write_it(given: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_machine(given).name == name


@pytest.mark.parametrize(
    ("device", "name", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40", 3.12e14),
        ("NVIDIA A100-SXM4-80GB", "a100", 3.12e14),
        ("NVIDIA H100 80GB HBM3", "h100", 9.89e14),
        ("NVIDIA H100 PCIe", "h100-pcie", 7.56e14),
        ("Tesla T4", "t4", 6.5e13),
        ("NVIDIA GeForce RTX 4090", "rtx-4090", 1.652e14),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada", 3.642e14),
        ("NVIDIA RTX A4000", None, None),
        ("NVIDIA A100X", None, 3.12e14),
        ("NVIDIA H100 NVL", "h100", 8.35e14),
        ("NVIDIA GB200", None, 2.25e15),
    ],
)
def test_a_driver_names_a_card_and_the_peak_of_its_sheet(device: str, name: str | None, peak: float | None) -> None:
    assert find_name(device) == name
    found = peak_of(device, "float16")
    assert (None if found is None else found[0]) == peak


def test_a_card_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = "bandwidth: 1.0e12, bfloat16: 4.0e14, float32: 1.0e14, copies: 5.0e10, link: 2.0e11"
    row = f"  x9: {{name: Example X9, memory: 31GiB, {rates}}}"
    text = (cards.SHIPPED / "cards.yaml").read_text(encoding="utf-8")
    (tmp_path / "cards.yaml").write_text(f"{text}{row}\n", encoding="utf-8")
    monkeypatch.setattr(cards, "SHIPPED", tmp_path)
    cards.card_table.cache_clear()
    try:
        card = find_machine("x9", devices=2)
        assert (card.name, card.device.memory_bytes) == ("Example X9", 31 << 30)
        assert (card.host.devices, card.host.memory_bytes, card.host.cores) == (2, 2 * (64 << 30), 16)
        assert card.device.copies == HostCopies(to_device=5e10, to_host=5e10, latency_seconds=1e-5)
        assert card.links.inside.nccl == LinkRates(latency_seconds=1e-5, bandwidth=2e11)
        assert card.links.between.nccl == LinkRates(latency_seconds=2e-5, bandwidth=3.1e9)
        smaller = find_machine("31GB")  # Of which a driver keeps 3 percent.
        assert smaller.name == "a card of 31 GB with the rates of Example X9"
        assert smaller.device.memory_bytes == int(0.97 * (31 << 30))
        assert find_name("Example X9 PCIe") == "x9"
        assert peak_of("Example X9 PCIe", "bfloat16") == (4e14, "x9")
    finally:
        cards.card_table.cache_clear()
