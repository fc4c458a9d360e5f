"""What CONTRIBUTING.md says of an axis and of a codec: each is a row and a file, here of a copy, in which a step is trained."""

import json
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import ended

ROOT = Path(__file__).parents[3]
CODEC = """
'''Gradients travel in bfloat16.'''

from dataclasses import replace

import torch

from zeromesh.mesh.collectives import CollectiveCall, Launched, Row


def in_bfloat16(row: Row) -> Row:
    def start(call: CollectiveCall) -> Launched:
        arrived = torch.empty_like(call.out, dtype=torch.bfloat16)
        launched = row(replace(call, out=arrived, given=call.given.to(torch.bfloat16)))
        return replace(launched, finish=lambda: call.out.copy_(arrived))

    return start
"""
ROWS = {
    "zeromesh/mesh/mesh_shape.py": {
        '    tensor: int = axis("layers", "sequence")\n': (
            '    island: int = axis("batch", "states")\n    tensor: int = axis("layers", "sequence")\n'
        )
    },
    "trainer/config/sections/parallelism.py": {
        "    tensor: keys.Count = 1\n": (
            '    island: keys.Count = 1\n    """Ranks of another axis of states."""\n    tensor: keys.Count = 1\n'
        )
    },
    "zeromesh/mesh/collectives.py": {
        "for on_device in (False, True)},\n": (
            "for on_device in (False, True)},\n    (Collective.ALL_TO_ALL, False): in_bfloat16(_all_to_all),\n"
        ),
        "COLLECTIVES: Mapping": "from zeromesh.mesh.wire_codec import in_bfloat16\n\nCOLLECTIVES: Mapping",
    },
}
PROGRAM = """
import json
import os

import torch

import zeromesh

rank = 0 if os.fork() else 1  # What takes long is imported once.
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
torch.set_num_threads(1)


def trained(**parallel):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 8))
    batch = torch.randn(8, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = zeromesh.shard(model, optimizer, stage=3, parallel=parallel)
    mesh = optimizer.engine.mesh
    mesh.recorder.enabled = True
    model(batch.chunk(mesh.data.size)[mesh.data_index]).square().mean().backward()
    optimizer.step()
    moved = {name: row["bytes"] for each in mesh.recorder.take_traffic().values() for name, row in each.items()}
    shares = [bucket.length for unit in optimizer.engine.units for bucket in unit.buckets]
    weights = {name: value.double().flatten().tolist() for name, value in optimizer.engine.state.parameters()}
    mesh.close()
    return {"weights": weights, "shares": shares, "moved": moved.get("reduce-scatter"), "mesh": str(mesh.shape)}


found = {"shard": trained(transport="shared"), "wire": trained(transport="gloo"), "island": trained(island=2, transport="shared")}
if rank:
    os._exit(0)
assert os.wait()[1] == 0
print(json.dumps(found))
"""


def _edited(folder: Path) -> None:
    """Copy the three floors, and add the rows and the codec's file."""
    for floor in ("zeromesh", "trainer", "offload"):
        shutil.copytree(ROOT / floor, folder / floor, symlinks=True)
    (folder / "zeromesh/mesh/wire_codec.py").write_text(CODEC)
    for name, changes in ROWS.items():
        text = (folder / name).read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, f"{name}: {old!r}"
            text = text.replace(old, new)
        (folder / name).write_text(text)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Any]]:
    """What two ranks have trained with the copy: over shared memory, over gloo, and along the new axis."""
    folder = tmp_path_factory.mktemp("rows")
    _edited(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    told = ended([sys.executable, "-c", PROGRAM], folder=folder, PYTHONPATH=str(folder), **common)
    assert told.returncode == 0, told
    yield json.loads(told.stdout.splitlines()[-1])
    shutil.rmtree(folder)


@pytest.mark.full
def test_an_axis_of_states_is_one_row(found: Mapping[str, Any]) -> None:
    island, shard = found["island"], found["shard"]
    assert island["mesh"] == "pipeline 1 x replicate 1 x shard 1 x context 1 x island 2 x tensor 1"
    assert island["shares"] == shard["shares"], "states are divided over it"
    assert island["weights"] == shard["weights"]


def test_a_codec_on_the_wire_is_one_row(found: Mapping[str, Any]) -> None:
    wire, memory = found["wire"], found["shard"]
    assert 2 * wire["moved"] == memory["moved"]
    for name, values in memory["weights"].items():
        assert wire["weights"][name] == pytest.approx(values, abs=2e-3)
    assert wire["weights"] != memory["weights"]
