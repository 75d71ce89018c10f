"""Where Lightning reads ranks from: the launcher has started them, and ``init()`` knows them."""

from __future__ import annotations

import polyhvd.torch as hvd
from polyhvd.lightning.base import cluster_environment

from polyhvd.errors import InvalidArgumentError

__all__ = ["PolyhvdEnvironment"]


class PolyhvdEnvironment(cluster_environment):  # type: ignore[misc]
    """The ranks of polyhvdrun, as a cluster environment of Lightning.

    Raises:
        NotInitializedError: a rank or a size is asked for before ``init()``.
        InvalidArgumentError: the main address or port is asked for, which there is none of.

    Example::

        trainer = lightning.Trainer(plugins=[PolyhvdEnvironment()])
    """

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning is not to start any."""
        return True

    @property
    def main_address(self) -> str:
        """Not there: ranks find each other through the launcher, not through torch.distributed."""
        raise InvalidArgumentError(
            "polyhvd's ranks have no main address: torch.distributed is not used; use hvd's operations"
        )

    @property
    def main_port(self) -> int:
        """See :attr:`main_address`."""
        raise InvalidArgumentError(
            "polyhvd's ranks have no main port: torch.distributed is not used; use hvd's operations"
        )

    @staticmethod
    def detect() -> bool:
        """Return whether there is more than one rank."""
        return hvd.is_initialized() and hvd.size() > 1

    def world_size(self) -> int:
        """Number of ranks."""
        return hvd.size()

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher decides."""

    def global_rank(self) -> int:
        """This process's rank."""
        return hvd.rank()

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launcher decides."""

    def local_rank(self) -> int:
        """Its rank among those of its host."""
        return hvd.local_rank()

    def node_rank(self) -> int:
        """Number of its host."""
        return hvd.cross_rank()
