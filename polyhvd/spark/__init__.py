"""Jobs on Spark: tasks start the ranks. See ``polyhvd docs spark``."""

from __future__ import annotations

import sys

from polyhvd.installed import is_installed

if not is_installed("pyspark"):
    raise ModuleNotFoundError(
        f"polyhvd.spark needs PySpark, which is not installed for {sys.executable}; "
        "install it with: pip install 'polyhvd[spark]'",
        name="pyspark",
    )

from polyhvd.spark import task
from polyhvd.spark.backend import Backend, LocalBackend, SparkBackend
from polyhvd.spark.elastic import run_elastic
from polyhvd.spark.running import run
from polyhvd.spark.store import DBFSLocalStore, FilesystemStore, HDFSStore, LocalStore, Store

__all__ = [
    "Backend",
    "DBFSLocalStore",
    "FilesystemStore",
    "HDFSStore",
    "LocalBackend",
    "LocalStore",
    "SparkBackend",
    "Store",
    "run",
    "run_elastic",
    "task",
]
