"""Two hosts for one mpirun: network namespaces with names of their own, and a stand-in for ssh."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jobs
import netns
import pytest
from netns import Namespace

__all__ = ["Hosts", "hosts"]

#: Runs a command on the host that is named, as ssh does.
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
inside='mount --bind HOSTS /etc/hosts; hostname "$1"; exec sh -c "$2"'
exec ip netns exec "$host" unshare --uts sh -c "$inside" sh "$host" "$*"
"""


@dataclass(frozen=True)
class Hosts:
    """Two hosts that know each other by name."""

    first: Namespace
    second: Namespace
    ssh: Path

    def start(
        self, script: Path, *arguments: str, slots: int = 2, launcher: Sequence[str] = (), **settings: str
    ) -> subprocess.Popen[str]:
        """Begin a job from the first host, of ``slots`` ranks on each; ``launcher`` has options of mpirun."""
        launchers = {
            **{f"OMPI_MCA_{name}": "eth0" for name in ("oob_tcp_if_include", "btl_tcp_if_include")},
            **{"OMPI_MCA_plm_rsh_agent": str(self.ssh), "PRTE_MCA_plm_ssh_agent": str(self.ssh)},
            **{"PRTE_MCA_prte_if_include": "eth0", "HYDRA_IFACE": "eth0"},
            **{"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(self.ssh)},
        }
        command = [sys.executable, "-m", "polyhvd.launch", "--mpi", f"--mpi-args={shlex.join(launcher)}"]
        command += ["-np", str(2 * slots), "-H", f"{self.first.name}:{slots},{self.second.name}:{slots}"]
        command += [sys.executable, str(script), *arguments]
        return subprocess.Popen(
            [
                str(self.ssh),
                self.first.name,
                shlex.join(["cd", str(jobs.ROOT)]) + "; exec " + shlex.join(command),
            ],
            env=jobs.environment(POLYHVD_FLIGHT_DIR=str(script.parent), **launchers, **settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: Path, **settings: str) -> tuple[int, str, str]:
        """Run a job of two ranks on each host to its end; returns exit status, standard output and error."""
        with self.start(script, **settings) as process:
            try:
                out, err = process.communicate(timeout=60)
            finally:
                process.kill()
        return process.returncode, out, err


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if not netns.available() or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root and iproute2")
    folder = tmp_path_factory.mktemp("hosts")
    with netns.two_hosts() as (first, second):
        known = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in (first, second))
        (folder / "hosts").write_text(known)
        ssh = folder / "ssh"
        ssh.write_text(SSH.replace("HOSTS", str(folder / "hosts")))
        ssh.chmod(0o755)
        yield Hosts(first, second, ssh)
