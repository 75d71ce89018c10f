"""Recovery times of others after kill -9 of a rank: torchrun's restarts, Ray Train, Horovod's elastic jobs.

Three ranks of PyTorch with 102 MB, on this host or on three that are namespaces, in each peer's own way.
``make bench-peers`` installs environments of Ray Train and Horovod; a peer without one is left out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.elastic_events import JobError, Log, Loss
from benchmarks.elastic_hosts import HOSTS, Hosts, hosts
from benchmarks.launchers import ROOT, CannotStart

RANKS = HOSTS
ENVIRONMENTS = ROOT / "build" / "peers"
_RESTARTS, _MEGABYTES = "100000", "102"
_PORT = 29400
_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True)
class Peer:
    """One way of others to start a job."""

    label: str
    start: Callable[[Hosts | None, Path], AbstractContextManager[Log]]
    several_hosts: bool
    after: str  #: what it does meanwhile


def _program(peer: str, folder: Path) -> list[str]:
    return ["-m", "benchmarks.elastic_peer_rank", peer, _MEGABYTES, str(folder)]


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1", **more}


def _python_of(name: str) -> str:
    """The interpreter of a peer's environment; raises CannotStart."""
    python = ENVIRONMENTS / name / "bin" / "python"
    if not (ENVIRONMENTS / name / "made").exists():
        raise CannotStart(f"there is no {ENVIRONMENTS.relative_to(ROOT) / name}: make bench-peers")
    return str(python)


@contextlib.contextmanager
def torchrun(among: Hosts | None, folder: Path) -> Iterator[Log]:
    """One agent for all ranks, or one on each host, the first of which has the rendezvous.

    Restarted ranks must not share a store with those before them, as they do by default: they
    would find the addresses of those, and fail some ten times.
    """
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode:
        raise CannotStart("PyTorch is not installed")
    run = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", _RESTARTS]
    if among is None:
        command = [*run, "--standalone", "--nproc-per-node", str(RANKS), *_program("torchrun", folder)]
        with contextlib.closing(Log(folder, command, cwd=ROOT, env=_environment(**_OWN_STORE))) as log:
            yield log
        return
    run += ["--nnodes", str(HOSTS), "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "bench"]
    run += ["--rdzv-endpoint", f"{among.places[0].address}:{_PORT}"]
    env = _environment(GLOO_SOCKET_IFNAME="eth0", **_OWN_STORE)
    with contextlib.ExitStack() as stack:
        for number, place in reversed(list(enumerate(among.places))):
            conf = ["--rdzv-conf", f"is_host={number == 0}", "--local-addr", place.address]
            command = [*place.command(), *run, *conf, *_program("torchrun", folder)]
            own = folder / str(number) if number else folder
            own.mkdir(exist_ok=True)
            log = stack.enter_context(contextlib.closing(Log(own, command, cwd=ROOT, env=env)))
        yield log


@contextlib.contextmanager
def ray_train(among: Hosts | None, folder: Path) -> Iterator[Log]:
    """Start a cluster on only this host, and a trainer that may fail any number of times."""
    command = [_python_of("ray"), *_program("ray", folder)]
    env = _environment(BENCH_RANKS=str(RANKS), RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
    log = Log(folder, command, cwd=ROOT, env=env)
    try:
        yield log
    finally:
        log.close()
        subprocess.run(
            [ENVIRONMENTS / "ray" / "bin" / "ray", "stop", "--force"], capture_output=True, env=env
        )


@contextlib.contextmanager
def horovod(among: Hosts | None, folder: Path) -> Iterator[Log]:
    """Its launcher with a script that says the hosts; one that has had a failure is used again soon."""
    python = _python_of("horovod")
    discover = folder / "discover.sh"
    names = ["localhost"] if among is None else [place.address for place in among.places]
    slots = RANKS // len(names)
    discover.write_text("#!/bin/sh\n" + "".join(f"echo {name}:{slots}\n" for name in names))
    discover.chmod(0o755)
    run = [str(Path(python).with_name("horovodrun")), "--gloo", "-np", str(RANKS), "--min-np", str(RANKS - 1)]
    run += ["--max-np", str(RANKS), "--host-discovery-script", str(discover), "--reset-limit", _RESTARTS]
    if among is not None:
        _shim_ssh(folder)
        run = [*among.places[0].command(), *run, *among.options[:2], "-i", among.options[3]]
        run += ["--network-interfaces", "eth0", "--blacklist-cooldown-range", "1", "2"]
    first = os.pathsep.join([str(folder), str(Path(python).parent), os.environ["PATH"]])
    command = [*run, python, *_program("horovod", folder)]
    with contextlib.closing(Log(folder, command, cwd=ROOT, env=_environment(PATH=first))) as log:
        yield log


def _shim_ssh(folder: Path) -> None:
    """Have Horovod's ssh keep no key of hosts that are soon gone."""
    ssh = folder / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -o UserKnownHostsFile=/dev/null "$@"\n')
    ssh.chmod(0o755)


PEERS = (
    Peer("torchrun --max-restarts, gloo", torchrun, False, "it restarts every process"),
    Peer("torchrun --max-restarts, gloo", torchrun, True, "it restarts every process, on all hosts"),
    Peer("Ray Train, gloo", ray_train, False, "it ends all workers and starts as many again"),
    Peer("Horovod elastic, gloo", horovod, True, "survivors go on; its host is not used for a while"),
    Peer("Horovod elastic, gloo", horovod, False, "the one host that it has is not used any more"),
)


def losses(peer: Peer, rounds: int) -> list[Loss]:
    """Start its job, and kill ranks of it; raises CannotStart or JobError."""
    found = []
    with (
        hosts() if peer.several_hosts else contextlib.nullcontext() as among,
        tempfile.TemporaryDirectory(dir="/dev/shm") as name,
        peer.start(among, Path(name)) as log,
    ):
        for _ in range(rounds):
            world = log.settled(RANKS)
            victim = next(pid for pid, event in world.first.items() if event["rank"] == 1)
            moment = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            found.append(log.after(world, moment))
    return found


def rows(rounds: int) -> Iterator[tuple[str, list[float], str]]:
    """Lines of the table: label, milliseconds from the kill to the last rank's first new step, and a note."""
    for peer in PEERS:
        label = f"{peer.label}, {f'{HOSTS} hosts' if peer.several_hosts else 'one host'}: from the kill on"
        try:
            yield label, [loss.step for loss in losses(peer, rounds)], peer.after
        except CannotStart as error:
            yield label, [], f"not measured: {error}"
        except JobError as error:
            yield label, [], f"{peer.after}; {str(error).splitlines()[0]}"
