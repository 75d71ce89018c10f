"""What Kubernetes' controllers make of a manifest: pods, with their names, labels, variables and files.

Job: https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
StatefulSet: https://kubernetes.io/docs/concepts/workloads/controllers/statefulset/#stable-network-id
MPIJob: https://github.com/kubeflow/mpi-operator, "How it works" in proposals/scalable-robust-operator.md
TrainJob: https://www.kubeflow.org/docs/components/trainer/operator-guides/runtime/; it makes a JobSet:
https://jobset.sigs.k8s.io/docs/concepts/
"""

from __future__ import annotations

import copy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml
from pods import Pod

__all__ = ["indexed_job", "mpi_job", "read", "services", "stateful_set", "train_job"]

Manifest = dict[str, Any]
_HOME = "/root"  # of the images that the operator is for, and of the tests' containers
_INDEX = "batch.kubernetes.io/job-completion-index"


def read(path: Path) -> list[Manifest]:
    """The documents of a file."""
    return list(yaml.safe_load_all(path.read_text()))


def services(documents: list[Manifest]) -> list[Manifest]:
    """The services among them."""
    return [one for one in documents if one["kind"] == "Service"]


def indexed_job(documents: list[Manifest]) -> list[Pod]:
    """The pods of the Job: its controller adds their index as annotation, label and variable."""
    job = _only(documents, "Job")
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["parallelism"] >= job["spec"]["completions"]
    count, name = job["spec"]["completions"], job["metadata"]["name"]
    return [_indexed(job["spec"]["template"], name, index) for index in range(count)]


def _indexed(template: Manifest, job: str, index: int, **labels: str) -> Pod:
    spec = copy.deepcopy(template["spec"])
    for container in spec["containers"]:
        path = f"metadata.annotations['{_INDEX}']"
        variable = {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": path}}}
        container.setdefault("env", []).append(variable)
    return Pod(
        f"{job}-{index}-x7k2{index}",
        f"{job}-{index}",
        spec,
        spec.get("subdomain", ""),
        {"batch.kubernetes.io/job-name": job, _INDEX: str(index), **labels},
        {_INDEX: str(index)},
    )


def stateful_set(documents: list[Manifest]) -> list[Pod]:
    """The pods of the StatefulSet, whose names are their host names."""
    wanted = _only(documents, "StatefulSet")
    name, template = wanted["metadata"]["name"], wanted["spec"]["template"]
    assert wanted["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    return [
        Pod(
            f"{name}-{index}",
            f"{name}-{index}",
            copy.deepcopy(template["spec"]),
            wanted["spec"]["serviceName"],
            {**template["metadata"]["labels"], "apps.kubernetes.io/pod-index": str(index)},
        )
        for index in range(wanted["spec"]["replicas"])
    ]


def mpi_job(documents: list[Manifest], folder: Path) -> tuple[list[Pod], list[Manifest]]:
    """The workers and then the launcher, and the service that the operator makes for them.

    It adds ssh keys to all, and to the launcher a host file and the variables that have mpirun use it.
    """
    job = _only(documents, "MPIJob")
    name, spec = job["metadata"]["name"], job["spec"]
    label = {"training.kubeflow.org/job-name": name}
    workers = range(spec["mpiReplicaSpecs"]["Worker"]["replicas"])
    config, keys = folder / "config", _keys(folder / "ssh")
    config.mkdir()
    slots = spec["slotsPerWorker"]
    hosts = [f"{name}-worker-{index}.{name}.default.svc slots={slots}\n" for index in workers]
    (config / "hostfile").write_text("".join(hosts))
    names = [*(f"{name}-worker-{index}" for index in workers), f"{name}-launcher"]
    pods = []
    for pod in names:
        replica = "Launcher" if pod.endswith("launcher") else "Worker"
        made = copy.deepcopy(spec["mpiReplicaSpecs"][replica]["template"]["spec"])
        made.setdefault("restartPolicy", "Never")
        (container,) = made["containers"]
        mounts = container.setdefault("volumeMounts", [])
        mounts.append({"name": "ssh-auth", "mountPath": spec.get("sshAuthMountPath", f"{_HOME}/.ssh")})
        variables = {"K_MPI_JOB_ROLE": replica.lower()}
        if replica == "Launcher":
            mounts.append({"name": "mpi-job-config", "mountPath": "/etc/mpi"})
            variables |= {
                "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
                "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
                "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
                "OMPI_MCA_orte_set_default_slots": str(spec["slotsPerWorker"]),
                "NVIDIA_VISIBLE_DEVICES": "",
                "NVIDIA_DRIVER_CAPABILITIES": "",
            }
        env = container.setdefault("env", [])
        env += [{"name": key, "value": value} for key, value in variables.items()]
        pods.append(Pod(pod, pod, made, name, label, folders={"ssh-auth": keys, "mpi-job-config": config}))
    return pods, [{"metadata": {"name": name}, "spec": {"clusterIP": "None", "selector": label}}]


def _keys(folder: Path) -> Path:
    """Of the Secret that the operator makes, with the modes that it asks for."""
    folder.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "id_rsa")], check=True)
    shutil.copy(folder / "id_rsa.pub", folder / "authorized_keys")
    folder.chmod(0o755)
    return folder


def train_job(documents: list[Manifest]) -> tuple[list[Pod], list[Manifest]]:
    """The nodes of a TrainJob with a torch policy, and the service that JobSet makes for them."""
    job, runtime = _only(documents, "TrainJob"), _only(documents, "ClusterTrainingRuntime")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert "torch" in runtime["spec"]["mlPolicy"]
    trainer, name = job["spec"]["trainer"], job["metadata"]["name"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"  # the one that the policy is applied to
    made = copy.deepcopy(replicated["template"]["spec"]["template"])
    (container,) = made["spec"]["containers"]
    assert container["name"] == "node"
    container |= {key: trainer[key] for key in ("image", "command", "args")}
    count = trainer["numNodes"]
    extra = {
        "PET_NNODES": str(count),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29400",
    }
    path = f"metadata.annotations['{_INDEX}']"
    container["env"] += [{"name": key, "value": value} for key, value in extra.items()]
    container["env"].append({"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": path}}})
    made["spec"] |= {"subdomain": name, "restartPolicy": "Never"}
    label = {"jobset.sigs.k8s.io/jobset-name": name}
    pods = [_indexed(made, f"{name}-node-0", index, **label) for index in range(count)]
    return pods, [{"metadata": {"name": name}, "spec": {"clusterIP": "None", "selector": label}}]


def _only(documents: list[Manifest], kind: str) -> Manifest:
    (found,) = [one for one in documents if one["kind"] == kind]
    return found
