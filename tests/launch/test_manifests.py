"""The manifests of examples/kubernetes, as Kubernetes and Kubeflow accept them; test_kubernetes.py runs them.

Kubernetes' own kinds are checked by the schemas of kubernetes-validate, which know every field, and Trainer's
by the classes that Kubeflow generates from its definitions, kubeflow-trainer-api. No package has the
definition of an MPIJob v2beta1: its pods are Kubernetes' own, and the other fields are listed here, after
https://github.com/kubeflow/mpi-operator/blob/master/pkg/apis/kubeflow/v2beta1/types.go
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import controllers
import pytest
from joining import ROOT

validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
EXAMPLES = ROOT / "examples" / "kubernetes"
FILES = sorted(EXAMPLES.glob("*.yaml"))
#: The oldest and the newest Kubernetes that the manifests are for.
VERSIONS = ("1.28", "1.37")
_TEXT, _COUNT, _FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


REPLICA = closed(["template"], replicas=_COUNT, restartPolicy=_TEXT, template={"type": "object"})
MPI_JOB = closed(
    ["mpiReplicaSpecs"],
    slotsPerWorker=_COUNT,
    runLauncherAsWorker=_FLAG,
    sshAuthMountPath=_TEXT,
    launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
    mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
    runPolicy=closed(
        [],
        cleanPodPolicy={"enum": ["None", "Running", "All"]},
        ttlSecondsAfterFinished=_COUNT,
        activeDeadlineSeconds=_COUNT,
        backoffLimit=_COUNT,
        schedulingPolicy={"type": "object"},
        suspend=_FLAG,
        managedBy=_TEXT,
    ),
    mpiReplicaSpecs=closed(["Launcher"], Launcher=REPLICA, Worker=REPLICA),
)


def check(document: dict[str, Any]) -> None:
    """Raise ValueError for a manifest that a cluster would refuse, or of which it would drop something."""
    kind = document["kind"]
    if kind == "MPIJob":
        check_mpi_job(document)
    elif document["apiVersion"].startswith("trainer.kubeflow.org/"):
        check_trainer(document)
    else:
        check_native(document)


def check_native(document: dict[str, Any]) -> None:
    for version in VERSIONS:
        try:
            validate.validate(document, version, strict=True)
        except validate.ValidationError as error:
            raise ValueError(f"{list(error.path)}: {error.message}") from None


def check_mpi_job(document: dict[str, Any]) -> None:
    import jsonschema

    assert document["apiVersion"] == "kubeflow.org/v2beta1"
    try:
        jsonschema.validate(document["spec"], MPI_JOB)
    except jsonschema.ValidationError as error:
        raise ValueError(error.message) from None
    for replica in document["spec"]["mpiReplicaSpecs"].values():
        check_native({"apiVersion": "v1", "kind": "PodTemplate", "template": replica["template"]})


def check_trainer(document: dict[str, Any]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    model = getattr(models, f"TrainerV1alpha1{document['kind']}")
    kept = model.from_dict(copy.deepcopy(document)).to_dict()
    lost = difference(document, kept)
    if lost:
        raise ValueError(f"there is no field {lost}")
    if document["kind"] == "ClusterTrainingRuntime":
        for job in document["spec"]["template"]["spec"]["replicatedJobs"]:
            pod = job["template"]["spec"]["template"]
            check_native({"apiVersion": "v1", "kind": "PodTemplate", "template": pod})


def difference(wanted: Any, kept: Any, where: str = "") -> str:
    """The first field that is not kept as it was; empty: there is none."""
    if isinstance(wanted, dict) and isinstance(kept, dict):
        found = (difference(value, kept.get(name), f"{where}.{name}") for name, value in wanted.items())
        return next(filter(None, found), "")
    if isinstance(wanted, list) and isinstance(kept, list) and len(wanted) == len(kept):
        pairs = enumerate(zip(wanted, kept, strict=True))
        return next(filter(None, (difference(one, two, f"{where}[{i}]") for i, (one, two) in pairs)), "")
    return "" if wanted == kept else where


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_manifest_is_valid(path: Path) -> None:
    documents = controllers.read(path)
    assert documents
    for document in documents:
        check(document)


def pod(document: dict[str, Any]) -> dict[str, Any]:
    """The pods' spec in a document."""
    if document["kind"] == "MPIJob":
        return dict(document["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"])
    template = document["spec"]["template"]
    if document["kind"] == "ClusterTrainingRuntime":
        template = template["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    return dict(template["spec"])


def misspell(document: dict[str, Any]) -> None:
    document["spec"]["slotsPerWorkers"] = 1


def misspell_in_the_container(document: dict[str, Any]) -> None:
    pod(document)["containers"][0]["volumeMount"] = []


def use_another_type(document: dict[str, Any]) -> None:
    pod(document)["containers"][0]["env"] = [{"name": "POLYHVD_SIZE", "value": 3}]


def leave_a_name_out(document: dict[str, Any]) -> None:
    del pod(document)["containers"][0]["name"]


@pytest.mark.parametrize("fault", [misspell, misspell_in_the_container, use_another_type, leave_a_name_out])
@pytest.mark.parametrize("kind", ["Job", "StatefulSet", "MPIJob", "ClusterTrainingRuntime"])
def test_a_broken_field_is_found(kind: str, fault: Callable[[dict[str, Any]], None]) -> None:
    document = next(one for path in FILES for one in controllers.read(path) if one["kind"] == kind)
    check(document)
    broken = copy.deepcopy(document)
    fault(broken)
    with pytest.raises(ValueError, match=r"\w"):
        check(broken)


def test_a_broken_field_of_a_train_job_is_found() -> None:
    (document,) = (one for one in controllers.read(EXAMPLES / "trainjob.yaml") if one["kind"] == "TrainJob")
    for broken in ({"numNode": 2}, {"numNodes": "two"}):
        changed = copy.deepcopy(document)
        changed["spec"]["trainer"] |= broken
        with pytest.raises(ValueError, match=r"num_?[nN]ode"):
            check(changed)
