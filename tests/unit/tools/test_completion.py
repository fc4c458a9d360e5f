"""`zeromesh completion`: scripts that know every command, option and key, and need no Python to complete."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zeromesh.trainer.cli.completion import SHELLS, commands_of, config_keys
from zeromesh.trainer.cli.main import main, make_parser
from zeromesh.trainer.config.messages import known_paths

_COMPLETED = [
    ("", {"train", "launch", "evaluate", "config", "init", "status", "checkpoint", "report", "doctor", "completion"}),
    ("che", {"checkpoint"}),
    ("init quick", {"quickstart"}),
    ("evaluate c.yaml zero.st", {"zero.stage="}),
    ("checkpoint ", {"list", "inspect", "verify", "export", "merge", "diff"}),
    ("checkpoint export --d", {"--dtype"}),
    ("checkpoint export --dtype ", {"float32", "bfloat16", "float16", "keep"}),
    ("completion ", set(SHELLS)),
    ("train --nn", {"--nnodes"}),
    ("train --nproc 2 c.yaml zero.st", {"zero.stage="}),
    ("train c.yaml zero.stage=", {"zero.stage=0", "zero.stage=1", "zero.stage=2", "zero.stage=3"}),
    ("config c.yaml zero.overlap=t", {"zero.overlap=true"}),
    ("train c.yaml run.seed=1 offload.optimizer=h", {"offload.optimizer=host"}),
    ("train c.yaml run.seed=", set()),
    ("status c.yaml zero.", set()),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of all shells, as `completion.SHELL` in one directory, beside a file `c.yaml`."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "c.yaml").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        for shell in SHELLS:
            written: list[str] = []
            patch.setattr("sys.stdout", type("Out", (), {"write": staticmethod(written.append)}))
            assert main(["completion", shell]) == 0
            (folder / f"completion.{shell}").write_text("".join(written))
    return folder


def test_every_command_option_and_key_is_known(scripts: Path) -> None:
    commands = list(commands_of(make_parser()))
    assert {command.words for command in commands} >= {(), ("train",), ("checkpoint", "export"), ("doctor",)}
    names = {name for command in commands for option in command.options for name in option.names}
    assert {"--nproc", "--hostfile", "--out", "--dtype", "--version"} <= names
    assert not {"--worker", "--attached"} & names
    keys = [key.path for key in config_keys()]
    assert {
        "zero.stage",
        "offload.optimizer",
        "offload.optimizer.fraction",
        "precision.loss_scale.growth_factor",
    } <= set(keys)
    assert not {"zero", "precision.loss_scale"} & set(keys)
    assert set(keys) <= set(known_paths())
    for shell in SHELLS:
        text = (scripts / f"completion.{shell}").read_text()
        assert all(path in text for path in keys)
        assert all(name.lstrip("-") in text for name in names)
        assert all(command.words[-1] in text for command in commands if command.words)


def words_of(shell: str, line: str, folder: Path) -> set[str]:
    """What a shell offers for the last word of `zeromesh LINE`, as whole words."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell} on this machine")
    text = f"zeromesh {line}"
    script = {
        "bash": """
            source ./completion.bash
            COMP_LINE=$1 COMP_POINT=${#1} COMP_WORDBREAKS=$2
            _zeromesh
            printf '%s\\n' "${COMPREPLY[@]}" """,
        "fish": 'source ./completion.fish; complete -C "$argv[1]" | string replace -r "\\t.*" ""; true',
        "zsh": _ZSH,
    }[shell]
    arguments = {
        "bash": [program, "--norc", "-c", script, "bash", text, "\"'><=;|&(: \n"],
        "fish": [program, "--no-config", "-c", script, text],
        "zsh": [program, "-f", "-c", script, "zsh", text],
    }[shell]
    found = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    words = {word for word in found.stdout.splitlines() if word.strip("=")}
    present = text.rpartition(" ")[2]
    if shell == "fish" or "=" not in present:
        return words
    begun = present.rpartition("=")[0] + "="  # which bash and zsh do not complete again
    return {word if word.startswith(begun) else begun + word for word in words}


# zsh completes only at a terminal: what it would do with the words that the script gives it stands here instead.
_ZSH = r"""
compdef() { }
compset() { PREFIX=${PREFIX#*=} }
compadd() { shift; print -rl -- "${(@M)@:#$PREFIX*}" }
_files() { print -rl -- $PREFIX*(N) }
_describe() {
  [[ $1 == -o ]] && shift
  local suffix= rows=("${(@P)2}")
  [[ $3 == -S ]] && suffix=$4
  print -rl -- "${(@M)${(@)rows%%:*}:#$PREFIX*}"$suffix
}
source ./completion.zsh
words=(${=1}) CURRENT=$#words
[[ $1 == *' ' ]] && words+=('') CURRENT=$#words
PREFIX=$words[CURRENT]
_zeromesh
"""


@pytest.mark.parametrize(("line", "wanted"), _COMPLETED)
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_offers_what_fits(scripts: Path, shell: str, line: str, wanted: set[str]) -> None:
    assert words_of(shell, line, scripts) == wanted


@pytest.mark.parametrize("shell", SHELLS)
def test_a_path_is_completed_where_one_is_meant(scripts: Path, shell: str) -> None:
    assert "c.yaml" in words_of(shell, "train c", scripts)


def test_bash_offers_sections_before_keys_and_completes_within_a_fifth_of_a_second(scripts: Path) -> None:
    assert "zero." in words_of("bash", "train c.yaml ", scripts)
    times = []
    for _ in range(5):  # of which some may be slow, for what else the machine does
        began = time.perf_counter()
        assert words_of("bash", "train c.yaml optimizer.", scripts)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.2


def test_help_loads_nothing_heavy() -> None:
    code = """
import sys
from zeromesh.trainer.cli.main import main
for words in (["--help"], ["completion", "bash"]):
    try:
        main(words)
    except SystemExit:
        pass
assert not {"torch", "transformers", "datasets", "wandb"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_commands_load_only_what_they_need(tmp_path: Path) -> None:
    """torch alone takes seconds, and transformers twice as many. `zeromesh train` starts its workers before either is loaded, which
    `zeromesh status` and `report` do not need; to look at checkpoints, torch is enough."""
    (tmp_path / "bad.yaml").write_text("zero: {stage: 7}")
    code = f"""
import sys
import zeromesh.launch.local, zeromesh.trainer.cli.status, zeromesh.trainer.tools.html_report.page
from zeromesh.trainer.cli.main import main
assert main(["train", {str(tmp_path / "bad.yaml")!r}, "--nproc", "2"]) == 2
assert main(["report", {str(tmp_path)!r}]) == 2
assert not {{"torch", "transformers"}} & set(sys.modules)
assert main(["checkpoint", "list", {str(tmp_path)!r}]) == 2
assert not {{"transformers", "peft", "accelerate", "datasets"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
