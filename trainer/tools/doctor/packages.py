"""Python and the packages that zeromesh needs, against what it was made for."""

from __future__ import annotations

import contextlib
import platform
import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import zeromesh
from zeromesh.trainer.tools.doctor.findings import Finding, Level

_NAME = "zeromesh"
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*((?:[<>=!~]=?=?[^;,]+,?)*)\s*(;.*)?")
_CONDITION = re.compile(r"\s*(>=|==|<=|<|>|!=)\s*([0-9][0-9.]*)")


def look() -> Iterator[Finding]:
    """Python, zeromesh and each of its dependencies."""
    yield Finding(what="python", found=f"{platform.python_implementation()} {platform.python_version()}")
    needed = requirements()
    yield Finding(what=_NAME, found=f"{zeromesh.__version__} in {Path(zeromesh.__file__).parent}")
    if not needed:
        yield Finding(
            what="requirements",
            found="not known",
            level=Level.WARNING,
            means="zeromesh is not installed as a package, and has no pyproject.toml beside it: versions cannot be checked.",
            do="Install it: pip install -e DIRECTORY",
        )
    for requirement in needed:
        match = _REQUIREMENT.fullmatch(requirement)
        if match and not match[3]:
            yield judge(match[1], match[2], installed(match[1]))


def requirements() -> list[str]:
    """What zeromesh needs: of the files that run, else of the package that is installed."""
    with contextlib.suppress(OSError, tomllib.TOMLDecodeError):
        project = Path(zeromesh.__file__).resolve().parent.parent / "pyproject.toml"
        content = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if content.get("name") == _NAME:
            return [str(each) for each in content.get("dependencies", [])]
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.requires(_NAME) or []
    return []


def installed(name: str) -> str | None:
    """The version of a package that is installed; None where it is not."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def judge(name: str, conditions: str, version: str | None) -> Finding:
    """Whether `version` fulfils `conditions` such as `>=2.11`; those of another form are not looked at."""
    wanted = f"{name}{conditions}"
    if version is None:
        return Finding(
            what=name,
            found="not installed",
            level=Level.PROBLEM,
            means=f"zeromesh needs {wanted}.",
            do=f"pip install '{wanted}'",
        )
    failed = [f"{sign}{other}" for sign, other in _CONDITION.findall(conditions) if not _holds(version, sign, other)]
    if not failed:
        return Finding(what=name, found=version)
    return Finding(
        what=name,
        found=version,
        level=Level.PROBLEM,
        means=f"zeromesh needs {name}{', '.join(failed)}, and was not tried with this version.",
        do=f"pip install '{wanted}'",
    )


def _holds(version: str, sign: str, other: str) -> bool:
    one, two = numbers(version), numbers(other)
    length = max(len(one), len(two))
    one, two = one + (0,) * (length - len(one)), two + (0,) * (length - len(two))
    return {
        ">=": one >= two,
        "<=": one <= two,
        "==": one == two,
        "!=": one != two,
        ">": one > two,
        "<": one < two,
    }[sign]


def numbers(version: str) -> tuple[int, ...]:
    """The release of a version: `2.13.0+cpu` is (2, 13, 0), and so is `2.13.0rc1`."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
