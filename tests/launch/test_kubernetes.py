"""The manifests of examples/kubernetes, run: pods as namespaces with their variables, files and DNS names."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import controllers
import pods
import pytest
from joining import ROOT, WORK
from pods import Cluster, Pod, Running

pytestmark = pytest.mark.skipif(bool(pods.available()), reason=pods.available() or "there is a cluster")
EXAMPLES = ROOT / "examples" / "kubernetes"
#: Three pods of a rank each, and where they are.
THREE = [f"place {rank} 3 0 1 {rank} 3 sum 6.0" for rank in range(3)]
#: The same for two pods of two ranks each.
TWICE_TWO = [f"place {rank} 4 {rank % 2} 2 {rank // 2} 2 sum 10.0" for rank in range(4)]
LOOP = WORK + "while True:\n    hvd.allreduce(np.ones(3), name='step')\n"
#: Its first attempt ends after a common step, by a fault of rank 1's.
ONE_FAULT = (
    WORK.partition("total")[0]
    + """
import pathlib
first = pathlib.Path("/app/attempted")
hvd.barrier()
fails = hvd.rank() == 1 and not first.exists()
hvd.allreduce(np.ones(3), name="step")
if fails:
    first.touch()
    sys.exit(3)
total = hvd.allreduce(np.ones(3), name="another")
"""
    + WORK.partition("hvd.init()\n")[2]
).replace("import os", "import os, sys", 1)
DIGITS = f"""
import hashlib, os, runpy, sys
sys.path.insert(0, "{ROOT}/examples")
sys.argv[1:] = ["--epochs", "3"]
trained = runpy.run_path("{ROOT}/examples/numpy_logistic.py")
digest = hashlib.sha256(trained["weights"].tobytes()).hexdigest()
os.write(1, f"\\nweights {{digest}} accuracy {{float(trained['accuracy']):.3f}}\\n".encode())
"""


def several_ranks() -> tuple[list[Pod], list[controllers.Manifest]]:
    documents = controllers.read(EXAMPLES / "indexed-job-several-ranks.yaml")
    return controllers.indexed_job(documents), controllers.services(documents)


def one_rank() -> tuple[list[Pod], list[controllers.Manifest]]:
    documents = controllers.read(EXAMPLES / "indexed-job.yaml")
    return controllers.indexed_job(documents), controllers.services(documents)


def say(pod: Pod, name: str, value: str | None) -> None:
    """Give its container another value of a variable, or none."""
    (container,) = pod.spec["containers"]
    container["env"] = [item for item in container["env"] if item["name"] != name]
    if value is not None:
        container["env"].append({"name": name, "value": value})


def error(running: Running) -> str:
    """The last error that a container has printed, all in one line."""
    return " ".join(running.log[running.log.rindex("Error") :].split())


@contextmanager
def training(folder: Path, source: str) -> Iterator[tuple[Cluster, list[Running]]]:
    """indexed-job.yaml, once all its ranks are in the world."""
    made, services = one_rank()
    with Cluster(folder, services) as cluster:
        cluster.train(source)
        running = [cluster.start(pod) for pod in made]
        cluster.wait_for(lambda: len(cluster.places()) == 3)
        yield cluster, running


def test_an_indexed_job_trains_one_model(tmp_path: Path) -> None:
    made, services = one_rank()
    with Cluster(tmp_path, services) as cluster:
        cluster.train(DIGITS)
        for pod in made:
            cluster.start(pod)
        assert cluster.finish() == [0, 0, 0], cluster.logs()
        lines = [line for one in cluster.pods.values() for line in one.log.splitlines() if "weights" in line]
    assert len(lines) == 3
    assert len(set(lines)) == 1
    assert float(lines[0].split()[-1]) > 0.8


def test_pods_may_start_in_any_order_and_long_before_they_have_a_name(tmp_path: Path) -> None:
    made, services = one_rank()
    with Cluster(tmp_path, services) as cluster:
        cluster.train(WORK)
        for index in (2, 1, 0):
            say(made[index], "HOSTNAME", made[index].name)  # as some set it: not what the host is called
            cluster.start(made[index])
            time.sleep(1.5)
        assert cluster.finish() == [0, 0, 0], cluster.logs()
        assert cluster.places() == THREE


def test_pods_of_several_ranks_are_one_job(tmp_path: Path) -> None:
    made, services = several_ranks()
    with Cluster(tmp_path, services, {"polyhvd": {"secret": "ab" * 32 + "\n"}}) as cluster:
        cluster.train(WORK)
        for pod in reversed(made):
            cluster.start(pod)
            time.sleep(1.0)
        assert cluster.finish() == [0, 0], cluster.logs()
        assert cluster.places() == TWICE_TWO


def test_a_pod_that_is_deleted_is_named_by_the_others(tmp_path: Path) -> None:
    with training(tmp_path, LOOP) as (cluster, running):
        assert cluster.delete(running[1]) < 20  # the grace period is 60 s
        assert cluster.finish() == [1, 1]
        for survivor in (running[0], running[2]):
            assert "PeerLostError" in survivor.log
            assert "rank 1" in error(survivor)


def test_a_pod_of_several_ranks_that_is_deleted_ends_the_job_within_its_grace_period(tmp_path: Path) -> None:
    made, services = several_ranks()
    source = LOOP.replace("hvd.init()", "hvd.init()\nimport signal\nsignal.signal(signal.SIGTERM, leave)")
    # The signal does not reach all pods in one instant, and who leaves at once is a lost peer of the others.
    saving = (
        "import os, time\ndef leave(*_):\n    os.write(1, b'saved\\n')\n    time.sleep(2)\n    os._exit(0)\n"
    )
    with Cluster(tmp_path, services) as cluster:
        cluster.train(saving + source)
        first, second = [cluster.start(pod) for pod in made]
        cluster.wait_for(lambda: len(cluster.places()) == 4)
        assert cluster.delete(second) < 30
        cluster.wait_for(lambda: first.status is not None)
        assert (first.log + second.log).count("saved") == 4


@pytest.mark.parametrize("policy", ["Never", "OnFailure"])
def test_a_rank_that_fails_has_all_ranks_start_again(tmp_path: Path, policy: str) -> None:
    made, services = one_rank()
    with Cluster(tmp_path, services) as cluster:
        cluster.train(ONE_FAULT)
        for pod in made:
            pod.spec["restartPolicy"] = policy
            cluster.start(pod)
        started = []

        def done() -> bool:
            started.append(cluster.reconcile())
            return all(running.status == 0 for running in cluster.pods.values())

        cluster.wait_for(done)
        assert sum(started) == 3  # each once: ranks that come first wait for those that have yet to fail
        assert len(cluster.places()) == 3


def test_a_rank_that_ends_before_it_has_met_the_others_may_come_again(tmp_path: Path) -> None:
    made, services = one_rank()
    source = """
import os, pathlib, sys
first = pathlib.Path("/app/attempted")
if os.environ["JOB_COMPLETION_INDEX"] == "2" and not first.exists():
    first.touch()
    sys.exit(3)
"""
    with Cluster(tmp_path, services) as cluster:
        cluster.train(source + WORK)
        running = [cluster.start(pod) for pod in made]
        cluster.wait_for(lambda: running[2].status == 3)
        assert cluster.reconcile() == 1
        assert cluster.finish() == [0, 0, 0], cluster.logs()
        assert cluster.places() == THREE


def test_a_stateful_set_starts_again_until_it_has_trained_and_then_sleeps(tmp_path: Path) -> None:
    documents = controllers.read(EXAMPLES / "statefulset.yaml")
    with Cluster(tmp_path, controllers.services(documents)) as cluster:
        cluster.train(ONE_FAULT)
        running = [cluster.start(pod) for pod in controllers.stateful_set(documents)]
        cluster.wait_for(lambda: cluster.reconcile() >= 0 and len(cluster.places()) == 3)
        assert [one.restarts for one in running] == [1, 1, 1]
        assert [one.status for one in running] == [None] * 3
        assert sum(cluster.delete(one) for one in running) < 20


def test_a_missing_secret_is_told_with_the_lines_to_add(tmp_path: Path) -> None:
    made, services = one_rank()
    with Cluster(tmp_path, services) as cluster:
        cluster.train(WORK)
        for pod in made:
            say(pod, "POLYHVD_SECRET", None)
            cluster.start(pod)
        assert cluster.finish() == [1, 1, 1]
        for running in cluster.pods.values():
            said = error(running)
            assert "kubectl create secret generic polyhvd --from-literal=secret=" in said
            assert "{name: POLYHVD_SECRET, valueFrom: {secretKeyRef: {name: polyhvd, key: secret}}}" in said


def test_another_secret_is_told_on_both_sides_within_seconds(tmp_path: Path) -> None:
    made, services = one_rank()
    with Cluster(tmp_path, services) as cluster:
        cluster.train(WORK)
        cluster.start(made[0])
        cluster.secrets = {"polyhvd": {"secret": "cd" * 32}}
        cluster.start(made[1])
        cluster.wait_for(lambda: cluster.logs().count("does not have this job's secret") == 2, seconds=10)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"POLYHVD_SIZE": "2"}, "rank 2 is not below the size 2 of Kubernetes's job"),
        ({"POLYHVD_SIZE": None}, "but not set their number; set POLYHVD_SIZE"),
        ({"POLYHVD_SIZE": "three"}, "POLYHVD_SIZE='three'"),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "variables contradict each other"),
        ({"POLYHVD_SECRET": "no secret"}, "POLYHVD_SECRET: "),
    ],
)
def test_variables_that_cannot_be_are_told_in_an_error(
    tmp_path: Path, variables: dict[str, str | None], message: str
) -> None:
    made, services = one_rank()
    for name, value in variables.items():
        say(made[2], name, value)
    with Cluster(tmp_path, services) as cluster:
        cluster.train(WORK)
        running = cluster.start(made[2])
        assert cluster.finish() == [1]
        assert message in error(running)


def test_a_pod_without_a_name_of_its_own_is_told_what_to_set(tmp_path: Path) -> None:
    made, services = one_rank()
    made[2].spec["hostNetwork"] = True
    with Cluster(tmp_path, services) as cluster:
        cluster.train(WORK)
        running = cluster.start(made[2])
        assert cluster.finish() == [1]
        assert "is called 'node7', and not after its index 2" in error(running)


@pytest.mark.parametrize("index", [0, 1])
def test_a_pod_that_waits_for_the_others_is_deleted_at_once(tmp_path: Path, index: int) -> None:
    made, services = several_ranks()
    with Cluster(tmp_path, services) as cluster:
        cluster.stop_dns()
        running = cluster.start(made[index])
        time.sleep(2.0)  # nothing tells that it waits
        assert cluster.delete(running) < 10


def test_pods_in_the_network_of_their_nodes_meet_by_variables(tmp_path: Path) -> None:
    made, services = one_rank()
    for index, pod in enumerate(made):
        pod.spec["hostNetwork"] = True
        env = {"RANK": str(index), "WORLD_SIZE": "3", "MASTER_ADDR": "train-0.train", "MASTER_PORT": "29500"}
        for name, value in env.items():
            say(pod, name, value)
    with Cluster(tmp_path, services) as cluster:
        cluster.train(WORK)
        for pod in reversed(made):
            cluster.start(pod)
        assert cluster.finish() == [0, 0, 0], cluster.logs()
        assert cluster.places() == THREE


def test_tasks_of_a_cluster_meet_by_names_that_come_late(tmp_path: Path) -> None:
    """As Kubeflow's TFJob has it: TF_CONFIG, a name for each task, and an evaluator that is not a rank."""
    documents = controllers.read(EXAMPLES / "statefulset.yaml")
    made = controllers.stateful_set(documents)
    names = [f"{pod.name}.train.default.svc:2222" for pod in made]
    kinds = {"chief": names[:1], "worker": names[1:2], "evaluator": names[2:]}
    with Cluster(tmp_path, controllers.services(documents)) as cluster:
        cluster.train(WORK)
        for pod, kind in reversed(list(zip(made, kinds, strict=True))):
            for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                say(pod, name, None)
            say(pod, "TF_CONFIG", json.dumps({"cluster": kinds, "task": {"type": kind, "index": 0}}))
            cluster.start(pod)
            time.sleep(0.5)
        cluster.wait_for(lambda: len(cluster.places()) == 3)
        assert cluster.places() == [
            "place 0 1 0 1 0 1 sum 1.0",
            "place 0 2 0 1 0 2 sum 3.0",
            "place 1 2 0 1 1 2 sum 3.0",
        ]


@pytest.mark.parametrize("silent", [False, True])
def test_a_name_that_is_never_known_is_an_error_in_time(tmp_path: Path, silent: bool) -> None:
    made, services = one_rank()
    with Cluster(tmp_path, services if silent else []) as cluster:
        cluster.train(WORK)
        say(made[1], "POLYHVD_START_TIMEOUT", "3")
        if silent:
            cluster.stop_dns()
        began = time.monotonic()
        running = cluster.start(made[1])
        assert cluster.finish() == [1]
        assert time.monotonic() - began < 30  # and not the 40 s that a resolver may take
        said = error(running)
        assert "rank 1 waited 3 s for rank 0 on train-0.train.default.svc.cluster.local" in said
        assert "whose address is not known here" in said
        assert "the pods need a headless service" in said


@pytest.mark.parametrize("program", ["mpirun", "polyhvdrun"])
@pytest.mark.skipif(not all(map(shutil.which, ("mpirun", "sshd"))), reason="needs Open MPI and sshd")
def test_an_mpi_job_is_one_job(tmp_path: Path, program: str) -> None:
    documents = controllers.read(EXAMPLES / "mpijob.yaml")
    made, services = controllers.mpi_job(documents, tmp_path)
    if program == "polyhvdrun":
        (launcher,) = made[-1].spec["containers"]
        words = ["--hostfile", "/etc/mpi/hostfile", "python", "train.py"]
        launcher |= {"command": ["polyhvdrun"], "args": words}
    with Cluster(tmp_path, services, image=mpi_image()) as cluster:
        cluster.train(WORK)
        for pod in made[:-1]:
            cluster.start(pod)
        # ssh tries a name that is not known yet once; the operator starts a launcher that has failed again.
        cluster.wait_for(lambda: cluster.logs().count("listening on 0.0.0.0") == len(made) - 1)
        launcher = cluster.start(made[-1])
        cluster.wait_for(lambda: launcher.status is not None)
        assert launcher.status == 0, cluster.logs()
        assert cluster.places() == TWICE_TWO


def mpi_image() -> str:
    """The steps of the image for MPIJobs, after the one that installs packages."""
    text = (EXAMPLES / "mpi.Dockerfile").read_text().replace("\\\n", "")
    steps = [line.removeprefix("RUN ") for line in text.splitlines() if line.startswith("RUN ")]
    assert "apt-get install" in steps[0]
    return "\n".join(steps[1:])


@pytest.mark.slow
def test_a_train_job_joins_torchruns_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    documents = controllers.read(EXAMPLES / "trainjob.yaml")
    made, services = controllers.train_job(documents)
    with Cluster(tmp_path, services) as cluster:
        cluster.train(WORK)
        for pod in made:
            cluster.start(pod)
        assert cluster.finish() == [0, 0], cluster.logs()
        assert cluster.places() == TWICE_TWO
