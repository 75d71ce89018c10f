"""Copies and comparisons of many arrays by the core, and that it leaves alone what it cannot have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyhvd import _core
from polyhvd.elastic.memory import like, overwrite

LARGE = 3 << 20  # float32s, more than what stays in caches


def test_arrays_of_any_size_get_the_values_and_their_neighbours_keep_theirs() -> None:
    memory = np.zeros(2 * LARGE, np.float32)
    sizes = [0, 1, 15, 16, 17, 1000, LARGE]
    starts = np.cumsum([3, *(size + 5 for size in sizes)])
    targets = [memory[a : a + size] for a, size in zip(starts, sizes, strict=False)]
    sources = [np.random.default_rng(size).random(size, np.float32) + 1 for size in sizes]
    assert _core.copy(targets, sources) == []
    expected = np.zeros_like(memory)
    for a, source in zip(starts, sources, strict=False):
        expected[a : a + len(source)] = source
    assert np.array_equal(memory, expected)


def read_only() -> Any:
    array = np.zeros(4)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (np.zeros(4), np.ones(3)),
        (np.zeros(3), np.ones(4)),
        (np.zeros((2, 2)), np.ones(4)),
        (np.zeros(4), np.ones(4, np.float32)),
        (np.zeros(4), np.ones(8)[::2]),
        (np.zeros(8)[::2], np.ones(4)),
        (np.zeros((2, 3), order="F"), np.ones((2, 3))),
        (read_only(), np.ones(4)),
        (np.zeros(2, complex), np.ones(2, complex)),
        (np.zeros(2, object), np.ones(2, object)),
        (np.zeros(2, ">f4"), np.ones(2, ">f4")),
        (None, np.ones(2)),
        (np.zeros(2), [1.0, 1.0]),
    ],
)
def test_what_the_core_cannot_copy_as_it_lies_is_left_to_the_caller(target: Any, source: Any) -> None:
    before = None if target is None else target.copy()
    whole = np.zeros(2)
    assert _core.copy([whole, target, whole], [np.ones(2), source, np.full(2, 3.0)]) == [1]
    assert whole.tolist() == [3.0, 3.0]
    assert target is None or np.array_equal(target, before)


def test_arrays_that_share_memory_are_left_to_the_caller() -> None:
    memory = np.arange(8.0)
    assert _core.copy([memory[:4], memory[:4], memory[:2]], [memory[3:7], memory[4:], memory[:2]]) == [0, 2]
    assert memory.tolist() == [4, 5, 6, 7, 4, 5, 6, 7]


def test_sequences_of_different_lengths_are_refused_before_anything_is_copied() -> None:
    target = np.zeros(2)
    for act in (_core.copy, _core.different):
        with pytest.raises(ValueError, match="1 tensors and 2 others"):
            act([target], [np.ones(2), np.ones(2)])
    assert not target.any()


def test_arrays_are_compared_bit_for_bit() -> None:
    nan = np.array([1.0, np.nan])
    other_nan = nan.copy()
    other_nan.view(np.uint64)[1] ^= np.uint64(1)
    large = np.ones(LARGE, np.float32)
    changed = large.copy()
    changed[-1] = 2
    ones = [nan, nan, np.zeros(1), large, large, np.ones(0), np.ones(2), np.ones(8)[::2], 3]
    others = [nan.copy(), other_nan, -np.zeros(1), large.copy(), changed, np.ones(0)]
    others += [np.ones(2, np.int64), np.ones(4), 3]
    assert _core.different(ones, others) == [1, 2, 4, 6, 7, 8]


def test_arrays_of_every_kind_are_overwritten() -> None:
    sources = [np.ones(3, complex), np.ones((2, 3)), np.array(5), np.ones(6)[::2]]
    targets = [np.zeros(3, complex), np.zeros((2, 3), order="F"), np.array(0), np.zeros(3)]
    overwrite(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert np.array_equal(target, source)


def test_memory_that_fits_is_used_again() -> None:
    there = [np.zeros(3), np.zeros(4)]
    found = like([np.ones(3), np.ones(4, np.float32), np.ones(2)], there)
    assert found[0] is there[0]
    assert [(array.shape, array.dtype.name) for array in found[1:]] == [((4,), "float32"), ((2,), "float64")]


def test_memory_that_is_new_lies_side_by_side_and_has_the_forms_asked_for() -> None:
    forms = [
        np.ones((2, 3), np.float32),
        np.ones((5, 7), order="F"),
        np.ones(1, bool),
        np.ones(()),
        np.ones((0, 4)),
        np.ones((4, 6), np.int16)[:, ::2],
        np.ones(3, np.complex64),
    ]
    made = like(forms, [])
    for array, form in zip(made, forms, strict=True):
        assert (array.shape, array.dtype) == (form.shape, form.dtype)
        assert array.flags.writeable
        assert array.size == 0 or array.ctypes.data % 64 == 0
        assert np.isfortran(array) == np.isfortran(form)
        array[...] = form
    assert all(np.array_equal(array, form) for array, form in zip(made, forms, strict=True)), "apart"
    assert len({id(_block(array)) for array in made}) == 1
    assert like([], []) == []
    (objects,) = like([np.array(["a", None], object)], [])
    assert objects.tolist() == [None, None], "no bytes of whatever was there"


def _block(array: Any) -> Any:
    return array if array.base is None else _block(array.base)
