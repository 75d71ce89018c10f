"""Horovod's queries about its build, such as ``nccl_built()``, answered for this host."""

from __future__ import annotations

import sys

from polyhvd.config import Settings
from polyhvd.installed import frameworks
from polyhvd.runtime import current, gpu, mpi

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_built(verbose: bool = False) -> bool:
    """Return whether MPI's library is on this machine.

    Args:
        verbose: accepted for compatibility with Horovod; has no effect.

    Raises:
        ConfigError: an environment variable cannot be used.

    Example::

        assert hvd.gloo_built() or hvd.mpi_built()
    """
    return isinstance(mpi.probe(Settings.from_environment()), mpi.Found)


def mpi_enabled() -> bool:
    """Return whether the ranks of this job have met through MPI; False before ``init()``.

    Example::

        print("met through", "MPI" if hvd.mpi_enabled() else "polyhvd's own server")
    """
    world = current.find()
    return world is not None and world.met_by_mpi is not None


def mpi_threads_supported() -> bool:
    """Return whether the program may call MPI (for example through mpi4py) while polyhvd's threads do.

    Raises:
        NotInitializedError: before ``init()``, as in Horovod.

    Example::

        if hvd.mpi_enabled() and hvd.mpi_threads_supported():
            from mpi4py import MPI
    """
    runtime = mpi.runtime() if current.world().met_by_mpi is not None else None
    return runtime is not None and runtime.threads_supported


def gloo_built(verbose: bool = False) -> bool:
    """Return whether CPU tensors are served without MPI: yes, by polyhvd's own shared memory and TCP.

    Scripts assert ``hvd.gloo_built() or hvd.mpi_built()`` to know that some transport is there. Gloo itself
    is not used.

    Args:
        verbose: accepted for compatibility with Horovod; has no effect.

    Example::

        assert hvd.gloo_built() or hvd.mpi_built()
    """
    return True


def gloo_enabled() -> bool:
    """Return whether this job runs without MPI. See :func:`gloo_built`.

    Example::

        assert hvd.gloo_enabled() != hvd.mpi_enabled()
    """
    return not mpi_enabled()


def gpu_available(ext_base_name: str | None = None, verbose: bool = False) -> bool:
    """Return whether a framework of this process can use a GPU.

    Args:
        ext_base_name: "torch", "tensorflow", "mxnet" or "cupy"; None asks all that have been imported.
        verbose: accepted, and does nothing.

    Example::

        device = "cuda" if hvd.gpu_available("torch") else "cpu"
    """
    known = frameworks()
    names = list(known) if ext_base_name is None else [ext_base_name]
    for framework in (known[name] for name in names if name in known):
        module = sys.modules.get(framework.packages[0])
        if module is None or framework.count_gpus is None:
            continue
        try:
            if framework.count_gpus(module) > 0:
                return True
        except Exception:  # CUDA without a driver or a device, in the framework's own words
            continue
    return False


def nccl_built(verbose: bool = False) -> int:
    """Version of NCCL on this machine, such as 21805; 0: GPU tensors pass through memory of the host.

    Opens the library, as the first operation on a GPU would.

    Args:
        verbose: accepted for compatibility with Horovod; has no effect.

    Raises:
        ConfigError: an environment variable cannot be used.

    Example::

        if not hvd.nccl_built():
            print("gradients on GPUs are staged in the host's memory")
    """
    settings = Settings.from_environment()
    found = gpu.probe_nccl(settings) if settings.may_use_nccl else ""
    return found.version if isinstance(found, gpu.Found) else 0


def ddl_built(verbose: bool = False) -> bool:
    """Return whether IBM's DDL can serve: no.

    Args:
        verbose: accepted for compatibility with Horovod; has no effect.

    Example::

        assert not hvd.ddl_built()
    """
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return whether Intel's oneCCL can serve: no.

    Args:
        verbose: accepted for compatibility with Horovod; has no effect.

    Example::

        assert not hvd.ccl_built()
    """
    return False


def cuda_built(verbose: bool = False) -> bool:
    """Return whether tensors on NVIDIA's GPUs are served: where CUDA's driver is on this machine.

    Args:
        verbose: accepted for compatibility with Horovod; has no effect.

    Example::

        device = "cuda" if hvd.cuda_built() and torch.cuda.is_available() else "cpu"
    """
    return isinstance(gpu.probe_cuda(), gpu.Found)


def rocm_built(verbose: bool = False) -> bool:
    """Return whether tensors on AMD's GPUs are served: no; move them with ``.cpu()``.

    Args:
        verbose: accepted for compatibility with Horovod; has no effect.

    Example::

        assert not hvd.rocm_built()
    """
    return False
