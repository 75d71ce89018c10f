"""Hosts that join by themselves: each runs polyhvdrun, and the first host's starts the ranks of all.

The others connect to it over TCP and prove the secret that all were given. The signed connection then carries
the messages to and from the agent, and outlives it: every host waits for the result of the whole job. The
secret of the ranks is not sent: both sides derive it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job import agent
from polyhvd.launch.job.agent_process import AgentStreams
from polyhvd.launch.providers.starting import HostAgent
from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import Greeting, derive_secret
from polyhvd.rendezvous.handshakes import Authenticated, Handshakes
from polyhvd.rendezvous.signed_stream import SignedStream, TamperedError, tampered

__all__ = ["PURPOSE", "Arrivals", "ArrivedAgent", "ArrivedAgents", "LateError", "ranks_secret"]

#: Of the connections, in their greeting.
PURPOSE = "agent"
_LOOK_S = 0.2
_CONCLUDE_S = 5.0


class LateError(OSError):
    """Not all hosts have connected in time."""


def ranks_secret(secret: bytes, nonce: str) -> str:
    """The secret of a job's ranks, as POLYHVD_SECRET has it; the nonce may be known to all."""
    return derive_secret(secret, f"ranks {nonce}").hex()


class ArrivedAgent(AgentStreams):
    """An agent on a host that has connected."""

    program = "polyhvdrun there"

    def __init__(
        self, connection: socket.socket, signed: SignedStream, host: str, slots: int, nonce: str
    ) -> None:
        """Take over a connection that has proved its secret and sent its hello."""
        self._signed = signed
        self.slots = slots
        # Of this host, as that one reaches it; a socket for both versions of IP returns it as IPv6.
        self.address = str(connection.getsockname()[0]).removeprefix("::ffff:")
        self._nonce = nonce
        self._socket = connection
        self._lost = False
        self._status = 0
        silent, write_end = os.pipe()  # it prints its complaints on its host
        os.close(write_end)
        # A selector waits for each direction by itself.
        stdin, stdout = (os.fdopen(os.dup(connection.fileno()), mode, 0) for mode in ("wb", "rb"))
        super().__init__(host, stdin, stdout, os.fdopen(silent, "rb", 0))
        self.ready = True

    def start(self, job: dict[str, Any]) -> None:
        """Have ranks started there, with a secret that is not sent."""
        self.ranks += [rank for rank, _ in job["ranks"]]
        env = {name: value for name, value in job["env"].items() if name != "POLYHVD_SECRET"}
        self.send(agent.JOB, json.dumps({**job, "env": env, "nonce": self._nonce}).encode())

    def receive(self) -> list[tuple[int, int, bytes]]:
        """Read what is there and return the frames of the agent; its end is one, too."""
        frames = super().receive()
        for kind, _, payload in frames:
            if kind == agent.OVER:
                self.ended, self.program = True, "its agent"
                self._status, reason = agent.parse_status(payload)
                self.fault = self.fault or reason
        self._lost = self._lost or self._at_end
        return frames

    def _unpacked(self, data: bytes) -> bytes:
        try:
            return b"" if self.fault else self._signed.unseal(data)
        except TamperedError as error:
            self.cut()  # its ranks; that host still receives the result, if its direction is sound
            self.fault = tampered(f"polyhvdrun on {self.host}", "this one", error)
            self._at_end = True
            return b""

    def _write(self, data: bytes) -> None:
        super()._write(self._signed.seal(data))

    def cut(self) -> None:
        """Have the agent there end; the host still waits for the result."""
        if not self.ended:
            self.send(agent.CUT)

    def kill(self) -> None:
        """Cut the connection: the host there ends its ranks."""
        self._lost = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def has_exited(self) -> bool:
        """Always: its process is on another host."""
        return True

    def close(self) -> int:
        """Nothing to wait for; the agent's status, or 1 where the connection was lost."""
        return int(self._lost) or self._status

    def conclude(self, result: dict[str, Any]) -> None:
        """Send the host the job's result, and close the connection."""
        self.send(agent.RESULT, json.dumps(result).encode())
        deadline = time.monotonic() + _CONCLUDE_S
        while not self._lost and not self.flush() and time.monotonic() < deadline:
            network.await_ready([self.stdin.fileno()], _LOOK_S, select.POLLOUT)
        for stream in (self.stdin, self.stdout, self.stderr, self._socket):
            with contextlib.suppress(OSError):
                stream.close()


class ArrivedAgents:
    """See :class:`polyhvd.launch.providers.starting.AgentProvider`."""

    def __init__(self, arrived: ArrivedAgent) -> None:
        self._arrived = arrived

    def agent(self, host: Host) -> HostAgent:
        """The agent that has arrived."""
        return self._arrived


@dataclass
class _Coming:
    """A connection that has proved the secret, and has not sent HELLO."""

    number: int
    signed: SignedStream
    inbox: bytearray


class Arrivals:
    """Waits on the first host for the others.

    Args:
        secret: that they prove.
        names: of all hosts, for messages; the first is this one.
        address: to listen on; empty: everywhere.
        port: to listen on.
        nonce: of this job, see :func:`ranks_secret`.
        version: of polyhvd, which has to be the same everywhere.
        report: is given a line for each host in whose name a process calls with another secret.

    Raises:
        OSError: this process cannot listen there.
    """

    def __init__(
        self,
        secret: bytes,
        names: Sequence[str],
        address: str,
        port: int,
        *,
        nonce: str,
        version: str,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._names = names
        self._report = report
        self._strangers: set[int] = set()  # hosts in whose names they call
        self._nonce = nonce
        self._hello = {"hosts": len(names), "version": version}
        self._called: set[int] = set()  # that have connected, and perhaps not proved anything
        self.arrived: dict[int, ArrivedAgent] = {}
        listener = network.listener(address, port) if address else network.listener_everywhere(port)
        self._handshakes = Handshakes(secret, self._admit, on_other_secret=self._warn_of)
        self._handshakes.listen(listener)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._handshakes, selectors.EVENT_READ)

    def wait(self, deadline: float) -> list[ArrivedAgent]:
        """All hosts but the first, in their order.

        Raises:
            LateError: some are not there by ``deadline`` (time.monotonic()); it names them.
            TamperedError: messages to or from one of them were changed.
        """
        while len(self.arrived) < len(self._names) - 1:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise LateError(self._late_hosts())
            events = self._selector.select(min(left_s, _LOOK_S, self._handshakes.timer_s()))
            for passed in self._handshakes.poll(0):
                self._begin(passed)
            for key, _ in events:
                if isinstance(key.data, _Coming):
                    self._read(key.fileobj, key.data)  # type: ignore[arg-type]
                elif key.data is not None:
                    self._look_after(key.data)
        return [self.arrived[number] for number in sorted(self.arrived)]

    def close(self) -> None:
        """Stop listening; hosts that have connected stay."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Coming):
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._handshakes.close()

    def _admit(self, greeting: Greeting) -> bool:
        wanted = greeting.purpose == PURPOSE and 0 < greeting.source < len(self._names)
        if wanted:
            self._called.add(greeting.source)
        return wanted

    def _warn_of(self, greeting: Greeting, address: str) -> None:
        if greeting.source not in self._strangers:
            self._strangers.add(greeting.source)
            where, name = address.removeprefix("::ffff:"), self._names[greeting.source]
            self._report(
                f"a process at {where} calls as {name}, and has another secret: POLYHVD_SECRET (or the file "
                "that POLYHVD_SECRET_FILE names) has to be the same on all hosts"
            )

    def _begin(self, passed: Authenticated) -> None:
        self._selector.register(
            passed.connection,
            selectors.EVENT_READ,
            _Coming(passed.greeting.source, SignedStream(passed.keys), bytearray()),
        )

    def _read(self, connection: socket.socket, coming: _Coming) -> None:
        try:
            data = connection.recv(65536)
            coming.inbox += coming.signed.unseal(data)
            frames = agent.split_frames(coming.inbox)
            hello = [json.loads(payload) for kind, _, payload in frames if kind == agent.HELLO]
        except BlockingIOError:
            return
        except TamperedError as error:
            reason = tampered(f"polyhvdrun on {self._names[coming.number]}", "this one", error)
            self._refuse(connection, coming, reason)
            raise TamperedError(reason) from None
        except (OSError, ValueError):
            data, hello = b"", []
        if data and not hello:
            return
        self._selector.unregister(connection)
        if not hello:
            connection.close()
            return
        self._enter(connection, coming, hello[0])

    def _enter(self, connection: socket.socket, coming: _Coming, hello: dict[str, Any]) -> None:
        number = coming.number
        differing = [name for name, value in self._hello.items() if hello.get(name) != value]
        reason = "; ".join(
            f"{name}: it has {hello.get(name)!r}, the first host {self._hello[name]!r}" for name in differing
        )
        if number in self.arrived:
            reason = f"another process is number {number} already"
        if reason:
            self._refuse(connection, coming, reason)
            connection.close()
            return
        arrived = ArrivedAgent(
            connection, coming.signed, str(hello["name"]), int(hello["slots"]), self._nonce
        )
        self.arrived[number] = arrived
        self._selector.register(arrived.stdout, selectors.EVENT_READ, arrived)

    def _refuse(self, connection: socket.socket, coming: _Coming, reason: str) -> None:
        with contextlib.suppress(OSError):
            connection.send(coming.signed.seal(agent.frame(agent.REFUSED, -1, reason.encode())))

    def _look_after(self, arrived: ArrivedAgent) -> None:
        """A host that has arrived sends something, or disconnects: it, or another one, may connect again."""
        arrived.put_aside()
        with contextlib.suppress(ValueError):
            arrived.receive()
        if arrived.fault:
            raise TamperedError(arrived.fault)
        if arrived.ended:
            self._selector.unregister(arrived.stdout)
            self.arrived = {number: other for number, other in self.arrived.items() if other is not arrived}
            arrived.conclude({})

    def _late_hosts(self) -> str:
        late = []
        for number in range(1, len(self._names)):
            if number in self.arrived:
                continue
            called = (
                " (it has connected, but not proved that it has the secret)" if number in self._called else ""
            )
            late.append(self._names[number] + called)
        return f"{', '.join(late)}: did not connect in time"
