"""Starts and watches the ranks of one host, on that host, for the launcher.

Runs as a process of its own, started directly or through ssh, which sends it this very file: so it
uses the standard library alone, and nothing newer than Python 3.8. It lives as long as its standard
input: when the launcher dies, however it dies, every rank and every process that a rank has started
is killed.

Frames in both directions: kind, rank, size, payload. The agent writes MAGIC first, since a login
shell may have printed something before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
from typing import Any

MAGIC = b"\0polyhvd agent 1\n"
FRAME = struct.Struct("!BiI")
FRAME_BYTES_MAX = 1 << 24

# From the agent
STDOUT, STDERR = 1, 2  # what a rank has written
STARTED = 3  # payload: pid
EXITED = 4  # payload: exit status, negative for a signal; all that the rank has written came before
FAILED = 5  # the rank was not started; payload: exit status, reason
# From the launcher
JOB = 16  # payload: JSON
SIGNAL = 17  # to all ranks that still run; payload: number

_NUMBER = struct.Struct("!i")
_READ_BYTES = 1 << 16
_OUTBOX_BYTES_MAX = 1 << 20
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def frame(kind: int, rank: int, payload: bytes = b"") -> bytes:
    """A frame of either direction."""
    return FRAME.pack(kind, rank, len(payload)) + payload


def split_frames(data: bytearray) -> list[tuple[int, int, bytes]]:
    """Take the complete frames off the front of ``data``; raises ValueError for an impossible one."""
    frames = []
    while len(data) >= FRAME.size:
        kind, rank, size = FRAME.unpack_from(data)
        if size > FRAME_BYTES_MAX:
            raise ValueError(f"a frame of {size} bytes")
        if len(data) < FRAME.size + size:
            break
        frames.append((kind, rank, bytes(data[FRAME.size : FRAME.size + size])))
        del data[: FRAME.size + size]
    return frames


def parse_status(payload: bytes) -> tuple[int, str]:
    """Exit status and reason of an EXITED or FAILED frame."""
    return _NUMBER.unpack_from(payload)[0], payload[_NUMBER.size :].decode("utf-8", "replace")


class Agent:
    """The ranks of this host, their pipes, and the launcher's two pipes."""

    def __init__(self, inlet: int, outlet: int) -> None:
        self._inlet, self._outlet = inlet, outlet
        self._inbox = bytearray()
        self._outbox = bytearray(MAGIC)
        self._ranks: dict[int, int] = {}  # pid -> rank, while it runs
        self._pipes: dict[int, tuple[int, int]] = {}  # descriptor -> rank, kind
        self._started = False
        self._paused = False  # the launcher does not keep up; the ranks wait
        self._ended = False  # the launcher is gone
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve the launcher until all ranks have ended or it is gone; leaves no process behind."""
        wake = self._watch_signals()
        os.set_blocking(self._inlet, False)
        os.set_blocking(self._outlet, False)
        self._selector.register(self._inlet, selectors.EVENT_READ)
        self._selector.register(wake, selectors.EVENT_READ)
        self._flush()
        while not self._ended and (self._ranks or not self._started):
            for key, _ in self._selector.select():
                descriptor = key.fd
                if descriptor == self._inlet:
                    self._listen()
                elif descriptor == self._outlet:
                    self._flush()
                elif descriptor == wake:
                    self._reap(wake)
                elif descriptor in self._pipes:
                    self._relay(descriptor)
        kill_descendants()
        while self._pipes and not self._ended:
            self._drain(next(iter(self._pipes)))
        os.set_blocking(self._outlet, True)
        while self._outbox and not self._ended:
            self._flush()

    def _watch_signals(self) -> int:
        wake, alarm = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(alarm, False)
        signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._end)
        return wake

    def _end(self, *_: Any) -> None:
        self._ended = True

    # The launcher

    def _listen(self) -> None:
        try:
            data = os.read(self._inlet, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._ended = True
            return
        self._inbox += data
        for kind, _, payload in split_frames(self._inbox):
            if kind == JOB:
                self._start(json.loads(payload))
            elif kind == SIGNAL:
                self._signal(_NUMBER.unpack(payload)[0])

    def _send(self, kind: int, rank: int, payload: bytes) -> None:
        self._outbox += frame(kind, rank, payload)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: os.write(self._outlet, self._outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._ended = True
        waiting = self._outlet in self._selector.get_map()
        if self._outbox and not waiting:
            self._selector.register(self._outlet, selectors.EVENT_WRITE)
        elif waiting and not self._outbox:
            self._selector.unregister(self._outlet)
        self._pause(len(self._outbox) > _OUTBOX_BYTES_MAX)

    def _pause(self, pause: bool) -> None:
        if pause == self._paused:
            return
        self._paused = pause
        for descriptor in self._pipes:
            if pause:
                self._selector.unregister(descriptor)
            else:
                self._selector.register(descriptor, selectors.EVENT_READ)

    # The ranks

    def _start(self, job: dict[str, Any]) -> None:
        self._started = True
        environment = {k: v for k, v in os.environ.items() if k not in job["unset"]}
        environment.update(job["env"])
        threads = max(1, len(os.sched_getaffinity(0)) // len(job["ranks"]))
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        for rank, its_environment in job["ranks"]:
            try:
                process = self._spawn(job["argv"], job["cwd"], {**environment, **its_environment})
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self._send(FAILED, rank, _explain(error, job["argv"][0], job["cwd"]))
                continue
            for kind, pipe in ((STDOUT, process.stdout), (STDERR, process.stderr)):
                descriptor = os.dup(pipe.fileno())
                pipe.close()
                os.set_blocking(descriptor, False)
                self._pipes[descriptor] = (rank, kind)
                if not self._paused:
                    self._selector.register(descriptor, selectors.EVENT_READ)
            self._ranks[process.pid] = rank
            process.returncode = 0  # reaped here, not by subprocess
            self._send(STARTED, rank, _NUMBER.pack(process.pid))

    def _spawn(self, argv: list[str], cwd: str, environment: dict[str, str]) -> Any:
        agent = os.getpid()

        def leash() -> None:
            # Safe here: this process has one thread. A rank never outlives its agent.
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != agent:
                os._exit(1)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)

        return subprocess.Popen(
            argv,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a group of its own, with its children
            preexec_fn=leash,
        )

    def _relay(self, descriptor: int) -> bool:
        """Pass on what a rank has written; False when there is nothing for now, or nothing more."""
        rank, kind = self._pipes[descriptor]
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            del self._pipes[descriptor]
            if not self._paused:
                self._selector.unregister(descriptor)
            os.close(descriptor)
            return False
        self._send(kind, rank, data)
        return True

    def _drain(self, descriptor: int) -> None:
        """Pass on what is there, but not for ever: children of a rank may write on."""
        for _ in range(64):
            if not self._relay(descriptor):
                return

    def _reap(self, wake: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(wake, _READ_BYTES)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            rank = self._ranks.pop(pid, None)
            if rank is None:
                continue  # an orphan of a rank
            for descriptor in [d for d, (owner, _) in self._pipes.items() if owner == rank]:
                self._drain(descriptor)
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            self._send(EXITED, rank, _NUMBER.pack(code))

    def _signal(self, number: int) -> None:
        for pid in self._ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)
        if number == signal.SIGKILL:
            kill_descendants(wait_s=0)


def _explain(error: Exception, program: str, cwd: str) -> bytes:
    reason = str(error)
    status = 126
    if isinstance(error, OSError):
        what = f"cannot enter {cwd}" if error.filename == cwd else f"cannot run {program!r}"
        reason = f"{what}: {error.strerror}"
        status = 127 if error.errno == errno.ENOENT else 126
    return _NUMBER.pack(status) + reason.encode()


def descendants() -> set[int]:
    """All living processes below this one."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
        except OSError:
            continue  # gone
        if fields[0] not in (b"Z", b"X"):
            children.setdefault(int(fields[1]), []).append(int(name))
    found: set[int] = set()
    queue = [os.getpid()]
    while queue:
        for child in children.get(queue.pop(), []):
            found.add(child)
            queue.append(child)
    return found


def kill_descendants(wait_s: float = 5.0) -> None:
    """Kill everything below this process; orphans come to us, who are their subreaper."""
    deadline = time.monotonic() + wait_s
    while True:
        living = descendants()
        for pid in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not living or time.monotonic() >= deadline:
            return
        time.sleep(0.005)


def main(parent: int | None = None) -> None:
    """Run an agent on standard input and output; ``parent``: end with this process as well."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Nothing but frames may reach the launcher, and no rank may hold its pipes.
    inlet, outlet = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    agent = Agent(inlet, outlet)
    if parent is not None:
        # Standard input alone would do, were the launcher sure never to be forked.
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            return
    agent.run()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else None)
