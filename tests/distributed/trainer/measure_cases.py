"""Measures the workers' machine with tiny sizes."""

from pathlib import Path

from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.planning.machine import find_machine, read_machine
from zeromesh.trainer.planning.measure import TINY_SIZES, measure_machine


def measured(mesh: Mesh, folder: str, hosts: int) -> None:
    """All ranks measure the same machine, inside of a host or between hosts, and nothing is left behind."""
    told: list[str] = []
    machine = measure_machine(mesh, Path(folder), told.append, TINY_SIZES)
    found = mesh.world.gather_json(machine.to_yaml(), "machines")
    assert found == found[:1] * mesh.world_size
    assert bool(told) is (mesh.rank == 0)
    assert not [name for name in mesh.process_sets if name.startswith(("shared", "gloo"))]
    assert list(Path(folder).iterdir()) == []
    mesh.world.barrier("the folder is empty")
    if mesh.rank:
        return
    path = Path(folder, "m.yaml")
    path.write_text(found[0])
    if hosts:
        machine = read_machine(path)
        assert machine.links.between.gloo is not None
        assert machine.collective_seconds("all-gather", 1 << 14, ranks=3, hosts=2) > 0
        return
    machine = find_machine(str(path))
    assert (machine.is_cpu, machine.host.devices, machine.links.between.gloo) == (True, 3, None)
    for link in (machine.links.inside.shared, machine.links.inside.gloo):
        assert link is not None
        assert 0 < link.latency_seconds < 1
    assert set(machine.device.products) == set(TINY_SIZES.dtypes)
    assert 0 < machine.device.launch_seconds < 1e-2
    assert machine.update.device is not None
    assert machine.library.host > 1 << 20
    assert machine.disk is None, "tiny sizes leave the disk out"
