"""Tests on the ranks of a job: a plugin of pytest, and the pools of warm processes that it runs them in.

Example::

    import numpy as np
    import polyhvd.numpy as hvd
    import pytest
    from polyhvd.testing import World

    @pytest.mark.ranks(2)
    def test_sum(rank: int, world: World) -> None:
        assert hvd.allreduce(np.array([rank + 1.0]), op=hvd.Sum)[0] == sum(range(1, world.size + 1))
"""

from __future__ import annotations

from polyhvd.testing.worlds import World

__all__ = ["World"]
