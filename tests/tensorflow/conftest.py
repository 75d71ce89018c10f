"""Tells tf_jobs which scripts of checks are wanted, so that they share processes, and where to fork them."""

from __future__ import annotations

import sys

import pytest
from fork_servers import ForkServers  # tests/harness, on the path by tests/conftest.py


@pytest.fixture(scope="session", autouse=True)
def _fork_servers(fork_servers: ForkServers) -> None:
    jobs = sys.modules.get("tf_jobs")
    if jobs is not None:
        jobs.servers = fork_servers


def pytest_collection_finish(session: pytest.Session) -> None:
    jobs = sys.modules.get("tf_jobs")  # if one of its users was collected
    if jobs is not None:
        modules = [getattr(item, "module", None) for item in session.items]
        jobs.selected.update(module.SCRIPT for module in modules if hasattr(module, "SCRIPT"))
