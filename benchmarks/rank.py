"""A rank of a peer: connects to the driver, and executes its commands until the connection ends.

``python -m benchmarks.rank PEER``, started by launchers.py.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection

from benchmarks.peers import make
from benchmarks.peers.base import Call, Peer
from benchmarks.workloads import Workload

#: Calls that are not timed when a peer takes its turn: its threads and caches were cold.
WARM_UP_CALLS = 2
COUNT_OF_LONG_CALLS = 3  # there one is enough


def timed(call: Call, count: int) -> list[float]:
    """Seconds of each of `count` calls, one after the other."""
    for _ in range(WARM_UP_CALLS if count > COUNT_OF_LONG_CALLS else 1):
        call()
    times = [0.0] * count
    clock = time.perf_counter
    for i in range(count):
        begin = clock()
        call()
        times[i] = clock() - begin
    return times


@contextlib.contextmanager
def first_in_line() -> Iterator[None]:
    """Give all threads of this process the highest of ordinary priorities, if BENCH_PRIORITY=1."""
    if os.environ.get("BENCH_PRIORITY") != "1":
        yield
        return
    try:
        _set_priority(-20)
        yield
    finally:
        _set_priority(0)


def pin(rank: int) -> None:
    """Keep this process, and all threads that it has or will have, on one core, if BENCH_PIN=1."""
    if os.environ.get("BENCH_PIN") == "1":
        cores = sorted(os.sched_getaffinity(0))
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), {cores[rank % len(cores)]})


def _set_priority(nice: int) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, int(thread), nice)


class Rank:
    """The orders, as methods; each returns its answer."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.calls: dict[Workload, Call] = {}

    def forget(self) -> None:
        """Let go of all workloads, and of their tensors."""
        self.calls.clear()

    def prepare(self, workload: Workload) -> bool:
        """Make ready for one more workload; False when the peer does not offer it."""
        call = self.peer.call(workload)
        if call is None:
            return False
        self.calls[workload] = call
        return True

    def measure(self, workload: Workload, count: int) -> tuple[list[float], float]:
        """Seconds of each call, and of CPU time that this process has used for all."""
        call = self.calls[workload]
        with first_in_line():
            begin = time.process_time()
            times = timed(call, count)
            return times, time.process_time() - begin

    def close(self) -> None:
        self.forget()
        self.peer.close()


def serve(connection: Connection, rank: Rank) -> None:
    """Until "close", or until the driver is gone."""
    while True:
        order, *arguments = connection.recv()
        try:
            answer = getattr(rank, order)(*arguments)
        except Exception as error:
            connection.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
            continue
        connection.send(("ok", answer))
        if order == "close":
            return


def main() -> None:
    name = sys.argv[1]
    key = bytes.fromhex(os.environ["BENCH_KEY"])
    connection = Client(os.environ["BENCH_SOCKET"], authkey=key)
    try:
        peer = make(name)
        pin(peer.rank)
        connection.send(("hello", peer.rank, os.getpid()))
        serve(connection, Rank(peer))
    except EOFError:
        pass  # the driver is gone, and with it the reason to measure
    finally:
        connection.close()
    sys.stdout.flush()
    # Peers that were not closed in good order may wait for each other at exit.
    os._exit(0)


if __name__ == "__main__":
    main()
