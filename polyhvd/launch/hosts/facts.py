"""Facts about a host before ranks are started there: a program that an agent runs.

It goes to the host as text, so it uses only the standard library, and nothing newer than Python 3.8. It
judges nothing: what is good enough :mod:`polyhvd.launch.hosts.checks` decides, where all hosts are known.
"""

from __future__ import annotations

import glob
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from typing import Any

__all__ = ["installed_version", "main", "reach_one", "report", "room", "versions_beside"]

#: Where packages of a Python lie, below its prefix.
_SITES = ("lib/python3*/site-packages", "local/lib/python3*/dist-packages", "lib/python3/dist-packages")
_PYTHON = re.compile(r"python[\d.]*")
_ASK_TIMEOUT_S = 30.0
#: Between a first try to reach an address of the launcher and one of the next.
_NEXT_ADDRESS_S = 0.3
#: Asks a Python where polyhvd is, as ranks will find it, without importing it.
_VERSION_PROGRAM = """
import sys
sys.path[:1] = [sys.argv[1]]
from importlib import metadata, util
try:
    found = metadata.version("polyhvd")
except metadata.PackageNotFoundError:
    found = "unknown" if util.find_spec("polyhvd") else ""
print("polyhvd-version", found)
"""


def main(request: dict[str, Any]) -> None:
    """Look at what the request names, and say what was found."""
    facts: dict[str, Any] = {"clock": time.time(), "python": ".".join(map(str, sys.version_info[:3]))}
    facts["cwd"] = _folder(request["cwd"])
    facts["room"] = {path: room(path) for path in ("/dev/shm", os.environ.get("TMPDIR") or "/tmp")}
    facts["programs"] = [
        _program(argv, request["cwd"], request["env"], request["version"]) for argv in request["programs"]
    ]
    facts["reached"], facts["from"], facts["unreached"] = reach_one(
        request["endpoints"], bytes.fromhex(request["secret"]), request["timeout_s"]
    )
    report(facts)


def report(value: Any) -> None:
    """Give the launcher a value, as a line of JSON."""
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


def room(path: str) -> dict[str, Any]:
    """How many bytes and files this user can still write to a folder; ``problem``: why none."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        return {"problem": error.strerror}
    problem = "" if os.access(path, os.W_OK | os.X_OK) else "not writable for this user"
    files = found.f_favail if found.f_files else -1  # not every file system counts them
    return {
        "free": found.f_bavail * found.f_frsize,
        "size": found.f_blocks * found.f_frsize,
        "files": files,
        "problem": problem,
    }


def _folder(path: str) -> str:
    """Why ranks cannot work in a folder; empty: they can."""
    try:
        os.scandir(path).close()
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(path, os.X_OK) else os.strerror(13)


def _program(argv: list[str], cwd: str, env: dict[str, str], version: str) -> dict[str, str]:
    """Return where a rank's program is on this host, and if it is a Python, which polyhvd it has."""
    environment = {**os.environ, **env}
    environment.pop("POLYHVD_SECRET", None)
    name = argv[0]
    if os.path.dirname(name):
        path = os.path.join(cwd, name)
        path = path if os.access(path, os.X_OK) and os.path.isfile(path) else ""
    else:
        path = shutil.which(name, path=environment.get("PATH", os.defpath)) or ""
    facts = {"name": name, "path": path, "polyhvd": ""}
    if path and _PYTHON.fullmatch(os.path.basename(name)):
        facts["is_python"] = "yes"
        script = next((word for word in argv[1:] if not word.startswith("-")), "")
        folder = os.path.dirname(os.path.join(cwd, script)) if argv[1:2] == [script] else cwd
        facts.update(installed_version(path, folder, environment, cwd, version))
    return facts


def versions_beside(python: str) -> list[str]:
    """The versions of polyhvd in the folders of a Python's packages: one, unless something is odd."""
    prefix = os.path.dirname(os.path.dirname(os.path.abspath(python)))
    places = [f"{glob.escape(prefix)}/{site}/polyhvd-*.dist-info" for site in _SITES]
    found = [os.path.basename(name) for place in places for name in glob.glob(place)]
    return [name[len("polyhvd-") : -len(".dist-info")] for name in found]


def installed_version(
    python: str, folder: str, env: dict[str, str], cwd: str, expected: str
) -> dict[str, str]:
    """Which polyhvd a Python would import: from its folders, or by running it if they lack the expected one.

    Args:
        python: path of the interpreter.
        folder: of the script that it would run.
        env: its environment.
        cwd: its folder.
        expected: version; folders are read within a millisecond, and an answer takes a hundred.

    Returns:
        ``polyhvd``: the version, empty where there is none, or "unknown"; ``problem``: why that is not known.
    """
    found = versions_beside(python)
    first = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), folder]
    if found == [expected] and not any(os.path.isdir(os.path.join(cwd, path, "polyhvd")) for path in first):
        return {"polyhvd": expected}
    try:
        asked = subprocess.run(
            [python, "-c", _VERSION_PROGRAM, folder],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"it did not report its version of polyhvd within {_ASK_TIMEOUT_S:g} s"}
    except OSError as error:
        return {"problem": error.strerror or str(error)}
    match = re.search(r"^polyhvd-version (\S*)$", asked.stdout.decode("utf-8", "replace"), re.M)
    if match is None:
        lines = asked.stderr.decode("utf-8", "replace").strip().splitlines()
        return {"problem": f"it cannot run: {lines[-1] if lines else f'status {asked.returncode}'}"}
    return {"polyhvd": match.group(1)}


def reach_one(
    endpoints: list[list[Any]], secret: bytes, timeout_s: float, purpose: str = "store"
) -> tuple[int, str, list[list[str]]]:
    """Find the first address of several that leads to the launcher's rendezvous, or to another server.

    The first one is tried first, and the next when that fails or takes long.

    Args:
        endpoints: pairs of an address and a port.
        secret: that both sides prove; empty: any listener counts as the launcher. Then nothing has to be
            imported, and it is quick.
        timeout_s: how long all of it may take.
        purpose: of the connections, in their greeting.

    Returns:
        Its number, -1 where none answers; the address of this host towards it; and of those that have failed
        the address and why.
    """
    deadline = time.monotonic() + timeout_s
    waiting = list(range(len(endpoints)))
    tries: dict[socket.socket, int] = {}
    failed: list[list[str]] = []
    next_at = 0.0
    while (waiting or tries) and time.monotonic() < deadline:
        if waiting and (not tries or time.monotonic() >= next_at):
            number = waiting.pop(0)
            next_at = time.monotonic() + _NEXT_ADDRESS_S
            started = _begin(endpoints[number])
            if isinstance(started, str):
                failed.append([endpoints[number][0], started])
            else:
                tries[started] = number
            continue
        pause_s = min([deadline, *([next_at] if waiting else [])]) - time.monotonic()
        for connection in select.select([], list(tries), [], max(0.0, pause_s))[1]:
            number = tries.pop(connection)
            own = str(connection.getsockname()[0])
            problem = _finish(connection, secret, purpose, min(deadline, time.monotonic() + 5.0))
            if not problem:
                for other in tries:
                    other.close()
                return number, own, failed
            failed.append([endpoints[number][0], problem])
    failed += [[endpoints[number][0], f"no answer within {timeout_s:g} s"] for number in tries.values()]
    for connection in tries:
        connection.close()
    return -1, "", failed


def _begin(endpoint: list[Any]) -> socket.socket | str:
    address, port = endpoint
    connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect((address, port))
    except BlockingIOError:
        pass
    except OSError as error:
        connection.close()
        return error.strerror or str(error)
    return connection


def _finish(connection: socket.socket, secret: bytes, purpose: str, deadline: float) -> str:
    """Prove the secret on a connection that is there; what went wrong, or nothing."""
    with connection:
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code or not secret:
            return os.strerror(code) if code else ""
        from polyhvd.rendezvous.auth import NO_RANK, Greeting, prove  # is sent along where it is needed

        try:
            prove(connection, secret, Greeting(purpose, 0, NO_RANK, NO_RANK), deadline)
        except OSError as error:
            return error.strerror or str(error)
    return ""
