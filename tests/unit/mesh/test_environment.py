"""The launch environment of every launcher, whole and in part."""

import re

import pytest

from zeromesh import environment as launch
from zeromesh.environment import LaunchEnvironment, first_host, read_environment, worker_environment
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


def place(environment: LaunchEnvironment) -> tuple[int, int, int, int]:
    return environment.rank, environment.world_size, environment.local_rank, environment.local_world_size


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_a_process_that_nobody_launched_is_a_world_of_one() -> None:
    alone = read_environment({})
    assert place(alone) == (0, 1, 0, 1)
    assert (alone.launcher, alone.master_address, alone.master_port) == ("single", "127.0.0.1", 0)


def test_torchrun() -> None:
    environment = read_environment(TORCHRUN)
    assert place(environment) == (3, 4, 1, 2)
    assert environment.launcher == "torchrun"
    assert (environment.master_address, environment.master_port) == ("node0", 29400)


def test_torchrun_variables_without_local_ones_are_one_process_per_host() -> None:
    assert place(read_environment(without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"))) == (3, 4, 0, 1)


def test_torchrun_inside_slurm_and_mpi_wins() -> None:
    assert read_environment(SLURM | OPENMPI | MPICH | TORCHRUN).launcher == "torchrun"


def test_slurm() -> None:
    environment = read_environment(SLURM)
    assert place(environment) == (3, 4, 1, 2)
    assert environment.launcher == "slurm"
    assert environment.master_address == "node07"
    assert 10000 <= environment.master_port < 30000


def test_slurm_ports_follow_the_job_and_the_step() -> None:
    port = read_environment(SLURM).master_port
    assert read_environment(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).master_port == port
    assert read_environment(SLURM | {"SLURM_JOB_ID": "4712"}).master_port != port
    assert read_environment(SLURM | {"SLURM_STEP_ID": "1"}).master_port != port
    chosen = read_environment(SLURM | {"MASTER_PORT": "1234", "MASTER_ADDR": "10.0.0.1"})
    assert (chosen.master_address, chosen.master_port) == ("10.0.0.1", 1234)


def test_slurm_with_uneven_nodes() -> None:
    uneven = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}
    assert place(read_environment(uneven)) == (3, 4, 0, 1)
    assert place(read_environment(uneven | {"SLURM_NODEID": "0", "SLURM_PROCID": "2"}))[3] == 3


def test_slurm_without_task_counts_per_node() -> None:
    bare = without(SLURM, "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")
    assert place(read_environment(bare)) == (3, 4, 1, 2)
    one_node = without(bare, "SLURM_NTASKS_PER_NODE") | {"SLURM_NNODES": "1"}
    assert place(read_environment(one_node)) == (3, 4, 1, 4)
    with pytest.raises(ConfigError, match="SLURM_NTASKS_PER_NODE"):
        read_environment(without(bare, "SLURM_NTASKS_PER_NODE"))


def test_the_smallest_slurm_environment() -> None:
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NODELIST")
    environment = read_environment({name: SLURM[name] for name in names})
    assert place(environment) == (3, 4, 1, 2)
    assert environment.master_address == "node01"


@pytest.mark.parametrize(
    "environ",
    [
        # A shell that `salloc` opened on the login node.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "node[1-2]"},
        # The body of a batch script, as sbatch sets it.
        without(SLURM, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST") | {"SLURM_PROCID": "0"},
    ],
)
def test_a_slurm_shell_outside_srun_is_a_single_process(environ: dict[str, str]) -> None:
    environment = read_environment(environ)
    assert (environment.launcher, environment.world_size) == ("single", 1)


def test_the_interactive_step_of_salloc_has_one_task() -> None:
    interactive = SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    interactive |= {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"}
    assert place(read_environment(interactive)) == (0, 1, 0, 1)


def test_openmpi_and_mpich() -> None:
    openmpi, mpich = read_environment(OPENMPI), read_environment(MPICH)
    assert place(openmpi) == place(mpich) == (1, 2, 1, 2)
    assert (openmpi.launcher, mpich.launcher) == ("openmpi", "mpich")
    assert openmpi.master_address == mpich.master_address == "127.0.0.1"
    assert mpich.master_port == 29500
    other = read_environment(OPENMPI | {"PMIX_NAMESPACE": "prterun-host-4466@1"})
    assert openmpi.master_port != other.master_port


def test_mpi_inside_a_slurm_job_wins_over_its_daemon() -> None:
    daemon = SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert read_environment(daemon | OPENMPI).launcher == "openmpi"
    assert read_environment(daemon | MPICH).launcher == "mpich"


def test_slurm_with_pmi2_is_slurm() -> None:
    assert read_environment(SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"}).launcher == "slurm"


def test_mpi_over_several_hosts_needs_the_address_of_rank_0() -> None:
    spread = OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        read_environment(spread)
    assert read_environment(spread | {"MASTER_ADDR": "node3"}).master_address == "node3"


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
        (without(SLURM, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), ["SLURM_STEP_NODELIST"]),
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
        (TORCHRUN | {"MASTER_PORT": "70000"}, "port 70000"),
        (TORCHRUN | {"WORLD_SIZE": "four"}, "WORLD_SIZE: got 'four'; allowed is an integer"),
        (TORCHRUN | {"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE"),
        (SLURM | {"SLURM_STEP_NODELIST": "node[01"}, "cannot be read; set MASTER_ADDR"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "tasks per node 'two'"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4"}, "SLURM_NODEID is 1"),
    ],
)
def test_contradictions_are_refused(environ: dict[str, str], message: str) -> None:
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
def test_workers_share_the_cores(processes: int, cores: int, threads: str) -> None:
    assert worker_environment(processes, environ={}, cores=cores)["OMP_NUM_THREADS"] == threads


def test_what_is_set_stays() -> None:
    assert "OMP_NUM_THREADS" not in worker_environment(2, environ={"OMP_NUM_THREADS": "5"}, cores=16)
    assert worker_environment(2, environ={"OMP_NUM_THREADS": ""}, cores=16)["OMP_NUM_THREADS"] == "8"
    assert launch.available_cores() >= 1


def test_variables_are_set_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROMESH_TEST", "before")
    with launch.kept_environment({"ZEROMESH_TEST": "inside", "ZEROMESH_MORE": "1"}):
        assert launch.setting("ZEROMESH_TEST") == "inside"
    assert launch.setting("ZEROMESH_TEST") == "before"
    assert launch.setting("ZEROMESH_MORE") is None
