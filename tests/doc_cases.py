"""Code blocks of the documentation, run by every worker."""

from __future__ import annotations

import contextlib
import io

from zeromesh.mesh.groups import Mesh


def printed(mesh: Mesh, code: str, folder: str = ".") -> str:
    """Run the text of a program that opens a mesh of its own, in a folder; returns what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.chdir(folder):
        exec(compile(code, "<documentation>", "exec"), {"__name__": "__main__"})
    mesh.world.barrier("the end of a program")
    return out.getvalue()
