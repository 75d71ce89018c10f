"""Public names of ``polyhvd``. Imported on first use: a launcher needs none of them."""

from __future__ import annotations

from polyhvd.capabilities import *
from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.membership import add_process_set, barrier, join, process_set_of, remove_process_set
from polyhvd.collectives.objects import allgather_object, broadcast_object
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.config import Settings
from polyhvd.errors import *
from polyhvd.installed import make_mxnet_importable
from polyhvd.launch import run
from polyhvd.launch.hosts.doctor import doctor
from polyhvd.launch.init import init, is_initialized, shutdown

__all__ = [
    "Adasum",
    "Average",
    "CheckpointError",
    "DataError",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "InvalidArgumentError",
    "Max",
    "Min",
    "NotInitializedError",
    "PeerDepartedError",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "RankMismatchError",
    "ReduceOp",
    "Settings",
    "ShutdownError",
    "Sum",
    "TransferTimeoutError",
    "UnsupportedError",
    "UnsupportedTypeError",
    "add_process_set",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "doctor",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "init",
    "is_initialized",
    "join",
    "make_mxnet_importable",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_of",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
]

Average = ReduceOp.Average
"""Value of ``op=``: the average over the ranks."""

Sum = ReduceOp.Sum
"""Value of ``op=``: the sum over the ranks."""

Adasum = ReduceOp.Adasum
"""Value of ``op=``: the ranks' gradients combined by Adasum (Maleki et al., MLSys 2021). It sums orthogonal
gradients, and averages parallel ones."""

Min = ReduceOp.Min
"""Value of ``op=``: the elementwise minimum over the ranks."""

Max = ReduceOp.Max
"""Value of ``op=``: the elementwise maximum over the ranks."""

Product = ReduceOp.Product
"""Value of ``op=``: the elementwise product over the ranks."""
