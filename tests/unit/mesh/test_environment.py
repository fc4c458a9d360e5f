"""The launch environment of every launcher, whole and in part."""

import os
import re
import sys
from types import SimpleNamespace

import pytest

from zeromesh import environment as launch
from zeromesh.environment import RankRange, first_host, read_environment, worker_environment
from zeromesh.errors import ConfigError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
}
# What `srun --ntasks-per-node=2` over two nodes sets for its last task.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_NODELIST": "node[01-08]",
    "SLURM_TASK_PID": "99",
}
# Seen with prterun --personality ompi (PMIx 5.0.11), two processes.
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-4465@1",
}
# Seen with mpiexec.hydra of MPICH 5.0.2, two processes.
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}


LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


UNEVEN = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}
BARE = without(SLURM, "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")
ONE_NODE = without(BARE, "SLURM_NTASKS_PER_NODE") | {"SLURM_NNODES": "1"}
NEEDED = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NODELIST")
# A shell that `salloc` opened on the login node, the body of a batch script as sbatch sets it, and the step of salloc, of one task.
SHELL = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "node[1-2]"}
BATCH = without(SLURM, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST") | {"SLURM_PROCID": "0"}
STEP = SLURM | {
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0",
}  # fmt: skip
# Within a job of Slurm, whose daemon MPI starts its processes by.
DAEMON = SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
SPREAD = OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}


@pytest.mark.parametrize(
    ("environ", "place", "launcher", "address", "port"),
    [
        ({}, (0, 1, 0, 1), "single", "127.0.0.1", 0),
        (TORCHRUN, (3, 4, 1, 2), "torchrun", "node0", 29400),
        (TORCHRUN | {"MASTER_PORT": "65535"}, (3, 4, 1, 2), "torchrun", "node0", 65535),
        (without(TORCHRUN, *LOCAL), (3, 4, 0, 1), "torchrun", "node0", 29400),
        (SLURM | OPENMPI | MPICH | TORCHRUN, (3, 4, 1, 2), "torchrun", "node0", 29400),
        (SLURM, (3, 4, 1, 2), "slurm", "node07", range(10000, 30000)),
        (UNEVEN, (3, 4, 0, 1), "slurm", "node07", range(10000, 30000)),
        (UNEVEN | {"SLURM_NODEID": "0", "SLURM_PROCID": "2"}, (2, 4, 0, 3), "slurm", "node07", range(10000, 30000)),
        (BARE | {"SLURM_NTASKS_PER_NODE": "8"}, (3, 4, 1, 4), "slurm", "node07", range(10000, 30000)),
        (without(STEP, *LISTS), (0, 1, 0, 1), "slurm", "127.0.0.1", range(10000, 30000)),
        (BARE, (3, 4, 1, 2), "slurm", "node07", range(10000, 30000)),
        (ONE_NODE, (3, 4, 1, 4), "slurm", "node07", range(10000, 30000)),
        # Each of three variables tells a step, and the step's own nodes come before those of its job.
        (without(SLURM, *LISTS[:1], "SLURM_STEP_ID"), (3, 4, 1, 2), "slurm", "node01", range(10000, 30000)),
        (without(SLURM, *LISTS[:1], "SLURM_STEP_NUM_TASKS"), (3, 4, 1, 2), "slurm", "node01", range(10000, 30000)),
        (without(SLURM, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"), (3, 4, 1, 2), "slurm", "node07", range(10000, 30000)),
        (ONE_NODE | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "2"}, (3, 4, 1, 4), "slurm", "node07", range(10000, 30000)),
        ({name: SLURM[name] for name in NEEDED}, (3, 4, 1, 2), "slurm", "node01", range(10000, 30000)),
        (SLURM | {"MASTER_PORT": "1234", "MASTER_ADDR": "10.0.0.1"}, (3, 4, 1, 2), "slurm", "10.0.0.1", 1234),
        (SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, 1, 2), "slurm", "node07", range(10000, 30000)),
        (SHELL, (0, 1, 0, 1), "single", "127.0.0.1", 0),
        (BATCH, (0, 1, 0, 1), "single", "127.0.0.1", 0),
        (STEP, (0, 1, 0, 1), "slurm", "node07", range(10000, 30000)),
        (OPENMPI, (1, 2, 1, 2), "openmpi", "127.0.0.1", range(10000, 30000)),
        (MPICH, (1, 2, 1, 2), "mpich", "127.0.0.1", 29500),
        (DAEMON | OPENMPI, (1, 2, 1, 2), "openmpi", "127.0.0.1", range(10000, 30000)),
        (DAEMON | MPICH, (1, 2, 1, 2), "mpich", "127.0.0.1", range(10000, 30000)),
        (SPREAD | {"MASTER_ADDR": "node3"}, (1, 2, 0, 1), "openmpi", "node3", range(10000, 30000)),
    ],
)
def test_a_process_finds_its_place(
    environ: dict[str, str], place: tuple[int, ...], launcher: str, address: str, port: int | range
) -> None:
    """That of every launcher, whole and in part; torchrun wins, then MPI over the job that it is in."""
    found = read_environment(environ)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == place
    assert (found.launcher, found.master_address) == (launcher, address)
    assert found.master_port in (port if isinstance(port, range) else (port,))


def test_ports_follow_the_job_and_the_step() -> None:
    port = read_environment(SLURM).master_port
    assert read_environment(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).master_port == port
    for name, other in (("SLURM_JOB_ID", "4712"), ("SLURM_STEP_ID", "1")):
        assert read_environment(SLURM | {name: other}).master_port != port
    jobs = [read_environment(SLURM | {"SLURM_JOB_ID": str(number)}).master_port for number in range(200)]
    assert all(10_000 <= each < 30_000 for each in jobs)
    other = read_environment(OPENMPI | {"PMIX_NAMESPACE": "prterun-host-4466@1"})
    assert read_environment(OPENMPI).master_port != other.master_port


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        (without(TORCHRUN, "WORLD_SIZE", "MASTER_ADDR"), ["WORLD_SIZE", "MASTER_ADDR"]),
        (without(TORCHRUN, "RANK"), ["RANK"]),
        (without(TORCHRUN, "LOCAL_RANK"), ["LOCAL_RANK"]),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), ["LOCAL_WORLD_SIZE"]),
        (TORCHRUN | {"MASTER_PORT": ""}, ["MASTER_PORT"]),
        (without(SLURM, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), ["SLURM_NTASKS"]),
        (without(SLURM, "SLURM_LOCALID"), ["SLURM_LOCALID"]),
        (without(SLURM, *LISTS), ["SLURM_STEP_NODELIST"]),
        (without(OPENMPI, "OMPI_COMM_WORLD_RANK"), ["OMPI_COMM_WORLD_RANK"]),
        (without(OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), ["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        ({"PMI_SIZE": "2"}, ["PMI_RANK"]),
        ({"PMI_RANK": "0"}, ["PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]),
    ],
)
def test_half_an_environment_names_what_is_missing(environ: dict[str, str], missing: list[str]) -> None:
    with pytest.raises(ConfigError, match="launch environment is incomplete") as caught:
        read_environment(environ)
    after = str(caught.value).split("but not ")[1]
    for name in missing:
        assert re.search(rf"\b{name}\b", after)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TORCHRUN | {"RANK": "4"}, "rank 4 is not below the world size 4"),
        (TORCHRUN | {"RANK": "-1"}, "rank -1"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "local rank 2 is not below 2"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "8 processes on this host, but 4 in the world"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "port 65536"),
        (TORCHRUN | {"WORLD_SIZE": "four"}, "WORLD_SIZE: got 'four', not an integer"),
        (TORCHRUN | {"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE"),
        (SLURM | {"SLURM_STEP_NODELIST": "node[01"}, "cannot be read; set MASTER_ADDR"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "tasks per node 'two'"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4"}, "SLURM_NODEID is 1"),
        # What cannot be told is asked for.
        (without(BARE, "SLURM_NTASKS_PER_NODE"), "SLURM_NTASKS_PER_NODE"),
        (SPREAD, "MASTER_ADDR"),  # over several hosts
    ],
)
def test_contradictions_and_gaps_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_environment(environ)


def test_all_contradictions_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_environment(TORCHRUN | {"RANK": "4", "MASTER_PORT": "-1"})
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[01-03,7]", "node01"),
        ("node[7,01-03],gpu1", "node7"),
        ("gpu1,node[01-03]", "gpu1"),
        ("rack[2-3]node[08-10]-ib", "rack2node08-ib"),
        ("node[1-1000000000]", "node1"),
        ("a.b-c.example.org", "a.b-c.example.org"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", " ", "node[", "node]1", "node[]", ",node1", "node[1-2][", "a b"])
def test_an_unreadable_node_list_is_refused(nodelist: str) -> None:
    with pytest.raises(ConfigError, match="node list"):
        first_host(nodelist)


@pytest.mark.parametrize(("processes", "cores", "threads"), [(2, 16, "8"), (3, 16, "5"), (4, 2, "1"), (1, 2, "2")])
def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch, processes: int, cores: int, threads: str) -> None:
    assert launch.available_cores() >= 1
    monkeypatch.setattr(launch, "available_cores", lambda: cores)
    assert worker_environment(processes, alone=True, environ={})["OMP_NUM_THREADS"] == threads
    assert worker_environment(processes, alone=True, environ={"OMP_NUM_THREADS": ""})["OMP_NUM_THREADS"] == threads
    assert "OMP_NUM_THREADS" not in worker_environment(processes, alone=True, environ={"OMP_NUM_THREADS": "5"})


def test_gloo_is_told_an_interface_on_a_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "available_cores", lambda: 4)
    assert worker_environment(2, alone=True, environ={}) == {"OMP_NUM_THREADS": "2", launch.INTERFACE: "lo"}
    assert worker_environment(2, alone=False, environ={}) == {"OMP_NUM_THREADS": "2"}
    assert worker_environment(2, alone=True, environ={launch.INTERFACE: "eth0"}) == {"OMP_NUM_THREADS": "2"}


def test_a_place_without_an_address_or_before_the_first_is_refused() -> None:
    for place, said in (((0, 1, 0, 1, "", 0), "address of rank 0 is empty"), ((0, 2, -1, 2, "a", 1), "local rank -1 is")):
        with pytest.raises(ConfigError, match=said):
            launch.LaunchEnvironment(*place, "single")


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((name, True) for name in ("HF_TOKEN", "hf_token", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "API_KEYS")),
        *((name, True) for name in ("DB_PASSWORD", "PGPASSWORD", "DB_PASSWD", "GPG_PASSPHRASE", "GIT_CREDENTIALS")),
        *((name, True) for name in ("MAIL_PASS", "PASS", "PAT", "GITHUB_PAT", "DB_PWD", "SENTRY_DSN", "TOKEN_OF_ME")),
        *((name, False) for name in ("PATH", "PWD", "OLDPWD", "COMPASS", "KEYBOARD", "TOKENIZERS_PARALLELISM", "DSN")),
    ],
)
def test_secrets_are_known_by_their_names(name: str, secret: bool) -> None:
    assert launch.secret_values({name: " 12345678 "}) == (("12345678",) if secret else ())


def test_a_process_ends_with_the_one_that_has_launched_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    library = SimpleNamespace(prctl=lambda *given: asked.append(given))
    monkeypatch.setattr(launch, "ctypes", SimpleNamespace(CDLL=lambda _: library))
    for variables in ({}, launch.launched_by(os.getppid())):
        with launch.kept_environment(variables):
            launch.die_with_parent()
    with launch.kept_environment(launch.launched_by(os.getpid())), pytest.raises(SystemExit) as ended:
        launch.die_with_parent()
    assert ended.value.code == 128 + 9
    assert asked == [(1, 9)] * 3  # PR_SET_PDEATHSIG, SIGKILL


def test_starts_on_a_host_are_told_apart() -> None:
    """By their address and port, and by torchrun's numbers of a run and of its restarts."""
    run = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"}
    found = []
    for changes in ({}, {"RANK": "2"}, {"MASTER_ADDR": "b"}, {"MASTER_PORT": "9"}, *({name: "7"} for name in run)):
        environ = TORCHRUN | run | changes
        with launch.kept_environment(environ):
            found.append(launch.launch_identity(read_environment(environ)))
    assert found[0] == found[1]
    assert len(set(found)) == 5


def test_a_module_is_searched_where_this_process_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    for first, options in (("", ()), (os.getcwd(), ()), ("/elsewhere", ("-P",))):
        monkeypatch.setattr(sys, "path", [first, os.getcwd()])
        assert launch.python_arguments("a.b", ["c"]) == (*options, "-m", "a.b", "c")


def test_the_place_of_a_started_process_is_read_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"master_address": "node0", "master_port": 29400}
    given = RankRange(first=2, processes=2, world_size=4, run_id="run", restart=1, **address).variables(1)  # type: ignore[arg-type]
    more = {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "1", launch.AGENT_STORE: "False"}
    assert TORCHRUN | more == given
    for restart, start in (("0", 1.5), ("1", None)):
        with launch.kept_environment({"TORCHELASTIC_RESTART_COUNT": restart, launch.BEGAN: "1.5"}):
            assert launch.command_start_time() == start
    with launch.kept_environment({"TORCHELASTIC_RESTART_COUNT": "0", launch.BEGAN: ""}):
        assert launch.command_start_time() is None
    monkeypatch.setenv("ZEROMESH_OLD", "here")
    monkeypatch.delenv("ZEROMESH_NEW", raising=False)
    for value, aliases, found in (("", (), None), ("1", ("ZEROMESH_OLD",), None), ("1", (), "1"), ("2", (), "1")):
        launch.set_default("ZEROMESH_NEW", value, *aliases)
        assert os.environ.get("ZEROMESH_NEW") == found
    assert launch.secret_values({"a_token": "12345678", "B_TOKEN": "1234567"}) == ("12345678",)


def test_variables_are_set_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROMESH_TEST", "before")
    with launch.kept_environment({"ZEROMESH_TEST": "inside", "ZEROMESH_MORE": "1"}):
        assert launch.setting("ZEROMESH_TEST") == "inside"
    assert launch.setting("ZEROMESH_TEST") == "before"
    assert launch.setting("ZEROMESH_MORE") is None
