"""Where ranks of a test meet: one class for each kind of store, with what is common to its tests."""

from __future__ import annotations

import abc
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.folder import FolderStore
from polyhvd.rendezvous.server import Server
from polyhvd.rendezvous.store import Store

__all__ = ["FolderPlace", "Place", "ServerPlace", "connect"]

_ROOT = Path(__file__).resolve().parents[2]


class Place(abc.ABC):
    """A store of one job, and the ways of its ranks to it."""

    #: Code that lets :meth:`process` say "half" in the middle of a put, and wait for its end there.
    halve = ""

    def __init__(self) -> None:
        self.secret = parse_secret(new_secret())
        self.stores: list[Store] = []

    def join(self, rank: int = 0) -> Store:
        """A rank's way to the store, which ends with the test at the latest."""
        self.stores.append(connect(*self.where(), self.secret, rank))
        return self.stores[-1]

    @abc.abstractmethod
    def where(self) -> tuple[str, str]:
        """What :func:`connect` needs in another process."""

    @abc.abstractmethod
    def lose(self) -> None:
        """Take the store away from everybody; idempotent."""

    @contextmanager
    def process(self, rank: int, code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A process that has a `store` and runs `code`; killed at the end of the block."""
        text = (
            "import os, sys, time\nimport places\n"
            "kind, where, secret, rank, *arguments = sys.argv[1:]\n"
            "store = places.connect(kind, where, bytes.fromhex(secret), int(rank))\n" + code
        )
        paths = os.pathsep.join((str(Path(__file__).parent), str(_ROOT)))
        process = subprocess.Popen(
            [sys.executable, "-c", text, *self.where(), self.secret.hex(), str(rank), *arguments],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def close(self) -> None:
        """End everything."""
        for store in self.stores:
            store.close()
        self.lose()


class ServerPlace(Place):
    """polyhvd's own server."""

    halve = """
def send_half(data):
    send(data[: len(data) // 2])
    print('half', flush=True)
    time.sleep(600)
class Half:
    def __init__(self, whole): self.whole = whole
    def __getattr__(self, name): return send_half if name == 'sendall' else getattr(self.whole, name)
send = store._socket.sendall
store._socket = Half(store._socket)
"""

    def __init__(self) -> None:
        super().__init__()
        self.server = Server(self.secret)

    def where(self) -> tuple[str, str]:
        return "server", self.server.endpoint

    def lose(self) -> None:
        self.server.close()


class FolderPlace(Place):
    """A folder."""

    halve = """
def write_half(descriptor, data):
    write(descriptor, data[: len(data) // 2])
    print('half', flush=True)
    time.sleep(600)
write, os.write = os.write, write_half
"""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def where(self) -> tuple[str, str]:
        return "folder", str(self.path)

    def lose(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def connect(kind: str, where: str, secret: bytes, rank: int) -> Store:
    """A store by the name of its kind, in any process."""
    if kind == "folder":
        return FolderStore(where, secret, rank)
    return Client(where, secret, rank=rank, generation=1, deadline=time.monotonic() + 20)
