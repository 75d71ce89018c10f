"""Python, for a program that is to run in a fork of a server: ``forked.py FOLDER SCRIPT ...``.

Stands for the program: has its environment, descriptors and exit status, and passes signals on to it.
The rank, or the number of a process in an elastic job, chooses the server, so that neighbours differ as
processes do. Imports little: it is started often.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys

_SENT_AWAY = 1 << 16  # as in fork_server.py
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Ask for the program, wait for its end, and end as it did."""
    folder, *argv = sys.argv[1:]
    descriptors = _descriptors()
    servers = sum(name.isdigit() for name in os.listdir(folder))
    number = os.environ.get("POLYHVD_MEMBER") or os.environ.get("POLYHVD_RANK") or "0"
    path = f"{folder}/{int(number) % servers}"
    server = socket.socket(socket.AF_UNIX)
    values = {"argv": argv, "cwd": os.getcwd(), "environment": dict(os.environ), "numbers": descriptors}
    request = json.dumps(values).encode()
    answer = b""
    with contextlib.suppress(ConnectionError):
        server.connect(path)
        socket.send_fds(server, [struct.pack("!I", len(request))], descriptors)
        server.sendall(request)
        # Until here a signal ends this process, as it ends an interpreter that starts. The server then ends
        # the program.
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: _pass_on(server, number))
        answer = server.recv(4)
    if len(answer) < 4:
        with open(f"{path}.log", errors="replace") as log:
            sys.exit(f"the fork server that was to run {argv} has ended; it printed:\n{log.read()[-4000:]}")
    (status,) = struct.unpack("!i", answer)
    if status == _SENT_AWAY:
        os.execv(sys.executable, [sys.executable, *argv])
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _pass_on(server: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        server.send(bytes([number]))


def _descriptors() -> list[int]:
    """All that are open, which are the program's: this one has opened none yet."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own
            os.fstat(number)
            found.append(number)
    return found


if __name__ == "__main__":
    main()
