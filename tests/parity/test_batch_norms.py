"""Batch normalization over the ranks is that of the joined batch, whatever the batches are."""

from __future__ import annotations

import batch_norms
import numpy as np
import pytest
from batch_norms import CASES
from worlds import Ranks


@pytest.mark.drivers("torch", "mxnet", "tensorflow")
@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("name", CASES)
def test_a_hard_batch_is_normalized_as_in_one_process(ranks: Ranks, name: str) -> None:
    case = CASES[name]
    found = ranks.run(batch_norms.normalize, name, ranks.size)
    for mine, expected in zip(found, batch_norms.by_hand(case, ranks.size), strict=True):
        deviation = np.sqrt(expected["variance"].max())
        np.testing.assert_allclose(mine["y"], expected["y"], rtol=0, atol=case.tolerance)
        np.testing.assert_allclose(
            mine["of_x"] * deviation, expected["of_x"] * deviation, rtol=0, atol=case.tolerance
        )
        # Of inputs as they are, single precision has six digits; none of them is lost.
        np.testing.assert_allclose(mine["mean"], expected["mean"], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(mine["variance"], expected["variance"], rtol=2e-4)
        for what in ("mean", "variance"):
            assert np.array_equal(mine[what], found[0][what]), "ranks have other bits"
