"""Each option of the distributed optimizers does the same in every framework: what the oracle says."""

from __future__ import annotations

import numpy as np
import optimizer_options
import pytest
from optimizer_options import NOT_IN_TORCH, OPTIONS, REFUSED
from worlds import Ranks


@pytest.mark.drivers("torch", "mxnet", "tensorflow")
@pytest.mark.sizes(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_training_with_an_option_is_what_the_oracle_makes_of_it(ranks: Ranks, name: str) -> None:
    if ranks.driver == "torch" and name in NOT_IN_TORCH:
        pytest.skip("torch has no such argument")
    option = OPTIONS[name]
    found = ranks.run(optimizer_options.train, name)
    for mine, expected in zip(found, optimizer_options.by_hand(option, ranks.size), strict=True):
        for position in range(4):
            np.testing.assert_allclose(mine[position], expected[position], rtol=0, atol=option.tolerance)
            if not option.local:
                assert np.array_equal(mine[position], found[0][position]), "ranks have other bits"


@pytest.mark.drivers("torch", "mxnet", "tensorflow")
@pytest.mark.sizes(3)
def test_all_options_together_on_three_ranks(ranks: Ranks) -> None:
    option = OPTIONS["everything"]
    found = ranks.run(optimizer_options.train, "everything")
    for mine, expected in zip(found, optimizer_options.by_hand(option, ranks.size), strict=True):
        for position in range(4):
            np.testing.assert_allclose(mine[position], expected[position], rtol=0, atol=option.tolerance)


def test_the_options_differ_from_plain_training_in_the_oracle() -> None:
    plain = optimizer_options.by_hand(OPTIONS["plain"], 2)
    for name in ("sum", "passes", "local", "local unscaled", "everything"):
        other = optimizer_options.by_hand(OPTIONS[name], 2)
        distance = max(
            float(np.abs(a - b).max())
            for one, two in zip(plain, other, strict=True)
            for a, b in zip(one, two, strict=True)
        )
        assert distance > 10 * OPTIONS[name].tolerance, name


@pytest.mark.drivers("torch", "mxnet", "tensorflow")
@pytest.mark.sizes(2)
def test_a_bad_option_raises_the_same_error_with_the_same_text_everywhere(ranks: Ranks) -> None:
    for found in ranks.run(optimizer_options.refusals):
        for (arguments, text), said in zip(REFUSED, found, strict=True):
            assert said, f"nothing takes {arguments}"
            assert said == dict.fromkeys(said, text), arguments
