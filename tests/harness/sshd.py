"""A real sshd of a test's own, and polyhvdrun's options that reach it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from netns import Namespace

__all__ = ["available", "sshd", "sshd_on"]

PORT = 2222  # of hosts with separate networks
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin") or ""
CONFIG = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
"""


def available() -> bool:
    """Whether there are sshd and ssh."""
    return bool(SSHD) and shutil.which("ssh") is not None


def _key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def sshd(
    folder: Path,
    *addresses: str,
    port: int = 0,
    within: Sequence[str] = (),
    answers: Callable[[str, int], bool] = _answers,
) -> Iterator[list[str]]:
    """Serve ssh on these addresses; gives polyhvdrun's options.

    ``within`` are words of a command that runs sshd, ``port`` 0 is a free one of this host's, and ``answers``
    says whether it listens.
    """
    _make_keys(folder)
    if port == 0:
        with socket.create_server((addresses[0], 0)) as probe:
            port = probe.getsockname()[1]
    with _serve(folder, addresses, port, within, answers):
        yield _options(folder, addresses, port)


@contextlib.contextmanager
def sshd_on(folder: Path, hosts: Sequence[Namespace]) -> Iterator[list[str]]:
    """Serve ssh on hosts with separate networks, all with one key; gives polyhvdrun's options."""
    _make_keys(folder)
    with contextlib.ExitStack() as stack:
        for host in hosts:

            def answers(address: str, port: int, host: Namespace = host) -> bool:
                return f"{_bracketed(address)}:{port} " in host.run("ss", "-Hltn", capture_output=True).stdout

            stack.enter_context(_serve(folder, [host.address], PORT, host.command(), answers))
        yield _options(folder, [address for host in hosts for address in (host.address, host.name)], PORT)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _make_keys(folder: Path) -> None:
    _key(folder / "host_key")
    _key(folder / "id")
    shutil.copy(folder / "id.pub", folder / "authorized_keys")
    (folder / "sshd_config").write_text(CONFIG.format(folder=folder))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)


def _options(folder: Path, addresses: Sequence[str], port: int) -> list[str]:
    public = " ".join((folder / "host_key.pub").read_text().split()[:2])
    known = folder / "known_hosts"
    known.write_text("".join(f"[{address}]:{port} {public}\n" for address in addresses))
    return ["-p", str(port), "-i", str(folder / "id"), "--ssh-option", f"UserKnownHostsFile={known}"]


@contextlib.contextmanager
def _serve(
    folder: Path,
    addresses: Sequence[str],
    port: int,
    within: Sequence[str],
    answers: Callable[[str, int], bool],
) -> Iterator[None]:
    log = (folder / f"log-{addresses[0]}").open("wb")
    command = [*within, SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
    command += ["-o", f"PidFile={folder}/pid-{addresses[0]}"]
    for address in addresses:
        command += ["-o", f"ListenAddress={_bracketed(address)}:{port}"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
    try:
        deadline = time.monotonic() + 20
        while not answers(addresses[-1], port):
            assert process.poll() is None, Path(log.name).read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait(20)
        log.close()
