"""Hosts for benchmarks: network namespaces of this machine, with an sshd each, as the tests have them."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
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
        sshd.sshd_on(Path(folder), made) as options,
    ):
        yield made, options
