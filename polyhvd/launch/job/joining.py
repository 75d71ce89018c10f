"""polyhvdrun on a host that is not the first: forwards messages between its agent and the first host.

It takes no part in decisions. When its ranks have ended it waits for the result of the whole job.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from polyhvd.launch.job import agent
from polyhvd.launch.providers.arriving import PURPOSE, ranks_secret
from polyhvd.launch.providers.local_agents import LocalAgent
from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import NO_RANK, OTHER_SECRET, AuthError, Greeting, SessionKeys, prove
from polyhvd.rendezvous.lookup import Lookup
from polyhvd.rendezvous.signed_stream import SignedStream, TamperedError, tampered

__all__ = ["Follower", "JoinError", "Result", "reach"]

_TRY_S = 5.0
_AGAIN_S = 0.2
_OUTBOX_BYTES_MAX = 1 << 20
_FORWARDED = (agent.HOLD, agent.GO_ON, agent.SUSPENDED, agent.BEAT)


class JoinError(OSError):
    """The first host cannot be reached, or does not take this one."""


@dataclass
class Result:
    """How the job has ended."""

    status: int
    failure: str = ""  # message if it has failed


def reach(
    host: str, port: int, number: int, secret: bytes, deadline: float
) -> tuple[socket.socket, SessionKeys]:
    """A connection to the first host's polyhvdrun, which has proved the secret to this one, and its keys.

    Args:
        host: its name or address.
        port: of it.
        number: of this host.
        secret: that both prove.
        deadline: by time.monotonic(); until then it is tried again.

    Raises:
        JoinError: there is no answer until then, or the first host has another secret.
    """
    where = network.endpoint_text(host, port)
    lookup, tries = Lookup(host), 0
    reason = "it was not tried"
    while (now := time.monotonic()) < deadline:
        addresses = lookup.look(max(0.01, min(deadline - now, _TRY_S)))
        connection = None
        try:
            if not addresses:
                raise OSError(lookup.problem)
            address = addresses[tries % len(addresses)]
            tries += 1
            connection = socket.create_connection(
                (address, port), timeout=max(0.01, min(deadline - now, _TRY_S))
            )
            network.tune(connection)
            greeting = Greeting(PURPOSE, 0, number, NO_RANK)
            return connection, prove(connection, secret, greeting, min(deadline, time.monotonic() + _TRY_S))
        except OSError as error:
            if connection is not None:
                connection.close()
            if isinstance(error, AuthError) and str(error) == OTHER_SECRET:
                raise JoinError(
                    f"the first host, at {where}, has another secret: POLYHVD_SECRET (or the file that "
                    "POLYHVD_SECRET_FILE names) has to be the same on all hosts"
                ) from None
            reason = error.strerror or str(error)
        time.sleep(max(0.0, min(_AGAIN_S, deadline - time.monotonic())))
    raise JoinError(f"the first host did not answer at {where}: {reason}")


class Follower:
    """One host's part in a job.

    Args:
        connection: of :func:`reach`; it now belongs to this object.
        keys: likewise.
        leader: name of the first host.
        name: of this host.
        secret: that was proved.
        start_by: when the first host has to have begun, by time.monotonic().
    """

    def __init__(
        self,
        connection: socket.socket,
        keys: SessionKeys,
        leader: str,
        name: str,
        secret: bytes,
        start_by: float,
    ) -> None:
        self._socket = connection
        self._signed = SignedStream(keys)
        self._leader = leader
        self._name = name
        self._secret = secret
        self._start_by = start_by
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._local: LocalAgent | None = None
        self._over = False  # our agent has ended
        self._result: Result | None = None
        self._lost_reason = ""  # why the connection to the first host is lost
        self._heartbeat: agent.Heartbeat | None = None
        self._suspended = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._alarm = os.pipe()

    def run(self, slots: int, hosts: int, version: str) -> Result:
        """Serve the first host until it sends the job's result.

        Args:
            slots: how many ranks this host takes.
            hosts: how many there are.
            version: of polyhvd.

        Raises:
            JoinError: it does not take this host, or does not begin.
        """
        self._socket.setblocking(False)
        for descriptor in (self._wake, self._alarm):
            os.set_blocking(descriptor, False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._socket, selectors.EVENT_READ)
        hello = {"name": self._name, "slots": slots, "hosts": hosts, "version": version}
        self._send(agent.HELLO, -1, json.dumps(hello).encode())
        try:
            with self._forwarding_signals():
                while self._result is None and not (self._lost_reason and self._is_over()):
                    self._turn()
        finally:
            self._close()
        return self._result or Result(
            1, f"{self._leader} is gone before the end of the job: {self._lost_reason}"
        )

    def _is_over(self) -> bool:
        return self._local is None or self._over

    def _turn(self) -> None:
        self._watch()
        for key, _ in self._selector.select(self._timer_s()):
            if key.fileobj is self._wake or key.fd == self._wake:
                self._forward_signals()
            elif key.fileobj is self._socket:
                self._converse(key.events)
            elif self._local is not None and key.fileobj is self._local.stdout:
                self._relay(self._local)
            elif self._local is None or self._over:
                continue  # its end was seen in this very turn
            elif not self._local.complain():
                self._selector.unregister(self._local.stderr)
        self._look_at_the_time(time.monotonic())

    def _watch(self) -> None:
        """Wait for what can be done: nothing more is read of the agent than the first host takes."""
        if not self._lost_reason:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
            self._selector.modify(self._socket, events)
        if self._local is None or self._over:
            return
        self._local.flush()
        wanted = len(self._outbox) <= _OUTBOX_BYTES_MAX
        watched = self._local.stdout in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(self._local.stdout, selectors.EVENT_READ)
        elif watched and not wanted:
            self._selector.unregister(self._local.stdout)

    def _timer_s(self) -> float | None:
        now = time.monotonic()
        if self._heartbeat is None:
            return max(0.0, self._start_by - now)
        timer_s = self._heartbeat.timer_s(now)
        if self._local is not None and self._local.unsent_bytes:
            timer_s = min(timer_s, _AGAIN_S)
        return timer_s if timer_s < float("inf") else None

    def _look_at_the_time(self, now: float) -> None:
        if self._heartbeat is None:
            if now >= self._start_by and self._result is None and not self._lost_reason:
                raise JoinError(f"{self._leader} has not begun in time: do all hosts run polyhvdrun?")
            return
        if self._heartbeat.is_due(now) and self._over and not self._outbox:  # until then the agent sends more
            self._send(agent.BEAT, -1)
        if self._suspended:
            self._heartbeat.received(now)
        if self._heartbeat.is_silent(now) and not self._lost_reason:
            # The agent notices the same, and ends its ranks gently.
            self._lose(f"nothing was received from it for {self._heartbeat.timeout_s:g} s")

    # The first host

    def _converse(self, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush()
            data = self._socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error.strerror or str(error))
            if self._local is not None:  # there may still be a network between others
                self._local.signal(signal.SIGTERM)
            return
        if not data:
            self._lose("it has closed the connection")
            if self._local is not None:
                self._local.cut()
            return
        try:
            self._inbox += self._signed.unseal(data)
        except TamperedError as error:
            self._distrust(error)
            return
        if self._heartbeat is not None:
            self._heartbeat.received(time.monotonic())
        for kind, _, payload in agent.split_frames(self._inbox):
            self._obey(kind, payload)

    def _distrust(self, error: TamperedError) -> None:
        reason = tampered(f"polyhvdrun on {self._leader}", f"that on {self._name}", error)
        self._send(agent.OVER, -1, (1).to_bytes(4, "big") + reason.encode())
        self._lose(reason)
        if self._local is not None:
            self._local.cut()

    def _obey(self, kind: int, payload: bytes) -> None:
        self._suspended = kind == agent.SUSPENDED
        if kind == agent.REFUSED:
            raise JoinError(f"{self._leader} refuses this host: {payload.decode('utf-8', 'replace')}")
        if kind == agent.RESULT:
            fields = json.loads(payload)
            self._result = Result(int(fields.get("status", 1)), str(fields.get("failure", "")))
        elif kind == agent.JOB:
            self._start(json.loads(payload))
        elif self._local is None:
            return
        elif kind == agent.CUT:
            self._local.cut()
        elif kind == agent.SIGNAL:
            self._local.send(kind, payload)
        elif kind in _FORWARDED:
            self._local.send(kind)

    def _start(self, job: dict[str, Any]) -> None:
        job["env"]["POLYHVD_SECRET"] = ranks_secret(self._secret, job.pop("nonce"))
        if self._local is None:
            self._local = LocalAgent(self._name)
            self._selector.register(self._local.stderr, selectors.EVENT_READ)
            self._heartbeat = agent.Heartbeat(float(job["heartbeat_timeout_s"]), time.monotonic())
        self._local.start(job)

    def _lose(self, reason: str) -> None:
        if not self._lost_reason:
            self._lost_reason = reason
            self._outbox.clear()
            self._selector.unregister(self._socket)

    def _send(self, kind: int, rank: int, payload: bytes = b"") -> None:
        if not self._lost_reason:
            self._outbox += self._signed.seal(agent.frame(kind, rank, payload))
            with contextlib.suppress(OSError):  # is seen when it is read
                self._flush()

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._outbox:
                del self._outbox[: self._socket.send(self._outbox, socket.MSG_NOSIGNAL)]

    # The agent

    def _relay(self, local: LocalAgent) -> None:
        for kind, rank, payload in local.receive():
            self._send(kind, rank, payload)
        if local.ended and not self._over:
            self._over = True
            for stream in (local.stdout, local.stderr):
                with contextlib.suppress(KeyError):
                    self._selector.unregister(stream)
            status = local.close()
            local.end_strays()
            self._send(agent.OVER, -1, status.to_bytes(4, "big", signed=True))

    # Signals to this process

    @contextlib.contextmanager
    def _forwarding_signals(self) -> Iterator[None]:
        numbers = (*agent.STOP_SIGNALS, *agent.USER_SIGNALS)
        former = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
        former_alarm = signal.set_wakeup_fd(self._alarm, warn_on_full_buffer=False)
        for number in former:
            signal.signal(number, agent.leave_to_the_loop)
        # Only the first host can suspend the job: if this process stopped, this host would count as lost.
        former[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(former_alarm)

    def _forward_signals(self) -> None:
        """Send the signals to the first host, and to the ranks here at once."""
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._wake, 4096):
                if number not in (*agent.STOP_SIGNALS, *agent.USER_SIGNALS):
                    continue
                if self._local is None and number in agent.STOP_SIGNALS:
                    self._result = Result(128 + number, f"polyhvdrun on {self._name} was requested to end")
                elif self._local is not None and number in agent.STOP_SIGNALS:
                    self._local.signal(number)
                self._send(agent.SIGNALLED, -1, number.to_bytes(4, "big"))

    def _close(self) -> None:
        if self._local is not None and not self._over:
            self._local.close()
            self._local.end_strays()
        self._socket.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._alarm)
