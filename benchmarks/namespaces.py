"""Hosts for benchmarks: network namespaces of this machine, with an sshd each, as the tests have them."""

from __future__ import annotations

import contextlib
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.launchers import ROOT, CannotStart

__all__ = ["namespaces"]


@contextlib.contextmanager
def namespaces(number: int) -> Iterator[tuple[list[Any], list[str]]]:
    """Make hosts, and say polyhvdrun's options that reach them.

    Args:
        number: of hosts.

    Raises:
        CannotStart: that needs root, iproute2 and sshd.
    """
    harness = str(ROOT / "tests/harness")
    if harness not in sys.path:
        sys.path.append(harness)
    import netns
    import sshd

    if not netns.available() or not sshd.available():
        raise CannotStart(
            f"{number} hosts are namespaces with an sshd each: that needs root, iproute2 and sshd"
        )
    with (
        tempfile.TemporaryDirectory() as folder,
        netns.hosts(number) as made,
        _named(made),
        sshd.sshd_on(Path(folder), made) as options,
    ):
        yield made, options


@contextlib.contextmanager
def _named(places: Sequence[Any]) -> Iterator[None]:
    """Have the name that they share be each one's own address there, since some look theirs up by it.

    What is started before, such as an sshd, and all that it starts, does not see it.
    """
    folders = [Path("/etc/netns") / place.name for place in places]
    try:
        for folder, place in zip(folders, places, strict=True):
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{place.address} {socket.gethostname()}\n")
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
