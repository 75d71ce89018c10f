"""Fixtures of MXNet's tests: modules that ranks import, and jobs of programs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from fork_servers import IMPORTS, ForkServers  # tests/harness, on the path by tests/conftest.py

if importlib.util.find_spec("mxnet") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def hvd() -> ModuleType:
    return importlib.import_module("polyhvd.mxnet")


@pytest.fixture
def mx(hvd: ModuleType) -> Any:
    """MXNet as it is in a new process, but for names that it counts."""
    mxnet, numpy = importlib.import_module("mxnet"), importlib.import_module("numpy")
    with contextlib.suppress(mxnet.base.MXNetError):  # which the last test left unread
        mxnet.nd.waitall()
    mxnet.npx.reset_np()
    numpy.random.seed(0)
    mxnet.random.seed(0)
    return mxnet


@pytest.fixture
def np() -> ModuleType:
    return importlib.import_module("numpy")


@pytest.fixture
def printed() -> Callable[[], str]:
    """A function that returns what the rank has printed since the test began."""

    def read() -> str:
        with open("/proc/self/fd/2", "rb") as log:
            log.seek(begin)
            return log.read().decode(errors="replace")

    begin = os.stat("/proc/self/fd/2").st_size
    return read


@pytest.fixture
def python_of_ranks(fork_servers: ForkServers) -> Callable[[int], list[str]]:
    """The interpreter of a job of so many ranks, for programs that import MXNet."""
    return lambda number: fork_servers.python(number, IMPORTS["mxnet"])
