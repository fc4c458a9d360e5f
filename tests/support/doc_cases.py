"""Code blocks and commands of the documentation, run by every worker."""

import contextlib
import io
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.input_cases import command
from zeromesh.environment import kept_environment
from zeromesh.mesh.process_mesh import Mesh


def printed(
    mesh: Mesh, code: str, folder: str, name: str = "<documentation>", asked: list[str] | None = None
) -> dict[str, Any]:
    """Run the text of a program in a folder: what it prints, and the values of the expressions that are `asked` for at its end.

    The program may open a mesh of its own; one called `mesh` that it leaves open is closed.
    """
    out, there = io.StringIO(), {"__name__": "__main__"}
    values: dict[str, Any] = {}
    # The program of this process, after which runs are called.
    program = mock.patch.object(sys.modules["__main__"], "__file__", str(Path(folder, name)), create=True)
    with contextlib.redirect_stdout(out), contextlib.chdir(folder), program, kept_environment():
        exec(compile(code, name, "exec"), there)
        exec("".join(f"values[{each!r}] = {each}\n" for each in asked or []), there, {"values": values})
    own: Any = there.get("mesh")
    if isinstance(own, Mesh) and not own.watch.closed.is_set():
        for each in list(own.process_sets):
            own.process_sets.remove(each)
        own.world.barrier("the end")
        own.close()
    mesh.world.barrier("the end of a program")
    return {"said": out.getvalue(), "values": values}


def commanded(mesh: Mesh, words: list[str], folder: str) -> dict[str, Any]:
    """What `zeromesh WORDS` prints in a folder, and its exit code."""
    with contextlib.chdir(folder):
        return command(mesh, words)
