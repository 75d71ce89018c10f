"""How gradients are scaled and where rows lie, without ranks."""

from __future__ import annotations

import pytest

from polyhvd.collectives.adapter import OpKind, ReduceOp
from polyhvd.collectives.adjoints import gradient_factor, rows_before, rows_kept
from polyhvd.errors import InvalidArgumentError


def test_horovods_factor_is_the_exact_one_divided_or_multiplied_by_the_number_of_ranks() -> None:
    for kind in (OpKind.ALLGATHER, OpKind.BROADCAST):
        assert gradient_factor(kind, 4, True) == 1.0
        assert gradient_factor(kind, 4, False) == 0.25
    for op, exact in ((ReduceOp.Sum, 1.0), (ReduceOp.Average, 0.25)):
        assert gradient_factor(OpKind.REDUCESCATTER, 4, True, op) == exact
        assert gradient_factor(OpKind.REDUCESCATTER, 4, False, op) == 4 * exact


def test_the_gradient_of_a_scattered_average_has_no_factor_whose_rounding_would_show() -> None:
    assert gradient_factor(OpKind.REDUCESCATTER, 49, False, ReduceOp.Average) == 1.0  # 1 / 49 * 49 is not


def test_the_first_members_keep_a_row_more() -> None:
    assert rows_kept(8, 3) == [3, 3, 2]
    assert rows_kept(2, 3) == [1, 1, 0]


def test_rows_before_a_member_are_those_of_lower_positions() -> None:
    lengths = [[0, 1, 5], [1, 2, 5], [2, 3, 5]]
    assert [rows_before(lengths, p, 3, [6, 15], "x") for p in range(3)] == [[0, 0], [1, 5], [3, 10]]


def test_rows_of_a_member_that_has_joined_since_still_lie_before_those_of_higher_positions() -> None:
    lengths = [[0, 1], [2, 3]]
    assert rows_before(lengths, 0, 3, [6], "x") == [0]
    assert rows_before(lengths, 2, 3, [6], "x") == [3]


def test_a_member_that_had_joined_already_has_no_rows() -> None:
    assert rows_before([[1, 2], [3, 4]], 3, 4, [6], "x") == [2]


def test_rows_that_may_lie_on_either_side_are_an_error_for_all() -> None:
    lengths = [[1, 2], [3, 4]]
    for position in (1, 3):
        with pytest.raises(InvalidArgumentError, match=r"allgather 'x'.*\[0, 2\].*join\(\) after backward"):
            rows_before(lengths, position, 4, [9], "x")
