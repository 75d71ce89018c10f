"""Brings the ranks of a world together: from a store to authenticated connections.

Ranks exchange their addresses in the job's store, find out which of them share a host, pass the shared
memory around there, and open TCP connections to all others. One loop drives all of it, so no order of
arrival deadlocks.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polyhvd.config import ConfigError, Settings
from polyhvd.errors import HorovodInternalError, PeerLostError, RankMismatchError
from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import Greeting, derive_secret
from polyhvd.rendezvous.handshakes import Authenticated, Handshakes, Outgoing
from polyhvd.rendezvous.store import GatherTimeoutError, Store, StoreError
from polyhvd.runtime.connections import Connections, tree_parent
from polyhvd.runtime.placement import Placement

__all__ = ["connect", "make_segment"]

_LOG = logging.getLogger("polyhvd")
_BACKLOG = 1024
_TICK_S = 1.0
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_INT = struct.Struct("i")
_HERE, _NONE = b"M", b"-"  # of messages with memory, and without
_REASON_S = 2.0  # for the report of a rank that cannot connect


def connect(
    settings: Settings, placement: Placement, store: Store | None, process_sets: list[list[int]]
) -> Connections:
    """Meet the other ranks and return the connections to them; the caller owns the descriptors.

    The placement's generation distinguishes this bootstrap from earlier ones of the same processes. Raises
    PeerLostError naming the ranks that did not come within ``settings.start_timeout_s``,
    RankMismatchError when ranks disagree on ``process_sets`` or the size, HorovodInternalError when
    another rank failed meanwhile, and ConfigError for settings that cannot work.
    """
    if placement.size == 1:
        return Connections(process_sets=process_sets, hosts=[placement.host])
    if store is None:
        raise ConfigError(f"a world of {placement.size} ranks needs a store in which they meet")
    meeting = _Meeting(settings, placement, process_sets, store)
    try:
        return meeting.run()
    except StoreError as error:
        raise HorovodInternalError(f"rank {placement.rank}: {error}") from None
    except BaseException as error:
        meeting.report_failure(error)
        raise
    finally:
        meeting.close()


def _pid_space() -> str:
    """This boot of the machine and its namespace of process ids: two containers share a host, not that."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _segment_bytes(local_size: int) -> int:
    from polyhvd import _core

    return _core.segment_bytes(local_size)


@dataclass
class _Card:
    """The data that a rank sends the others about itself."""

    rank: int
    size: int
    pid: int
    uid: int
    hostname: str
    host_id: str
    address: str
    port: int
    nonce: str
    unix_name: str  # of its abstract socket; empty: no shared memory
    pid_space: str  # equal where process ids mean the same; empty: unknown
    others: list[tuple[str, int]] = field(default_factory=list)  # further addresses and ports
    process_sets: list[list[int]] = field(default_factory=list)
    reproducible: bool = False
    data_checksums: bool = False
    backends: list[str] = field(default_factory=list)
    hierarchical_allreduce: bool = False
    check_drift: str = "warn"

    @property
    def label(self) -> str:
        return f"pid {self.pid} on {self.hostname}"


class _Meeting:
    """One rank's part in one generation; ``close`` drops whatever was not handed out."""

    def __init__(
        self,
        settings: Settings,
        placement: Placement,
        process_sets: list[list[int]],
        store: Store,
    ) -> None:
        self._settings = settings
        self._placement = placement
        self._rank = placement.rank
        self._size = placement.size
        self._generation = placement.generation
        self._process_sets = process_sets
        self._store = store
        self._deadline = time.monotonic() + settings.start_timeout_s
        self._handshakes = Handshakes(store.secret, self._admit)
        self._cards: list[_Card] = []
        #: Finished connections and own dials, by (purpose, peer).
        self._open: dict[tuple[str, int], Authenticated] = {}
        self._dials: dict[tuple[str, int], Outgoing] = {}
        self._host = _Host()
        self._failure = -1  # the request that is answered when another rank fails
        self._is_reported = False

    def run(self) -> Connections:
        """Go through the stages; whatever can fail fails here."""
        self._store.forget(self._scope("failed"), 0)  # of an earlier process in this rank's place
        self._failure = self._store.post_gather(self._scope("failed"), 1, self._remaining_s() + 60)
        cards = self._exchange("hello", asdict(self._introduce()), "they have not called init()")
        self._cards = [_Card(**card) for card in cards]
        self._compare()
        domains = self._share_memory()
        self._connect_domains(domains)
        self._exchange("done", None, "they did not finish connecting")
        connections = Connections(
            rank=self._rank,
            size=self._size,
            domains=domains,
            labels=[card.label for card in self._cards],
            hosts=[card.host_id for card in self._cards],
            pids=self._pids(),
            process_sets=self._process_sets,
            world_key=self._world_key(),
        )
        self._hand_out(connections)
        return connections

    def report_failure(self, error: BaseException) -> None:
        """Send the reason for which this rank fails to the others, unless they have it already."""
        if self._is_reported or isinstance(error, RankMismatchError):
            return
        lost = isinstance(error, PeerLostError)  # its text names the rank
        text = str(error) or type(error).__name__
        reason = text if lost else f"rank {self._rank} failed in init(): {text}"
        with suppress(OSError, ValueError):
            self._store.put(self._scope("failed"), 0, json.dumps([lost, reason[:4000]]).encode())

    def close(self) -> None:
        """Close every socket, and the memory, that this object still owns."""
        self._handshakes.close()
        for passed in self._open.values():
            passed.connection.close()
        self._open.clear()
        self._host.close()

    # Stages

    def _introduce(self) -> _Card:
        """Open the listeners; return their addresses."""
        address = self._store.address or network.loopback()
        further = list(self._store.further_addresses)
        if self._settings.interface:
            try:
                address, further = network.address_of(self._settings.interface), []
            except ValueError as error:
                raise ConfigError(f"POLYHVD_GLOO_IFACE: {error}") from None
        port = self._listen(address)
        unix_name = ""
        if self._settings.shared_memory:
            unix_name = f"polyhvd-{secrets.token_hex(16)}"
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._handshakes.listen(local)
            local.bind(f"\0{unix_name}")
            local.listen(_BACKLOG)
        return _Card(
            rank=self._rank,
            size=self._size,
            pid=os.getpid(),
            uid=os.geteuid(),
            hostname=socket.gethostname(),
            host_id=self._placement.host,
            address=address,
            port=port,
            others=[(item, self._listen(item)) for item in further],
            nonce=secrets.token_hex(16),
            unix_name=unix_name,
            pid_space=_pid_space(),
            process_sets=self._process_sets,
            reproducible=self._settings.reproducible,
            data_checksums=self._settings.data_checksums,
            hierarchical_allreduce=self._settings.hierarchical_allreduce,
            check_drift=self._settings.check_drift,
            backends=list(self._settings.backends),
        )

    def _listen(self, address: str) -> int:
        """Listen on an address of this host; returns the port."""
        listener = network.listener(address)
        self._handshakes.listen(listener)
        return int(listener.getsockname()[1])

    def _compare(self) -> None:
        """Raise on every rank what the ranks do not agree on."""
        for what in (
            "size",
            "process_sets",
            "reproducible",
            "data_checksums",
            "backends",
            "hierarchical_allreduce",
            "check_drift",
        ):
            sides: dict[str, list[int]] = {}
            for card in self._cards:
                sides.setdefault(str(getattr(card, what)), []).append(card.rank)
            if len(sides) > 1:
                text = "; ".join(f"ranks {ranks} have {value}" for value, ranks in sides.items())
                raise RankMismatchError(f"init(): {what} must be the same on all ranks: {text}")

    def _world_key(self) -> bytes:
        """A key that no other world has, even with the same secret: every rank contributes a nonce."""
        nonces = " ".join(card.nonce for card in self._cards)
        return derive_secret(self._store.secret, f"world of generation {self._generation}: {nonces}")

    def _pids(self) -> list[int]:
        """Ids of the processes whose state this rank may look up."""
        own = self._cards[self._rank]
        mine = (own.host_id, own.uid, own.pid_space)
        near = [bool(own.pid_space) and (c.host_id, c.uid, c.pid_space) == mine for c in self._cards]
        return [card.pid if is_near else 0 for card, is_near in zip(self._cards, near, strict=True)]

    def _share_memory(self) -> list[list[int]]:
        """Group the ranks into domains: those of a host, if all of them got at its memory."""
        hosts: dict[str, list[int]] = {}
        for card in self._cards:
            hosts.setdefault(card.host_id, []).append(card.rank)
        groups = [ranks for ranks in hosts.values() if len(ranks) > 1 and self._may_share(ranks)]
        verdicts = [""] * self._size
        if groups:
            own = next((ranks for ranks in groups if self._rank in ranks), [])
            problem = self._join_host(own) if own else ""
            verdicts = self._exchange("local", problem, "they did not send whether they share memory")
        domains = []
        for ranks in hosts.values():
            reasons = [f"rank {rank}: {verdicts[rank]}" for rank in ranks if verdicts[rank]]
            if reasons and ranks[0] == self._rank:
                _LOG.warning("ranks %s of one host use TCP, not shared memory: %s", ranks, "; ".join(reasons))
            shared = ranks in groups and not reasons
            domains += [ranks] if shared else [[rank] for rank in ranks]
            if self._rank in ranks and not shared:
                self._leave_host()
        return sorted(domains)

    def _may_share(self, ranks: list[int]) -> bool:
        cards = [self._cards[rank] for rank in ranks]
        return all(card.unix_name for card in cards) and len({card.uid for card in cards}) == 1

    def _join_host(self, ranks: list[int]) -> str:
        """Connect within the host and get hold of its memory; returns what went wrong, or nothing."""
        size = _segment_bytes(len(ranks))
        self._host.open(ranks, size, leading=ranks[0] == self._rank)
        for peer in ranks:
            self._meet("local", peer, socket.AF_UNIX, f"\0{self._cards[peer].unix_name}")
            if (early := self._open.get(("local", peer))) is not None:
                self._host.serve(peer, early.connection)
        if ranks[0] == self._rank:
            return self._host.problem  # and go on serving while the others answer
        dials = [self._dials["local", peer] for peer in ranks if peer < self._rank]
        # Not all of the time that there is: TCP may still be needed.
        give_up_at = time.monotonic() + self._remaining_s() / 2

        def settled() -> bool:
            failed = [dial for dial in dials if dial.failed]
            if failed and not self._host.problem:
                self._host.problem = f"cannot reach rank {failed[0].greeting.target}: {failed[0].error}"
            complete = self._host.descriptor >= 0 and all(dial.done for dial in dials)
            return complete or bool(self._host.problem) or time.monotonic() >= give_up_at

        self._until(settled, lambda: f"shared memory of rank {ranks[0]}")
        if self._host.descriptor < 0 and not self._host.problem:
            return "it did not arrive in time"
        return self._host.problem

    def _leave_host(self) -> None:
        self._host.close()
        for key in [key for key in self._dials if key[0] == "local"]:
            del self._dials[key]
        for key in [key for key in self._open if key[0] == "local"]:
            self._open.pop(key).connection.close()

    def _connect_domains(self, domains: list[list[int]]) -> None:
        """TCP between leaders along the tree, and between all ranks that share no memory."""
        mine = next(i for i, ranks in enumerate(domains) if self._rank in ranks)
        for i, ranks in enumerate(domains):
            if i == mine:
                continue
            for peer in ranks:
                self._meet_by_tcp("data", peer)
            if self._rank == domains[mine][0] and (tree_parent(i) == mine or tree_parent(mine) == i):
                self._meet_by_tcp("control", ranks[0])
        # A rank that only waits to be called does not know what fails: one that calls reports it first.
        calls = any(peer < self._rank for purpose, peer in self._dials if purpose != "local")
        self._until(lambda: not self._absent(), self._absent_text, slack_s=0.0 if calls else _REASON_S)

    def _meet_by_tcp(self, purpose: str, peer: int) -> None:
        """The first address that answers, where there are several."""
        card, own = self._cards[peer], self._cards[self._rank]
        ports = {card.address: card.port, **{address: port for address, port in card.others}}
        order = network.nearest_first(ports, [own.address, *(address for address, _ in own.others)])
        (first, *others) = [
            (socket.AF_INET6 if ":" in address else socket.AF_INET, (address, ports[address]))
            for address in (order if card.others else [card.address])
        ]
        self._meet(purpose, peer, *first, others)

    def _meet(
        self, purpose: str, peer: int, family: int, address: Any, others: Sequence[tuple[int, Any]] = ()
    ) -> None:
        """Connect to a lower rank; expect a connection of a higher one."""
        if peer == self._rank:
            return
        source, target = max(peer, self._rank), min(peer, self._rank)
        greeting = Greeting(purpose, self._generation, source, target)
        if peer < self._rank:
            persistent = family != socket.AF_UNIX  # within a host, retrying does not help
            self._dials[purpose, peer] = self._handshakes.connect(
                family, address, greeting, persistent=persistent, others=others
            )
        else:
            self._dials[purpose, peer] = Outgoing(family, address, greeting, persistent=True)

    def _absent(self) -> list[tuple[str, int]]:
        return [key for key in self._dials if key not in self._open]

    def _absent_text(self) -> str:
        absent = self._absent()
        parts = []
        for rank in sorted({peer for _, peer in absent}):
            card = self._cards[rank]
            errors = [self._dials[key].error for key in absent if key[1] == rank]
            parts.append(f"rank {rank} ({card.label}, {card.address} port {card.port}): {errors[0]}")
        return (
            f"connections with ranks {sorted({peer for _, peer in absent})} (of {self._size}): "
            f"{'; '.join(parts)}; a firewall, or the wrong interface (POLYHVD_GLOO_IFACE)?"
        )

    def _hand_out(self, connections: Connections) -> None:
        """Move the descriptors into the connections; nothing here fails."""
        tables = {
            "local": connections.local_fds,
            "control": connections.control_fds,
            "data": connections.data_fds,
        }
        keys = {"local": {}, "control": connections.control_keys, "data": connections.data_keys}
        for purpose, peer in sorted(self._dials):
            passed = self._open.pop((purpose, peer))
            tables[purpose][peer] = passed.connection.detach()
            keys[purpose][peer] = passed.keys
        connections.segment_fd, self._host.descriptor = self._host.descriptor, -1

    # The loop

    def _exchange(self, stage: str, mine: Any, meaning: str) -> list[Any]:
        """Send a value to all ranks and return the values of all of them, in rank order."""
        request = self._store.post_gather(
            self._scope(stage),
            self._size,
            self._remaining_s(),
            own=(self._rank, json.dumps(mine).encode()),
        )
        answer: list[Any] = []

        def answered() -> bool:
            try:
                values = self._store.take(request)
            except GatherTimeoutError as error:
                raise PeerLostError(self._late(f"ranks {error.missing}", meaning)) from None
            answer.extend(json.loads(value) for value in values or [])
            return bool(answer)

        # The server's own deadline comes first, since it knows which ranks are missing.
        self._until(answered, lambda: "the rendezvous", slack_s=5.0)
        return answer

    def _until(self, done: Callable[[], bool], what: Callable[[], str], slack_s: float = 0.0) -> None:
        """Drive everything until ``done``; raises at the deadline, or when another rank has failed."""
        while not done():
            remaining_s = self._remaining_s() + slack_s
            if remaining_s <= 0:
                raise PeerLostError(
                    f"rank {self._rank} waited {self._settings.start_timeout_s:g} s for {what()}"
                )
            poller = select.poll()
            watched = self._store.fileno() >= 0
            if watched:
                poller.register(self._store, select.POLLIN)
            poller.register(self._handshakes, select.POLLIN)
            if self._host.source is not None:
                poller.register(self._host.source, select.POLLIN)
            tick_s = _TICK_S if watched else self._store.poll_s
            poller.poll(1000 * min(remaining_s, self._handshakes.timer_s(), tick_s))
            for passed in self._handshakes.poll(0):
                self._arrived(passed)
            self._host.receive()
            self._check_failure()
            self._check_dials()

    def _admit(self, greeting: Greeting) -> bool:
        return (
            greeting.generation == self._generation
            and greeting.target == self._rank
            and self._rank < greeting.source < self._size
            and greeting.purpose in ("local", "control", "data")
        )

    def _arrived(self, passed: Authenticated) -> None:
        greeting = passed.greeting
        peer = greeting.source if passed.incoming else greeting.target
        if greeting.purpose == "local" and self._host.closed:
            passed.connection.close()  # this host has gone over to TCP
            return
        if (former := self._open.pop((greeting.purpose, peer), None)) is not None:
            former.connection.close()  # the peer has given that one up
        self._open[greeting.purpose, peer] = passed
        if greeting.purpose == "local":
            self._host.serve(peer, passed.connection)

    def _check_failure(self) -> None:
        with suppress(GatherTimeoutError):
            if values := self._store.take(self._failure):
                self._is_reported = True
                lost, reason = json.loads(values[0])
                raise (PeerLostError if lost else HorovodInternalError)(str(reason))

    def _check_dials(self) -> None:
        for (purpose, peer), dial in self._dials.items():
            if dial.failed and purpose != "local":
                raise HorovodInternalError(f"rank {self._rank} cannot connect to rank {peer}: {dial.error}")

    def _scope(self, stage: str) -> str:
        return f"init/{self._generation}/{stage}"

    def _remaining_s(self) -> float:
        return self._deadline - time.monotonic()

    def _late(self, missing: str, meaning: str) -> str:
        return (
            f"rank {self._rank} waited {self._settings.start_timeout_s:g} s for {missing} "
            f"(of {self._size}): {meaning}; POLYHVD_START_TIMEOUT sets the limit"
        )


class _Host:
    """The shared memory of the own host: made here by its first rank, received by the others."""

    def __init__(self) -> None:
        self.descriptor = -1
        self.problem = ""
        self.closed = False
        self.source: socket.socket | None = None  # that the memory will come from
        self._ranks: list[int] = []
        self._leading = False
        self._size = 0

    def open(self, ranks: list[int], size: int, *, leading: bool) -> None:
        self._ranks, self._size, self._leading = ranks, size, leading
        if leading:
            try:
                self.descriptor = make_segment(size)
            except OSError as error:
                self.problem = f"cannot make shared memory: {error.strerror}"

    def serve(self, peer: int, connection: socket.socket) -> None:
        """A connection to another rank of the host is there."""
        if peer not in self._ranks:
            return  # not known yet, or no rank of this host
        if self._leading:
            with suppress(OSError):  # then the peer reports it
                send_segment(connection, self.descriptor)
        elif peer == self._ranks[0]:
            self.source = connection

    def receive(self) -> None:
        """Take the memory if it has come."""
        if self.source is None:
            return
        try:
            descriptor = receive_segment(self.source, self._size)
        except OSError as error:
            self.problem = str(error)
            self.source = None
            return
        if descriptor is not None:
            self.descriptor = descriptor
            self.source = None

    def close(self) -> None:
        self.closed = True
        self.source = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


# The memory is a sealed memfd, passed over a Unix socket. It has no name, so nothing is left of it after a
# crash, and no size limit of /dev/shm applies.


def make_segment(size: int) -> int:
    """A zeroed memfd of ``size`` bytes that cannot be resized any more; raises OSError."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    descriptor = os.memfd_create("polyhvd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def send_segment(connection: socket.socket, descriptor: int) -> None:
    """Pass a descriptor to the other end; -1 if there is none. Raises OSError."""
    if descriptor < 0:
        connection.send(_NONE, socket.MSG_NOSIGNAL)
    else:
        socket.send_fds(connection, [_HERE], [descriptor], socket.MSG_NOSIGNAL)


def receive_segment(connection: socket.socket, size: int) -> int | None:
    """The descriptor that the other end passes, or None while it has not; raises OSError.

    ``connection`` is non-blocking; exactly the one byte that carries the descriptor is read.
    """
    space = socket.CMSG_LEN(_INT.size)
    try:  # not socket.recv_fds, which ignores its flags
        data, ancillary, _, _ = connection.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    descriptors = [
        int(_INT.unpack(rights)[0])
        for level, kind, rights in ancillary
        if (level, kind, len(rights)) == (socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT.size)
    ]
    try:
        if not descriptors:
            raise OSError("the host's first rank closed the connection" if not data else "it made no memory")
        found = os.fstat(descriptors[0]).st_size
        seals = fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS)
        if found != size or seals & _SEALS != _SEALS:
            raise OSError(
                f"the shared memory has {found} bytes and seals {seals}, expected {size} and {_SEALS}"
            )
    except OSError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors[0]
