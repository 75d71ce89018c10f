"""Access to a store that world rank 0 serves: how it publishes its address, and how the others find it.

Under launchers that serve no store, rank 0 does so while the ranks of one generation connect. The others
keep trying all places at which it may be until one proves that it belongs to the job; other listeners there
do no harm.
"""

from __future__ import annotations

import abc
import hashlib
import json
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import NO_RANK, OTHER_SECRET, Greeting, derive_secret, new_secret, parse_secret
from polyhvd.rendezvous.client import ConnectedStore
from polyhvd.rendezvous.handshakes import Authenticated, Handshakes, Outgoing
from polyhvd.rendezvous.lookup import Lookup
from polyhvd.rendezvous.server import Server
from polyhvd.rendezvous.store import StoreError, job_name

__all__ = ["FileMeetingPoint", "MeetingPoint", "PortMeetingPoint", "RootNotFoundError", "UnixMeetingPoint"]

_BACKLOG = 1024
_CANDIDATES = 4  # places that rank 0 may take, if others have the first ones
#: Below the ports that systems give to outgoing connections, and above those of well-known services.
_PORTS = range(15000, 32000)
_LOOK_S = 0.3
_LOOK_UP_S = 2.0  # of rank 0 for its own name, which is in /etc/hosts as a rule
#: From the first peer with another secret on: the job's own rank 0 may listen at the next port.
_OTHER_SECRET_S = 2.0
_FLUSH_S = 2.0
_TICK_S = 0.1
#: Extra time after the deadline, in which rank 0 can report a timeout itself.
_GRACE_S = 3.0
_FILE_BYTES_MAX = 65536

_SAME_SECRET = "POLYHVD_SECRET (or the file that POLYHVD_SECRET_FILE names) has to be the same on all ranks"
_STRANGERS_MAX = 16  # that rank 0 warns of
_LOG = logging.getLogger("polyhvd")

#: Family and address of a socket.
Place = tuple[int, Any]


class RootNotFoundError(StoreError):
    """Rank 0 was not found in time."""


class HostedStore(ConnectedStore):
    """Rank 0's access to the store that it serves itself; the store ends when this is closed."""

    def __init__(
        self,
        server: Server,
        passed: Authenticated,
        secret: bytes,
        *,
        job: str,
        strangers: set[int],
        at_end: Callable[[], None],
    ) -> None:
        super().__init__(passed.connection, passed.keys, secret, job=job, server="the store of this process")
        self.strangers = strangers
        self._hosted = server
        self._at_end = at_end

    def close(self) -> None:
        """Have the server answer what it was sent, and end it; idempotent."""
        with suppress(OSError):  # whoever waits for a value that was put just now gets it
            self.gather("closing", 1, _FLUSH_S, own=(0, b""))
        super().close()
        self._hosted.close()
        self._at_end()


class MeetingPoint(abc.ABC):
    """How rank 0 of a job listens, and how the others find it.

    Args:
        key: identifies this job; the same on all its ranks.
        secret: that a peer has to prove; empty: the subclass gets one.
    """

    #: Whether only processes of this user can listen where rank 0 is looked for. Otherwise one with another
    #: secret may be any user's, and rank 0 is waited for until the deadline.
    _knows_peers = False

    def __init__(self, key: str, secret: bytes = b"") -> None:
        self._key = key
        self._secret = secret

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """The place where ranks look for rank 0, for messages."""

    @abc.abstractmethod
    def _listen(self, generation: int) -> tuple[socket.socket, list[Place]]:
        """On rank 0: a listening socket, and at which places it is reached from here."""

    @abc.abstractmethod
    def _places(self, generation: int) -> list[Place]:
        """On other ranks: where rank 0 may listen, as far as that is known by now."""

    def open(self, rank: int, generation: int, deadline: float) -> ConnectedStore:
        """Serve the store, or find the one that rank 0 serves.

        Args:
            rank: of this process.
            generation: of the world that is to be made.
            deadline: by time.monotonic().

        Raises:
            StoreError: rank 0 cannot listen, or was not found, or has another secret.
        """
        greeting = Greeting("store", generation, rank, NO_RANK)
        job = job_name(self._key, hashlib.sha256(self._key.encode()).digest())
        if rank > 0:
            passed = self._reach(lambda: self._places(generation), greeting, deadline)
            store = ConnectedStore(passed.connection, passed.keys, self._secret, job=job, server="rank 0")
            return self._agreed(store, deadline)
        listener, places = self._listen(generation)
        strangers = _Strangers()
        server = Server(
            self._secret, listener=listener, generation=generation, on_other_secret=strangers.warn_of
        )
        try:
            passed = self._reach(lambda: places, greeting, deadline)
            hosted = HostedStore(
                server,
                passed,
                self._secret,
                job=job,
                strangers=strangers.ranks,
                at_end=lambda: self._forget(generation),
            )
            return self._agreed(hosted, deadline)
        except BaseException:
            server.close()
            self._forget(generation)
            raise

    def _reach(self, look: Callable[[], list[Place]], greeting: Greeting, deadline: float) -> Authenticated:
        """The first connection that proves the secret, at any of the places that ``look`` returns."""
        dials = _Dials(greeting)
        is_refused = False
        try:
            while (now := time.monotonic()) < deadline:
                dials.try_all(look(), self._secret)
                if (passed := dials.wait(min(deadline, now + _LOOK_S))) is not None:
                    return passed
                if not is_refused and dials.refused_for_good:
                    if self._knows_peers:
                        break
                    is_refused = True
                    _LOG.warning("rank %d: %s", greeting.source, self._other_secret())
            if dials.were_refused:
                raise StoreError(self._other_secret())
            raise RootNotFoundError(self.description)
        finally:
            dials.close()

    def _other_secret(self) -> str:
        return f"{self.description}: {OTHER_SECRET}; {_SAME_SECRET}"

    def _forget(self, generation: int) -> None:
        """Remove on rank 0 what it has published; nothing, unless a subclass publishes something."""
        return

    def _agreed(self, store: ConnectedStore, deadline: float) -> ConnectedStore:
        """The store, once its ranks have one secret."""
        return store


class UnixMeetingPoint(MeetingPoint):
    """A Unix socket for ranks of one host and one user; at both ends, the kernel reports the user.

    A secret is not required; if one is given, it must be the same on all ranks. For connections between
    each other, the ranks get a secret that rank 0 creates.
    """

    _knows_peers = True

    def __init__(self, key: str, secret: bytes = b"") -> None:
        super().__init__(key, derive_secret(secret, key))

    @property
    def description(self) -> str:
        """The place where ranks look for rank 0."""
        return "rank 0 on this host"

    def _name(self, generation: int) -> str:
        """Prefix of the name of rank 0's abstract socket; random digits follow.

        Another user can bind names with this prefix, but not the one that rank 0 will choose.
        """
        text = f"{os.geteuid()} {generation} {self._key}"
        return f"polyhvd-join-{hashlib.sha256(text.encode()).hexdigest()[:32]}-"

    def _listen(self, generation: int) -> tuple[socket.socket, list[Place]]:
        name = f"\0{self._name(generation)}{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(name)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise StoreError(f"rank 0 cannot listen on this host: {error.strerror}") from None
        return listener, [(socket.AF_UNIX, name)]

    def _places(self, generation: int) -> list[Place]:
        found = network.abstract_listeners(self._name(generation))
        return [(socket.AF_UNIX, name) for name, _, user in found if user == os.geteuid()]

    def _agreed(self, store: ConnectedStore, deadline: float) -> ConnectedStore:
        try:
            if isinstance(store, HostedStore):
                store.put("secret", 0, parse_secret(new_secret()))
            request = store.post_gather("secret", 1, max(0.1, deadline - time.monotonic()))
            while (values := store.take(request)) is None:
                if time.monotonic() >= deadline + _GRACE_S:
                    raise StoreError("rank 0 does not answer: it is stopped")
                network.await_ready([store.fileno()], _TICK_S)
            store.secret = values[0]
        except BaseException:
            store.close()
            raise
        return store


class PortMeetingPoint(MeetingPoint):
    """One of a few ports of rank 0's host, for ranks that know this host and a secret.

    The ports are derived from the job's name, and differ from ports that the user has set: a program may
    listen on those itself, like torch.distributed on MASTER_PORT.
    """

    def __init__(self, key: str, secret: bytes, host: str) -> None:
        super().__init__(key, derive_secret(secret, key))
        self._host = host
        self._lookup = Lookup(host)

    @property
    def description(self) -> str:
        """The place where ranks look for rank 0."""
        ports = ", ".join(map(str, self._ports()))
        problem = self._lookup.problem
        unresolved = f", whose address is not known here ({problem})" if problem else ""
        return f"rank 0 on {self._host} (ports {ports}){unresolved}"

    def _ports(self) -> list[int]:
        """Candidates for rank 0's port: half follow from the key only, half from the secret as well.

        The first half lets a rank with another secret find rank 0, and report that. The second half cannot be
        predicted by other users.
        """
        texts = [f"ports {self._key}", f"ports {self._key} {self._secret.hex()}"]
        digests = [hashlib.sha256(text.encode()).digest() for text in texts]
        numbers = [
            int.from_bytes(digest[4 * i : 4 * i + 4], "big")
            for digest in digests
            for i in range(_CANDIDATES // 2)
        ]
        return list(dict.fromkeys(_PORTS[number % len(_PORTS)] for number in numbers))

    def _listen(self, generation: int) -> tuple[socket.socket, list[Place]]:
        own = [*network.own_addresses(), network.loopback()]
        named = [address for address in self._lookup.look(_LOOK_UP_S) if address in own]
        # Where the name is not this host's own address here, the others may still reach it by that.
        address = named[0] if named and not network.is_loopback(named[0]) else ""
        for port in self._ports():
            with suppress(OSError):
                if address:
                    return network.listener(address, port), [_place(address, port)]
                return network.listener_everywhere(port), [_place(network.loopback(), port)]
        raise StoreError(f"this host has other listeners on the ports of {self.description}")

    def _places(self, generation: int) -> list[Place]:
        addresses = self._lookup.look(_LOOK_S)
        return [_place(address, port) for port in self._ports() for address in addresses]


class FileMeetingPoint(MeetingPoint):
    """A file of mode 0600, with the secret, for ranks of one user whose hosts share a file system.

    Args:
        key: see :class:`MeetingPoint`.
        path: of the file, in a folder that is made, with mode 0700, where it is not there yet.
        interface: to listen on, as POLYHVD_GLOO_IFACE names it; empty: all.
    """

    def __init__(self, key: str, path: Path, interface: str = "") -> None:
        super().__init__(key)
        self._path = path
        self._interface = interface

    @property
    def description(self) -> str:
        """The place where ranks look for rank 0."""
        return (
            f"the file {self._path}, in which rank 0 writes its address (do all hosts see that folder? "
            "POLYHVD_SHARED_DIR names another)"
        )

    def open(self, rank: int, generation: int, deadline: float) -> ConnectedStore:
        """See :meth:`MeetingPoint.open`. The file is removed when rank 0 closes the store."""
        self._folder()
        return super().open(rank, generation, deadline)

    def _file(self, generation: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{generation}")

    def _folder(self) -> None:
        folder = self._path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
        except OSError as error:
            cure = "set POLYHVD_SHARED_DIR to another folder"
            raise StoreError(f"{folder}: {error.strerror}; {cure}") from None
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StoreError(
                f"{folder}: others may write there (owner {found.st_uid}, mode "
                f"{stat.S_IMODE(found.st_mode):04o}); name a folder of this user's with POLYHVD_SHARED_DIR"
            )

    def _listen(self, generation: int) -> tuple[socket.socket, list[Place]]:
        try:
            addresses = [network.address_of(self._interface)] if self._interface else network.own_addresses()
        except ValueError as error:
            raise StoreError(str(error)) from None
        listener = network.listener(addresses[0], 0) if self._interface else network.listener_everywhere(0)
        try:
            port = listener.getsockname()[1]
            self._secret = parse_secret(new_secret())
            self._write(generation, {"addresses": addresses, "port": port, "secret": self._secret.hex()})
        except OSError as error:
            listener.close()
            raise StoreError(f"{self._path}: {error.strerror}") from None
        own = addresses[0] if self._interface else network.loopback()
        return listener, [_place(own, port)]

    def _write(self, generation: int, record: dict[str, Any]) -> None:
        file = self._file(generation)
        temporary = file.with_name(f"{file.name}.{new_secret()[:16]}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600)
        try:
            with open(descriptor, "w", encoding="ascii") as stream:
                json.dump(record, stream)
            temporary.replace(file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _places(self, generation: int) -> list[Place]:
        with suppress(OSError):
            os.listdir(self._path.parent)  # NFS remembers for a while that there was no such file
        try:
            record = json.loads(self._read(generation))
            self._secret = parse_secret(record["secret"])
            return [_place(str(address), int(record["port"])) for address in record["addresses"]]
        except FileNotFoundError:
            return []
        except (KeyError, TypeError, ValueError):
            raise StoreError(f"{self._file(generation)} is not a file of polyhvd's") from None

    def _read(self, generation: int) -> str:
        file = self._file(generation)
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            private = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
            if not private or not stat.S_ISREG(found.st_mode):
                raise StoreError(f"{file}: expected a file of this user's with mode 0600")
            return os.read(descriptor, _FILE_BYTES_MAX).decode("ascii", "replace")
        finally:
            os.close(descriptor)

    def _forget(self, generation: int) -> None:
        with suppress(OSError):
            self._file(generation).unlink()


class _Strangers:
    """Processes that call rank 0 with another secret. They prove nothing, so they only are warned of."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()  # in whose names they call

    def warn_of(self, greeting: Greeting, address: str) -> None:
        """Log it once for each rank."""
        if greeting.source in self.ranks or len(self.ranks) == _STRANGERS_MAX:
            return
        self.ranks.add(greeting.source)
        _LOG.warning(
            "rank 0: a process on %s calls as rank %d, and does not have this job's secret; %s",
            address.removeprefix("::ffff:") or "this host",
            greeting.source,
            _SAME_SECRET,
        )


class _Dials:
    """Tries to connect to many places at once."""

    def __init__(self, greeting: Greeting) -> None:
        self._greeting = greeting
        self._secret = b""
        self._handshakes: Handshakes | None = None
        self._dials: dict[Place, Outgoing] = {}
        self._other_since = 0.0

    @property
    def were_refused(self) -> bool:
        """Whether a process that speaks polyhvd's protocol had another secret."""
        return self._other_since > 0

    @property
    def refused_for_good(self) -> bool:
        """Whether all answers in polyhvd's protocol have had another secret for a while."""
        return self.were_refused and time.monotonic() >= self._other_since + _OTHER_SECRET_S

    def try_all(self, places: list[Place], secret: bytes) -> None:
        """Try these places, too, and those again that have failed for good."""
        if places and (self._handshakes is None or secret != self._secret):
            self.close()
            self._handshakes, self._secret = Handshakes(secret, lambda _: False), secret
            self._dials, self._other_since = {}, 0.0
        for place in places:
            former = self._dials.get(place)
            assert self._handshakes is not None
            if former is None or former.failed:
                self._dials[place] = self._handshakes.connect(*place, self._greeting)
            if former is not None and former.error == OTHER_SECRET:
                self._other_since = self._other_since or time.monotonic()

    def wait(self, until: float) -> Authenticated | None:
        """Go on until one place has proved itself, or the time is over."""
        while (remaining_s := until - time.monotonic()) > 0:
            if self._handshakes is None:
                time.sleep(remaining_s)
                continue
            passed = self._handshakes.poll(remaining_s)
            for other in passed[1:]:
                other.connection.close()
            if passed:
                return passed[0]
        return None

    def close(self) -> None:
        """Give up."""
        if self._handshakes is not None:
            self._handshakes.close()


def _place(address: str, port: int) -> Place:
    return (socket.AF_INET6 if ":" in address else socket.AF_INET), (address, port)
