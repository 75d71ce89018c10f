"""What ranks do in more than one test of flight dumps."""

from __future__ import annotations

import numpy as np
import polyhvd.numpy as hvd

from polyhvd.testing import worker

__all__ = ["reduce_until_it_fails"]


def reduce_until_it_fails() -> str:
    """Note when the loop is well under way; return the name of the error that ends it."""
    try:
        for i in range(1 << 30):
            hvd.allreduce(np.ones(100, np.float32), name=f"loop {i % 7}")
            if i == 20:
                worker.note("in the loop")
    except hvd.HorovodInternalError as error:
        return type(error).__name__
    raise AssertionError("unreachable")
