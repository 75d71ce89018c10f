"""Ranks as other launchers start them: processes with nothing but those launchers' variables."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import netns

__all__ = [
    "DEADLINE_S",
    "ROOT",
    "SECRET",
    "TORCHRUN",
    "WORK",
    "Job",
    "can_make_hosts",
    "environment",
    "free_port",
]

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 90.0  # for liveness only
SECRET = "5e" * 32
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
#: A rank that says where it is, and what the sum over the ranks is.
WORK = """
import os
import random
import numpy as np
import polyhvd.numpy as hvd
hvd.init()
total = hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum)
place = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
os.write(1, (" ".join(map(str, ["place", *place, "sum", total[0].item()])) + "\\n").encode())
"""


def environment(**variables: str) -> dict[str, str]:
    """This process's, less what says whose rank a process is, and with ``variables``."""
    words = ("POLYHVD_", "HOROVOD_", "SLURM", "OMPI_", "PMI", "TORCHELASTIC", "SM_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(words)}
    return {**{name: value for name, value in kept.items() if name not in names}, **variables}


@functools.cache
def can_make_hosts() -> bool:
    """Whether namespaces of network, host name and mounts can be made here."""
    if not netns.available():
        return False
    probe = ["unshare", "-um", "sh", "-c", "hostname probe && mount -t tmpfs none /sys/fs/cgroup"]
    return subprocess.run(probe, capture_output=True).returncode == 0


def free_port() -> int:
    """A port on which nothing listens, and which the kernel gives to no connection meanwhile."""
    while True:
        port = random.randrange(15_000, 32_000)  # below net.ipv4.ip_local_port_range
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


class Job:
    """Processes that end together; leaving the block kills what is left, and all that they have started."""

    #: What runs ranks of this host: tests may set a fork server's.
    python: Sequence[str] = (sys.executable,)

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a process, in a session of its own."""
        process = subprocess.Popen(
            argv,
            env=dict(env),
            cwd=ROOT,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def rank(self, source: str = WORK, before: Sequence[str] = (), **variables: str) -> None:
        """Start a rank that runs ``source``; words ``before`` run it elsewhere."""
        python = [*before, sys.executable] if before else self.python
        self.start([*python, "-c", source], environment(**variables))

    def finish(self) -> list[tuple[int, str, str]]:
        """Wait for all; exit status, output and errors of each."""
        ended = []
        for process in self.processes:
            out, err = process.communicate(timeout=DEADLINE_S)
            ended.append((process.returncode, out, err))
        return ended
