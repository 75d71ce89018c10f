"""Training jobs whose ranks have different frameworks."""

from __future__ import annotations

from itertools import permutations

import mixed_embedding
import mixed_training
import numpy as np
import pytest
from worlds import Ranks

PAIRS = ["+".join(pair) for pair in permutations(mixed_training.TRAINED, 2)]
ALL = "+".join(mixed_training.TRAINED)
SOME = (PAIRS[0], ALL)

pytestmark = [pytest.mark.drivers(*PAIRS, ALL), pytest.mark.not_by_mpi]


def test_weights_stay_equal_while_each_rank_trains_in_its_framework(ranks: Ranks) -> None:
    # The worlds take turns in their options.
    options = {"gradient_predivide_factor": 2.0} if ranks.driver.startswith("torch") else {}
    first, *others = ranks.run(mixed_training.train, options)
    for other in others:
        for (form, mine), (their_form, theirs) in zip(first, other, strict=True):
            assert form == their_form
            if form[0] not in ("mean", "variance"):  # those are of each rank's own batches
                np.testing.assert_allclose(theirs, mine, rtol=1e-5, atol=1e-6, err_msg=str(form))


def test_a_job_of_several_frameworks_trains_as_each_does_alone(ranks: Ranks) -> None:
    ranks.run(mixed_training.alone)


@pytest.mark.drivers(*SOME)
def test_weights_that_are_frozen_everywhere_stay(ranks: Ranks) -> None:
    ranks.run(mixed_training.frozen)


@pytest.mark.drivers(*SOME)
def test_models_that_are_not_alike_are_refused_on_every_rank(ranks: Ranks) -> None:
    texts = ranks.run(mixed_training.mismatch)
    assert len(set(texts)) == 1
    for part in ("rank 0 (torch)", "kernel float32 [10, 12]", "rank 1 (mxnet)", "[11, 12]", "same layers"):
        assert part in texts[0]


@pytest.mark.drivers(*SOME)
def test_weights_that_differ_between_frameworks_are_reported(ranks: Ranks) -> None:
    for error in ranks.run(mixed_training.drifting, False):
        assert "1 of 8 weights differ between ranks" in error
        assert f"rank {ranks.size - 1} has other values than rank 0" in error
        assert "call mapping.broadcast(root_rank=0)" in error
    assert set(ranks.run(mixed_training.drifting, True)) == {""}


@pytest.mark.drivers(ALL)
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_an_embedding_is_trained_with_sparse_gradients(ranks: Ranks, sparse_as_dense: bool) -> None:
    first, *others = ranks.run(mixed_embedding.embedding, sparse_as_dense)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            np.testing.assert_allclose(theirs, mine, rtol=1e-5, atol=1e-6)


@pytest.mark.drivers("torch+tensorflow", "tensorflow+torch")
def test_a_weight_that_a_rank_has_not_used_has_no_effect_there(ranks: Ranks) -> None:
    ranks.run(mixed_embedding.unused)
