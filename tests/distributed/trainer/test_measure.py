"""The machine is measured by all ranks alike, inside of a host and between hosts, and nothing is left behind."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.workers import PoolOptions, Workers
from zeromesh.trainer.planning.machine import find_machine, read_machine
from zeromesh.trainer.planning.measure import TINY_SIZES


def measured(workers: Workers, tmp_path: Path, hosts: int) -> list[dict[str, object]]:
    with workers.fresh(PoolOptions(size=3, hosts=hosts)) if hosts else nullcontext(workers.pool(3)) as pool:
        found = pool.run("measure_cases:measured", folder=str(tmp_path))
    assert len({each["machine"] for each in found}) == 1, "all ranks have the same machine"
    assert [bool(each["told"]) for each in found] == [True, False, False]
    assert [each["left"] for each in found] == [[], [], []]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "m.yaml").write_text(str(found[0]["machine"]))
    return list(found)


@pytest.mark.full
def test_the_ranks_of_a_host_are_measured(workers: Workers, tmp_path: Path) -> None:
    measured(workers, tmp_path, 0)
    machine = find_machine(str(tmp_path / "m.yaml"))
    assert machine.is_cpu
    assert machine.host.devices == 3
    assert machine.links.between.gloo is None
    for link in (machine.links.inside.shared, machine.links.inside.gloo):
        assert link is not None
        assert 0 < link.latency_seconds < 1
    assert set(machine.device.products) == set(TINY_SIZES.dtypes)
    assert 0 < machine.device.launch_seconds < 1e-2
    assert machine.update.device is not None
    assert machine.library.host > 1 << 20
    assert machine.disk is None, "tiny sizes leave the disk out"


@pytest.mark.full
def test_a_link_between_hosts_is_measured(workers: Workers, tmp_path: Path) -> None:
    measured(workers, tmp_path, 2)
    machine = read_machine(tmp_path / "m.yaml")
    between = machine.links.between.gloo
    assert between is not None
    assert machine.collective_seconds("all-gather", 1 << 14, ranks=3, hosts=2) > 0
