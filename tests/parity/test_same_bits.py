"""The association of a sum's terms is a function of the ranks alone; nothing else shows in the bits."""

from __future__ import annotations

import collectives
import pytest
from worlds import Ranks

from polyhvd.collectives.adapter import Capability


# Two ranks could never show a fault: a + b is b + a.
@pytest.mark.not_by_mpi  # tests/mpi has it: in reproducible mode, for else MPI associates
@pytest.mark.sizes(3, 4)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_order_grouping_and_offset_do_not_show_in_the_bits(ranks: Ranks, seed: int) -> None:
    ranks.needs(Capability.ASYNC)
    ranks.run_alike(collectives.same_bits, seed)
