"""A compressor with state for each gradient does in every optimizer what it does by hand."""

from __future__ import annotations

import keyed_compressors
import numpy as np
import pytest
from keyed_compressors import LOCAL, MODES, OPTIMIZERS, SHAPES
from worlds import Ranks


@pytest.mark.drivers("torch")
@pytest.mark.sizes(2)
@pytest.mark.parametrize("mode", MODES["torch"])
def test_optimizers_of_torch_keep_what_is_not_sent_for_each_gradient(ranks: Ranks, mode: str) -> None:
    check(ranks, mode)


@pytest.mark.drivers("mxnet")
@pytest.mark.sizes(2)
@pytest.mark.parametrize("mode", MODES["mxnet"])
def test_trainers_of_mxnet_keep_what_is_not_sent_for_each_gradient(ranks: Ranks, mode: str) -> None:
    check(ranks, mode)


@pytest.mark.drivers("tensorflow")
@pytest.mark.sizes(2)
@pytest.mark.parametrize("mode", MODES["tensorflow"])
def test_optimizers_and_tapes_of_tensorflow_keep_what_is_not_sent_for_each_gradient(
    ranks: Ranks, mode: str
) -> None:
    check(ranks, mode)


def check(ranks: Ranks, mode: str) -> None:
    found = ranks.run(keyed_compressors.train, mode)
    expected, rests = keyed_compressors.by_hand(ranks.size)
    for rank, (weights, kept) in enumerate(found):
        for optimizer in range(OPTIMIZERS):
            for position in range(len(SHAPES)):
                np.testing.assert_array_equal(
                    weights[optimizer][position], expected[rank][optimizer][position]
                )
            sent = [i for i in range(len(SHAPES)) if (optimizer, i) != (1, LOCAL)]
            assert sorted(kept[optimizer]) == sorted(found[0][1][optimizer]), "ranks have other keys"
            assert len(kept[optimizer]) == len(sent), kept[optimizer].keys()
            for (key, rest), position in zip(sorted(kept[optimizer].items()), sent, strict=True):
                assert key.endswith(f".{position}")
                np.testing.assert_array_equal(rest, rests[rank][optimizer][position])
