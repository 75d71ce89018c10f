"""The place of ``run`` in Horovod: ``from polyhvd.runner import run``."""

from polyhvd.launch import run

__all__ = ["run"]
