"""polyhvd.parity.compare: the same tensor on ranks of different frameworks."""

from __future__ import annotations

from typing import Any

import mixed_comparing
import numpy as np
import pytest
from worlds import Ranks

from polyhvd.parity import comparing
from polyhvd.parity.fingerprints import Fingerprint, tolerance_of

#: As `parity.compare` reads tensors by framework, and sends arrays of NumPy, these meet each framework once.
_WORLDS = ("torch+mxnet", "tensorflow+numpy", "numpy+torch+mxnet+tensorflow")
_FINGERPRINT_BYTES_MAX = 20_000

pytestmark = [pytest.mark.drivers(*_WORLDS), pytest.mark.not_by_mpi]


def test_equal_tensors_move_fingerprints_only(ranks: Ranks) -> None:
    assert 0 < max(ranks.run(mixed_comparing.equal)) < _FINGERPRINT_BYTES_MAX


def test_rounding_is_tolerated_by_the_number_of_terms(ranks: Ranks) -> None:
    ranks.run(mixed_comparing.near)


def test_a_difference_is_told_to_all_ranks_with_its_place(ranks: Ranks) -> None:
    ranks.run(mixed_comparing.far)


def test_threads_compare_at_the_same_time(ranks: Ranks) -> None:
    ranks.run(mixed_comparing.in_threads)


def test_what_is_not_finite_agrees_with_itself_alone(ranks: Ranks) -> None:
    ranks.run(mixed_comparing.not_finite)


def test_shapes_and_types_that_differ_cost_no_tensor(ranks: Ranks) -> None:
    assert 0 < max(ranks.run(mixed_comparing.unlike)) < _FINGERPRINT_BYTES_MAX


def test_layouts_are_mapped(ranks: Ranks) -> None:
    ranks.run(mixed_comparing.by_layout)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_sums_in_any_order_are_within_the_tolerance_and_one_wrong_term_is_not(dtype: str) -> None:
    random = np.random.default_rng(0)
    for terms in (1, 16, 1024, 16384):
        a = random.standard_normal((50, terms)).astype(dtype)
        forward = np.add.accumulate(a, axis=1)[:, -1]
        backward = np.add.accumulate(a[:, ::-1], axis=1)[:, -1]
        tolerance = tolerance_of(dtype, terms, Fingerprint.of(forward).scale)
        allowed = tolerance.atol + tolerance.rtol * np.abs(forward)
        assert (np.abs(forward - backward) <= allowed).all()
        assert (np.abs(forward - (forward - a[:, 0])) > allowed).mean() > 0.9


def test_integers_have_no_tolerance() -> None:
    assert tolerance_of("int64") == tolerance_of("bool") == tolerance_of("int64", 1, 5.0)
    assert tolerance_of("int64").rtol == tolerance_of("int64").atol == 0


@pytest.mark.parametrize(
    ("mine", "reference"),
    [
        pytest.param(np.array([2**60 + 1, 3]), np.array([2**60, 3]), id="integers beyond 2^53"),
        pytest.param(np.array([-(2**63), 3]), np.array([2**63 - 1, 3]), id="integers of both signs"),
        pytest.param(np.array([2e200, 3e200]), np.array([1e200, 3e200]), id="numbers with infinite squares"),
    ],
)
def test_numbers_are_compared_in_their_whole_range(
    mine: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]
) -> None:
    found = Fingerprint.of(reference)
    assert np.isfinite(found.norm)
    difference, margin = comparing._difference(1, mine, reference, tolerance_of(found.dtype, 1, found.scale))
    assert (difference.count, difference.at) == (1, (0,))
    assert 0 < difference.relative < np.inf
    assert margin > 1
