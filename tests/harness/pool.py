"""The pools of polyhvd's own tests: ranks started by fork servers, in network namespaces, or by mpirun.

What is general about pools is in polyhvd.testing.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

from fork_servers import IMPORTS, ForkServers
from inside import inside
from netns import Namespace

import polyhvd.testing.pool as testing
from polyhvd.rendezvous.auth import parse_secret
from polyhvd.rendezvous.server import Server
from polyhvd.runtime.placement import Placement
from polyhvd.testing.pool import MARK, START_S, WORKER, Rank, RankFailure

__all__ = ["MARK", "Pool", "PoolSpec", "Pools", "RankFailure"]

#: Whatever the user has set. One thread between operations, so that a kernel that blocks is noticed.
_ENVIRONMENT = {
    **testing._THREADS,
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # more are processes that import torch
    "MXNET_CPU_WORKER_NTHREADS": "1",
    "MXNET_MP_WORKER_NTHREADS": "1",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "CUDA_VISIBLE_DEVICES": "-1",
    "PYTHONFAULTHANDLER": "1",
    "POLYHVD_CHECK_DRIFT": "off",  # many tests count operations; those of the check turn it on
}
#: Settings that have no meaning while a framework is imported.
_READ_LATER = ("POLYHVD_", "HOROVOD_", "TF_NUM_")


@dataclass(frozen=True)
class PoolSpec(testing.PoolSpec):
    """What a pool is made of. Equal specs share a pool."""

    namespaces: tuple[Namespace, ...] = ()  # of the hosts, if they have their own network
    mpirun: tuple[str, ...] = ()  # the launcher of MPI that starts the ranks, with its options

    def __str__(self) -> str:
        return super().__str__() + (f" below {self.mpirun[0]}" if self.mpirun else "")


class _RankBelow(Rank):
    """A rank that a launcher has started and that connects to ``listener``."""

    def __init__(
        self, number: int, process: subprocess.Popen[bytes], listener: socket.socket, folder: Path
    ) -> None:
        self.number, self.process, self.notes, self.answer = number, process, [], None
        self.stacks, self.log = folder / f"rank{number}.stacks", folder / "mpirun.log"
        with listener:
            listener.settimeout(START_S)
            try:
                self.connection = connection.Connection(listener.accept()[0].detach())
            except TimeoutError:
                raise RankFailure(f"rank {number} was not started{self.shown_log()}") from None


class Pool(testing.Pool):
    """Ranks that wait for functions. Close it, or use it as a context manager."""

    spec: PoolSpec

    def __init__(self, spec: PoolSpec, servers: ForkServers | None = None) -> None:
        """Start the ranks, in forks of the servers if there are some, and run hvd.init() on all of them."""
        self._python: dict[str, list[str]] = {}  # by framework
        for framework in {spec.framework_of(rank) for rank in range(spec.size)}:
            if servers is not None and framework in IMPORTS and not (spec.namespaces or spec.mpirun):
                settings = {k: v for k, v in spec.settings if not k.startswith(_READ_LATER)}
                self._python[framework] = servers.python(spec.size, IMPORTS[framework], **settings)
        super().__init__(spec)

    def _meeting_place(self, secret: str) -> Server:
        if not self.spec.namespaces:
            return super()._meeting_place(secret)
        with inside(self.spec.namespaces[0].name):
            return Server(parse_secret(secret), self.spec.namespaces[0].address)

    def _command(self, placement: Placement) -> tuple[list[str], int]:
        command, parent = super()._command(placement)
        python = self._python.get(self.spec.framework_of(placement.rank), command)
        if python != command:
            parent = 0  # a fork lives as its server does
        where = self.spec.namespaces[int(placement.host)].command() if self.spec.namespaces else []
        return [*where, *python], parent

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **_ENVIRONMENT}

    def _start(self, placements: Sequence[Placement], secret: str) -> None:
        if self.spec.mpirun:
            self._start_below(self.spec.mpirun)
        else:
            super()._start(placements, secret)

    def _start_below(self, launcher: Sequence[str]) -> None:
        """All ranks as MPI's launcher starts them, which knows nothing of pools: it closes descriptors."""
        folder = Path(self._folder.name)
        listeners, command = [], list(launcher)
        for number in range(self.spec.size):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"\0polyhvd-pool-{self.mark}-{number}")
            listener.listen(1)
            listeners.append(listener)
            command += [":"] if number else []
            command += ["-np", "1", sys.executable, "-c", WORKER]
            command += [f"polyhvd-pool-{self.mark}-{number}", "0", str(folder / f"rank{number}.stacks")]
            command += [self.spec.framework]
        env = {**self._environment(), "POLYHVD_FLIGHT_DIR": str(folder), **dict(self.spec.settings)}
        with (folder / "mpirun.log").open("wb") as log:
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        for number, item in enumerate(listeners):
            self._ranks.append(_RankBelow(number, process, item, folder))


class Pools(testing.Pools):
    """At most one pool at a time: memory is for one framework's ranks."""

    def __init__(self, servers: ForkServers | None = None) -> None:
        super().__init__(pools_max=1)
        self._servers = servers

    def get(self, spec: testing.PoolSpec) -> testing.Pool:
        return super().get(_own(spec))

    def new(self, spec: testing.PoolSpec) -> Pool:
        return Pool(_own(spec), self._servers)


def _own(spec: testing.PoolSpec) -> PoolSpec:
    """A marked test and others share the pool of a spec."""
    return spec if isinstance(spec, PoolSpec) else PoolSpec(spec.framework, spec.hosts, spec.settings)
