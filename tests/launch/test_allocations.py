"""What is read of a batch system's environment: the hosts of the job, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_providers import ENVIRONMENTS, read

from polyhvd.config import ConfigError
from polyhvd.launch.hosts.lists import Host, HostsError, parse_hosts
from polyhvd.launch.providers.allocation import Allocation, find
from polyhvd.launch.providers.lsf_agents import hosts_of_jsrun
from polyhvd.launch.providers.nodelist import counts
from polyhvd.launch.providers.slurm_agents import gpus_of_hosts, srun_command, srun_environment

SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
LSF = {"LSB_JOBID": "17", "LSB_MCPU_HOSTS": "a 4 b 4", "LSB_DJOB_NUMPROC": "8"}


def found(environ: dict[str, str]) -> Allocation:
    allocation = find(environ)
    assert allocation is not None
    return allocation


@pytest.mark.parametrize("path", ENVIRONMENTS, ids=lambda path: path.stem)
def test_a_recorded_environment_has_the_hosts_that_its_batch_system_means(path: Path, tmp_path: Path) -> None:
    said, environ = read(path)
    if "nodefile" in said:
        nodefile = tmp_path / "nodes"
        nodefile.write_text(said["nodefile"].replace(" ", "\n") + "\n")
        environ["PBS_NODEFILE"] = str(nodefile)
    if "hosts" in said:
        assert list(found(environ).hosts) == parse_hosts(said["hosts"])
    elif {"SLURM_JOB_NODELIST", "LSB_MCPU_HOSTS"} & environ.keys():  # tasks, whose allocation is not theirs
        with pytest.raises(ConfigError, match="and each would start a separate job"):
            find(environ)
    else:
        assert find(environ) is None


def test_what_is_of_no_batch_system_is_no_allocation() -> None:
    for environ in (
        {},
        {"SLURM_JOB_ID": "1"},
        {"LSB_JOBID": "1"},
        {"PBS_JOBID": "1"},
        {"SLURM_NODELIST": "n1"},
    ):
        assert find(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**SLURM, "SLURM_JOB_NODELIST": "n[1-"}, "SLURM_JOB_NODELIST: 'n.1-' is cut off"),
        (
            {**SLURM, "SLURM_JOB_NODELIST": "n1"},
            "names 1 hosts, but SLURM_JOB_NUM_NODES=2; is the list cut off",
        ),
        ({**SLURM, "SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not set, but SLURM_JOB_NUM_NODES=2"),
        (
            {**SLURM, "SLURM_TASKS_PER_NODE": "2(x3)"},
            "names 2 hosts, but SLURM_TASKS_PER_NODE=2.x3. is for 3",
        ),
        (
            {**SLURM, "SLURM_TASKS_PER_NODE": "2(x"},
            "SLURM_TASKS_PER_NODE: '2.x': '2.x' is neither a number",
        ),
        ({**SLURM, "SLURM_HET_SIZE": "2"}, "SLURM_HET_SIZE=2: .* heterogeneous job; name them with -H"),
        ({**SLURM, "SLURM_GPUS_PER_NODE": "a100:"}, "SLURM_GPUS_PER_NODE=a100:: 'a100:' is not a number"),
        (
            {**SLURM, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"},
            "srun has started this polyhvdrun as one of 4 .SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=4.",
        ),
        ({**LSF, "LSB_MCPU_HOSTS": "a 4 b"}, "LSB_MCPU_HOSTS=a 4 b is not a list of hosts"),
        ({**LSF, "LSB_MCPU_HOSTS": "a 4 b 0"}, "LSB_MCPU_HOSTS=a 4 b 0 is not a list of hosts"),
        ({**LSF, "LSB_DJOB_NUMPROC": "12"}, "LSB_MCPU_HOSTS=a 4 b 4 has 8 slots, but LSB_DJOB_NUMPROC=12"),
        ({"LSB_JOBID": "1", "LSB_DJOB_HOSTFILE": "/nowhere"}, "LSB_DJOB_HOSTFILE=/nowhere cannot be read"),
        ({**LSF, "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "6"}, "jsrun has started .* as one of 6"),
        ({"PBS_JOBID": "1", "PBS_NODEFILE": "/nowhere"}, "PBS_NODEFILE: cannot read the host file /nowhere"),
    ],
)
def test_what_cannot_be_is_one_line(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        find(environ)
    assert "\n" not in str(caught.value)


def test_a_node_file_that_is_cut_off_is_told(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\na\nb\n")
    with pytest.raises(ConfigError, match="has 3 lines, but PBS_NP=4; is the file cut off"):
        find({"PBS_JOBID": "1", "PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_NP": "4"})


def test_files_and_words_of_lsf_are_read_where_there_is_no_better_list(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\na\nb\n")
    hosts = (Host("a", 2), Host("b", 1))
    assert found({"LSB_JOBID": "1", "LSB_DJOB_HOSTFILE": str(tmp_path / "hosts")}).hosts == hosts
    assert found({"LSB_JOBID": "1", "LSB_HOSTS": "a a b"}).hosts == hosts


def test_ranks_need_slots_on_several_hosts_and_none_on_one() -> None:
    several, one = (
        found(SLURM),
        found({**SLURM, "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "1"}),
    )
    assert several.sized(3, None) == several.sized(None, None) == [Host("n1", 2), Host("n2", 2)]
    assert several.sized(5, 3) == [Host("n1", 3), Host("n2", 3)]
    assert one.sized(8, None) == [Host("n1", 8)]
    with pytest.raises(
        HostsError, match=r"Slurm job 17 has 4 slots \(n1:2,n2:2; SLURM_JOB_NODELIST=n\[1-2\]"
    ):
        several.sized(5, None)
    with pytest.raises(HostsError, match="has 2 slots"):
        one.sized(3, 2)


def test_gpus_of_a_node_are_its_slots_unless_the_job_has_asked_for_tasks() -> None:
    gpus = {**SLURM, "SLURM_GPUS_PER_NODE": "a100:2,v100:2"}
    assert found(gpus).hosts == (Host("n1", 4), Host("n2", 4))
    assert found({**gpus, "SLURM_NTASKS": "4"}).hosts == (Host("n1", 2), Host("n2", 2))


def test_requeueing_is_counted() -> None:
    assert found({**SLURM, "SLURM_RESTART_COUNT": "2"}).restarts == 2


def test_numbers_for_each_host_are_expanded() -> None:
    assert counts("2(x3),1") == [2, 2, 2, 1]
    assert counts("4") == [4]
    for text in ("", "2,", "0", "2(x0)", "2x3", "2(3)", "-1", "2(x3", "1(x65537)", "\u0662"):
        with pytest.raises(ValueError, match=r"is (?:neither|not) a number|is for more than"):
            counts(text)


def test_jsrun_s_ranks_are_as_many_on_each_compute_node() -> None:
    launch_node = found({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "batch1 1 c1 42 c2 42"})
    assert hosts_of_jsrun(launch_node, 12, None) == [Host("c1", 6), Host("c2", 6)]
    assert hosts_of_jsrun(launch_node, None, None) == [Host("c1", 42), Host("c2", 42)]
    assert hosts_of_jsrun(found(LSF), 2, 2) == [Host("a", 2), Host("b", 2)]
    with pytest.raises(HostsError, match="--jsrun: 13 ranks cannot be distributed equally over 2 hosts"):
        hosts_of_jsrun(launch_node, 13, None)
    for other in (None, found(SLURM)):
        with pytest.raises(ValueError, match="--jsrun is for jobs of LSF, on the hosts"):
            hosts_of_jsrun(other, 2, None)


def test_an_agent_s_step_is_what_its_options_say_alone() -> None:
    kept = {"SLURM_JOB_ID": "17", "SLURM_CONF": "/c", "SLURM_ARRAY_TASK_ID": "3", "PATH": "/bin", "X": "1"}
    input_variables = (
        "SLURM_CPUS_PER_TASK",
        "SLURM_NTASKS",
        "SLURM_EXACT",
        "SLURM_LABELIO",
        "SLURM_MPI_TYPE",
        "SLURM_GPUS_PER_TASK",
        "SLURM_PROCID",
        "SLURM_STEP_ID",
        "SRUN_CPUS_PER_TASK",
        "PMI_RANK",
    )
    assert srun_environment({**kept, **dict.fromkeys(input_variables, "1")}) == kept
    command = srun_command("n2", "17", "/usr/bin/python3", 10)
    assert "--nodelist=n2" in command
    assert command[command.index("--") + 1] == "/usr/bin/python3"
    assert not any("gpus" in word for word in command)


def test_an_agent_s_step_has_the_gpus_of_all_its_ranks() -> None:
    hosts = [Host("n1", 4), Host("n2", 1)]
    assert gpus_of_hosts({"SLURM_GPUS_PER_TASK": "2"}, hosts) == {"n1": "8", "n2": "2"}
    assert gpus_of_hosts({"SLURM_GPUS_PER_TASK": "a100:1"}, hosts) == {"n1": "a100:4", "n2": "a100:1"}
    assert gpus_of_hosts({"SLURM_GPUS_PER_TASK": "a:1,v:2"}, hosts) == {"n1": "a:4,v:8", "n2": "a:1,v:2"}
    for environ in ({}, {"SLURM_GPUS_PER_TASK": "many"}, {"SLURM_GPUS_PER_NODE": "4"}):
        assert gpus_of_hosts(environ, hosts) == {}
    assert "--gpus-per-node=8" in srun_command("n1", "17", "python", 10, "8")
