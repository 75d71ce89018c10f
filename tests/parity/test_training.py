"""Training on several ranks is training on the joined batch, and the same in every framework."""

from __future__ import annotations

import numpy as np
import pytest
import training
from worlds import Ranks


@pytest.mark.drivers("torch", "mxnet", "tensorflow")
@pytest.mark.sizes(2)
def test_training_on_two_ranks_equals_training_on_the_joined_batch(ranks: Ranks) -> None:
    results = ranks.run(training.train)
    together = [weights for weights, _ in results]
    for other in together[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(together[0], other, strict=True))
    for mine, alone in zip(together[0], results[0][1], strict=True):
        np.testing.assert_allclose(mine, alone, rtol=0, atol=1e-5)
    # Within half of 1e-4 of one oracle, frameworks are within 1e-4 of each other.
    for mine, expected in zip(together[0], training.by_hand(ranks.size), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=5e-5)
