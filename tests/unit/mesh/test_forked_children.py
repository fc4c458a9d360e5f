"""What processes that are forked from a rank may not do."""

import gc
import os

from zeromesh.mesh import process_mesh


class Resource:
    """Something that belongs to the process which has made it, and is part of a cycle."""

    def __init__(self, pipe: int) -> None:
        self.pipe, self.own = pipe, self

    def __del__(self) -> None:
        os.write(self.pipe, b"!")


def test_a_child_does_not_collect_the_garbage_of_its_parent() -> None:
    assert process_mesh.ProcessMesh
    reading, writing = os.pipe()
    enabled = gc.isenabled()
    gc.disable()
    try:
        Resource(writing)
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.set_blocking(reading, False)
        with open(reading, "rb", closefd=False) as file:
            assert not file.read(), "collected in the child"
            gc.collect()
            assert file.read() == b"!", "collected in the parent"
    finally:
        if enabled:
            gc.enable()
        os.close(reading)
        os.close(writing)
