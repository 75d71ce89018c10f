"""polyhvd.parity.watch: where a model's training in one framework parts from that in another."""

from __future__ import annotations

import mixed_watching
import pytest
from worlds import Ranks

#: Rank 1 makes the mistake, each framework once.
_WORLDS = ("torch+mxnet", "mxnet+tensorflow", "tensorflow+torch")

pytestmark = [pytest.mark.drivers(*_WORLDS), pytest.mark.not_by_mpi]


@pytest.mark.parametrize("defect", mixed_watching.DEFECTS)
def test_the_first_divergence_is_found_with_its_kind_and_layer(ranks: Ranks, defect: str) -> None:
    first, *others = ranks.run(mixed_watching.found, defect)
    expected = mixed_watching.DEFECTS[defect]
    if expected is None:
        assert [first, *others] == [None] * ranks.size
        return
    assert first is not None, "nothing was found"
    assert all(other[:3] == first[:3] for other in others)
    kind, layers = expected
    assert (first[0], first[2]) == (kind, 0), first
    assert first[1] in layers, first
    assert "on rank 1" in first[3]


def test_a_watch_that_has_ended_sees_nothing(ranks: Ranks) -> None:
    ranks.run(mixed_watching.ends)
