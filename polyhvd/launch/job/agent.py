"""Starts and watches the ranks of one host, on that host, for the launcher.

Runs as a separate process, started directly or through ssh, and is sent its program: this file and
``processes.py``, see :mod:`polyhvd.launch.job.agent_program`. So it uses only the standard library, and
nothing newer than Python 3.8. It lives as long as its standard input: when the launcher dies, however it
dies, every rank and every process that a rank has started is killed. It is two processes: the agent, and
above it a guard that does the same when the agent is killed. If the launcher falls silent, the ranks are
ended gently.

Frames in both directions: kind, rank, size, payload. The agent writes MAGIC first, since a login
shell may have printed something before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any

from polyhvd.launch.job.processes import kill_descendants, oom_kills, run_aside, send_signal

MAGIC = b"\0polyhvd agent 1\n"
FRAME = struct.Struct("!BiI")
FRAME_BYTES_MAX = 1 << 24

# From the agent
STDOUT, STDERR = 1, 2  # what a rank has written
STARTED = 3  # payload: pid
#: Payload: exit status, negative for a signal; and why the agent has ended the rank, if it has. All that the
#: rank has written came before.
EXITED = 4
FAILED = 5  # the rank was not started; payload: exit status, reason
#: A rank was killed by SIGKILL, and the kernel has killed processes for lack of memory since the first rank
#: was started. Payload: how many of this cgroup, and of this host. Sent before EXITED.
OUT_OF_MEMORY = 6
REPORT = 7  # errors that other ranks have caused in a rank, each with a final zero; sent before EXITED
NOTICE = 12  # this agent has received the signal that stands in place of a rank
FACTS = 11  # what the program of the EXAMINE with this number has written; empty: it has ended
# From a host that joins by itself, see polyhvd/launch/job/joining.py; agents do not send these
HELLO = 8  # payload: JSON
SIGNALLED = 9  # polyhvdrun there has got a signal; payload: number
OVER = 10  # the agent there has ended, and the host waits for RESULT
# To such a host
REFUSED = 24  # payload: why
CUT = 25  # end the agent
RESULT = 26  # of the job; payload: exit status, and what has failed
# From the launcher
JOB = 16  # payload: JSON
SIGNAL = 17  # to all ranks that still run; payload: number
SUSPENDED = 18  # the launcher sends nothing more until it is continued
HOLD, GO_ON = 19, 20  # hold the output of ranks, since it is not read; pass it on again
EXAMINE = 21  # payload: a program in Python that looks at this host; in place of a rank a number below 0
KILL = 22  # the rank in this place of the frame, with its process group
# From both
BEAT = 32  # a heartbeat, if there is nothing else to send

#: They end a job: each rank gets any of them once.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Only ranks that catch them receive them.
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
INTERRUPT_GRACE_S = 5.0  # from SIGINT or SIGHUP to SIGTERM
REPEAT_S = 1.0  # a signal that is repeated sooner counts as the same one, sent by two processes

#: Default of the seconds of silence after which the launcher and an agent give each other up.
HEARTBEAT_TIMEOUT_S = 30.0
_BEATS = 6  # in that time
_JOB_TIMEOUT_S = 300.0  # until the launcher sends a job

_NUMBER = struct.Struct("!i")
_COUNTS = struct.Struct("!II")
#: A rank that is stopped by a signal for so long is reported, once.
_STOPPED_S = 5.0
_READ_BYTES = 1 << 16
_OUTBOX_BYTES_MAX = 1 << 20
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PARENT_GONE = signal.SIGRTMIN
#: How long to see whether a signal was sent to every process here, so that ranks have it already.
_SETTLE_S = 0.05
_LAUNCHER = 0
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


def parse_counts(payload: bytes) -> tuple[int, int]:
    """The counts of an OUT_OF_MEMORY frame."""
    of_cgroup, of_host = _COUNTS.unpack(payload)
    return of_cgroup, of_host


class Heartbeat:
    """Decides when to send a heartbeat, and when the other side has been silent for too long. Pure.

    The launcher and the agents send heartbeats in the loop that does their work: a thread would continue when
    the loop hangs. A side that was stopped or starved of CPU has not read yet what arrived meanwhile, so it
    gives the other side the whole time again.

    Args:
        timeout_s: how long the other side may be silent; 0: for ever.
        now: the time, as of all methods, by ``time.monotonic()``.
    """

    def __init__(self, timeout_s: float, now: float) -> None:
        self.timeout_s = timeout_s
        # An agent without a job has its own limit, whatever that of the job is.
        self._interval_s = min(timeout_s or _JOB_TIMEOUT_S, _JOB_TIMEOUT_S) / _BEATS
        self._received_at = self._sent = self._looked = now

    def received(self, now: float) -> None:
        """Record that something was received from the other side."""
        self._received_at = now

    def is_due(self, now: float) -> bool:
        """Return whether this side has to send a heartbeat now, which then counts as sent."""
        if now < self._sent + self._interval_s:
            return False
        self._sent = now
        return True

    def is_silent(self, now: float) -> bool:
        """Return whether to give up the other side; called in every turn, after reading what was received."""
        if now > self._looked + 2 * self._interval_s:
            self._received_at = now
        self._looked = now
        return 0 < self.timeout_s <= now - self._received_at

    def timer_s(self, now: float) -> float:
        """Seconds until this has to be asked again."""
        return max(0.0, self._sent + self._interval_s - now)


class Agent:
    """The ranks of this host, their pipes, the launcher's two pipes, and the guard's."""

    def __init__(self, inlet: int, outlet: int, guard: int = -1, set_patience: int = -1) -> None:
        self._inlet, self._outlet, self._guard, self._set_patience = inlet, outlet, guard, set_patience
        self._inbox = bytearray()
        self._outbox = bytearray(MAGIC)
        self._ranks: dict[int, int] = {}  # pid -> rank, while it runs
        self._pipes: dict[int, tuple[int, int]] = {}  # descriptor -> rank, kind
        self._reports: dict[int, int] = {}  # rank -> descriptor
        self._handled: dict[int, int] = {}  # rank -> descriptor: numbers of signals, after a zero
        self._handled_before: dict[int, set[int]] = {}  # rank -> numbers that were read from there
        self._oom_kills = oom_kills()  # before the first rank
        self._started = False
        self._paused = False  # the launcher does not keep up; the ranks wait
        self._held = False  # the launcher has requested that
        self._ended = False  # the launcher is gone
        self._heartbeat = Heartbeat(_JOB_TIMEOUT_S, time.monotonic())
        self._suspended = False  # the launcher has announced that it will be silent
        self._given_up = ""  # why: the launcher was silent for too long
        self._grace_s = 0.0
        self._stays = False  # without ranks, since more may come
        self._stopping = False  # by a signal to this process, whatever the launcher does
        self._got: dict[tuple[int, int], float] = {}  # signal, of agent or guard -> when first
        self._asked: dict[int, set[int]] = {}  # signal that waits to be passed on -> its senders
        self._expected: dict[int, float] = {}  # signal that the launcher will send, too -> since when
        self._passed: set[int] = set()  # stop signals that ranks have got
        self._steps: list[tuple[float, int]] = []  # when to send which signal next
        self._stopped: dict[int, float] = {}  # pid of a rank that is stopped -> since when
        self._reported: set[int] = set()  # of those
        self._stopped_s = float("inf")  # after which such a rank is ended
        self._last_exit = 0.0  # when a rank has ended
        self._reasons: dict[int, str] = {}  # pid of a rank that was ended here -> why
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve the launcher until all ranks have ended or it is gone; leaves no process behind."""
        wake = self._watch_signals()
        os.set_blocking(self._inlet, False)
        os.set_blocking(self._outlet, False)
        for descriptor in filter(lambda fd: fd >= 0, (self._inlet, wake, self._guard)):
            self._selector.register(descriptor, selectors.EVENT_READ)
        self._flush()
        while not self._ended and (self._ranks or not self._started or self._waits_for_ranks()):
            self._turn(wake)
        kill_descendants()
        while self._pipes and not self._ended:
            self._drain(next(iter(self._pipes)))
        while self._outbox and not self._ended and not self._given_up:
            self._turn(wake)

    def _waits_for_ranks(self) -> bool:
        return self._stays and not self._stopping and not self._given_up

    def _turn(self, wake: int) -> None:
        for key, _ in self._selector.select(self._timer_s()):
            descriptor = key.fd
            if descriptor == self._inlet:
                self._listen()
            elif descriptor == self._outlet:
                self._flush()
            elif descriptor == wake:
                self._read_signals(wake, os.getpid())
                self._reap()
            elif descriptor == self._guard:
                self._read_signals(self._guard, os.getppid())
            elif descriptor in self._pipes:
                self._relay(descriptor)
        now = time.monotonic()
        self._take_steps(now)
        self._report_stopped(now)
        self._exchange_heartbeats(now)

    # Signals to this process

    def _watch_signals(self) -> int:
        wake, alarm = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(alarm, False)
        signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, leave_to_the_loop)
        for number in (*STOP_SIGNALS, *USER_SIGNALS):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, leave_to_the_loop)
        return wake

    def _read_signals(self, descriptor: int, process: int) -> None:
        """Take the signals that the agent or its guard has got."""
        try:
            numbers = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        if not numbers:
            self._ended = True  # the guard is dead
        for number in numbers:
            if number == _PARENT_GONE or not self._started:
                self._ended = self._ended or number != signal.SIGCHLD
            elif number != signal.SIGCHLD:
                self._handle_signal(number, process, time.monotonic())

    def _handle_signal(self, number: int, process: int, now: float) -> None:
        """Handle a signal as the launcher does: pass it on gently, wait, then kill."""
        before = self._got.setdefault((number, process), now)
        if number in USER_SIGNALS:
            self._pass_on(number, process)
        elif not self._stopping:
            self._stopping = True
            self._send(NOTICE, number, b"")
            self._pass_on(number, process)
            if number != signal.SIGTERM:
                now += INTERRUPT_GRACE_S
                self._steps.append((now, signal.SIGTERM))
            self._steps.append((now + self._grace_s, signal.SIGKILL))
        elif now >= before + REPEAT_S:
            self._signal(signal.SIGKILL)
        else:
            self._pass_on(number, process)

    def _pass_on(self, number: int, sender: int) -> None:
        """Send a signal to the ranks in a moment, unless they have it; ``sender`` 0: the launcher."""
        now = time.monotonic()
        if sender == _LAUNCHER and now < self._expected.pop(number, -REPEAT_S) + REPEAT_S:
            return
        if number in self._asked:
            self._asked[number].add(sender)
        elif number not in self._passed:
            self._asked[number] = {sender}
            self._steps.append((now + _SETTLE_S, number))
            self._passed |= {number} & set(STOP_SIGNALS)

    def _timer_s(self) -> float | None:
        now = time.monotonic()
        moments = [*(moment for moment, _ in self._steps), *map(self._stopped_until, self._stopped)]
        times = [max(0.0, moment - now) for moment in moments]
        timer_s = min([*times, self._heartbeat.timer_s(now)])
        return timer_s if timer_s < float("inf") else None

    def _take_steps(self, now: float) -> None:
        due = sorted(step for step in self._steps if step[0] <= now)
        self._steps = [step for step in self._steps if step[0] > now]
        for _, number in due:
            asked = self._asked.pop(number, set())
            if not asked >= {os.getpid(), os.getppid()}:
                self._signal(number)
                continue
            # The agent and its guard got it, so probably every process did, perhaps the launcher as well.
            self._signal(number, where_missed=True)
            if _LAUNCHER not in asked:
                self._expected[number] = now

    # The launcher

    def _exchange_heartbeats(self, now: float) -> None:
        if self._heartbeat.is_due(now) and not self._outbox:  # what waits there is as good
            self._send(BEAT, -1, b"")
            self._read_handled()  # or a program with a timer would fill the pipe
        if self._suspended:
            self._heartbeat.received(now)
        if self._heartbeat.is_silent(now) and not self._given_up:
            self._give_up(now)

    def _give_up(self, now: float) -> None:
        """End the ranks gently: they are cut off from the launcher, which takes this host for lost."""
        where = socket.gethostname()
        self._given_up = (
            f"nothing was received from the launcher on {where} for {self._heartbeat.timeout_s:g} s"
        )
        text = f"polyhvd agent: {self._given_up}; ending the ranks of this host\n".encode()
        if select.select([], [2], [], 0)[1]:
            with contextlib.suppress(OSError):
                os.write(2, text)
        for rank in self._ranks.values():
            self._send(STDERR, rank, text)
        self._pause(pause=False)
        if not self._started:
            self._ended = True
        self._stopping = True
        self._pass_on(signal.SIGTERM, _LAUNCHER)
        self._steps.append((now + self._grace_s, signal.SIGKILL))

    def _listen(self) -> None:
        try:
            data = os.read(self._inlet, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(self._inlet)
            self._ended = not self._stopping
            return
        self._inbox += data
        self._heartbeat.received(time.monotonic())
        for kind, number, payload in split_frames(self._inbox):
            self._suspended = kind == SUSPENDED
            if kind in (HOLD, GO_ON):
                self._held = kind == HOLD
                self._flush()
            elif kind == JOB:
                self._start(json.loads(payload))
            elif kind == EXAMINE:
                self._watch_pipe(run_aside(payload), number, FACTS)
            elif kind == KILL:
                self._kill(number)
            elif kind == SIGNAL:
                sent = _NUMBER.unpack(payload)[0]
                if sent == signal.SIGKILL:
                    self._signal(sent)
                else:
                    self._pass_on(sent, _LAUNCHER)

    def _send(self, kind: int, rank: int, payload: bytes) -> None:
        if self._given_up and kind in (STDOUT, STDERR) and len(self._outbox) > _OUTBOX_BYTES_MAX:
            return  # it may never be read, and ranks must not wait for that to write a last checkpoint
        self._outbox += frame(kind, rank, payload)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: os.write(self._outlet, self._outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._outbox.clear()
            self._ended = not self._stopping
        waiting = self._outlet in self._selector.get_map()
        if self._outbox and not waiting:
            self._selector.register(self._outlet, selectors.EVENT_WRITE)
        elif waiting and not self._outbox:
            self._selector.unregister(self._outlet)
        full = self._held or len(self._outbox) > _OUTBOX_BYTES_MAX
        self._pause(pause=full and not self._given_up)

    def _pause(self, *, pause: bool) -> None:
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
        self._stays = bool(job.get("stays", False))
        self._grace_s = float(job.get("grace_s", 0.0))
        timeout_s = float(job.get("heartbeat_timeout_s", HEARTBEAT_TIMEOUT_S))
        self._heartbeat = Heartbeat(timeout_s, time.monotonic())
        # The other ranks end the job before, with what they know.
        stopped_s = float(job.get("stopped_s", 0.0))
        self._stopped_s = stopped_s + _STOPPED_S if stopped_s > 0 else float("inf")
        if self._set_patience >= 0:
            os.write(self._set_patience, struct.pack("d", timeout_s))
        ignored = set(job.get("ignored", ()))
        for number in (*STOP_SIGNALS, *USER_SIGNALS):
            signal.signal(number, signal.SIG_IGN if number in ignored else leave_to_the_loop)
        environment = {k: v for k, v in os.environ.items() if k not in job["unset"]}
        environment.update(job["env"])
        threads = max(1, len(os.sched_getaffinity(0)) // job.get("local_size", len(job["ranks"])))
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        for rank, its_environment in job["ranks"]:
            report, pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            handled, signals = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            its_environment["POLYHVD_REPORT"] = f"{pipe}:{os.fstat(pipe).st_ino}"
            its_environment["POLYHVD_SIGNALS"] = f"{signals}:{os.fstat(signals).st_ino}"
            try:
                process = self._spawn(job, {**environment, **its_environment}, ignored, (pipe, signals))
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self._send(FAILED, rank, _explain(error, job["argv"][0], job["cwd"]))
                os.close(report)
                os.close(handled)
                continue
            finally:
                os.close(pipe)
                os.close(signals)
            self._reports[rank], self._handled[rank] = report, handled
            self._handled_before[rank] = set()
            for kind, pipe in ((STDOUT, process.stdout), (STDERR, process.stderr)):
                self._watch_pipe(os.dup(pipe.fileno()), rank, kind)
                pipe.close()
            self._ranks[process.pid] = rank
            process.returncode = 0  # reaped here, not by subprocess
            self._send(STARTED, rank, _NUMBER.pack(process.pid))

    def _spawn(
        self, job: dict[str, Any], environment: dict[str, str], ignored: set[int], pipes: tuple[int, int]
    ) -> Any:
        agent = os.getpid()

        def leash() -> None:
            # Safe here: this process has one thread. A rank never outlives its agent.
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != agent:
                os._exit(1)
            for number in (*STOP_SIGNALS, *USER_SIGNALS, signal.SIGCHLD):
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

        return subprocess.Popen(
            job["argv"],
            cwd=job["cwd"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a separate group, with its children
            preexec_fn=leash,
            pass_fds=pipes,
        )

    def _watch_pipe(self, descriptor: int, rank: int, kind: int) -> None:
        os.set_blocking(descriptor, False)
        self._pipes[descriptor] = (rank, kind)
        if not self._paused:
            self._selector.register(descriptor, selectors.EVENT_READ)

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
            if kind == FACTS:
                self._send(FACTS, rank, b"")
            return False
        self._send(kind, rank, data)
        return True

    def _drain(self, descriptor: int) -> None:
        """Pass on what is there, but not for ever: children of a rank may write on."""
        for _ in range(64):
            if not self._relay(descriptor):
                return

    def _reap(self) -> None:
        now = time.monotonic()  # one for all, since their order is not known
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._stopped.pop(pid, None)
            self._reported.discard(pid)
            if os.WIFSTOPPED(status) and pid in self._ranks:
                self._stopped[pid] = now
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                continue
            rank = self._ranks.pop(pid, None)
            if rank is None:
                continue  # an orphan of a rank
            self._last_exit = now
            for descriptor in [d for d, (owner, _) in self._pipes.items() if owner == rank]:
                self._drain(descriptor)
            self._send_report(rank)
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            if code in (-signal.SIGKILL, 128 + signal.SIGKILL):  # the latter of a shell
                self._send_oom_kills(rank)
            reason = self._reasons.pop(pid, self._given_up)
            self._send(EXITED, rank, _NUMBER.pack(code) + reason.encode())

    def _stopped_until(self, pid: int) -> float:
        """Return when to report a stopped rank, or to end it."""
        return self._stopped[pid] + (self._stopped_s if pid in self._reported else _STOPPED_S)

    def _report_stopped(self, now: float) -> None:
        """Report ranks that do not go on: others may wait for them, or the launcher only for their end.

        They are ended if the job has a limit, unless all ranks of this host are stopped. If others have ended
        since, these may have waited for them. One that is left of several is ended.
        """
        for pid in [pid for pid in self._stopped if self._stopped_until(pid) <= now]:
            are_all = len(self._stopped) == len(self._ranks) and self._last_exit <= self._stopped[pid]
            are_all = are_all and (len(self._ranks) > 1 or not self._last_exit)
            if self._suspended or (pid in self._reported and are_all):
                self._stopped[pid] = now
            elif pid in self._reported:
                self._reasons[pid] = f"it was stopped by a signal for {self._stopped_s:g} s"
                self._kill(self._ranks[pid])
                self._stopped[pid] = float("inf")
            else:
                self._reported.add(pid)
                text = (
                    f"polyhvd agent: this rank (pid {pid} on {socket.gethostname()}) was stopped by a "
                    f"signal, such as SIGSTOP or Ctrl-Z, {_STOPPED_S:g} s ago; `kill -CONT {pid}` lets "
                    "it go on\n"
                )
                self._send(STDERR, self._ranks[pid], text.encode())

    def _send_oom_kills(self, rank: int) -> None:
        now = oom_kills()
        of_cgroup, of_host = (max(0, now[i] - self._oom_kills[i]) for i in range(2))
        if of_cgroup or of_host:
            self._send(OUT_OF_MEMORY, rank, _COUNTS.pack(of_cgroup, of_host))

    def _send_report(self, rank: int) -> None:
        report = self._reports.pop(rank)
        with contextlib.suppress(BlockingIOError):
            if data := os.read(report, _READ_BYTES):
                self._send(REPORT, rank, data)
        os.close(report)
        os.close(self._handled.pop(rank))
        del self._handled_before[rank]

    def _kill(self, rank: int) -> None:
        for pid in [pid for pid, own in self._ranks.items() if own == rank]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _signal(self, number: int, *, where_missed: bool = False) -> None:
        """Send a signal to the ranks; with ``where_missed`` only to those that have not received it.

        A rank without a handler would have been ended by it. With one, it is sent nothing where that is not
        known: a program's handler is not called twice.
        """
        if number == signal.SIGKILL:
            return kill_descendants(wait_s=0.0)
        full = self._read_handled() if where_missed else []
        for pid, rank in self._ranks.items():
            if where_missed and (
                number in USER_SIGNALS or rank in full or self._may_have_received(pid, rank, number)
            ):
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if number in USER_SIGNALS:
                    send_signal(pid, number)
                else:
                    os.killpg(pid, number)
                    os.killpg(pid, signal.SIGCONT)  # or a stopped one would not notice
        return None

    def _may_have_received(self, pid: int, rank: int, number: int) -> bool:
        if not has_handler(pid, number):
            return False
        before = self._handled_before[rank]
        return number in before or 0 not in before

    def _read_handled(self) -> list[int]:
        """Read the numbers of signals that ranks have handled; return the ranks whose pipes were full."""
        full = []
        for rank, descriptor in self._handled.items():
            with contextlib.suppress(BlockingIOError):
                numbers = os.read(descriptor, _READ_BYTES)
                self._handled_before[rank].update(numbers)
                full += [rank] if len(numbers) == _READ_BYTES else []
        return full


def has_handler(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, from /proc; True if that is unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            caught = file.read().split("SigCgt:", 1)[1].split(None, 1)[0]
        return bool(int(caught, 16) >> (number - 1) & 1)
    return True


def leave_to_the_loop(*_: Any) -> None:
    """Python's C handler has written the signal's number into a pipe, see set_wakeup_fd."""


def _explain(error: Exception, program: str, cwd: str) -> bytes:
    reason = str(error)
    status = 126
    if isinstance(error, OSError):
        what = f"cannot enter {cwd}" if error.filename == cwd else f"cannot run {program!r}"
        reason = f"{what}: {error.strerror}"
        if error.filename != cwd and _is_script(os.path.join(cwd, program)):
            reason += f". Was `python {program}` meant?"
        status = 127 if error.errno == errno.ENOENT else 126
    return _NUMBER.pack(status) + reason.encode("utf-8", "surrogateescape")


def _is_script(path: str) -> bool:
    """Return whether a file that cannot be run is rather for Python to read."""
    try:
        with open(path, "rb") as file:
            return path.endswith(".py") or b"python" in file.readline(200)
    except OSError:
        return False


def _guard(agent: int, alarm: int, patience: int) -> int:
    """Wait for the end of the agent, and kill what it has left; returns its wait status.

    Signals to this process are passed to the agent through ``alarm``. An agent that is stopped (SIGSTOP)
    watches over nothing, and is killed after the time that it has written to ``patience``.
    """
    patience_s = HEARTBEAT_TIMEOUT_S
    signal.signal(signal.SIGALRM, lambda *_: os.kill(agent, signal.SIGKILL))
    os.set_blocking(alarm, False)
    signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
    for number in (*STOP_SIGNALS, *USER_SIGNALS, _PARENT_GONE):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, leave_to_the_loop)
    while True:
        pid, status = os.waitpid(-1, os.WUNTRACED | os.WCONTINUED)
        if pid != agent:
            continue
        if os.WIFSTOPPED(status):
            with contextlib.suppress(BlockingIOError):
                patience_s = struct.unpack("d", os.read(patience, _READ_BYTES)[-8:])[0]
            signal.setitimer(signal.ITIMER_REAL, patience_s)  # 0: for ever
        elif os.WIFCONTINUED(status):
            signal.setitimer(signal.ITIMER_REAL, 0)
        else:
            kill_descendants()
            return status


def _end_like(status: int) -> None:
    """End this process as another one has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def main(parent: int | None = None) -> None:
    """Run an agent on standard input and output; ``parent``: end with this process as well."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that has started it may have blocked any
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(_PARENT_GONE, leave_to_the_loop)  # not ignored, and not yet deadly
    if parent is not None:
        # The end of standard input would be enough if the launcher were never forked.
        _LIBC.prctl(_PR_SET_PDEATHSIG, _PARENT_GONE, 0, 0, 0)
        if os.getppid() != parent:
            return
    # Nothing but frames may reach the launcher, and no rank may hold its pipes.
    inlet, outlet = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    guard, alarm = os.pipe()
    patience, set_patience = os.pipe()
    os.set_blocking(patience, False)
    pid = os.fork()
    if pid > 0:
        # Not `set_patience`: without a writer, `patience` would be at its end.
        for descriptor in (inlet, outlet, guard):
            os.close(descriptor)
        _end_like(_guard(pid, alarm, patience))
    os.close(alarm)
    os.close(patience)
    os.set_blocking(guard, False)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # End of file on `guard` shows that the guard has ended, but not to a process that is stopped.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    Agent(inlet, outlet, guard, set_patience).run()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else None)
