"""Rendezvous of ranks whose launcher serves no store of polyhvd's: world rank 0 serves one.

A provider finds the rank of this process and the host of rank 0. The rest is the same for all providers: on
one host a Unix socket, whose kernel identifies the peer; between hosts a port of rank 0's host and a secret
from the user. The ranks exchange their hosts.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

from polyhvd.config import ConfigError, Launched, Settings
from polyhvd.errors import HorovodInternalError, PeerLostError, RankMismatchError
from polyhvd.launch import sagemaker
from polyhvd.launch.providers.provider import Claim, Met, Provider
from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import parse_secret
from polyhvd.rendezvous.client import ConnectedStore
from polyhvd.rendezvous.meeting_points import (
    FileMeetingPoint,
    MeetingPoint,
    PortMeetingPoint,
    RootNotFoundError,
    UnixMeetingPoint,
)
from polyhvd.rendezvous.store import GatherTimeoutError, StoreError, job_name
from polyhvd.runtime.placement import RANKS_MAX, Placement, placements

__all__ = ["MeetingProvider", "exposed_secret", "given_secret"]

_LOG = logging.getLogger("polyhvd")
#: The secret of a job whose user trusts the network.
_NO_SECRET = b"polyhvd: the network is trusted"
_REASON_CHARS_MAX = 4000
#: Of the secret's file, which is far shorter; and for a pipe in its place.
_FILE_BYTES_MAX = 4096
_FILE_WAIT_S = 5.0
_TICK_S = 0.1
#: Extra time after the deadline, in which rank 0 can report the missing ranks.
_GRACE_S = 3.0


def given_secret(launched: Launched) -> bytes:
    """The secret in the environment, or in the file that it names; empty: none. Raises ConfigError."""
    text, name = launched.secret, "POLYHVD_SECRET"
    if not text and not launched.secret_file:
        return b""
    if not text:
        name = f"POLYHVD_SECRET_FILE={launched.secret_file}"
        try:
            text = _read_file(Path(launched.secret_file).expanduser()).decode("ascii")
        except OSError as error:
            raise ConfigError(f"{name}: {error.strerror}") from None
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        except ValueError:
            raise ConfigError(f"{name}: the job's secret must be hexadecimal") from None
    try:
        return parse_secret(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _read_file(path: Path) -> bytes:
    """The beginning of a file. A pipe without a writer counts as an empty file."""
    deadline, found = time.monotonic() + _FILE_WAIT_S, b""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_owner(os.fstat(descriptor))
        while len(found) < _FILE_BYTES_MAX:
            if not network.await_ready([descriptor], deadline - time.monotonic()):
                break
            part = os.read(descriptor, _FILE_BYTES_MAX - len(found))
            if not part:
                break
            found += part
        return found
    finally:
        os.close(descriptor)


def _check_owner(found: os.stat_result) -> None:
    """Raise ConfigError for a file whose content another user decides on, other than root."""
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISFIFO(found.st_mode):
        return
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"user {found.st_uid} owns it, and this process is of user {os.geteuid()}; "
            "use a file of this user's"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"other users may write to it (mode {stat.S_IMODE(found.st_mode):o}); chmod 600 it")


def exposed_secret(launched: Launched) -> str:
    """A warning if other users of the host can read the user's secret; else empty."""
    if launched.secret or not launched.secret_file:
        return ""
    path = Path(launched.secret_file).expanduser()
    with suppress(OSError):
        found = path.stat()
        if stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IROTH and found.st_uid == os.geteuid():
            return (
                f"POLYHVD_SECRET_FILE={path}: every user of this host can read it (mode "
                f"{stat.S_IMODE(found.st_mode):o}), and join the job; chmod 600 it (defaultMode: 0440 of a "
                "Secret of Kubernetes)"
            )
    return ""


class MeetingProvider(Provider):
    """A provider whose ranks meet at a store of rank 0's. A subclass finds the rank of this process.

    See :class:`polyhvd.launch.providers.provider.Provider`.
    """

    #: Where a user gives the ranks of such a job a secret.
    secret_hint = "before the ranks are started, on every host"

    def meet(self, claim: Claim | None, settings: Settings, after: int, deadline: float) -> Met:
        """Find rank 0, and agree on the hosts of all ranks."""
        assert claim is not None
        rank, size = self._checked(claim)
        generation = after + 1
        if size == 1:
            return Met(Placement(generation=generation), None)
        launched = Launched.from_environment()
        if rank == 0 and (warning := exposed_secret(launched)):
            _LOG.warning("%s", warning)
        try:
            store = self.meeting_point(claim, settings, given_secret(launched)).open(
                rank, generation, deadline
            )
        except RootNotFoundError as error:
            raise PeerLostError(
                f"rank {rank} waited {settings.start_timeout_s:g} s for {error}: it has not called init(); "
                f"POLYHVD_START_TIMEOUT sets the limit{self._unfound(claim)}"
            ) from None
        except StoreError as error:
            raise HorovodInternalError(f"rank {rank}: {error}") from None
        try:
            return Met(_Placing(store, rank, size, generation, settings, deadline).run(), store)
        except BaseException:
            store.close()
            raise

    def meeting_point(self, claim: Claim, settings: Settings, secret: bytes) -> MeetingPoint:
        """How rank 0 of this job is found; raises ConfigError where there is no secret, and one is needed."""
        if claim.one_host:
            return UnixMeetingPoint(f"{claim.job_id} {claim.restart}", secret)
        if not claim.root:
            raise ConfigError(f"init(): {self.name} does not contain the address of rank 0 ({claim.seen})")
        return PortMeetingPoint(claim.job_id, secret or self._without_secret(claim, settings), claim.root)

    @staticmethod
    def shared_file(claim: Claim, settings: Settings) -> MeetingPoint:
        """By a file of mode 0600 in a folder that all hosts see, with a secret that rank 0 makes."""
        folder = Path(settings.shared_dir or "~/.polyhvd").expanduser()
        name = re.sub(r"[^\w.-]", "_", f"{claim.job_id}.{claim.restart}")
        return FileMeetingPoint(f"{claim.job_id} {claim.restart}", folder / name, settings.interface)

    def _checked(self, claim: Claim) -> tuple[int, int]:
        if claim.size is None:
            raise ConfigError(
                f"init(): {self.name} has started this process as one of several ({claim.seen}), but not "
                "set their number; set POLYHVD_SIZE, or POLYHVD_ALONE=1 for a world of one rank"
            )
        rank = claim.rank or 0
        if not rank < claim.size:
            raise ConfigError(
                f"init(): rank {rank} is not below the size {claim.size} of {self.name}'s job ({claim.seen})"
            )
        if claim.size > RANKS_MAX:
            raise ConfigError(
                f"init(): {self.name}'s job has {claim.size} ranks ({claim.seen}); at most {RANKS_MAX} are "
                "supported"
            )
        return rank, claim.size

    def _without_secret(self, claim: Claim, settings: Settings) -> bytes:
        if settings.trust_network:
            if not claim.rank:
                _LOG.warning(
                    "POLYHVD_TRUST_NETWORK=1: the ranks of this job have no secret; any process that reaches "
                    "their ports can join it, and make them run code"
                )
            return _NO_SECRET
        raise ConfigError(
            f"init(): the ranks that {self.name} has started ({claim.seen}) may be on several hosts, and "
            f"have no secret to authenticate each other. {self._secret_recipe()}"
        )

    def _secret_recipe(self) -> str:
        """How a user of such jobs makes a secret, and gives it to the ranks."""
        if sagemaker.is_here():
            return f"Set one {sagemaker.SECRET_HINT} (or there POLYHVD_TRUST_NETWORK to 1, to do without)"
        return (
            "Make a file with one that all hosts see:\n"
            "    (umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > ~/polyhvd.secret)\n"
            f"and set, {self.secret_hint}:\n"
            "    export POLYHVD_SECRET_FILE=~/polyhvd.secret\n"
            "(or POLYHVD_SECRET to the secret itself; or POLYHVD_TRUST_NETWORK=1 to do without)"
        )

    def _unfound(self, claim: Claim) -> str:
        """Other possible reasons why rank 0 was not found, to end a sentence."""
        return ""


class _Placing:
    """Exchanges the hosts of all ranks, and fails at once when one of them fails."""

    def __init__(
        self,
        store: ConnectedStore,
        rank: int,
        size: int,
        generation: int,
        settings: Settings,
        deadline: float,
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._generation = generation
        self._settings = settings
        self._deadline = deadline  # by time.monotonic()
        self._nonce = secrets.token_hex(8)
        self._failure = -1  # the request that gets a reply when another rank fails
        self._failure_is_known = False

    def run(self) -> Placement:
        """This rank's place; raises what :meth:`MeetingProvider.meet` does."""
        try:
            return self._agree()
        except StoreError as error:
            raise HorovodInternalError(f"rank {self._rank}: {error}") from None
        except BaseException as error:
            self._report_failure(error)
            raise

    def _agree(self) -> Placement:
        wait_s = self._settings.start_timeout_s
        self._failure = self._store.post_gather(self._scope("failed"), 1, wait_s + 60)
        if self._rank == 0:
            job = {"size": self._size, "name": secrets.token_hex(16)}  # another one for each run
            self._store.put(self._scope("job"), 0, json.dumps(job).encode())
        agreed = json.loads(self._gather("job", 1, None)[0])
        self._store.job = job_name(str(agreed["name"]), self._store.secret)
        size = int(agreed["size"])
        if size != self._size:
            raise RankMismatchError(
                f"init(): size must be the same on all ranks: rank {self._rank} has {self._size}, "
                f"rank 0 {size}"
            )
        card = {"host": network.host_identity(), "nonce": self._nonce, "root": self._store.peer_address}
        cards = [json.loads(card) for card in self._gather("place", size, json.dumps(card).encode())]
        if cards[self._rank]["nonce"] != self._nonce:
            raise HorovodInternalError(
                f"rank {self._rank}: another process of this job is rank {self._rank}, too; "
                "is it running twice?"
            )
        hosts = [str(card["host"]) for card in cards]
        if hosts[self._rank] == hosts[0]:  # as the other hosts reach it: this one may have many addresses
            seen = [str(card["root"]) for card in cards if card["host"] != hosts[0]]
            self._store.address = seen[0] if seen else network.loopback()
        return placements(hosts, self._generation)[self._rank]

    def _gather(self, stage: str, count: int, mine: bytes | None) -> list[bytes]:
        own = None if mine is None else (self._rank, mine)
        wait_s = self._settings.start_timeout_s
        left_s = max(0.0, self._deadline - time.monotonic())
        request = self._store.post_gather(self._scope(stage), count, left_s, own=own)
        while True:
            try:
                values = self._store.take(request)
            except GatherTimeoutError as error:
                rejected = sorted(self._store.strangers.intersection(error.missing))
                why = "they have not called init(); POLYHVD_START_TIMEOUT sets the limit"
                if rejected:
                    why = (
                        f"processes that call as ranks {rejected} have another secret; POLYHVD_SECRET (or "
                        "the file that POLYHVD_SECRET_FILE names) has to be the same on all ranks"
                    )
                raise PeerLostError(
                    f"rank {self._rank} waited {wait_s:g} s for ranks {error.missing} "
                    f"(of {self._size}): {why}"
                ) from None
            self._check_failure()
            if values is not None:
                return values
            if time.monotonic() >= self._deadline + _GRACE_S:
                raise PeerLostError(
                    f"rank {self._rank} waited {wait_s:g} s for rank 0, which does not answer: it is "
                    "stopped, or disconnected from this process; POLYHVD_START_TIMEOUT sets the limit"
                )
            network.await_ready([self._store.fileno()], _TICK_S)  # a value and a failure may arrive together

    def _check_failure(self) -> None:
        with suppress(GatherTimeoutError):
            if values := self._store.take(self._failure):
                self._failure_is_known = True
                lost, reason = json.loads(values[0])
                raise (PeerLostError if lost else HorovodInternalError)(str(reason))

    def _report_failure(self, error: BaseException) -> None:
        """Send the others the reason of this rank's failure, unless they know."""
        if self._failure_is_known:
            return
        lost = isinstance(error, PeerLostError)  # its text names the rank
        known = lost or isinstance(error, RankMismatchError)
        text = str(error) or type(error).__name__
        if not known:
            text = f"rank {self._rank} failed in init(): {text}"
        with suppress(OSError, ValueError):
            message = json.dumps([lost, text[:_REASON_CHARS_MAX]]).encode()
            self._store.put(self._scope("failed"), 0, message)

    def _scope(self, stage: str) -> str:
        return f"init/{self._generation}/{stage}"
