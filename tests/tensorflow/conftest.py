"""Tells tf_jobs which scripts of checks are wanted, so that they share processes."""

from __future__ import annotations

import sys

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    jobs = sys.modules.get("tf_jobs")  # if one of its users was collected
    if jobs is not None:
        modules = [getattr(item, "module", None) for item in session.items]
        jobs.selected.update(module.SCRIPT for module in modules if hasattr(module, "SCRIPT"))
