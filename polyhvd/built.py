"""What Horovod was built with, as scripts ask for it. They ask which path will serve them, not for a name."""

from __future__ import annotations

from polyhvd import context

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_built(verbose: bool = False) -> bool:
    """Whether MPI can serve: no. ``verbose`` is accepted and does nothing, here and below."""
    return False


def mpi_enabled() -> bool:
    """Whether MPI serves this job: no."""
    return False


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads beside polyhvd: no, as it does not serve.

    Raises:
        NotInitializedError: before ``init()``, as in Horovod.
    """
    context.engine()
    return False


def gloo_built(verbose: bool = False) -> bool:
    """Whether CPU tensors are served without MPI: yes, by polyhvd's own shared memory and TCP.

    Scripts assert ``hvd.gloo_built() or hvd.mpi_built()`` to know that some transport is there. Gloo itself
    is not used.
    """
    return True


def gloo_enabled() -> bool:
    """Whether this job runs without MPI: yes. See :func:`gloo_built`."""
    return True


def nccl_built(verbose: bool = False) -> int:
    """Version of NCCL, such as 21805, or 0 where it cannot serve: 0."""
    return 0


def ddl_built(verbose: bool = False) -> bool:
    """Whether IBM's DDL can serve: no."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Whether Intel's oneCCL can serve: no."""
    return False


def cuda_built(verbose: bool = False) -> bool:
    """Whether tensors on NVIDIA's GPUs are served: no; move them with ``.cpu()``."""
    return False


def rocm_built(verbose: bool = False) -> bool:
    """Whether tensors on AMD's GPUs are served: no; move them with ``.cpu()``."""
    return False
