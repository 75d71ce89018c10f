"""A process that another launcher has started never becomes a silent world of one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from polyhvd.launch.providers.foreign import foreign_launch

#: What launchers set, shortened to what could matter.
TORCHRUN = {
    "GROUP_RANK": "0",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "RANK": "1",
    "ROLE_RANK": "1",
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "2",
}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
SRUN = {
    **BATCH_SCRIPT,
    "SLURM_PROCID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "8",
}
SRUN_OF_ONE = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_RANK": "0",
}
#: mpirun's daemons are tasks of a step, and what they start inherits that.
OPEN_MPI_OF_ONE_IN_SLURM = {**SRUN, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}
HYDRA = {"PMI_FD": "9", "PMI_RANK": "2", "PMI_SIZE": "3"}
JSRUN = {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "6", "PMIX_RANK": "1"}
TF_WORKERS = {
    "TF_CONFIG": '{"cluster": {"chief": ["a:1"], "ps": ["b:1"], "worker": ["c:1", "d:1"]}, '
    '"task": {"type": "worker", "index": 1}}'
}
TF_EVALUATOR = {"TF_CONFIG": TF_WORKERS["TF_CONFIG"].replace('"type": "worker"', '"type": "evaluator"')}
TF_ALONE = {"TF_CONFIG": '{"cluster": {"worker": ["c:1"]}, "task": {"type": "worker", "index": 0}}'}
SAGEMAKER = {"SM_CURRENT_HOST": "algo-2", "SM_HOSTS": '["algo-1","algo-2"]'}
MXNET = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"}


@pytest.mark.parametrize(
    ("environ", "launcher", "size", "cure"),
    [
        (OPEN_MPI, "Open MPI", 4, "mpirun -np 4"),
        (HYDRA, "MPI's launcher", 3, "mpirun -np 3"),
        (MXNET, "MXNet", 2, "polyhvdrun -np 2"),
        ({"PMIX_RANK": "3"}, "PMIx", 0, "mpirun -np N"),
    ],
)
def test_one_of_several_is_recognised(environ: dict[str, str], launcher: str, size: int, cure: str) -> None:
    found = foreign_launch(environ)
    assert found is not None
    assert found.certain
    assert launcher in found.launcher
    assert found.size == size
    assert cure in found.cure


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH_SCRIPT,
        OPEN_MPI_OF_ONE_IN_SLURM,
        {**HYDRA, "PMI_RANK": "0", "PMI_SIZE": "1"},
        {**MXNET, "DMLC_ROLE": "server"},
    ],
)
def test_one_of_one_is_left_alone(environ: dict[str, str]) -> None:
    assert foreign_launch(environ) is None


def test_first_of_an_unknown_number_is_uncertain() -> None:
    found = foreign_launch({"PMIX_RANK": "0"})
    assert found is not None
    assert not found.certain
    assert foreign_launch({"PMIX_RANK": "0"}, met_by_mpi=True) is None


def init(environ: dict[str, str], call: str = "polyhvd.init()") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import polyhvd; {call}; print(polyhvd.size())"],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_init_says_what_was_seen_and_how_to_start() -> None:
    result = init(MXNET)
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert "ConfigError: init(): this process is one of 2 that MXNet's launcher has started" in error
    assert "DMLC_NUM_WORKER=2" in error
    assert "polyhvdrun -np 2" in error
    assert "POLYHVD_ALONE=1" in error


@pytest.mark.parametrize(
    "environ",
    [SRUN_OF_ONE, {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, TF_EVALUATOR, TF_ALONE, {"RANK": "7"}],
)
def test_one_of_one_is_a_world_of_one(environ: dict[str, str]) -> None:
    result = init(environ)
    assert (result.returncode, result.stdout, result.stderr) == (0, "1\n", "")


def test_variables_that_contradict_each_other_are_told_at_once() -> None:
    patient = {"POLYHVD_START_TIMEOUT": "600"}  # more than init() above waits
    result = init({**SRUN, "RANK": "0", "WORLD_SIZE": "1", **patient})
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert "contradict each other" in error
    assert "RANK=0, WORLD_SIZE=1" in error
    assert "SLURM_PROCID=5, SLURM_STEP_NUM_TASKS=8" in error


def test_several_hosts_without_a_secret_are_told_what_to_add() -> None:
    result = init({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"})
    assert result.returncode == 1
    assert "may be on several hosts, and have no secret" in result.stderr
    assert "secrets.token_hex(32))' > ~/polyhvd.secret)" in result.stderr
    assert "before torchrun, on every host" in result.stderr
    assert "export POLYHVD_SECRET_FILE=~/polyhvd.secret" in result.stderr


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 is not below the size 2"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "does not contain the address of rank 0 (RANK=1, WORLD_SIZE=2)"),
        ({"JOB_COMPLETION_INDEX": "1"}, "but not set their number; set POLYHVD_SIZE"),
        ({**MXNET, "DMLC_NUM_WORKER": "two"}, "DMLC_NUM_WORKER='two': must be a number"),
        ({**TORCHRUN, "POLYHVD_SECRET": "zz"}, "POLYHVD_SECRET: the job's secret must be hexadecimal"),
        ({**TORCHRUN, "POLYHVD_SECRET_FILE": "/nowhere"}, "POLYHVD_SECRET_FILE=/nowhere: No such file"),
        (
            {**TORCHRUN, "POLYHVD_CONTROLLER": "mpi"},
            "MPI has started only this process, but torchrun gives rank 1 of 2",
        ),
    ],
)
def test_what_cannot_be_joined_is_told_in_a_line(environ: dict[str, str], message: str) -> None:
    result = init(environ)
    assert result.returncode == 1
    assert message in result.stderr.splitlines()[-1]


def test_world_of_one_on_purpose_is_possible_everywhere() -> None:
    for name in ("POLYHVD_ALONE", "HOROVOD_ALONE"):
        result = init({**TORCHRUN, name: "1"})
        assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr


def test_batch_script_is_a_world_of_one() -> None:
    result = init(BATCH_SCRIPT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "1\n", "")


def test_uncertain_first_of_several_says_so() -> None:
    result = init({"JOB_COMPLETION_INDEX": "0"})
    assert (result.returncode, result.stdout) == (0, "1\n")
    assert "may be one of several that Kubernetes has started" in result.stderr


def test_mpi_that_is_kept_out_makes_no_world_of_one() -> None:
    result = init({**OPEN_MPI, "POLYHVD_CONTROLLER": "gloo"})
    assert result.returncode == 1
    assert "one of 4 that Open MPI has started" in result.stderr


@pytest.mark.parametrize(
    ("environ", "size"),
    [(SRUN, 2), (TORCHRUN, 2), (SAGEMAKER, 2), (TF_WORKERS, 2), (JSRUN, 2), (TORCHRUN, 1), (OPEN_MPI, 1)],
)
def test_polyhvdrun_starts_jobs_within_other_launchers(environ: dict[str, str], size: int) -> None:
    program = "import polyhvd; polyhvd.init(); print('size', polyhvd.size())"
    result = subprocess.run(
        [sys.executable, "-m", "polyhvd.launch", "-H", f"localhost:{size}", sys.executable, "-c", program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] size {size}" for rank in range(size)]


@pytest.mark.parametrize(
    ("comm", "message"),
    [("5", "expected a communicator of mpi4py or a list"), ("[0]", "needs a job that MPI has started")],
)
def test_a_comm_that_cannot_be_used_is_an_error(comm: str, message: str) -> None:
    result = init({}, f"polyhvd.init(comm={comm})")
    assert f"InvalidArgumentError: init(comm={comm}): " in result.stderr
    assert message in result.stderr
