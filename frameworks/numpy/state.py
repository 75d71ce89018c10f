"""Parameters from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from polyhvd.numpy.adapter import Array
from polyhvd.numpy.functions import functions

from polyhvd.collectives.process_sets import ProcessSet, global_process_set

__all__ = ["broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Array] | Iterable[Array] | Iterable[tuple[str, Array]],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite arrays with the root's, in place, on every rank.

    Args:
        params: arrays by their names: a dict, or pairs of name and array; or only arrays, which are
            matched by their positions. Names, shapes and dtypes are the same on every rank.
        root_rank: world rank of the sender, which is a member of the process set.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: an array is read-only, or the process set is unknown.
        RankMismatchError: the ranks' names, shapes or dtypes differ.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import numpy as np
        import polyhvd.numpy as hvd
        hvd.init()
        hvd.broadcast_parameters({"weight": np.ones((2, 3)), "bias": np.ones((3,))}, root_rank=0)
    """
    functions.broadcast_parameters(params, root_rank, process_set)
