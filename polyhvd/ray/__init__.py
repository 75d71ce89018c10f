"""Jobs on Ray: actors are the ranks. See ``polyhvd docs ray``."""

from __future__ import annotations

import sys

from polyhvd.installed import is_installed

if not is_installed("ray"):
    raise ModuleNotFoundError(
        f"polyhvd.ray needs Ray, which is not installed for {sys.executable}; "
        "install it with: pip install 'polyhvd[ray]'",
        name="ray",
    )

from polyhvd.ray import ray_logger
from polyhvd.ray.elastic import ElasticParams, ElasticRayExecutor, ElasticSettings
from polyhvd.ray.executor import RayExecutor, RaySettings, StaticParams
from polyhvd.ray.meeting import rendezvous
from polyhvd.ray.room import RayHostDiscovery
from polyhvd.ray.worker import BaseHorovodWorker

__all__ = [
    "BaseHorovodWorker",
    "ElasticParams",
    "ElasticRayExecutor",
    "ElasticSettings",
    "RayExecutor",
    "RayHostDiscovery",
    "RaySettings",
    "StaticParams",
    "ray_logger",
    "rendezvous",
]
