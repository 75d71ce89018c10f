"""Agents on other hosts, through ssh: options, command line, and what ranks there get of the environment."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass, field

from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job.agent_process import AgentProcess
from polyhvd.launch.job.agent_program import agent_source, reader

__all__ = ["SshAgent", "SshAgents", "SshOptions", "forwarded_environment", "ssh_command"]

#: Belongs to the launcher's session or host, not to the job.
_NOT_FORWARDED = re.compile(
    r"_|DISPLAY|HOME|HOST|HOSTNAME|LOGNAME|LS_COLORS|MAIL|OLDPWD|PWD|SHELL|SHLVL|TERM|TMPDIR|USER"
    r"|(BASH_FUNC|DBUS|SSH|SUDO|SYSTEMD|WAYLAND|XDG)_.*"
)


@dataclass(frozen=True)
class SshOptions:
    """How other hosts are reached; everything else is left to the user's ssh configuration.

    Raises:
        ValueError: that is not a port.
    """

    port: int | None = None
    identity_file: str | None = None
    options: tuple[str, ...] = ()  # as for ssh -o
    python: str = field(default_factory=lambda: sys.executable)  # on the other host
    connect_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ValueError(f"ssh's port {self.port} (-p): ports are from 1 to 65535")


class SshAgents:
    """See :class:`polyhvd.launch.providers.starting.AgentProvider`."""

    def __init__(self, options: SshOptions | None = None) -> None:
        self._options = options or SshOptions()

    def agent(self, host: Host) -> SshAgent:
        """Start ssh, and through it an agent."""
        return SshAgent(host.name, self._options)


class SshAgent(AgentProcess):
    """An agent whose pipes ssh carries. Its ranks get what ``forwarded_environment`` says."""

    program = "ssh"

    def __init__(self, host: str, options: SshOptions) -> None:
        """Start it; its program goes to it first, since polyhvd need not lie at the same place there."""
        source = agent_source()
        super().__init__(host, ssh_command(host, options, len(source)), source)
        self.environment = forwarded_environment()


def ssh_command(host: str, ssh: SshOptions, source_bytes: int) -> list[str]:
    """The command of an agent on another host, which reads its program from standard input."""
    # BatchMode: there is no user to answer a prompt. Host keys are checked according to the user's
    # configuration, because the job's secret goes over this connection.
    options = ["BatchMode=yes", f"ConnectTimeout={max(1, round(ssh.connect_timeout_s))}"]
    options += ["ServerAliveInterval=5", "ServerAliveCountMax=3", *ssh.options]
    command = ["ssh", "-T", "-x"]
    for option in options:
        command += ["-o", option]
    if ssh.port is not None:
        command += ["-p", str(ssh.port)]
    if ssh.identity_file is not None:
        command += ["-i", ssh.identity_file]
    # A signal to every process of this job must not end ssh, and with it the remote ranks, at once.
    shield = ["sh", "-c", 'trap "" HUP INT TERM; exec "$@"', "ssh"]
    remote = f"exec {shlex.quote(ssh.python)} -I -S -c {shlex.quote(reader(source_bytes))}"
    return [*shield, *command, "--", host, remote]


def forwarded_environment() -> dict[str, str]:
    """The variables of the launcher's environment that ranks on other hosts get."""
    return {name: value for name, value in os.environ.items() if not _NOT_FORWARDED.fullmatch(name)}
