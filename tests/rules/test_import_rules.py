"""The house's rules, read from the source: what may import what, and which file alone may do what.

Nothing is imported here: every rule looks at syntax trees. Links are skipped, so that each file is seen once, under the
name that it is imported by.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import structure_report
from structure_report import DOORS, Source, circles, crowded, duplicate_classes, folder_circles, long_functions, short_modules

ROOT = Path(__file__).resolve().parents[2]

# What each floor may import besides the standard library and itself. `zeromesh.errors`, `zeromesh.files` and
# `zeromesh.intervals` import nothing but each other and stand below.
BELOW = {"zeromesh.errors", "zeromesh.files", "zeromesh.intervals"}
ENGINE = {"zeromesh", "torch", "numpy", "safetensors", "xxhash", "psutil", "annotated_types"}
FLOORS = {
    "offload": {"torch", "numpy", "xxhash", "psutil", "zeromesh.offload", *BELOW},
    "zeromesh": ENGINE,
    "trainer": ENGINE
    | {"transformers", "huggingface_hub", "datasets", "pyarrow", "accelerate", "lightning", "wandb", "peft"}
    | {"pydantic", "pydantic_core", "yaml", "jinja2", "markupsafe", "rich", "shtab", "plotly", "packaging"}
    | {"clearml", "comet_ml", "swanlab"}  # which are there where a person tracks by them
    | {"fastapi", "starlette", "uvicorn", "h11"}  # which are there where a person serves a model
    | {"PIL"}  # which is there where a person trains on pictures
    | {"IPython"}  # which is there in a notebook
    | {"trl", "tokenizers"}  # where a person trains by preferences and rewards
    | {"torchao"}  # and where a person computes linear layers by it
    | {"ray"},  # and where a person's nodes are those of a Ray cluster
}
HOUSE = structure_report.sources(ROOT)
MODULES = {source.module for source in HOUSE}
LINES = 55_000
"""What the three floors may have: features come as rows and files of what is there."""


@cache
def nodes(source: Source) -> list[ast.AST]:
    return list(ast.walk(source.tree))


def imports(found: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Every module that is imported by these nodes, with its line; `from a import b` as `a.b`."""
    for node in found:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


@cache
def names(source: Source) -> list[tuple[str, int]]:
    """Every import, and every dotted name that is used, with its line."""
    used = [node for node in nodes(source) if isinstance(node, ast.Attribute | ast.Name)]
    return [*imports(nodes(source)), *((ast.unparse(node), node.lineno) for node in used)]


def is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def offenders(sources: Iterable[Source], *forbidden: str) -> list[str]:
    return [
        f"{source.path}:{line}: {name}"
        for source in sources
        for name, line in names(source)
        if any(is_below(name, package) for package in forbidden)
    ]


def outside(*allowed: str) -> list[Source]:
    """All files but those whose path starts with one of `allowed`."""
    return [source for source in HOUSE if not source.path.startswith(allowed)]


def test_the_walk_found_the_house() -> None:
    paths = {source.path for source in HOUSE}
    some = ("zeromesh/errors.py", "zeromesh/mesh/mesh_shape.py", "trainer/config/trainer_config.py", "trainer/cli/main.py")
    assert {*some} <= paths
    assert len(paths) == len(HOUSE) > 20
    for floor in FLOORS:
        assert [path for path in paths if path.startswith(f"{floor}/")], f"no file found in {floor}/"
    assert not [path for path in paths if path.startswith(("zeromesh/trainer/", "zeromesh/offload/"))]


@pytest.mark.parametrize("name", ["trainer", "offload"])
def test_the_other_floors_are_linked_into_the_package(name: str) -> None:
    assert os.readlink(ROOT / "zeromesh" / name) == f"../{name}"


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_what_it_may(floor: str) -> None:
    found = [
        f"{source.path}:{line}: {name}"
        for source in HOUSE
        if source.floor == floor
        for name, line in imports(nodes(source))
        if name.partition(".")[0] not in sys.stdlib_module_names and not any(is_below(name, package) for package in FLOORS[floor])
    ]
    assert not found


def test_imports_use_the_installed_name() -> None:
    other = (".", "trainer.", "offload.")
    found = [(s.path, line, name) for s in HOUSE for name, line in imports(nodes(s)) if f"{name}.".startswith(other)]
    assert not found


@pytest.mark.parametrize("path", ["zeromesh/errors.py", "zeromesh/files.py", "zeromesh/intervals.py"])
def test_a_few_modules_stand_below_everything(path: str) -> None:
    (source,) = [source for source in HOUSE if source.path == path]
    found = [name for name, _ in imports(nodes(source)) if not any(is_below(name, each) for each in BELOW)]
    assert not [name for name in found if name.partition(".")[0] not in sys.stdlib_module_names]


FORBIDDEN: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "the engine does not import the trainer": (("trainer/", "offload/", *DOORS), ["zeromesh.trainer"]),
    "collectives are called in the mesh alone": (("zeromesh/mesh/",), ["torch.distributed"]),
    "a row of the table begins each collective": (
        ("zeromesh/mesh/collectives.py",),
        [f"dist.{name}" for name in ("all_gather", "broadcast", "reduce_scatter_tensor", "all_to_all_single")],
    ),
    "one file knows what kinds of devices there are": (("offload/accelerator.py",), ["torch.cuda"]),
    "the environment is read in one file": (
        ("zeromesh/environment.py",),
        ["os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"],
    ),
    "only the command line prints": (("trainer/cli/main.py",), ["print"]),
    "nothing loads code": (
        (),
        [
            *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"),
            *("torch.load", "torch.save", "yaml.load", "yaml.unsafe_load"),
        ],
    ),
    "no module uses the root logger": (
        (),
        [f"logging.{name}" for name in ["debug", "info", "warning", "error", "exception", "basicConfig", "critical"]],
    ),
}
"""What none but some files may import or name, by the rule."""


@pytest.mark.parametrize("rule", FORBIDDEN)
def test_a_name_is_used_where_it_belongs(rule: str) -> None:
    allowed, forbidden = FORBIDDEN[rule]
    assert not offenders(outside(*allowed), *forbidden)


def _hooks(node: ast.AST) -> bool:
    """Those of torch's modules and tensors; accelerate calls its own when it saves and loads."""
    name = getattr(node, "attr", getattr(node, "id", "")) if isinstance(node, ast.Attribute | ast.Name) else ""
    return name.startswith("register_") and name.endswith(("_hook", "_hooks")) and "_state_pre_" not in name


def _device(node: ast.AST) -> bool:
    """What holds for CUDA is to hold for every accelerator, the simulated one of the tests among them."""
    constant = isinstance(node, ast.Constant) and node.value == "cuda"
    return constant or (isinstance(node, ast.Attribute) and node.attr == "is_cuda")


def _writes(node: ast.AST) -> bool:
    """Where links are not followed, nothing waits for a pipe, and the umask sets permissions."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    if name.rpartition(".")[2] in ("write_text", "write_bytes", "touch", "mkstemp", "NamedTemporaryFile"):
        return True
    if name == "os.open":
        return "O_CREAT" in ast.unparse(node)
    given = [*node.args[:2], *(each.value for each in node.keywords if each.arg == "mode")]
    modes = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return name.rpartition(".")[2] == "open" and any(re.fullmatch(r"(?=.*[wa+])[rwabt+]+", mode) for mode in modes)


def _trusts(node: ast.AST, *names: str) -> bool:
    false = isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant) and node.value.value is False
    return isinstance(node, ast.keyword) and node.arg in names and not false


def _asks(node: ast.AST) -> bool:
    """transformers asks on the terminal where nothing is said, and ranks that wait for an answer hang."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"from_pretrained", "from_config"}
        and ast.unparse(node.func.value).rpartition(".")[2].startswith(("Auto", "automatic"))
        and not ast.unparse(node.func.value).endswith("Quantizer")  # which runs no code of a directory
        and "trust_remote_code" not in {keyword.arg for keyword in node.keywords}
    )


PATTERNS: dict[str, tuple[tuple[str, ...], Callable[[ast.AST], bool]]] = {
    "hooks are registered in one file": (("zeromesh/zero/hooks.py",), _hooks),
    "one file knows what kinds of devices there are": (("offload/accelerator.py",), _device),
    "files are written in one file": (("zeromesh/files.py", "offload/io/file_tier.py", "trainer/monitoring/profiler.py"), _writes),
    # As calls only: `eval` is also a split of the data and a mode of a model.
    "no text is run": ((), lambda node: isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"eval", "exec", "compile"}),
    "nothing is unpickled": ((), lambda node: _trusts(node, "allow_pickle", "weights_only")),
    # Code that a model brings along is run where `model.trust_remote_code` is true, which these two files are told.
    "code of a model runs where it may": (
        ("trainer/models/build.py", "trainer/setup/model.py"),
        lambda node: _trusts(node, "trust_remote_code"),
    ),
    "whether code may run is always said": ((), _asks),
    # Under `python -O` an assert is gone, and with it whatever it checked.
    "nothing asserts outside of tests": ((), lambda node: isinstance(node, ast.Assert)),
}
"""What nodes none but some files may have, by the rule."""


@pytest.mark.parametrize("rule", PATTERNS)
def test_a_thing_is_done_where_it_belongs(rule: str) -> None:
    allowed, found = PATTERNS[rule]
    bad = [(source.path, node) for source in outside(*allowed) for node in nodes(source) if found(node)]
    assert [f"{path}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}" for path, node in bad] == []


def test_few_files_name_an_axis() -> None:
    """What an axis divides is a row of `MeshShape`; others ask for the ranks of the batch, of the states or of the model."""
    naming = {
        source.path
        for source in HOUSE
        for node in nodes(source)
        if isinstance(node, ast.Attribute)
        and node.attr in ("tensor", "pipeline")
        and ast.unparse(node.value).rpartition(".")[2] in ("mesh", "_mesh", "shape")
    }
    assert len(naming) <= 12, sorted(naming)


def test_what_passes_arguments_on_takes_its_own_by_position() -> None:
    """A model's forward may have an argument of any name, `index` and `name` too (WavLM's blocks have), which is not ours."""
    found = [
        f"{source.path}:{node.lineno}: {node.name}"
        for source in HOUSE
        for node in nodes(source)
        if isinstance(node, ast.FunctionDef)
        and node.args.vararg
        and node.args.kwarg
        and any("Callable" in ast.unparse(each.annotation or each) for each in node.args.args + node.args.posonlyargs)
        and {each.arg for each in node.args.args + node.args.kwonlyargs} - {"self"}
    ]
    assert not found, found


def test_no_import_cycles() -> None:
    graph = {source.module: set(_needed(source)) for source in HOUSE}
    assert sum(map(len, graph.values())) > 20
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def _needed(source: Source) -> Iterator[str]:
    """The modules of this project that have to be imported before `source`: those of its module level."""
    for name, _ in imports(_at_import(source.tree.body)):
        module = name if name in MODULES else name.rpartition(".")[0]
        if module in MODULES and module != source.module:
            yield module


def _at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The import statements that run when a module is imported: not in functions, not for type checkers only."""
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" not in ast.unparse(statement.test):
            yield from _at_import([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try | ast.With | ast.ClassDef):
            yield from _at_import(statement.body)


def test_a_circle_is_found() -> None:
    graph = {"mesh": {"flat"}, "flat": {"zero"}, "zero": {"mesh", "optim"}, "optim": set[str]()}
    assert circles(graph) == [["flat", "mesh", "zero"]]


def test_files_of_a_folder_and_its_subfolder_may_form_one(tmp_path: Path) -> None:
    texts = {
        "zeromesh/flat/layout.py": "from zeromesh.flat.inner import plan",
        "zeromesh/flat/shard.py": "",
        "zeromesh/flat/inner/plan.py": "def f():\n    from zeromesh.flat.shard import x",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).with_name("__init__.py").touch()
    assert folder_circles(structure_report.sources(tmp_path)) == ["zeromesh/flat: . <-> inner"]


# Circles of folders count imports inside functions and for type checkers too.
@pytest.mark.parametrize("wrong", [folder_circles, crowded, duplicate_classes, short_modules])
def test_the_structure_of_the_house(wrong: Callable[[list[Source]], object]) -> None:
    assert not wrong(HOUSE)


def test_the_house_stays_within_its_lines() -> None:
    """A floor's root holds what a reader opens first; only the step is told in one piece, however long that takes."""
    assert sum(source.lines for source in HOUSE) <= LINES
    assert max(source.lines for source in HOUSE) <= 600
    at_the_root = Counter(s.floor for s in HOUSE if s.path.count("/") == 1 and not s.is_package and s.path not in DOORS)
    assert max(at_the_root.values()) <= 9
    assert [each for each in long_functions(HOUSE) if "train_step.py: train_step" not in each] == []


def _sample(code: str) -> Source:
    return Source(path="x.py", module="x", lines=code.count("\n"), tree=ast.parse(code))


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("import torch.distributed as dist", "torch.distributed"),
        ("from torch import distributed", "torch.distributed"),
        ("import torch\ntorch.distributed.all_reduce(x)", "torch.distributed"),
        ("from os import environ", "os.environ"),
        ("import os\nx = os.environ['A']", "os.environ"),
        ("print('x')", "print"),
        ("def f():\n    import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
    ],
)
def test_the_rules_see_what_they_look_for(code: str, rule: str) -> None:
    assert offenders([_sample(code)], rule)


@pytest.mark.parametrize(
    ("code", "writes"),
    [
        ("path.write_text(text)", True),
        ("path.open('ab', buffering=0)", True),
        ("open(path, mode='r+')", True),
        ("os.open(path, os.O_RDWR | os.O_CREAT)", True),
        ("path.open('x')", False),  # Only where there is nothing yet.
        ("open(path, 'rb')", False),
        ("open(path, encoding='ascii')", False),
        ("traffic.open(name, 2)", False),
    ],
)
def test_the_rules_see_what_writes(code: str, writes: bool) -> None:
    (call,) = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    assert _writes(call) == writes


def test_the_rules_see_no_more() -> None:
    code = "import torch\nfrom transformers import printer\nmodel.print()\ntorch.distributions.x\nlisten.environ"
    assert not offenders([_sample(code)], "torch.distributed", "print", "os.environ", "pickle")


def test_what_tests_share_has_names_of_its_own() -> None:
    """Such modules are found by their names alone, on one path: of two, the first would be taken for the other."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if not (path.parent / "__init__.py").exists()]
    names = [path.stem for path in paths if not path.stem.startswith(("test_", "conftest"))]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_the_root_of_scripts_has_few_files() -> None:
    """Those that others call by name; benchmarks, suites, pictures and pages have folders."""
    assert len([path for path in (ROOT / "scripts").iterdir() if path.is_file()]) <= 12
