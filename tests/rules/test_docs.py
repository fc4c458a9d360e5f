"""Every code block of README and docs/ does what its page says: programs run, configurations load, commands are understood.

A block's language is its rule. `text` alone is not tried: what is printed, and pictures made of letters. A page is gone through
from top to bottom in a folder of its own, with the files that it names.
"""

import inspect
import os
import re
import runpy
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml

from tests.support.doc_blocks import PAGES, ROOT, anchors, blocks_of, links, scripts_of, spans
from tests.support.doc_commands import CommandError, Reader, commands
from tests.support.doc_pages import SKIPPED, Page, Walk, why_skipped, write_files
from tests.support.programs import Programs
from tests.support.workers import Workers
from zeromesh.errors import ConfigError, LayoutError
from zeromesh.trainer.callbacks.callback import Callback
from zeromesh.trainer.config.foreign_names import KEY_BY_NAME, TABLE
from zeromesh.trainer.data.text_sources import ROW_FILES

LANGUAGES = {"python", "yaml", "json", "sh", "console", "text"}
WITH_BLOCKS = [page for page in PAGES if blocks_of(page)]
LONGEST = {"docs/howto/finetune.md", "docs/quickstart.md"}
"""Pages that take as long as ten others; tests of adapters and of TRL do what the first says, README has the runs of the second."""


@pytest.fixture(scope="module")
def run(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with two checkpoints."""
    folder = tmp_path_factory.mktemp("a run")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200, encoding="utf-8")
    changes = ["data.train=text.txt", "data.sequence_length=16", "run.max_steps=4", "checkpoint.every_steps=2"]
    small = ["model.config.hidden_size=32", "model.config.num_hidden_layers=1", "batch.micro_size=4"]
    words = ["train", str(ROOT / "configs/quickstart.yaml"), *changes, *small]
    (found,) = workers.run(1, "doc_pages:commanded", words=words, folder=str(folder))
    assert found["code"] == 0, found
    return folder / "runs/quickstart"


def test_pages_of_the_api_name_what_there_is() -> None:
    named = [name for page in (ROOT / "docs").rglob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)]
    assert len(named) > 20
    assert [name for name in named if not _is_there(name)] == []
    assert not _is_there("zeromesh.mesh.mesh_shape.Nothing")


def test_the_page_on_the_engine_shows_all_members() -> None:
    """The site leaves out methods and properties without a docstring."""
    named = re.findall(r"^::: (\S+)", (ROOT / "docs/api/engine.md").read_text(), re.M)
    shown = {each.__name__: each for each in map(resolve_name, named) if isinstance(each, type)}
    members = {f"{kind}.{name}": value for kind, each in shown.items() for name, value in vars(each).items()}
    public = {name: value for name, value in members.items() if "._" not in name and _runs(value)}
    assert len(public) > 40
    assert [name for name, value in public.items() if not inspect.getdoc(value)] == []


def _runs(value: object) -> bool:
    return isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)


def _is_there(name: str) -> bool:
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_page_on_the_architecture_names_todays_lines() -> None:
    names = runpy.run_path(str(ROOT / "scripts" / "pages" / "line_numbers.py"))
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert text.count(".py:") >= 20
    assert text == names["renewed"](text), "run: python scripts/pages/line_numbers.py"
    with pytest.raises(LookupError, match=r"zeromesh/errors\.py defines no Nothing"):
        names["renewed"]("`zeromesh/errors.py:1` | `Nothing`")


def test_the_tables_of_other_trainers_are_those_of_the_code() -> None:
    text: str = runpy.run_path(str(ROOT / "scripts/pages/migration_tables.py"))["page"]()
    page = ROOT / "docs" / "coming-from.md"
    assert page.read_text(encoding="utf-8") == text, "run: python scripts/pages/migration_tables.py"
    of_deepspeed, names_of_others = text.partition("<!-- What follows")[2].split("## Names of other trainers")
    rows = [line for line in of_deepspeed.splitlines() if line.startswith("| `")]
    names = [name for line in rows for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])]
    assert sorted(names) == sorted(row.name for row in TABLE)
    assert all(line.count(" | ") == 2 for line in rows)
    assert all(f"`{name}`" in names_of_others for name in KEY_BY_NAME)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    return tmp_path


@pytest.mark.parametrize("page", [pytest.param(page, marks=pytest.mark.full) if page in LONGEST else page for page in WITH_BLOCKS])
def test_a_page_does_what_it_says(page: str, folder: Path, workers: Workers, run: Path) -> None:
    Page(page, folder, workers, run).go_through()


@pytest.mark.full
@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_a_reader_walks_through_a_page(page: str, tmp_path: Path, run: Path, programs: Programs) -> None:
    """As it is written, by a shell, and each program on one rank and then on two."""
    Walk(page, tmp_path, run, programs).go()


def test_what_a_walk_leaves_out() -> None:
    """Each reason for that is one of some page, and what needs nothing but this machine is not left out."""
    texts = [block.text.replace("\\\n", " ") for page in PAGES for block in blocks_of(page) if block.language in ("sh", "console")]
    lines = [line.removeprefix("$ ") for text in texts for line in text.splitlines()]
    assert [pattern for pattern in SKIPPED if not any(re.search(pattern, line) for line in lines)] == []
    for line in (
        "make train",
        "zeromesh train configs/quickstart.yaml --nproc 2",
        "zeromesh generate ./my-model --chat",
        "zeromesh serve ./my-model",
        "zeromesh plan small.yaml --ranks 8 --device h100",
    ):
        assert why_skipped(line) == ""


# What stands in the text


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_rule(page: str) -> None:
    wrong = [block.where for block in blocks_of(page) if block.language not in LANGUAGES]
    assert not wrong, f"{wrong}: give the block a language of {', '.join(sorted(LANGUAGES))}"
    unnamed = [script.page for script in scripts_of(page) if not script.name]
    assert not unnamed, "a Python block without a file's name goes on where another ends, and there is none"


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_are_understood(page: str, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    write_files(page, tmp_path)
    for line, text in spans(page):
        try:
            reader.mention(text)
        except Exception as error:
            raise AssertionError(f"{page}:{line}: `{text}`: {error}") from error


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    for line, path, anchor in links(page):
        target = (folder / path).resolve() if path else ROOT / page
        assert target.is_file(), f"{page}:{line}: there is no {path}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.relative_to(ROOT).as_posix()), f"{page}:{line}: {path} has no #{anchor}"


def test_tests_that_a_page_names_are_there() -> None:
    known = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        known.update(re.findall(r"^ *(?:async )?(?:def|class) ([Tt]est\w+)", text, re.M))
        known.update(re.findall(r"^(test_\w+) = (?:pytest\.mark\.sampled\(\d+\)\(\s*)?tried\(", text, re.M))
    for page in PAGES:
        for line, text in spans(page):
            parts = text.rpartition("/")[2].split("::")
            if not re.fullmatch(r"test_[a-z0-9_]+(\.py)?", parts[0]) or parts[0] in KEY_BY_NAME:
                continue
            assert known.issuperset(parts), f"{page}:{line}: there is no `{text}`"


def test_pictures_are_current() -> None:
    pictures = runpy.run_path(str(ROOT / "scripts/pictures/pictures.py"))
    for name, draw in pictures["PICTURES"].items():
        assert (pictures["FOLDER"] / name).read_text(encoding="utf-8") == draw(), "run: python scripts/pictures/pictures.py"


def test_every_page_is_in_the_site() -> None:
    def entries(nav: Any) -> list[str]:
        if isinstance(nav, str):
            return [nav]
        return [entry for each in (nav.values() if isinstance(nav, dict) else nav) for entry in entries(each)]

    patterns = entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    pages = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert [page for page in pages if not any(fnmatchcase(page, pattern) for pattern in patterns)] == []


@pytest.mark.full
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=variables, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)|<link[^>]* href="([^"]+)', page.read_text(encoding="utf-8"))
        assert not [each for pair in loaded for each in pair if each.startswith(("http:", "https:", "//"))], page


def test_every_configuration_is_on_its_page() -> None:
    named = [Path(path).name for _, path, _ in links("docs/howto/configurations.md") if "/configs/" in path]
    assert sorted(named) == sorted(path.name for path in (ROOT / "configs").iterdir())


def test_the_guide_names_all_methods_of_callbacks_and_kinds_of_files() -> None:
    """The other pages refer to it."""
    text = (ROOT / "docs/guide.md").read_text(encoding="utf-8")
    named = re.findall(r"`(on_\w+)\(", text)
    assert sorted(set(named)) == sorted(name for name in vars(Callback) if name.startswith("on_"))
    assert [suffix for suffix in ROW_FILES.split(", ") if f"`{suffix}`" not in text and suffix != ".arrow"] == []


def test_the_table_of_stages_is_the_same_everywhere() -> None:
    tables = [
        re.findall(r"^\| (?:stage|[0-3]) .*sum, host.*|^\| [0-3] \| .*W.*|^\| 0 \| 2 .*", (ROOT / page).read_text(), re.MULTILINE)
        for page in ("README.md", "docs/concepts/stages.md")
    ]
    assert tables[0] == tables[1]
    assert len(tables[0]) == 5


# The collector itself

SAMPLE = """\
Text.

  ```yaml title="a.yaml"
  run: {max_steps: 1}
  ```

````text
```sh
inside of another
```
````

```
nothing
```

```python
# two.py: torchrun --nproc-per-node 2 two.py
pass
```
"""


def test_blocks_are_found_wherever_they_stand() -> None:
    first, second, third, fourth = blocks_of("sample.md", SAMPLE)
    assert (first.language, first.name, first.text, first.line) == ("yaml", "a.yaml", "run: {max_steps: 1}\n", 4)
    assert second.text == "```sh\ninside of another\n```\n"
    assert (third.language, third.text) == ("", "nothing\n")
    assert (fourth.name, fourth.ranks) == ("two.py", 2)
    with pytest.raises(AssertionError, match="does not end"):
        blocks_of("sample.md", "```sh\nmake\n")


@pytest.mark.parametrize(
    "line",
    [
        "zeromesh train configs/quickstart.yaml --nprocs 2",
        "zeromesh train configs/gone.yaml",
        "zeromesh train configs/quickstart.yaml zero.stage=5",
        "zeromesh train configs/quickstart.yaml --nproc 3 parallel.tensor=2",
        "zeromesh checkpoint verfy runs/quickstart",
        "make trian",
        "make setup PYTON=python3",
        "python scripts/gone.py",
        "python scripts/benchmarks/bench_offload.py --no-such-option",
        "torchrun --nproc 2 -m zeromesh train configs/gone.yaml",
        "srun --nodes 2 zeromesh train configs/gone.yaml",
        "sbatch scripts/gone.sbatch configs/quickstart.yaml",
        "kubectl apply -f scripts/gone.yaml",
        "pytest tests/test_gone.py",
        "pytest tests/rules/test_docs.py -k nosuchtest" + "whatever",
        "pip install 'zeromesh[no_such_extra]'",
        "unknown program",
    ],
)
def test_a_command_that_is_wrong_is_found(line: str, tmp_path: Path) -> None:
    (command,) = commands(line)
    with pytest.raises((CommandError, ConfigError, LayoutError)):
        Reader(tmp_path).read(command.words)


def test_commands_of_a_line() -> None:
    found = list(
        commands("mkdir -p a && zeromesh completion zsh > a/_z  # for zsh\nA=1 zeromesh \\\n  config x.yaml  # exit code 2\n")
    )
    assert [command.words for command in found] == [
        ("mkdir", "-p", "a"),
        ("zeromesh", "completion", "zsh"),
        ("A=1", "zeromesh", "config", "x.yaml"),
    ]
    assert [command.code for command in found] == [0, 0, 2]
