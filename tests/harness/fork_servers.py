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
from pathlib import Path

__all__ = ["IMPORTS", "SETTINGS", "ForkServers"]

#: What takes seconds to import, by framework.
IMPORTS = {
    "mxnet": ["polyhvd.mxnet"],  # which mends NumPy before it imports mxnet
    "numpy": ["polyhvd.numpy", "polyhvd.testing.worker"],
    "tensorflow": ["tensorflow"],
    "torch": ["torch", "torch._dynamo"],
}
#: The environment in which it is imported: no library starts threads, or looks for GPUs.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",  # as pools have it, which share the servers
    "PYTHONFAULTHANDLER": "1",
}

_IMPORT_S = 180.0
_SERVERS_MAX = 2
_FOLDER = Path(__file__).resolve().parent
_Key = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]


class ForkServers:
    """Two servers, for even and for odd ranks, of modules imported under the same settings.

    So a rank has another layout of memory, and another seed of hashes, than its neighbours, and an import is
    paid for twice at most. Servers end with this process.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="polyhvd-fork-")
        self._servers: dict[_Key, list[subprocess.Popen[bytes]]] = {}

    def python(self, ranks: int, modules: Sequence[str], **settings: str) -> list[str]:
        """What stands for ``sys.executable`` in the command of a job whose program imports these modules.

        ``settings`` are added to SETTINGS, for modules that read them when they are imported. Programs have
        the environment that they are started with.
        """
        if not hasattr(ctypes.CDLL(None), "_Fork"):  # glibc before 2.34
            return [sys.executable]
        key = (tuple(modules), tuple(sorted(settings.items())))
        servers = self._servers.setdefault(key, [])
        folder = Path(self._folder.name) / str(list(self._servers).index(key))
        folder.mkdir(exist_ok=True)
        ready = []
        while len(servers) < min(ranks, _SERVERS_MAX):
            server, pipe = _start(folder, len(servers), modules, {**SETTINGS, **settings})
            servers.append(server)
            ready.append(pipe)
        # Ranks whose servers are new would keep the others waiting for longer than they do.
        for pipe in ready:
            assert select.select([pipe], [], [], _IMPORT_S)[0], f"{modules}: not imported in {_IMPORT_S} s"
            os.close(pipe)
        return [sys.executable, "-I", "-S", str(_FOLDER / "forked.py"), str(folder)]

    def close(self) -> None:
        """End them, and every program that still runs."""
        for server in [server for servers in self._servers.values() for server in servers]:
            server.kill()
            server.wait()
        self._servers.clear()
        self._folder.cleanup()


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
