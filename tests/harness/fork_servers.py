"""Starts the fork servers of a session, and names the interpreter that runs programs in forks of them."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["IMPORTS", "SETTINGS", "ForkServers"]

#: What takes seconds to import, by framework.
IMPORTS = {
    "lightning": ["torch", "torch._dynamo", "polyhvd.torch", "lightning"],
    "mxnet": ["polyhvd.mxnet"],  # which mends NumPy before it imports mxnet
    "numpy": ["polyhvd.numpy", "polyhvd.testing.worker"],
    "tensorflow": ["tensorflow", "polyhvd.tensorflow.keras"],
    "torch": ["torch", "torch._dynamo", "polyhvd.torch"],
}
#: The environment in which it is imported: no library starts threads, or looks for GPUs.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",  # as pools have it, which share the servers
    "PYTHONFAULTHANDLER": "1",
    # PyTorch's compiler would compile all of its headers once, and a program for each kind of vector unit.
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
}

_IMPORT_S = 180.0
_SERVERS_MAX = 2
_GROUPS_MAX = 5  # those of NumPy with and without a program's modules, and of the frameworks of a mixed world
_FOLDER = Path(__file__).resolve().parent
_Key = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]


@dataclass
class _Group:
    """The servers of the same modules and settings, and the folder of their sockets."""

    folder: Path
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def is_idle(self) -> bool:
        """Return whether no program runs in a fork of these servers."""
        return not any(_has_children(server.pid) for server in self.servers)

    def close(self) -> None:
        for server in self.servers:
            server.kill()
            server.wait()


class ForkServers:
    """Two servers, for even and for odd ranks, of modules imported under the same settings.

    So a rank has another layout of memory, and another seed of hashes, than its neighbours, and an import is
    paid for twice at most. Servers end with this process, or when those of many other modules are needed and
    they run no program: call :meth:`python` again for each job.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="polyhvd-fork-")
        self._groups: dict[_Key, _Group] = {}  # the least recently used first
        self._made = 0

    def python(self, ranks: int, modules: Sequence[str], **settings: str) -> list[str]:
        """What stands for ``sys.executable`` in the command of a job whose program imports these modules.

        ``settings`` are added to SETTINGS, for modules that read them when they are imported. Programs have
        the environment that they are started with.
        """
        if not hasattr(ctypes.CDLL(None), "_Fork"):  # glibc before 2.34
            return [sys.executable]
        group = self._group((tuple(modules), tuple(sorted(settings.items()))))
        ready = []
        while len(group.servers) < min(ranks, _SERVERS_MAX):
            server, pipe = _start(group.folder, len(group.servers), modules, {**SETTINGS, **settings})
            group.servers.append(server)
            ready.append(pipe)
        # Ranks whose servers are new would keep the others waiting for longer than they do.
        for pipe in ready:
            assert select.select([pipe], [], [], _IMPORT_S)[0], f"{modules}: not imported in {_IMPORT_S} s"
            os.close(pipe)
        return [sys.executable, "-I", "-S", str(_FOLDER / "forked.py"), str(group.folder)]

    def _group(self, key: _Key) -> _Group:
        """The group of this key, which becomes the most recently used one."""
        group = self._groups.pop(key, None)
        if group is None:
            self._close_unused()
            group = _Group(Path(self._folder.name) / str(self._made))
            group.folder.mkdir()
            self._made += 1
        self._groups[key] = group
        return group

    def _close_unused(self) -> None:
        """Close the least recently used groups, so that one more has room; those with programs stay."""
        for key in [key for key, group in self._groups.items() if group.is_idle()]:
            if len(self._groups) < _GROUPS_MAX:
                return
            self._groups.pop(key).close()

    def close(self) -> None:
        """End them, and every program that still runs."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()
        self._folder.cleanup()


def _has_children(pid: int) -> bool:
    return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def _start(
    folder: Path, rank: int, modules: Sequence[str], settings: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    """A server, and a pipe that ends when it has imported the modules."""
    ready, imported = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener, (folder / f"{rank}.log").open("wb") as log:
        listener.bind(str(folder / str(rank)))
        listener.listen()
        numbers = [str(number) for number in (listener.fileno(), imported, os.getpid())]
        server = subprocess.Popen(
            [sys.executable, str(_FOLDER / "fork_server.py"), *numbers, *modules],
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno(), imported],
            start_new_session=True,  # Ctrl-C is for pytest
        )
    os.close(imported)
    return server, ready
