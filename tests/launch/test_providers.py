"""What providers read of environments that launchers make, and which provider wins where several match."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from polyhvd.config import ConfigError
from polyhvd.launch.providers.choice import choose, explain, seen
from polyhvd.launch.providers.precedence import PROVIDERS, RAY
from polyhvd.launch.providers.ray import Assignment, RayProvider
from polyhvd.runtime.placement import Placement

ENVIRONMENTS = sorted((Path(__file__).parent / "environments").glob("*.env"))
SRUN = {
    "SLURM_JOB_ID": "1",
    "SLURM_PROCID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "8",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
TORCHRUN = {**BY_HAND, "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"}


def read(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """What a file says of itself, and its variables."""
    lines = path.read_text().splitlines()
    said = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# ") and ": " in line)
    said |= {line[2:]: "yes" for line in lines if line.startswith("# ") and ": " not in line}
    return said, dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def cluster(kind: str, index: int = 0, **hosts: list[str]) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": hosts, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize("path", ENVIRONMENTS, ids=lambda path: path.stem)
def test_a_recorded_environment_is_read_as_its_launcher_means_it(path: Path) -> None:
    said, environ = read(path)
    assert said["source"]
    chosen = choose(seen(PROVIDERS, environ))
    if said["provider"] == "none":
        assert chosen is None
        return
    assert chosen is not None
    claim = chosen.claim
    assert chosen.provider.name == said["provider"]
    size = "unknown" if claim.size is None else claim.size
    assert f"{claim.rank} of {size}" == said["place"]
    assert claim.one_host == ("one host" in said)
    if "root" in said:
        assert claim.root == said["root"]


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "7"},
        {"WORLD_SIZE": "7"},
        {"RANK": "first", "WORLD_SIZE": "many"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {"TF_CONFIG": ""},
        {"TF_CONFIG": "{}"},
        {"POLYHVD_SIZE": "1"},
    ],
)
def test_a_word_that_anybody_may_use_is_no_claim(environ: dict[str, str]) -> None:
    assert seen(PROVIDERS, environ) == []


@pytest.mark.parametrize(
    ("outer", "inner", "winner"),
    [
        (SRUN, {**TORCHRUN, "WORLD_SIZE": "16"}, "torchrun"),
        (SRUN, {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, "torchrun"),  # eight searches
        (SRUN, OPEN_MPI, "MPI"),
        (OPEN_MPI, TORCHRUN, "torchrun"),
        (cluster("worker", chief=["a:1"], worker=["b:1"]), OPEN_MPI, "MPI"),
        ({"JOB_COMPLETION_INDEX": "1"}, TORCHRUN, "torchrun"),
        (SRUN, {"POLYHVD_RANK": "0", "POLYHVD_SIZE": "2", "POLYHVD_RENDEZVOUS": "a:1"}, "polyhvdrun"),
        ({"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "b"}, OPEN_MPI, "MPI"),
        ({"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "b"}, TORCHRUN, "torchrun"),
        ({"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "a"}, BY_HAND, "torch.distributed"),
        (SRUN, {**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}, "srun"),
        (SRUN, {"PMI_RANK": "1", "PMI_SIZE": "16"}, "MPI"),  # mpiexec, whose proxies srun has started
    ],
)
def test_a_launcher_within_another_wins(outer: dict[str, str], inner: dict[str, str], winner: str) -> None:
    chosen = choose(seen(PROVIDERS, {**outer, **inner}))
    assert chosen is not None
    assert chosen.provider.name == winner


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        (SRUN, BY_HAND, ("WORLD_SIZE=2", "SLURM_STEP_NUM_TASKS=8")),
        (SRUN, {**BY_HAND, "RANK": "0", "WORLD_SIZE": "1"}, ("WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=8")),
        (SRUN, {**BY_HAND, "WORLD_SIZE": "8"}, ("RANK=1", "SLURM_PROCID=5")),
        (OPEN_MPI, BY_HAND, ("OMPI_COMM_WORLD_SIZE=4", "WORLD_SIZE=2")),
        (cluster("worker", worker=["a:1", "b:1", "c:1"]), BY_HAND, ("TF_CONFIG: task worker 0", "RANK=1")),
        ({"JOB_COMPLETION_INDEX": "0"}, BY_HAND, ("JOB_COMPLETION_INDEX=0", "RANK=1")),
        (
            {"CLUSTER_SPEC": cluster("worker", 1, worker=["a:1", "b:1"])["TF_CONFIG"]},
            cluster("worker", 0, worker=["a:1", "b:1"]),
            ("CLUSTER_SPEC: task worker 1", "TF_CONFIG: task worker 0"),
        ),
    ],
)
def test_a_contradiction_names_both_sides_with_their_variables(
    one: dict[str, str], other: dict[str, str], named: tuple[str, str]
) -> None:
    found = seen(PROVIDERS, {**one, **other})
    with pytest.raises(ConfigError, match="contradict each other") as caught:
        choose(found)
    assert all(name in str(caught.value) for name in named)
    assert explain(found) == [str(caught.value)]


def test_variables_that_agree_are_no_contradiction() -> None:
    by_hand = {**BY_HAND, "RANK": "5", "WORLD_SIZE": "8"}
    assert choose(seen(PROVIDERS, {**SRUN, **by_hand})) is not None


@pytest.mark.parametrize("started", [SRUN, TORCHRUN, OPEN_MPI], ids=["srun", "torchrun", "mpirun"])
def test_a_place_that_ray_has_given_comes_before_variables_of_whatever_started_the_node(
    started: dict[str, str],
) -> None:
    ray = RayProvider(within=RAY.within)
    providers = (ray, *(provider for provider in PROVIDERS if provider is not RAY))
    before = choose(seen(providers, started))
    assert before is not None
    assert before.provider is not ray
    ray.give(Assignment(Placement(rank=2, size=3, local_rank=1, local_size=2), "", "00" * 32))
    after = choose(seen(providers, started))
    assert after is not None
    assert (after.provider, after.claim.rank, after.claim.size) == (ray, 2, 3)
    assert "0000" not in repr(ray._given)


def test_the_doctor_s_lines_say_what_was_seen_and_which_came_first() -> None:
    first, second = explain(seen(PROVIDERS, {**SRUN, **TORCHRUN}))
    assert re.match(r"init\(\) joins: torchrun gives rank 1 of 2 \(RANK=1, WORLD_SIZE=2", first)
    assert re.match(r"seen as well, and not used: srun gives rank 5 of 8 \(SLURM_PROCID=5", second)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"'}, "TF_CONFIG is not a description of a cluster"),
        ({"TF_CONFIG": '{"cluster": {"worker": "a:1"}}'}, "TF_CONFIG is not a description of a cluster"),
        ({"TF_CONFIG": "[" * 100_000}, "TF_CONFIG is not a description of a cluster"),
        (cluster("worker", worker=["a:1", "b:1", "a:1"]), "TF_CONFIG names a:1 twice"),
        (
            cluster("worker", worker=[]),
            "is not a rank of its cluster .TF_CONFIG: task worker 0 of 0 of worker",
        ),
        ({"SM_HOSTS": '["a", "a"]', "SM_CURRENT_HOST": "a"}, "SM_HOSTS must name each host once"),
        ({"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "c"}, "SM_CURRENT_HOST must be one of"),
        ({"SM_HOSTS": '["a", "b"', "SM_CURRENT_HOST": "a"}, "SM_HOSTS must be a list of names"),
        ({"TF_CONFIG": '{"cluster": ' + 20_000 * "["}, "TF_CONFIG is not a description of a cluster"),
        ({"TF_CONFIG": "[1]"}, "TF_CONFIG is not a description of a cluster"),
        (
            cluster("worker", 2, worker=["a:1", "b:1"]),
            "is not a rank of its cluster .TF_CONFIG: task worker 2",
        ),
        (cluster("ps", worker=["a:1"], ps=["b:1"]), "is not a rank of its cluster"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}'}, "is not a rank of its cluster"),
        (
            {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}}'},
            r"is not a rank of its cluster \(TF_CONFIG: task worker \? of 2 of worker",
        ),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST: .* is cut off"),
        ({**SRUN, "SLURM_PROCID": "first"}, r"init\(\): SLURM_PROCID='first': must be a number, 0 or more"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1e9"}, "SLURM_STEP_NUM_TASKS='1e9': must be a number"),
        ({**BY_HAND, "RANK": "-1"}, "RANK='-1': must be a number"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE='two': must be a number"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "\u00b2"}, "OMPI_COMM_WORLD_RANK='\u00b2': must be a number"),
        ({"PMI_RANK": "0", "PMI_SIZE": "x"}, "PMI_SIZE='x': must be a number"),
        ({"PMIX_RANK": "x"}, "PMIX_RANK='x': must be a number"),
        ({"MV2_COMM_WORLD_RANK": "x"}, "MV2_COMM_WORLD_RANK='x': must be a number"),
        ({"JOB_COMPLETION_INDEX": "last"}, "JOB_COMPLETION_INDEX='last': must be a number"),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "x"}, "JSM_NAMESPACE_SIZE='x': must be a number"),
    ],
)
def test_variables_that_cannot_be_read_are_an_error(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        seen(PROVIDERS, environ)


def test_ranks_of_a_cluster_are_numbered_as_tf_distribute_does() -> None:
    hosts = {"worker": ["w0:1", "w1:1"], "ps": ["p:1"], "chief": ["c:1"], "evaluator": ["e:1"]}
    cluster_provider = next(provider for provider in PROVIDERS if provider.name == "TF_CONFIG")
    places = [("chief", 0), ("worker", 0), ("worker", 1)]
    claims = [cluster_provider.detect(cluster(kind, index, **hosts)) for kind, index in places]
    assert [(claim.rank, claim.size, claim.root) for claim in claims if claim] == [
        (rank, 3, "c") for rank in range(3)
    ]
    assert len({claim.job_id for claim in claims if claim}) == 1
