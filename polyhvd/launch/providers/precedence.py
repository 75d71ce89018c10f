"""All providers that a rank uses, in the order in which it tries them."""

from __future__ import annotations

from polyhvd.launch.providers.cluster import ClusterProvider
from polyhvd.launch.providers.jsrun import JsrunProvider
from polyhvd.launch.providers.kubernetes import KubernetesProvider
from polyhvd.launch.providers.local import AloneProvider, PolyhvdrunProvider
from polyhvd.launch.providers.mpi import MpiProvider
from polyhvd.launch.providers.provider import Provider
from polyhvd.launch.providers.ray import RayProvider
from polyhvd.launch.providers.sagemaker import SageMakerProvider
from polyhvd.launch.providers.slurm import SlurmProvider
from polyhvd.launch.providers.torchrun import TorchrunProvider, TorchVariablesProvider

__all__ = ["ALONE", "MPI", "POLYHVDRUN", "PROVIDERS", "RAY"]

#: One of each for the process: they know what it has met before.
POLYHVDRUN = PolyhvdrunProvider()
MPI = MpiProvider()
ALONE = AloneProvider()

_FROM_ENVIRONMENT: tuple[Provider, ...] = (
    POLYHVDRUN,
    TorchrunProvider(),
    JsrunProvider(),  # whose tasks have MPI's variables, too
    MPI,
    TorchVariablesProvider(),
    SlurmProvider(),
    ClusterProvider("TF_CONFIG"),
    ClusterProvider("CLUSTER_SPEC"),
    KubernetesProvider(),
    SageMakerProvider(),
)
RAY = RayProvider(within=frozenset(provider.name for provider in _FROM_ENVIRONMENT))

#: In the order in which they are tried: the launcher that is likely to have been
#: started by the others, as torchrun is by srun, comes before them, since its ranks inherit their variables.
PROVIDERS: tuple[Provider, ...] = (RAY, *_FROM_ENVIRONMENT)
