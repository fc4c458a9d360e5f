"""`zeromesh completion`: scripts that know every command, option and key, and need no Python to complete."""

import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from zeromesh.trainer.cli.main import SHELLS, config_keys, main
from zeromesh.trainer.config.messages import known_paths

_ALL = "train run launch evaluate generate serve config init plan status trace verify checkpoint report doctor completion"
_COMPLETED = [
    ("", {*_ALL.split()}),
    ("che", {"checkpoint"}),
    ("init quick", {"quickstart"}),
    ("evaluate c.yaml zero.st", {"zero.stage="}),
    ("checkpoint ", {"list", "inspect", "verify", "export", "merge", "diff"}),
    ("checkpoint export --d", {"--dtype"}),
    ("checkpoint export --dtype ", {"float32", "bfloat16", "float16", "keep", "nf4", "fp4"}),
    ("completion ", set(SHELLS)),
    ("train --nn", {"--nnodes"}),
    ("train --nproc 2 c.yaml zero.st", {"zero.stage="}),
    ("train c.yaml zero.stage=", {"0", "1", "2", "3"}),
    ("config c.yaml zero.overlap=t", {"true"}),
    ("train c.yaml run.seed=1 offload.optimizer=h", {"host"}),
    ("train c.yaml run.seed=", set()),
    ("train c.", {"c.yaml"}),
    ("status c.", {"c.yaml"}),
    ("status zero.", set()),
]
_BASH = """
source ./completion.bash
compopt() { :; }
COMP_LINE=$1 COMP_POINT=${#1} COMP_WORDBREAKS=$'"\\'><=;|&(: \\n'
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_zeromesh
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of all shells, as `completion.SHELL` in one directory, beside a file `c.yaml`."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "c.yaml").write_text("{}")
    for shell in SHELLS:
        with redirect_stdout(StringIO()) as written:
            assert main(["completion", shell]) == 0
        (folder / f"completion.{shell}").write_text(written.getvalue())
    return folder


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_knows_commands_options_and_keys(scripts: Path, shell: str) -> None:
    text = (scripts / f"completion.{shell}").read_text()
    keys = dict(config_keys())
    some = ("zero.stage", "offload.optimizer", "offload.optimizer.fraction", "precision.loss_scale.growth_factor")
    assert {*some} <= set(keys)
    assert not {"zero", "precision.loss_scale"} & set(keys)
    assert set(keys) <= set(known_paths())
    assert all(f"{key}=" in text for key in keys)
    assert all(f"{key}={word}" in text for key, words in keys.items() for word in words)
    assert all(word in text for word in ("checkpoint", "doctor", "nproc", "hostfile", "dtype", "version"))
    assert not {"worker", "attached"} & set(re.findall(r"\w+", text))
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n", scripts / f"completion.{shell}"], check=True, timeout=60)


@pytest.mark.parametrize(("line", "wanted"), _COMPLETED)
def test_bash_offers_what_fits(scripts: Path, line: str, wanted: set[str]) -> None:
    text = f"zeromesh {line}"
    # Readline breaks words at `=`, which is a word of its own.
    words = text.replace("=", " = ").split(" ") if not text.endswith("=") else text.replace("=", " =").split(" ")
    command = ["bash", "--norc", "-c", _BASH, "bash", text, *words]
    found = subprocess.run(command, cwd=scripts, capture_output=True, text=True, timeout=60, check=True)
    assert set(found.stdout.split()) == wanted


def test_commands_load_only_what_they_need(tmp_path: Path) -> None:
    """torch alone takes seconds, and transformers twice as many. Help and completion need neither; `zeromesh train` starts its
    workers before either is loaded, which `zeromesh status` and `report` do not need; to look at checkpoints, torch is enough."""
    (tmp_path / "bad.yaml").write_text("zero: {stage: 7}")
    code = f"""
import sys
from contextlib import suppress
from zeromesh.trainer.cli.main import main
with suppress(SystemExit):
    main(["--help"])
assert main(["completion", "bash"]) == 0
assert not {{"torch", "transformers", "datasets", "wandb"}} & set(sys.modules)
import zeromesh.launch.rendezvous, zeromesh.trainer.tools.html_report.page
assert main(["train", {str(tmp_path / "bad.yaml")!r}, "--nproc", "2"]) == 2
assert main(["report", {str(tmp_path)!r}]) == 2
assert not {{"torch", "transformers"}} & set(sys.modules)
assert main(["checkpoint", "list", {str(tmp_path)!r}]) == 2
assert not {{"transformers", "peft", "accelerate", "datasets"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
