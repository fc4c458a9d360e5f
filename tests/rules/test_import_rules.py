"""The house's rules, read from the source: what may import what, and which file alone may do what.

Nothing is imported here: every rule looks at syntax trees. Links are skipped, so that each file is seen once, under the
name that it is imported by.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import structure_report
from structure_report import circles, crowded, duplicate_classes, folder_circles, long_functions, short_modules

ROOT = Path(__file__).resolve().parents[2]

# What each floor may import besides the standard library and itself. `zeromesh.errors` and `zeromesh.files`
# import nothing but each other and stand below.
BELOW = {"zeromesh.errors", "zeromesh.files"}
ENGINE = {"zeromesh", "torch", "numpy", "safetensors", "xxhash", "psutil", "annotated_types"}
FLOORS = {
    "offload": {"torch", "numpy", "xxhash", "psutil", "zeromesh.offload", *BELOW},
    "zeromesh": ENGINE,
    "trainer": ENGINE
    | {"transformers", "huggingface_hub", "datasets", "pyarrow", "accelerate", "lightning", "wandb", "peft"}
    | {"pydantic", "pydantic_core", "yaml", "jinja2", "rich", "shtab", "plotly", "packaging"}
    | {"clearml", "comet_ml", "swanlab"}  # which are there where a person tracks by them
    | {"fastapi", "starlette", "uvicorn", "h11"}  # which are there where a person serves a model
    | {"PIL"}  # which is there where a person trains on pictures
    | {"IPython"}  # which is there in a notebook
    | {"trl", "tokenizers"}  # where a person trains by preferences and rewards
    | {"liger_kernel", "torchao"},  # and where a person computes the loss or linear layers by them
}
# The package hands `Trainer` on lazily, `python -m zeromesh` is the command, and others hand on what is for other libraries' loops.
DOORS = {"zeromesh/__init__.py", "zeromesh/__main__.py"}
DOORS |= {"zeromesh/accelerate.py", "zeromesh/transformers.py", "zeromesh/lightning.py"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file: its path from the root, the module that it is, and its tree."""

    path: str
    module: str
    tree: ast.Module

    @property
    def floor(self) -> str:
        return self.path.partition("/")[0]


def _sources() -> Iterator[Source]:
    for floor in FLOORS:
        for folder, folders, files in os.walk(ROOT / floor, followlinks=False):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in files:
                path = Path(folder, name)
                if path.suffix == ".py" and not path.is_symlink():
                    yield _source(path)


def _source(path: Path) -> Source:
    relative = path.relative_to(ROOT)
    parts = relative.with_suffix("").parts
    if parts[0] != "zeromesh":
        parts = ("zeromesh", *parts)
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(relative))
    return Source(path=relative.as_posix(), module=module, tree=tree)


SOURCES = sorted(_sources(), key=lambda source: source.path)
MODULES = {source.module for source in SOURCES}


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module that is imported anywhere in `tree`, with its line; `from a import b` as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def attributes(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every dotted name that is used in `tree`, and its dotted beginnings, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            yield ast.unparse(node), node.lineno


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    yield from imports(tree)
    yield from attributes(tree)


def is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def offenders(sources: list[Source], *forbidden: str) -> list[str]:
    return [
        f"{source.path}:{line}: {name}"
        for source in sources
        for name, line in names(source.tree)
        if any(is_below(name, package) for package in forbidden)
    ]


def outside(*allowed: str) -> list[Source]:
    """All files but those whose path starts with one of `allowed`."""
    return [source for source in SOURCES if not source.path.startswith(allowed)]


def test_the_walk_found_the_house() -> None:
    paths = {source.path for source in SOURCES}
    assert {
        "zeromesh/errors.py",
        "zeromesh/mesh/mesh_shape.py",
        "trainer/config/trainer_config.py",
        "trainer/cli/main.py",
    } <= paths
    assert len(paths) == len(SOURCES) > 20
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
        for source in SOURCES
        if source.floor == floor
        for name, line in imports(source.tree)
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not any(is_below(name, package) for package in FLOORS[floor])
    ]
    assert not found


def test_imports_go_downward_only() -> None:
    engine = [source for source in SOURCES if source.floor == "zeromesh" and source.path not in DOORS]
    assert not offenders(engine, "zeromesh.trainer")


def test_imports_use_the_installed_name() -> None:
    other = (".", "trainer.", "offload.")
    found = [(s.path, line, name) for s in SOURCES for name, line in imports(s.tree) if f"{name}.".startswith(other)]
    assert not found


@pytest.mark.parametrize("path", ["zeromesh/errors.py", "zeromesh/files.py"])
def test_errors_and_files_stand_below_everything(path: str) -> None:
    (source,) = [source for source in SOURCES if source.path == path]
    found = [name for name, _ in imports(source.tree) if not any(f"{name}.".startswith(f"{each}.") for each in BELOW)]
    assert not [name for name in found if name.partition(".")[0] not in sys.stdlib_module_names]


def test_collectives_are_called_in_the_mesh_alone() -> None:
    assert not offenders(outside("zeromesh/mesh/"), "torch.distributed")
    moving = [f"dist.{name}" for name in ("all_gather", "broadcast", "reduce_scatter_tensor", "all_to_all_single")]
    assert not offenders(outside("zeromesh/mesh/collectives.py"), *moving), "a row of the table begins each"


def test_few_files_name_an_axis() -> None:
    """What an axis divides is a row of `MeshShape`; others ask for the ranks of the batch, of the states or of the model."""
    naming = {
        source.path
        for source in SOURCES
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("tensor", "pipeline")
        and ast.unparse(node.value).rpartition(".")[2] in ("mesh", "_mesh", "shape")
    }
    assert len(naming) <= 12, sorted(naming)


def test_one_file_knows_what_kinds_of_devices_there_are() -> None:
    """What holds for CUDA is to hold for every accelerator, the simulated one of the tests among them."""
    others = outside("offload/accelerator.py")
    found = offenders(others, "torch.cuda")
    for source in others:
        for node in ast.walk(source.tree):
            if (isinstance(node, ast.Attribute) and node.attr == "is_cuda") or (
                isinstance(node, ast.Constant) and node.value == "cuda"
            ):
                found.append(f"{source.path}:{node.lineno}: {ast.unparse(node)}")
    assert not found


def test_hooks_are_registered_in_one_file() -> None:
    found = [
        f"{source.path}:{line}: {name}"
        for source in outside("zeromesh/zero/hooks.py")
        for name, line in attributes(source.tree)
        if (last := name.rpartition(".")[2]).startswith("register_") and last.endswith(("_hook", "_hooks"))
    ]
    assert not found


def test_the_environment_is_read_in_one_file() -> None:
    forbidden = ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv")
    assert not offenders(outside("zeromesh/environment.py"), *forbidden)


def test_files_are_written_in_one_file() -> None:
    """Where links are not followed, nothing waits for a pipe, and the umask sets permissions."""
    allowed = (
        "zeromesh/files.py",
        "offload/io/file_tier.py",
        "trainer/monitoring/profiler.py",
    )
    found = [
        f"{source.path}:{node.lineno}: {ast.unparse(node)}"
        for source in outside(*allowed)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and _writes(node)
    ]
    assert not found


def _writes(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name.rpartition(".")[2] in ("write_text", "write_bytes", "touch", "mkstemp", "NamedTemporaryFile"):
        return True
    if name == "os.open":
        return "O_CREAT" in ast.unparse(call)
    given = [*call.args[:2], *(each.value for each in call.keywords if each.arg == "mode")]
    modes = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return name.rpartition(".")[2] == "open" and any(re.fullmatch(r"(?=.*[wa+])[rwabt+]+", mode) for mode in modes)


def test_only_the_command_line_prints() -> None:
    assert not offenders(outside("trainer/cli/main.py"), "print")


def test_nothing_loads_code() -> None:
    loaders = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")
    assert not offenders(SOURCES, *loaders, "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load")
    # As calls only: `eval` is also a split of the data and a mode of a model.
    builtin = [
        f"{source.path}:{node.lineno}: {node.func.id}"
        for source in SOURCES
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"eval", "exec", "compile"}
    ]
    assert not builtin
    keywords = ("allow_pickle", "weights_only", "trust_remote_code")
    found = [
        f"{source.path}:{node.value.lineno}: {node.arg}"
        for source in SOURCES
        for node in ast.walk(source.tree)
        if isinstance(node, ast.keyword) and node.arg in keywords and not _is_false(node.value)
    ]
    # Code that a model brings along is run where `model.trust_remote_code` is true, which these two files are told.
    trusting = ("trainer/models/build.py", "trainer/setup/model.py")
    assert not [each for each in found if not each.startswith(trusting) or not each.endswith("trust_remote_code")]


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_whether_code_may_run_is_always_said() -> None:
    """transformers asks on the terminal where nothing is said, and ranks that wait for an answer hang."""
    asking = {"from_pretrained", "from_config"}
    found = [
        f"{source.path}:{node.lineno}"
        for source in SOURCES
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in asking
        and ast.unparse(node.func.value).rpartition(".")[2].startswith(("Auto", "automatic"))
        and "trust_remote_code" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not found


def test_nothing_asserts_outside_of_tests() -> None:
    """Under `python -O` an assert is gone, and with it whatever it checked."""
    found = [f"{s.path}:{node.lineno}" for s in SOURCES for node in ast.walk(s.tree) if isinstance(node, ast.Assert)]
    assert not found


def test_no_module_uses_the_root_logger() -> None:
    roots = ("logging.debug", "logging.info", "logging.warning", "logging.error", "logging.exception")
    assert not offenders(SOURCES, *roots, "logging.basicConfig", "logging.critical")


def test_no_import_cycles() -> None:
    graph = {source.module: set(_needed(source)) for source in SOURCES}
    assert sum(map(len, graph.values())) > 20
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def _needed(source: Source) -> Iterator[str]:
    """The modules of this project that have to be imported before `source`: those of its module level."""
    for name, _ in imports(ast.Module(body=list(_at_import(source.tree.body)), type_ignores=[])):
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


HOUSE = structure_report.sources(ROOT)
LINES = 53_960
"""What the three floors may have: features come as rows and files of what is there."""


def test_the_graph_of_folders_has_no_circle() -> None:
    """Imports inside functions and for type checkers count."""
    assert folder_circles(HOUSE) == []


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


def test_a_folder_has_at_most_twelve_modules() -> None:
    assert crowded(HOUSE) == {}


def test_the_house_stays_within_its_lines() -> None:
    """A floor's root holds what a reader opens first; only the step is told in one piece, however long that takes."""
    assert sum(source.lines for source in HOUSE) <= LINES
    assert max(source.lines for source in HOUSE) <= 600
    assert structure_report.figures(ROOT)["most files at the root of a floor"] <= 9
    assert [each for each in long_functions(HOUSE) if "train_step.py: train_step" not in each] == []


def test_a_class_has_a_name_of_its_own() -> None:
    assert duplicate_classes(HOUSE) == {}


def test_a_module_is_long_or_has_several_importers() -> None:
    assert short_modules(HOUSE) == []


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
    assert offenders([Source(path="x.py", module="x", tree=ast.parse(code))], rule)


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
    source = Source(path="x.py", module="x", tree=ast.parse(code))
    assert not offenders([source], "torch.distributed", "print", "os.environ", "pickle")


def test_what_tests_share_has_names_of_its_own() -> None:
    """Such modules are found by their names alone, on one path: of two, the first would be taken for the other."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if not (path.parent / "__init__.py").exists()]
    names = [path.stem for path in paths if not path.stem.startswith("test_")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_the_root_of_scripts_has_few_files() -> None:
    """Those that others call by name; benchmarks, suites, pictures and pages have folders."""
    assert len([path for path in (ROOT / "scripts").iterdir() if path.is_file()]) <= 12
