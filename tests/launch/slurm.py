"""A real Slurm of two hosts on one machine: two namespaces of network and host name, behind a bridge.

Needs root, iproute2 and Debian's slurm-wlm and munge. slurmd wants something mounted on /sys/fs/cgroup, hence
the tmpfs in a namespace of mounts. Nothing in it reaches outside.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from joining import can_make_hosts

__all__ = ["available", "cluster"]

_UP_S = 60.0
_LETTERS = itertools.cycle("abcd")
_CONF = """ClusterName=test
SlurmctldHost=ctl(10.214.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/ctl.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctl.log
SlurmdLogFile={folder}/%n.log
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n1 NodeAddr=10.214.0.11 CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeAddr=10.214.0.12 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def available() -> str:
    """Why there can be no Slurm here; empty: there can."""
    missing = [name for name in ("slurmctld", "slurmd", "srun", "munged") if shutil.which(name) is None]
    if missing:
        return f"needs Debian's slurm-wlm and munge: there is no {missing[0]}"
    return "" if can_make_hosts() else "needs namespaces of network, host name and mounts"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start it, and end it with all that runs there; gives what srun needs in its environment."""
    # The kernel takes its time to remove the last one's interfaces.
    mark = f"hs{os.getpid() % 100000}{next(_LETTERS)}"
    with contextlib.ExitStack() as stack:
        _make_hosts(mark, stack)
        for name in ("state", "spool-n1", "spool-n2", "tmp-n1", "tmp-n2", "munge"):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (folder / "munge" / "key").write_bytes(secrets.token_bytes(1024))
        (folder / "munge" / "key").chmod(0o400)
        environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        files = [f"--{name}={folder}/munge/{name.removesuffix('-file')}" for name in _MUNGE]
        _start(["munged", "--foreground", "--force", *files], folder, environment, stack)
        _wait(lambda: (folder / "munge" / "socket").exists(), "munged")
        _start(["unshare", "-u", "sh", "-c", "hostname ctl; exec slurmctld -D"], folder, environment, stack)
        for number in (1, 2):
            shell = f"hostname n{number}; mount -t tmpfs none /sys/fs/cgroup; exec slurmd -D -N n{number}"
            host = ["ip", "netns", "exec", f"{mark}{number}", "unshare", "-um", "sh", "-c", shell]
            _start(host, folder, environment, stack)
        _wait(lambda: _idle(environment) == ["idle"] * 2, "slurmd")
        yield environment


_MUNGE = ("key-file", "socket", "pid-file", "log-file", "seed-file")


def _make_hosts(mark: str, stack: contextlib.ExitStack) -> None:
    bridge = f"{mark}br"
    stack.callback(_ip, "link", "del", bridge, check=False)
    _ip("link", "add", bridge, "type", "bridge")
    _ip("addr", "add", "10.214.0.1/24", "dev", bridge)
    _ip("link", "set", bridge, "up")
    for number in (1, 2):
        host = f"{mark}{number}"
        stack.callback(_remove, host)
        _ip("netns", "add", host)
        # As on every host with containers: an address that leads nowhere from the others.
        _ip("-n", host, "link", "add", "docker0", "type", "bridge")
        _ip("-n", host, "addr", "add", "172.17.0.1/16", "dev", "docker0")
        _ip("-n", host, "link", "set", "docker0", "up")
        _ip("link", "add", f"{host}v", "type", "veth", "peer", "name", "eth0", "netns", host)
        _ip("link", "set", f"{host}v", "master", bridge, "up")
        _ip("-n", host, "addr", "add", f"10.214.0.1{number}/24", "dev", "eth0")
        _ip("-n", host, "link", "set", "eth0", "up")
        _ip("-n", host, "link", "set", "lo", "up")


def _remove(host: str) -> None:
    pids = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout
    for pid in pids.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), 9)
    _ip("netns", "del", host, check=False)


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


def _start(
    command: list[str], folder: Path, environment: dict[str, str], stack: contextlib.ExitStack
) -> None:
    with open(folder / f"out{len(list(folder.iterdir()))}", "wb") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )

    def end() -> None:
        process.kill()
        process.wait()

    stack.callback(end)


def _idle(environment: dict[str, str]) -> list[str]:
    command = ["sinfo", "-h", "-N", "-o", "%T"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    return done.stdout.split()


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _UP_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come up"
        time.sleep(0.1)
