"""Runs one case of the fault test, and looks at what it has left behind."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ranks_alive
from fault_cases import ON_THE_WIRE, TO_A_RANK, Case, Fault
from fault_ranks import Report
from fault_wire import Crowd, Rendezvous, Wire

from polyhvd.launch.hosts.lists import Host, place
from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import new_secret, parse_secret

__all__ = ["CaseError", "Server", "run_case"]

ROOT = Path(__file__).resolve().parents[2]
#: No case takes longer, whatever happens: the sum of all timeouts, and room for a busy machine.
_DEADLINE_S = 60.0
_START_S = 60.0
_STACKS_S = 1.0
_VISITORS_LOCAL = 30
_LOG_BYTES_SHOWN = 6000


class CaseError(AssertionError):
    """A case has not ended as it must."""


class Server:
    """The process that ranks are forked from; see ``fault_ranks.serve``.

    Args:
        user: whom it runs as; None: as this process does.
    """

    def __init__(self, user: int | None = None) -> None:
        self.user = os.geteuid() if user is None else user
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        prefixes = ("POLYHVD_", "HOROVOD_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            serve = f"import fault_ranks; fault_ranks.serve({theirs.fileno()}, {self.user})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", serve],
                cwd=ROOT,
                env=env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._control = ours
        self._exits: dict[int, int] = {}

    def fork(self, case: Case, env: dict[str, str], log: Path) -> tuple[int, Connection]:
        """A rank; its process id and the connection to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [pickle.dumps((case, env, str(log)))], [theirs.fileno()])
        while True:
            kind, pid = self._hear(_START_S)
            if kind == "pid":
                return pid, Connection(ours.detach())

    def status(self, pid: int, deadline: float) -> int | None:
        """The exit status of a rank; None when it does not end."""
        while pid not in self._exits:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not connection.wait([self._control], left_s):
                return None
            self._hear(0.0)
        return self._exits[pid]

    def close(self) -> None:
        """End the server, and with it every rank that is left."""
        self._control.close()
        self._process.wait()

    def _hear(self, wait_s: float) -> tuple[str, int]:
        if wait_s and not connection.wait([self._control], wait_s):
            raise CaseError("the server of ranks does not answer")
        message = self._control.recv(1 << 16)
        if not message:
            raise CaseError("the server of ranks has ended")
        kind, pid, status = pickle.loads(message)
        if kind == "exit":
            self._exits[pid] = status
        return kind, pid


def run_case(server: Server, case: Case, folder: Path) -> list[str]:
    """Run it; raises CaseError unless it ends as it must. Returns what has happened, for a log."""
    _raise_limit()
    before = _named_files()
    job = _Job(server, case, folder)
    try:
        job.run()
    except CaseError as error:
        raise CaseError(f"{case}\n{error}\n{job.logs()}") from None
    finally:
        job.close()
    left = sorted(_named_files() - before) + os.listdir(job.temporary)
    if left:
        raise CaseError(f"{case}\nleft behind: {left}")
    return job.events


class _Job:
    """The ranks of one case, and what stands between them."""

    def __init__(self, server: Server, case: Case, folder: Path) -> None:
        self._case = case
        self._server = server
        self._folder = folder
        self.temporary = folder / "tmp"  # what a job may use, and has to clear
        self.temporary.mkdir()
        os.chown(self.temporary, server.user, -1)
        self._crowd = Crowd(case.seed)
        self.events: list[str] = []
        self._deadline = time.monotonic() + _DEADLINE_S
        early = [fault for fault in case.faults if fault.step < 0]
        self._strangers = [fault for fault in early if fault.kind == "strangers"]
        on_wire = case.kinds & set(ON_THE_WIRE)
        self._wire = Wire([fault for fault in early if fault.kind in ON_THE_WIRE]) if on_wire else None
        secret = new_secret()
        self._rendezvous = Rendezvous(parse_secret(secret), self._show)
        self._pids: list[int] = []
        self._ends: list[Connection] = []
        self._killed: set[int] = set()
        if self._strangers:
            self._crowd.visit(socket.AF_INET, network.parse_endpoint(self._rendezvous.endpoint), 100)
        hosts = [Host(f"host{number}", slots) for number, slots in enumerate(case.hosts)]
        for placement in place(hosts):
            values = {
                **placement.values(),
                "HOST_ID": placement.host,
                "RENDEZVOUS": self._rendezvous.endpoint,
                "SECRET": secret,
                "FLIGHT_DIR": folder,
            }
            env = {**{f"POLYHVD_{name}": str(value) for name, value in values.items()}, **case.settings}
            env["TMPDIR"] = str(self.temporary)
            pid, end = server.fork(case, env, self._log(placement.rank))
            self._pids.append(pid)
            self._ends.append(end)

    def run(self) -> None:
        """Let the faults happen; then all ranks that live say how it ended, and once more without."""
        reports = self._first_life()
        self._judge(reports, harmless=self._case.harmless)
        if not self._killed:
            again = self._second_life()
            self._judge(again, harmless=True)
        for rank in self._alive():
            self._tell(rank, "end")
        for rank, pid in enumerate(self._pids):
            status = self._server.status(pid, self._deadline)
            if status is None:
                raise CaseError(f"rank {rank} does not end{self._stacks()}")
            expected = -signal.SIGKILL if rank in self._killed else 0
            if status != expected:
                raise CaseError(f"rank {rank} has ended with status {status}, not {expected}")

    def close(self) -> None:
        """End everything, whatever state it is in."""
        for pid in self._pids:
            if ranks_alive.is_running(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for end in self._ends:
            end.close()
        for pid in self._pids:
            self._server.status(pid, time.monotonic() + _START_S)
        if self._wire is not None:
            self._wire.close()
            self.events += self._wire.done
        self._crowd.close()
        self._rendezvous.close()

    def logs(self) -> str:
        """What the ranks have printed."""
        shown = []
        for rank in range(self._case.size):
            text = self._log(rank).read_text("utf-8", "replace") if self._log(rank).exists() else ""
            if text:
                shown.append(f"--- printed by rank {rank}:\n{text[-_LOG_BYTES_SHOWN:]}")
        wire = self._wire.done if self._wire is not None else []
        return "\n".join([f"happened: {self.events + wire}", *shown])

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def _alive(self) -> Sequence[int]:
        return [rank for rank in range(self._case.size) if rank not in self._killed]

    def _show(self, card: dict[str, Any]) -> None:
        """A rank's listeners are up: strangers come first, and then the others, by the proxy."""
        if self._strangers:
            self._crowd.visit(socket.AF_INET, (card["address"], card["port"]), 100)
            if card["unix_name"]:
                self._crowd.visit(socket.AF_UNIX, f"\0{card['unix_name']}", _VISITORS_LOCAL)
            self.events.append(f"strangers at rank {card['rank']}")
        if self._wire is not None:
            self._wire.stand_before(card)

    def _first_life(self) -> dict[int, Report]:
        reports: dict[int, Report] = {}
        while len(reports) < len(self._alive()):
            rank, value = self._hear([rank for rank in self._alive() if rank not in reports])
            if isinstance(value, Report):
                reports[rank] = value
                continue
            for fault in self._case.faults:
                meant = (fault.victim, fault.step) == (rank, value) and rank not in self._killed
                if meant and (value >= 0 or fault.kind in TO_A_RANK):
                    self._do(fault)
        return reports

    def _second_life(self) -> dict[int, Report]:
        for rank in self._alive():
            self._tell(rank, "again")
        reports: dict[int, Report] = {}
        while len(reports) < len(self._alive()):
            rank, value = self._hear([rank for rank in self._alive() if rank not in reports])
            reports[rank] = value
        return reports

    def _do(self, fault: Fault) -> None:
        time.sleep(fault.wait_s)
        pid = self._pids[fault.victim]
        self.events.append(fault.kind)
        if fault.kind in ON_THE_WIRE:
            assert self._wire is not None
            self._wire.strike(fault)
        elif fault.kind == "shut a socket":
            self._tell(fault.victim, "shut", fault.pick)
        elif fault.kind == "kill":
            self._kill(fault.victim)
        else:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(fault.hold_s)
            if fault.kind == "stop":
                os.kill(pid, signal.SIGCONT)
            else:
                self._kill(fault.victim)

    def _kill(self, rank: int) -> None:
        os.kill(self._pids[rank], signal.SIGKILL)
        self._killed.add(rank)

    def _tell(self, rank: int, word: str, pick: int = 0) -> None:
        with contextlib.suppress(OSError):  # its end is seen elsewhere
            self._ends[rank].send((word, pick))

    def _hear(self, ranks: Sequence[int]) -> tuple[int, Any]:
        ends = {self._ends[rank]: rank for rank in ranks}
        ready = connection.wait(list(ends), max(0.0, self._deadline - time.monotonic()))
        if not ready:
            raise CaseError(f"a hang: nothing from ranks {list(ranks)}{self._stacks()}")
        end = ready[0]
        rank = ends[end]  # type: ignore[index]
        try:
            return rank, end.recv()  # type: ignore[union-attr]
        except (EOFError, ConnectionError):
            status = self._server.status(self._pids[rank], self._deadline)
            raise CaseError(f"rank {rank} has crashed: status {status}") from None

    def _stacks(self) -> str:
        """Have every rank print where it is."""
        for rank in self._alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(_STACKS_S)
        return ""

    def _judge(self, reports: dict[int, Report], *, harmless: bool) -> None:
        said = "\n".join(f"rank {r}: {x.status} {x.kind}: {x.message}" for r, x in sorted(reports.items()))
        for rank, report in reports.items():
            if report.status == "broken":
                raise CaseError(f"rank {rank} is wrong:\n{said}")
            if report.leaks:
                raise CaseError(f"rank {rank} leaks: {report.leaks}\n{said}")
            if harmless and report.status != "right":
                raise CaseError(f"rank {rank} has failed although nothing fatal has happened:\n{said}")
            if report.kind == "RankMismatchError":
                raise CaseError(f"rank {rank} takes a fault for a disagreement:\n{said}")
        failed = [report for report in reports.values() if report.status == "failed"]
        if len(failed) == len(reports) and any(report.kind == "PeerDepartedError" for report in failed):
            raise CaseError(f"nobody has left in good order:\n{said}")
        if len(self._case.faults) == 1 and self._killed and self._case.faults[0].step >= 0:
            victim = self._case.faults[0].victim
            for report in failed:
                if f"rank {victim} " not in report.message:
                    raise CaseError(f"rank {victim} was killed, and is not named:\n{said}")


def _named_files() -> set[str]:
    """What a job might leave behind under a name."""
    return {
        f"{folder}/{name}"
        for folder in ("/dev/shm", "/dev/mqueue")
        if os.path.isdir(folder)
        for name in os.listdir(folder)
        if "polyhvd" in name.lower()
    }


def _raise_limit() -> None:
    """A crowd needs many descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
