"""Jobs of a real Slurm of two hosts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm
from joining import DEADLINE_S, WORK, Job, environment
from launching import wait_until

pytestmark = pytest.mark.skipif(bool(slurm.available()), reason=slurm.available() or "there is Slurm")


@pytest.fixture(scope="module")
def srun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which srun finds Slurm, and ranks a folder that all hosts see."""
    folder = tmp_path_factory.mktemp("slurm")
    with slurm.cluster(folder) as found:
        yield {**environment(**found), "POLYHVD_SHARED_DIR": str(folder / "shared")}


def places(status: int, out: str, error: str) -> list[str]:
    assert status == 0, error
    return sorted(line for line in out.splitlines() if line.startswith("place"))


def run(argv: list[str], env: dict[str, str]) -> tuple[int, str, str]:
    with Job() as job:
        job.start(argv, env)
        return job.finish()[0]


@pytest.mark.parametrize("pmi", ["none", "pmi2", "pmix"])
def test_tasks_of_two_hosts_meet_without_a_secret_of_the_user_s(srun: dict[str, str], pmi: str) -> None:
    found = run(["srun", f"--mpi={pmi}", "-N2", "-n4", sys.executable, "-c", WORK], srun)
    assert places(*found) == [f"place {rank} 4 {rank % 2} 2 {rank // 2} 2 sum 10.0" for rank in range(4)]
    assert os.listdir(srun["POLYHVD_SHARED_DIR"]) == []


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
def test_tasks_of_two_hosts_meet_through_mpi_over_pmix(srun: dict[str, str]) -> None:
    """With the interface named to both: docker0 is the same on each host, and hosts have no names here."""
    chosen = {"OMPI_MCA_btl_tcp_if_include": "eth0", "POLYHVD_GLOO_IFACE": "eth0"}
    env = {**srun, **chosen, "POLYHVD_CONTROLLER": "mpi", "POLYHVD_SHARED_DIR": "/proc/nowhere"}
    found = run(["srun", "--mpi=pmix", "-N2", "-n4", sys.executable, "-c", WORK], env)
    assert places(*found) == [f"place {rank} 4 {rank % 2} 2 {rank // 2} 2 sum 10.0" for rank in range(4)]


@pytest.mark.parametrize("pmi", ["none", "pmix"])
def test_tasks_of_one_host_need_no_folder(srun: dict[str, str], pmi: str) -> None:
    env = {**srun, "POLYHVD_SHARED_DIR": "/proc/nowhere"}
    found = run(["srun", f"--mpi={pmi}", "-N1", "-n2", sys.executable, "-c", WORK], env)
    assert places(*found) == ["place 0 2 0 2 0 1 sum 3.0", "place 1 2 1 2 0 1 sum 3.0"]


def test_components_of_a_heterogeneous_job_are_one_job(srun: dict[str, str]) -> None:
    rank = [sys.executable, "-c", WORK]
    found = run(["srun", "-N1", "-n2", "-wn1", *rank, ":", "-N1", "-n1", "-wn2", *rank], srun)
    assert places(*found) == [
        "place 0 3 0 2 0 2 sum 6.0",
        "place 1 3 1 2 0 1 sum 6.0",
        "place 2 3 0 1 1 2 sum 6.0",
    ]


def test_a_folder_that_cannot_be_used_is_named(srun: dict[str, str]) -> None:
    env = {**srun, "POLYHVD_SHARED_DIR": "/proc/nowhere"}
    status, _, error = run(["srun", "-N2", "-n2", sys.executable, "-c", WORK], env)
    assert status != 0
    assert "/proc/nowhere: No such file or directory; set POLYHVD_SHARED_DIR to another folder" in error


def test_a_batch_script_is_no_rank_and_its_steps_are(srun: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORK)
    script = tmp_path / "job.sh"
    line = f"{sys.executable} {tmp_path / 'work.py'}"
    script.write_text(f"#!/bin/sh\n{line}\nsrun {line}\nsrun -n1 -N1 {line}\necho end\n")
    status, _, error = run(["sbatch", "-N2", "-n4", "-o", str(tmp_path / "out"), str(script)], srun)
    assert status == 0, error
    printed = tmp_path / "out"
    wait_until(
        lambda: printed.exists() and printed.read_text().endswith("end\n"), "the job's end", DEADLINE_S
    )
    assert places(0, printed.read_text(), "") == [
        "place 0 1 0 1 0 1 sum 1.0",
        "place 0 1 0 1 0 1 sum 1.0",
        *(f"place {rank} 4 {rank % 2} 2 {rank // 2} 2 sum 10.0" for rank in range(4)),
    ]
