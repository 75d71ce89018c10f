"""AWS's own toolkit starts a job by its mpi distribution, in two containers with real ssh between them.

It takes a minute, and packages that nothing else here needs: so it runs where SAGEMAKER_TOOLKIT names the bin
folder of an environment with sagemaker-training 5.1.4, mpi4py and polyhvd.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import joining
import netns
import pytest

BIN = os.environ.get("SAGEMAKER_TOOLKIT", "")
pytestmark = [
    pytest.mark.skipif(not BIN, reason="SAGEMAKER_TOOLKIT names no environment with the toolkit"),
    pytest.mark.skipif(not joining.can_make_hosts(), reason="needs root, iproute2 and util-linux"),
    pytest.mark.skipif(not all(map(shutil.which, ("mpirun", "ssh-keygen"))), reason="needs MPI and ssh"),
]
HYPERPARAMETERS = {
    "sagemaker_program": '"train.py"',
    "sagemaker_submit_directory": '"/opt/ml/code"',
    "sagemaker_mpi_enabled": "true",
    "sagemaker_mpi_num_of_processes_per_host": "2",
    "sagemaker_mpi_custom_mpi_options": '"--oversubscribe"',
    "sagemaker_region": '"us-east-1"',
    "lr": "0.1",
}
INPUT = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
#: In namespaces of its own: the container's name, its /opt/ml, and the job's ssh keys.
ENTER = (
    'hostname "$1"; mount -t tmpfs none /opt; mkdir /opt/ml; mount --bind "$2" /opt/ml; '
    'mkdir -p ~/.ssh /run/sshd; mount --bind "$3" ~/.ssh; cd /; exec "$4/train"'
)


def keys(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", str(folder / "id_rsa")], check=True)
    shutil.copy(folder / "id_rsa.pub", folder / "authorized_keys")
    (folder / "config").write_text("Host *\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n")
    (folder / "config").chmod(0o600)
    return folder


def container(base: Path, name: str, source: str) -> Path:
    for part in ("input/config", "input/data/training", "model", "output", "code"):
        (base / part).mkdir(parents=True)
    (base / "code/train.py").write_text(source)
    hosts = ["algo-1", "algo-2"]
    told = {"current_host": name, "hosts": hosts, "network_interface_name": "eth0"}
    config = base / "input/config"
    (config / "resourceconfig.json").write_text(json.dumps(told))
    (config / "hyperparameters.json").write_text(json.dumps(HYPERPARAMETERS))
    (config / "inputdataconfig.json").write_text(json.dumps({"training": INPUT}))
    return base


@contextmanager
def etc(host: netns.Namespace, addresses: dict[str, str]) -> Iterator[None]:
    """Files that `ip netns exec` shows in place of those in /etc."""
    folder = Path("/etc/netns") / host.name
    folder.mkdir(parents=True)
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    if Path("/etc/environment").exists():
        (folder / "environment").touch()
    try:
        yield
    finally:
        shutil.rmtree(folder)


def test_mpi_distribution_of_the_toolkit_runs_a_job(tmp_path: Path) -> None:
    source = joining.WORK + "import sys\nos.write(1, (repr(sys.argv[1:]) + '\\n').encode())\n"
    ssh = keys(tmp_path / "ssh")
    names = ("algo-1", "algo-2")
    environ = joining.environment(PATH=f"{BIN}:{os.environ['PATH']}", TRAINING_JOB_NAME="job")
    with netns.two_hosts() as hosts:
        addresses = dict(zip(names, (host.address for host in hosts), strict=True))
        with etc(hosts[0], addresses), etc(hosts[1], addresses):
            started = [
                host.popen(
                    *("unshare", "-um", "bash", "-ec", ENTER, "enter", name),
                    *(str(container(tmp_path / name, name, source)), str(ssh), BIN),
                    env=environ,
                    stdout=(tmp_path / f"{name}.log").open("wb"),  # which sshd keeps open
                    stderr=subprocess.STDOUT,
                )
                for host, name in zip(hosts, names, strict=True)
            ]
            statuses = [process.wait(180) for process in started]
    outputs = [(tmp_path / f"{name}.log").read_text() for name in names]
    assert statuses == [0, 0], "\n".join(outputs)
    for rank in range(4):
        assert f"place {rank} 4 {rank % 2} 2 {rank // 2} 2 sum 10.0" in outputs[0]
    assert outputs[0].count("['--lr', '0.1']") == 4
