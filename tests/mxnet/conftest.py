"""Fixtures of MXNet's tests: modules that ranks import, and jobs of programs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from fork_servers import IMPORTS, ForkServers  # tests/harness, on the path by tests/conftest.py
from rank_side import Imported

if importlib.util.find_spec("mxnet") is None:
    collect_ignore_glob = ["test_*.py"]


@dataclass(frozen=True)
class _Mxnet(Imported):
    """MXNet as it is in a new process, but for names that it counts."""

    def on_rank(self) -> Any:
        mxnet, numpy = super().on_rank(), importlib.import_module("numpy")
        with contextlib.suppress(mxnet.base.MXNetError):  # which the last test left unread
            mxnet.nd.waitall()
        mxnet.npx.reset_np()
        numpy.random.seed(0)
        mxnet.random.seed(0)
        return mxnet


class _Printed:
    """A function that returns what the rank has printed since the test began."""

    def on_rank(self) -> Callable[[], str]:
        def read() -> str:
            with open("/proc/self/fd/2", "rb") as log:
                log.seek(begin)
                return log.read().decode(errors="replace")

        begin = os.stat("/proc/self/fd/2").st_size
        return read


@pytest.fixture
def hvd() -> Imported:
    return Imported("polyhvd.mxnet")


@pytest.fixture
def mx() -> Imported:
    return _Mxnet("mxnet")


@pytest.fixture
def np() -> Imported:
    return Imported("numpy")


@pytest.fixture
def printed() -> _Printed:
    return _Printed()


@pytest.fixture
def python_of_ranks(fork_servers: ForkServers) -> Callable[[int], list[str]]:
    """The interpreter of a job of so many ranks, for programs that import MXNet."""
    return lambda number: fork_servers.python(number, IMPORTS["mxnet"])
