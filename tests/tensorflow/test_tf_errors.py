"""Errors inside of graphs, as four ranks; the properties stand in ranks_errors.py."""

from __future__ import annotations

import pytest
from tf_jobs import checks_in, expect_passed

SCRIPT, RANKS = "ranks_errors.py", 4


@pytest.mark.parametrize("check", checks_in(SCRIPT))
def test_errors(check: str) -> None:
    survivors = RANKS - 1 if check == "a_lost_rank_is_told" else RANKS
    expect_passed(SCRIPT, RANKS, check, passing=survivors)


def test_every_class_of_the_core_has_one_of_tensorflow() -> None:
    tensorflow = pytest.importorskip("polyhvd.tensorflow.errors", reason="TensorFlow is not installed")
    from polyhvd import errors

    mapped = tensorflow._FROM_CORE
    assert set(errors.by_code().values()) | {errors.NotInitializedError} == set(mapped)
    for core, both in mapped.items():
        assert issubclass(both, core)
        assert set(both.__bases__) & set(tensorflow._FROM_KERNEL), both
