"""A compressor with state for each gradient does in every optimizer what it does by hand."""

from __future__ import annotations

import importlib.util

import keyed_compressors
import numpy as np
import pytest
from keyed_compressors import LOCAL, MODES, OPTIMIZERS, SHAPES
from worlds import Ranks


@pytest.mark.drivers("torch")
@pytest.mark.sizes(2)
@pytest.mark.parametrize("mode", MODES["torch"])
def test_optimizers_of_torch_keep_what_is_not_sent_for_each_gradient(ranks: Ranks, mode: str) -> None:
    if mode == "keras" and importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
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


@pytest.mark.drivers("numpy", "torch", "tensorflow")
@pytest.mark.sizes(2)
def test_verbs_keep_state_by_the_name_of_the_operation(ranks: Ranks) -> None:
    expected = keyed_compressors.verbs_by_hand(ranks.size)
    for found in ranks.run(keyed_compressors.verbs):
        for mine, right in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, right)


@pytest.mark.drivers("torch", "mxnet", "tensorflow")
@pytest.mark.sizes(2)
def test_an_instance_serves_one_optimizer_and_a_class_any_number(ranks: Ranks) -> None:
    ranks.run(keyed_compressors.an_instance_serves_one_optimizer)


@pytest.mark.drivers("torch", "mxnet", "tensorflow")
@pytest.mark.sizes(2)
def test_state_can_be_saved_and_forgotten(ranks: Ranks) -> None:
    for with_state, without, after_reset in ranks.run(keyed_compressors.state_is_saved_and_forgotten):
        np.testing.assert_array_equal(with_state, [0, 0, -10, 0])
        np.testing.assert_array_equal(without, [0, 0, -8, 0])
        np.testing.assert_array_equal(after_reset, [-8, 0, -8, 0])


@pytest.mark.drivers("torch", "mxnet", "tensorflow")
@pytest.mark.sizes(2)
def test_a_compressor_that_returns_what_it_was_given_restores_it(ranks: Ranks) -> None:
    for found in ranks.run(keyed_compressors.what_is_returned_unchanged_is_restored):
        np.testing.assert_array_equal(found, [-3, -3, -3, -3])


@pytest.mark.drivers("torch", "mxnet", "tensorflow")
@pytest.mark.sizes(2)
def test_a_compressor_that_fails_once_leaves_nothing_behind(ranks: Ranks) -> None:
    for said, found in ranks.run(keyed_compressors.one_that_fails):
        assert said == "ArithmeticError: no room"
        np.testing.assert_array_equal(found, [-4, 0, 0, 0])


@pytest.mark.drivers("torch", "mxnet", "tensorflow")
@pytest.mark.sizes(3)
def test_a_rank_outside_of_the_process_set_works_by_itself(ranks: Ranks) -> None:
    for rank, found in ranks.run(keyed_compressors.outside):
        np.testing.assert_array_equal(found, [-4.0 if rank == 2 else -1.5] * 4)


@pytest.mark.drivers("torch", "mxnet", "tensorflow")
@pytest.mark.sizes(3)
def test_gradients_of_float16_are_divided_before_their_sum_overflows(ranks: Ranks) -> None:
    for found in ranks.run(keyed_compressors.halves):
        np.testing.assert_allclose(found.astype(np.float64), -40000.0, rtol=2e-3)
