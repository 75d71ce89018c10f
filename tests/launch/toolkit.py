"""Training jobs of AWS's own toolkit. Containers are namespaces: each has its processes and its /opt/ml."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import joining
import netns

__all__ = ["ToolkitJob"]

_INPUT = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
#: In namespaces of its own: the container's processes, its name, its /opt/ml, and the job's ssh keys. The
#: shell stays, as in AWS's images: as the first process it reaps the daemons that mpirun starts over ssh.
_ENTER = (
    'hostname "$1"; mount -t tmpfs none /opt; mkdir /opt/ml; mount --bind "$2" /opt/ml; '
    'mkdir -p ~/.ssh /run/sshd; mount --bind "$3" ~/.ssh; cd /; "$4/train" & wait $!'
)
_NAMESPACES = ("unshare", "-umpf", "--mount-proc", "--kill-child")
_DEADLINE_S = 240.0


class ToolkitJob:
    """One job of two containers, which runs the toolkit's ``train`` in each.

    Args:
        name: tells it from jobs that run at the same time.
        folder: for its files.
        programs: the bin folder of an environment with the toolkit.
    """

    def __init__(self, name: str, folder: Path, programs: str) -> None:
        self._name = name
        self._folder = folder / name
        self._programs = programs
        # The toolkit's mpi distribution leaves a file of the first one's name in /tmp.
        self.hosts = [f"algo-{number}-{name}-{os.getpid()}" for number in (1, 2)]
        self.bases = [self._folder / host for host in self.hosts]

    def prepare(self, source: str, hyperparameters: Mapping[str, str]) -> None:
        """Make what SageMaker and the estimator would have put into the containers."""
        for host, base in zip(self.hosts, self.bases, strict=True):
            for part in ("input/config", "input/data/training", "model", "output", "code"):
                (base / part).mkdir(parents=True)
            (base / "code/train.py").write_text(source)
            resources = {"current_host": host, "hosts": self.hosts, "network_interface_name": "eth0"}
            config = base / "input/config"
            (config / "resourceconfig.json").write_text(json.dumps(resources))
            (config / "hyperparameters.json").write_text(json.dumps(hyperparameters))
            (config / "inputdataconfig.json").write_text(json.dumps({"training": _INPUT}))
        self._make_keys()
        self._make_torchrun()

    @contextmanager
    def running(self, **variables: str) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Start the containers, and leave nothing of them behind."""
        path = f"{self._programs}:{self._folder}/bin:{os.environ['PATH']}"
        environ = joining.environment(PATH=path, TRAINING_JOB_NAME=self._name, **variables)
        with netns.two_hosts(self._name[:1]) as hosts, self._etc(hosts):
            yield [
                host.popen(
                    *(*_NAMESPACES, "bash", "-ec", _ENTER, "enter", name),
                    *(str(base), str(self._folder / "ssh"), self._programs),
                    env=environ,
                    stdout=self._log(name).open("wb"),  # which sshd keeps open
                    stderr=subprocess.STDOUT,
                )
                for host, name, base in zip(hosts, self.hosts, self.bases, strict=True)
            ]
        with suppress(FileNotFoundError):
            Path(f"/tmp/done.{self.hosts[0]}").unlink()

    def finish(self, containers: list[subprocess.Popen[bytes]]) -> tuple[list[int], str]:
        """Wait for the containers; the exit status of each, and what all have printed."""
        statuses = [container.wait(_DEADLINE_S) for container in containers]
        return statuses, "\n".join(self._log(name).read_text(errors="replace") for name in self.hosts)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _make_keys(self) -> None:
        folder = self._folder / "ssh"
        folder.mkdir(mode=0o700)
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "id_ed25519")], check=True
        )
        shutil.copy(folder / "id_ed25519.pub", folder / "authorized_keys")
        (folder / "config").write_text("Host *\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n")
        (folder / "config").chmod(0o600)

    def _make_torchrun(self) -> None:
        """The program of that name, for an environment that sees PyTorch in another one's folder."""
        program = self._folder / "bin/torchrun"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec "{self._programs}/python" -m torch.distributed.run "$@"\n')
        program.chmod(0o755)

    @contextmanager
    def _etc(self, hosts: tuple[netns.Namespace, netns.Namespace]) -> Iterator[None]:
        """Files that `ip netns exec` shows in place of those in /etc."""
        addresses = [f"{host.address} {name}" for host, name in zip(hosts, self.hosts, strict=True)]
        folders = [Path("/etc/netns") / host.name for host in hosts]
        try:
            for folder in folders:
                folder.mkdir(parents=True)
                (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *addresses]) + "\n")
                if Path("/etc/environment").exists():
                    (folder / "environment").touch()
            yield
        finally:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
