"""The report of ``polyhvd doctor`` on a cluster of Ray; a program, since a connection may hang or print."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys

__all__ = ["describe", "main"]


def describe() -> str:
    """Connect to the cluster that ``ray.init(address="auto")`` finds, and describe it in one line.

    Raises:
        ConnectionError: there is none.
        RuntimeError: its version is another.
    """
    import ray

    ray.init(address="auto", log_to_driver=False, logging_level="CRITICAL", configure_logging=False)
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        address = ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()
    cpus, gpus = (sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU"))
    version = importlib.metadata.version("ray")
    count = f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}"
    return f"Ray {version} at {address}, as here: {count} with {cpus:g} CPUs and {gpus:g} GPUs"


def main() -> int:
    """Print the line; returns 0: there is a cluster, 1: it cannot be used, and the line is the reason."""
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
        try:
            line, status = describe(), 0
        except Exception as error:
            line, status = " ".join(str(error).split()), 1
    print(line, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
