"""Slurm, Kubernetes and MPI: the files in `scripts/`, with the variables that those set."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from zeromesh.trainer.cli.main import _parse
from zeromesh.trainer.monitoring.step_metrics import read_metrics

ROOT = Path(__file__).resolve().parents[3]
CONFIG = """\
model: {config: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
                 num_key_value_heads: 2}}
data: {train: FOLDER/text.txt, sequence_length: 32, eval_fraction: 0.0}
precision: {compute: float32}
batch: {global_size: 8, micro_size: 4}
checkpoint: {every_steps: 0}
"""
# Runs a command as `srun --nodes 2 --ntasks-per-node 1` does, all tasks together.
SRUN = """\
import os, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
common = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2",
          "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "localhost,other",
          "SLURM_TASK_PID": "1"}
own = [{"SLURM_PROCID": str(node), "SLURM_NODEID": str(node)} for node in range(2)]
tasks = [subprocess.Popen(command, env={**os.environ, **common, **each}) for each in own]
sys.exit(max(task.wait(timeout=120) for task in tasks))
"""


def tool(folder: Path, name: str, text: str) -> Path:
    """A command of this name in `folder`, which is to be on the path; it runs Python."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """The environment of a cluster's user: `zeromesh` and `srun` are on the path."""
    tool(tmp_path, "srun", SRUN)
    tool(tmp_path, "zeromesh", "import sys\nfrom zeromesh.trainer.cli.main import main\nsys.exit(main())\n")
    (tmp_path / "text.txt").write_text("What a run learns does not depend on who computes it. " * 100)
    (tmp_path / "config.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def overrides(folder: Path) -> list[str]:
    return ["run.name=run", f"run.output_dir={folder}", "run.max_steps=3"]


@pytest.mark.full
def test_the_slurm_script_trains(tmp_path: Path, tools: dict[str, str]) -> None:
    command = ["bash", str(ROOT / "scripts/slurm.sbatch"), str(tmp_path / "config.yaml"), *overrides(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=tools, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert "run: ZeRO stage 3 on 2 CPU ranks: shard 2" in done.stdout
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3


@pytest.mark.parametrize(("code", "told"), [(0, ""), (1, ""), (143, "requeue 7")])
def test_the_slurm_script_queues_a_stopped_run_again(tmp_path: Path, code: int, told: str) -> None:
    tool(tmp_path, "srun", f"import sys\nprint(*sys.argv[1:])\nsys.exit({code})\n")
    tool(tmp_path, "scontrol", "import sys\nprint(*sys.argv[1:])\n")
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}
    command = ["bash", str(ROOT / "scripts/slurm.sbatch"), "c.yaml", "run.seed=3"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=30, check=False)
    assert done.returncode == code
    called, *after = done.stdout.splitlines()
    assert after == [told] * bool(told)
    options = _parse(called.split()[2:])
    assert (options.config, options.overrides, options.nproc) == ("c.yaml", ["run.seed=3"], 4)


@pytest.mark.full
@pytest.mark.parametrize(
    "names", ["OMPI_COMM_WORLD_{} RANK SIZE LOCAL_RANK LOCAL_SIZE", "{} PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"]
)
def test_mpi_trains(tmp_path: Path, tools: dict[str, str], names: str) -> None:
    """As `mpirun -n 2 zeromesh train CONFIG` starts it."""
    form, *names = names.split()
    command = [str(tmp_path / "zeromesh"), "train", str(tmp_path / "config.yaml"), *overrides(tmp_path)]
    shared = {"MASTER_PORT": str(20000 + os.getpid() % 10000)}
    ranks = []
    for rank in map(str, range(2)):
        values = dict(zip(names, (rank, "2", rank, "2"), strict=True))
        variables = {**tools, **shared, **{form.format(name): value for name, value in values.items()}}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen(command, env=variables, text=True, **pipes))
    try:
        said = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert said[0][0].startswith("run: ZeRO stage 3 on 2 CPU ranks: shard 2")
    assert said[1][0] == ""


def test_the_slurm_script_asks_for_what_slurm_understands() -> None:
    lines = (ROOT / "scripts/slurm.sbatch").read_text().splitlines()
    found = (re.match(r"#SBATCH --([a-z-]+)(?:=(\S+))?(?:\s+#.*)?$", line) for line in lines)
    asked = dict(each.groups() for each in found if each)
    assert len(asked) == sum(line.startswith("#SBATCH") for line in lines)
    assert asked["ntasks-per-node"] == "1"
    assert asked["signal"].startswith("TERM@")


def manifest() -> tuple[str, dict[str, Any]]:
    """The name of the set, and its only job."""
    text = (ROOT / "scripts/kubernetes.yaml").read_text()
    found = yaml.safe_load(text)
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert found["spec"]["network"]["enableDNSHostnames"]
    (job,) = found["spec"]["replicatedJobs"]
    return found["metadata"]["name"], job


def test_the_pods_of_the_manifest_meet(tmp_path: Path) -> None:
    name, job = manifest()
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    tool(tmp_path, "zeromesh", "import sys\nprint('\\0'.join(sys.argv[1:]), end='')\n")
    for index in range(spec["completions"]):
        variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": str(index), "NAMESPACE": "here"}
        command = container["command"]
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=30, check=True)
        options = _parse(done.stdout.split("\0"))
        assert (options.command, options.config) == ("train", "/data/config.yaml")
        assert options.nnodes == (spec["completions"], spec["parallelism"])
        assert options.max_restarts > 0
        assert options.node_rank is None, "a pod that is lost would end the run"
        assert options.nproc == container["resources"]["limits"]["nvidia.com/gpu"]
        host, _, port = options.rdzv_endpoint.partition(":")
        assert host == f"{name}-{job['name']}-0-0.{name}.here.svc.cluster.local"
        assert int(port) in [each["containerPort"] for each in container["ports"]]
    assert spec["completionMode"] == "Indexed"
    assert spec["template"]["spec"]["restartPolicy"] == "OnFailure", "a container starts again in its pod"
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in spec["template"]["spec"]["volumes"]}


TYPES: dict[str, type | tuple[type, ...]] = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}


def problems(schema: dict[str, Any], found: Any, where: str = "") -> Iterator[str]:
    """What a value has that its schema does not allow."""
    kinds = [TYPES[word] for word in schema["type"].split(" or ")]
    if not any(isinstance(found, kind) and (kind is bool or not isinstance(found, bool)) for kind in kinds):
        yield f"{where}: {found!r} is no {schema['type']}"
    elif isinstance(found, dict):
        known = schema.get("properties", {})
        yield from (f"{where}.{name} is missing" for name in schema.get("required", ()) if name not in found)
        for name, value in found.items():
            if name in known or "values" in schema:
                yield from problems(known.get(name) or schema["values"], value, f"{where}.{name}")
            else:
                yield f"{where}.{name} is unknown"
    elif isinstance(found, list):
        for index, each in enumerate(found):
            yield from problems(schema["items"], each, f"{where}[{index}]")
    elif found not in schema.get("enum", [found]) or found < schema.get("minimum", found):
        yield f"{where}: {found!r} is not allowed"


def test_the_manifest_has_the_form_of_a_job_set() -> None:
    schema = yaml.safe_load((ROOT / "tests/support/jobset_schema.yaml").read_text())
    found = yaml.safe_load((ROOT / "scripts/kubernetes.yaml").read_text())
    assert found.pop("metadata").keys() == {"name"}
    assert [*problems(schema, found)] == []
    (job,) = found["spec"]["replicatedJobs"]
    job["template"]["spec"] |= {"backofflimit": 1, "parallelism": "2", "template": {"spec": {}}}
    job["replicas"] = -1
    at = ".spec.replicatedJobs[0]"
    assert [*problems(schema, found)] == [
        f"{at}.replicas: -1 is not allowed",
        f"{at}.template.spec.parallelism: '2' is no integer",
        f"{at}.template.spec.template.spec.containers is missing",
        f"{at}.template.spec.backofflimit is unknown",
    ]
