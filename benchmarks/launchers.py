"""Starts the ranks of a peer, each library by its own launcher. What they then do is in rank.py.

Ranks lie on this host, or on two: network namespaces that a cable joins (tests/harness/netns.py).
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from benchmarks.peers import ENTRIES, MPICH_LIBRARY

ROOT = Path(__file__).resolve().parents[1]
SECRET = "5e" * 32  # of jobs in namespaces that no other user can enter

#: Serves a rendezvous on argv[1] until standard input ends.
RENDEZVOUS = """
import sys
from polyhvd.rendezvous.auth import parse_secret
from polyhvd.rendezvous.server import Server
with Server(parse_secret(sys.argv[2]), sys.argv[1]) as server:
    print(server.endpoint, flush=True)
    sys.stdin.read()
"""


#: Serves Horovod's rendezvous for argv[1] ranks on this host until standard input ends. Says at which port,
#: and what each rank is to find in its environment.
HOROVOD_RENDEZVOUS = """
import json, sys
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer
server = RendezvousServer()
port = server.start()
plan = get_host_assignments(parse_hosts("localhost:" + sys.argv[1]), int(sys.argv[1]))
server.init(plan)
print(json.dumps([port, [create_slot_env_vars(slot) for slot in plan]]), flush=True)
sys.stdin.read()
server.stop()
"""

#: Says on what Horovod can run there, and of which versions it is.
HOROVOD_VERSIONS = """
import horovod, torch
import horovod.torch as hvd
print(*(name for name in ("gloo", "mpi") if getattr(hvd, name + "_built")()))
print("Horovod", horovod.__version__, "with PyTorch", torch.__version__)
"""


class Place(Protocol):
    """A host that ranks lie on; tests/harness/netns.Namespace is one."""

    name: str
    address: str

    def command(self, *argv: str) -> list[str]: ...


@dataclass(frozen=True)
class Here:
    """This host."""

    name: str = ""
    address: str = "127.0.0.1"

    def command(self, *argv: str) -> list[str]:
        return list(argv)


class CannotStart(Exception):
    """A peer that is not installed, or that cannot run where it was asked to."""


def openmpi_launcher() -> str:
    for name in ("mpirun.openmpi", "mpirun"):
        path = shutil.which(name)
        if path and "Open MPI" in subprocess.run([path, "--version"], capture_output=True, text=True).stdout:
            return path
    raise CannotStart("Open MPI's mpirun is not on the path")


def horovod_versions(python: str, transport: str) -> str:
    """Return the versions of Horovod and PyTorch in that Python; raises CannotStart without the transport."""
    asked = subprocess.run(
        [python, "-c", HOROVOD_VERSIONS], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if asked.returncode != 0:
        why = (asked.stderr.strip() or f"exit status {asked.returncode}").splitlines()[-1]
        raise CannotStart(f"{python} cannot import horovod.torch ({why}); --horovod names a Python that can")
    built, versions = asked.stdout.strip().splitlines()[-2:]
    if transport not in built.split():
        raise CannotStart(
            f"{python} has Horovod without {transport}; build it with HOROVOD_WITH_{transport.upper()}=1"
        )
    return versions


def free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def _end_with_parent() -> None:
    """In a child before exec: a driver that is killed leaves no process behind."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


class Launcher:
    """Starts the ranks of one peer; `processes` are what it started, launchers included."""

    def __init__(
        self, peer: str, size: int, places: Sequence[Place], env: dict[str, str], log: IO[bytes]
    ) -> None:
        self.peer, self.size, self.places, self.log = peer, size, places, log
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1", **env}
        self.rank_command = [sys.executable, "-m", "benchmarks.rank", peer]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.versions = ""  # of what does not lie beside this Python

    def start(self) -> None:
        entry = ENTRIES[self.peer]
        if missing := entry.missing():
            raise CannotStart(f"{missing} is not installed")
        together = len(self.places) == 1
        starts = {
            "plain": self._plain,
            "polyhvdrun": self._polyhvdrun if together else self._polyhvd_by_hand,
            "openmpi": self._openmpi,
            "horovod-gloo": self._horovod_gloo,
            "horovod-mpi": self._horovod_mpi,
            "mpich": self._mpich,
            "kvstore": self._kvstore,
        }
        if not together and entry.start in ("mpich", "kvstore", "horovod-gloo"):
            raise CannotStart(f"{entry.label} is measured on one host only")
        starts[entry.start]()

    def place_of(self, rank: int) -> Place:
        """Ranks lie on the hosts in blocks."""
        return self.places[rank * len(self.places) // self.size]

    def _popen(
        self, place: Place, argv: list[str], env: dict[str, str], **options: int
    ) -> subprocess.Popen[bytes]:
        streams: dict[str, object] = {"stdin": subprocess.DEVNULL, "stdout": self.log, **options}
        process = subprocess.Popen(
            place.command(*argv),
            cwd=ROOT,
            env={**self.env, **env},
            stderr=self.log,
            preexec_fn=_end_with_parent,
            **streams,  # type: ignore[call-overload]
        )
        self.processes.append(process)
        return process

    def _plain(self) -> None:
        first = self.places[0].address
        workers = ",".join(f"{self.place_of(r).address}:{free_port()}" for r in range(self.size))
        common = {"BENCH_SIZE": str(self.size), "MASTER_ADDR": first, "MASTER_PORT": str(free_port())}
        if len(self.places) > 1:
            common["GLOO_SOCKET_IFNAME"] = "eth0"
        for rank in range(self.size):
            env = {**common, "BENCH_WORKERS": workers, "BENCH_RANK": str(rank)}
            self._popen(self.place_of(rank), self.rank_command, env)

    def _polyhvdrun(self) -> None:
        command = [sys.executable, "-m", "polyhvd.launch", "-np", str(self.size), *self.rank_command]
        self._popen(self.places[0], command, {})

    def _polyhvd_by_hand(self) -> None:
        """Starts ranks as polyhvdrun does over ssh, for hosts that run no sshd."""
        first = self.places[0]
        server = self._popen(
            first,
            [sys.executable, "-c", RENDEZVOUS, first.address, SECRET],
            {},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert server.stdout is not None
        endpoint = server.stdout.readline().decode().strip()
        for rank in range(self.size):
            place = self.place_of(rank)
            env = {
                "POLYHVD_RANK": str(rank),
                "POLYHVD_SIZE": str(self.size),
                "POLYHVD_HOST_ID": place.name,
                "POLYHVD_RENDEZVOUS": endpoint,
                "POLYHVD_SECRET": SECRET,
            }
            self._popen(place, self.rank_command, env)

    def _openmpi(self) -> None:
        command = [openmpi_launcher(), "-np", str(self.size), "--bind-to", "none", "--oversubscribe"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        env = {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": "libmpi.so.40"}
        if len(self.places) > 1:
            each = self.size // len(self.places)
            command += ["-H", ",".join(f"{place.address}:{each}" for place in self.places)]
            agent = f"{sys.executable} -m benchmarks.netns_agent"
            for name, value in (
                ("plm_rsh_agent", agent),
                ("btl", "tcp,self"),
                ("btl_tcp_if_include", "eth0"),
                ("oob_tcp_if_include", "eth0"),
                ("pml", "ob1"),
            ):
                command += ["--mca", name, value]
            env["BENCH_NAMESPACES"] = json.dumps({place.address: place.name for place in self.places})
        ours = ("BENCH_SOCKET", "BENCH_KEY", "BENCH_PRIORITY", "BENCH_PIN", "OMP_NUM_THREADS")
        for name in (*env, *ours):
            command += ["-x", name]
        self._popen(self.places[0], [*command, *self.rank_command], env)

    def _in_horovods_python(self, transport: str) -> None:
        """Have BENCH_HOROVOD, a Python with Horovod, run the ranks."""
        self.versions = horovod_versions(os.environ["BENCH_HOROVOD"], transport)
        self.rank_command[0] = os.environ["BENCH_HOROVOD"]

    def _horovod_gloo(self) -> None:
        """Starts ranks as horovodrun does on one host."""
        self._in_horovods_python("gloo")
        first = self.places[0]
        server = self._popen(
            first,
            [self.rank_command[0], "-c", HOROVOD_RENDEZVOUS, str(self.size)],
            {},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert server.stdout is not None
        answer = server.stdout.readline()
        if not answer:
            raise CannotStart(f"its rendezvous did not start; {self.log.name} says why")
        port, environments = json.loads(answer)
        common = {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "100000",  # its ranks are stopped while others are measured
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": first.address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        }
        for env in environments:
            self._popen(first, self.rank_command, {**common, **env})

    def _horovod_mpi(self) -> None:
        self._in_horovods_python("mpi")
        self._openmpi()

    def _mpich(self) -> None:
        beside = MPICH_LIBRARY.parents[1] / "bin" / "mpiexec.hydra"
        launcher = str(beside) if beside.exists() else shutil.which("mpiexec.mpich")
        if launcher is None:
            raise CannotStart("MPICH is not installed; pip install mpich, or your system's package")
        env = {"MPI4PY_MPIABI": "mpich", "MPI4PY_LIBMPI": "libmpich.so.12"}
        if beside.exists():
            folder = str(MPICH_LIBRARY.parent)
            env |= {"MPI4PY_LIBMPI": str(MPICH_LIBRARY), "LD_LIBRARY_PATH": folder}
        self._popen(self.places[0], [launcher, "-n", str(self.size), *self.rank_command], env)

    def _kvstore(self) -> None:
        """A scheduler and one server, which MXNet becomes when it is imported with these variables."""
        common = {
            "DMLC_PS_ROOT_URI": self.places[0].address,
            "DMLC_PS_ROOT_PORT": str(free_port()),
            "DMLC_NUM_WORKER": str(self.size),
            "DMLC_NUM_SERVER": "1",
        }
        serve = [sys.executable, "-c", "import polyhvd.mxnet, mxnet"]
        if self.env.get("BENCH_PRIORITY") == "1":  # as its workers have while they are timed
            serve = ["nice", "-n", "-20", *serve]
        for role in ("scheduler", "server"):
            self._popen(self.places[0], serve, {**common, "DMLC_ROLE": role})
        for _ in range(self.size):
            self._popen(self.places[0], self.rank_command, {**common, "DMLC_ROLE": "worker"})
