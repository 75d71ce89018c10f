"""Sketches of tensors, against their definition in NumPy; and that a glance at them accepts nothing wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from depth import repeats  # tests/harness, on the path by tests/conftest.py
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhvd import _core
from polyhvd.parity.limits import Bounds, computed_in, differences, suspicious
from polyhvd.parity.pages import Plan
from polyhvd.parity.traces import KINDS, Facts, Trace, joined, mean_of, trace_of

Array = np.ndarray[Any, Any]
COLUMNS = 64
DTYPES = ["float32", "float64", "float16", "bfloat16", "bool"]
DTYPES += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


def signs_of(row: int) -> Array:
    """By SplitMix64: the j-th bit of its output says whether column j is subtracted."""
    mask = 2**64 - 1
    z = (row + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    z ^= z >> 31
    return np.array([-1.0 if z >> j & 1 else 1.0 for j in range(COLUMNS)])


def sketch_of(array: Array, begin: int = 0, factor: float = 1.0, less: Array | None = None) -> Array:
    """The norm, how many are not finite, and the columns."""
    with np.errstate(all="ignore"):
        flat = array.astype(np.float64).reshape(-1)
        flat = flat if less is None else flat - less.astype(np.float64).reshape(-1)
        first = begin // COLUMNS
        rows = -(-(begin % COLUMNS + flat.size) // COLUMNS)
        whole = np.zeros(rows * COLUMNS)
        whole[begin % COLUMNS : begin % COLUMNS + flat.size] = flat
        odd = ~np.isfinite(whole)
        whole = np.where(odd, 0.0, whole).reshape(rows, COLUMNS)
        squares, sums, total = np.zeros(COLUMNS), np.zeros(COLUMNS), 0.0
        for number, row in enumerate(whole):
            squares += row * row
            sums += row * signs_of(first + number)
        for square in squares:
            total += square
        return np.array([np.sqrt(total) * abs(factor), odd.sum(), *(sums * factor)])


def array_of(dtype: str, bits: bytes) -> Array:
    if dtype == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes")
        return np.frombuffer(bits[: len(bits) // 2 * 2], np.uint16).view(ml_dtypes.bfloat16)
    size = np.dtype(dtype).itemsize
    return np.frombuffer(bits[: len(bits) // size * size], dtype)


def made(tensors: list[Any], **options: Any) -> Array:
    rows = np.full((len(tensors), _core.SKETCH_NUMBERS), 7.0)
    forms = _core.sketch(tensors, rows, list(range(len(tensors))), **options)
    assert forms == [(tensor.dtype.name, tensor.shape) for tensor in tensors]
    return rows


@settings(max_examples=repeats(60, 200), deadline=None)
@given(
    st.sampled_from(DTYPES), st.binary(max_size=1500), st.integers(0, 2**40), st.floats(-1e3, 1e3), st.data()
)
def test_any_bits_have_the_sketch_of_the_definition(
    dtype: str, bits: bytes, begin: int, factor: float, data: st.DataObject
) -> None:
    array = array_of(dtype, bits)
    less = array_of(dtype, data.draw(st.binary(min_size=len(bits), max_size=len(bits))))
    copy = np.zeros_like(array)
    options: dict[str, Any] = {"begins": [begin], "factors": [factor]}
    (plain,) = made([array], **options, copies=[copy])
    np.testing.assert_array_equal(plain, sketch_of(array, begin, factor))
    assert copy.tobytes() == array.tobytes()
    (difference,) = made([array], **options, less=[less.view(np.uint8)])
    np.testing.assert_array_equal(difference, sketch_of(array, begin, factor, less))


def test_a_large_tensor_has_the_sketch_of_the_definition() -> None:
    array = np.random.default_rng(0).standard_normal((70, 1111), np.float32)
    (row,) = made([array], begins=[77])
    np.testing.assert_array_equal(row, sketch_of(array, 77))


def test_what_cannot_be_read_where_it_lies_is_told_and_nothing_is_written() -> None:
    rows = np.full((4, _core.SKETCH_NUMBERS), 7.0)
    matrix = np.ones((4, 4), np.float32)
    tensors = [matrix.T[1:], "a word", matrix, np.ones(3, complex)]
    assert _core.sketch(tensors, rows, [0, 1, 2, 3]) == [None, None, ("float32", (4, 4)), None]
    assert (rows[[0, 1, 3]] == 7.0).all()
    assert rows[2, 0] == 4.0
    assert _core.sketch([matrix], rows, [0], less=[matrix[1:]]) == [None]
    assert _core.sketch([matrix], rows, [0], copies=[np.empty(65, np.uint8)]) == [None]


@pytest.mark.parametrize(
    ("rows", "places", "options", "error"),
    [
        (np.zeros((1, 66)), [1], {}, IndexError),
        (np.zeros((1, 66)), [], {}, ValueError),
        (np.zeros((1, 65)), [0], {}, ValueError),
        (np.zeros(66), [0], {}, ValueError),
        (np.zeros((1, 66)), [0], {"begins": []}, ValueError),
        (np.zeros((1, 66), np.float32), [0], {}, TypeError),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    rows: Array, places: list[int], options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        _core.sketch([np.ones(3, np.float32)], rows, places, **options)


@settings(max_examples=repeats(25, 50), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3, 4]), st.integers(1, 700))
def test_a_whole_has_the_trace_of_its_parts(seed: int, parts: int, width: int) -> None:
    array = np.random.default_rng(seed).standard_normal((parts * 2, width), np.float32)
    whole = trace_of("input", 0, 0, "x", array)
    pieces = [
        trace_of("input", 0, 0, "x", piece, (number, parts))
        for number, piece in enumerate(np.split(array, parts))
    ]
    together = joined(pieces)
    assert (together.shape, together.dtype) == (whole.shape, whole.dtype)
    assert together.norm == pytest.approx(whole.norm, rel=1e-12)
    np.testing.assert_allclose(together.sketch, whole.sketch, rtol=0, atol=1e-12 * (1 + whole.norm))


def test_the_mean_of_traces_is_the_trace_of_the_mean() -> None:
    arrays = np.random.default_rng(1).standard_normal((3, 500))
    mean = mean_of([trace_of("gradient", 0, 0, "w", array) for array in arrays])
    expected = trace_of("gradient", 0, 0, "w", arrays.mean(axis=0))
    np.testing.assert_allclose(mean.sketch, expected.sketch, rtol=0, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 40, 500, 5000]))
def test_a_sketch_estimates_the_norm(seed: int, size: int) -> None:
    array = np.random.default_rng(seed).standard_normal(size, np.float32)
    trace = trace_of("gradient", 0, 0, "w", array)
    estimate = float(np.sqrt(np.square(trace.sketch).sum()))
    assert estimate == pytest.approx(trace.norm, rel=0.6)  # seven deviations: sqrt(2 / 64) / 2 each
    assert size > COLUMNS or estimate == pytest.approx(trace.norm, rel=1e-12)


# At a glance ------------------------------------------------------------------------


def bounds_of(sides: list[dict[Any, Trace]]) -> Bounds:
    precision, begins = computed_in(side.values() for side in sides)
    return Bounds(precision=precision, begins=begins)


def reported(sides: list[dict[Any, Trace]], limit: float | None) -> list[Any]:
    """What parity.watch would report, by the comparison with care."""
    return [
        key
        for side in sides[1:]
        for key, relative, own in differences(side, sides[0], bounds_of(sides))
        if relative > (limit or own)
    ]


@settings(max_examples=repeats(100, 400), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([None, 1e-6, 0.01]), st.integers(1, 3), st.data())
def test_nothing_is_accepted_at_a_glance_that_is_reported_with_care(
    seed: int, limit: float | None, others: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8))
    facts, arrays = [], []
    for place, kind in enumerate(kinds):
        size = data.draw(st.sampled_from([1, 3, 64, 130]))
        dtype = data.draw(st.sampled_from(["float32", "float16", "float64"]))
        facts.append(Facts(kind, place, place // 2, "w", (size,), dtype))
        arrays.append(rng.standard_normal(size) * 10.0 ** data.draw(st.integers(-9, 2)))
    reference = [*facts]
    sides = [np.stack([sketch_of(array) for array in arrays])]
    orders = [list(range(len(facts)))]
    for _ in range(others):
        changed = []
        for array in arrays:
            by = data.draw(st.sampled_from([0.0, 0.0, 1e-7, 1e-6, 1e-5, 9e-4, 9.8e-4, 1e-3, 0.1]))
            noise = rng.standard_normal(array.size)
            noise *= by * np.linalg.norm(array) / max(np.linalg.norm(noise), 1e-300)
            other = array + noise
            if data.draw(st.integers(0, 20)) == 0:
                other[0] = np.nan
            changed.append(other)
        order = list(rng.permutation(len(facts)))
        orders.append(order)
        sides.append(np.stack([sketch_of(changed[i]) for i in order]))
    pages = [tuple(reference[i] for i in order) for order in orders]
    if not Plan(pages, limit).accepts(sides):
        return
    traces = [
        {each.key: Trace.of(each, row) for each, row in zip(page, side, strict=True)}
        for page, side in zip(pages, sides, strict=True)
    ]
    assert reported(traces, limit) == []
    bounds = bounds_of(traces)
    for side in traces[1:] if limit is None else []:
        assert suspicious(differences(side, traces[0], bounds), side, traces[0], bounds) is None


def facts_of(*shapes: tuple[int, ...]) -> tuple[Facts, ...]:
    return tuple(Facts("gradient", place, 0, "w", shape, "float32") for place, shape in enumerate(shapes))


def test_rounding_is_accepted_at_a_glance_and_more_is_not() -> None:
    arrays = np.random.default_rng(0).standard_normal((2, 100))
    rows = np.stack([sketch_of(array) for array in arrays])
    plan = Plan([facts_of((100,), (100,))] * 3, None)
    limit = 8 * 4 * 8 * 2.0**-24
    near, far = rows.copy(), rows.copy()
    near[1, 2:] *= 1 + limit / 2
    far[1, 2:] *= 1 + 2 * limit
    assert plan.accepts([rows, rows.copy(), rows.copy()])
    assert plan.accepts([rows, rows, near])
    assert not plan.accepts([rows, rows, far])
    assert not plan.accepts([rows, far, rows])


@pytest.mark.parametrize(
    "other", [facts_of((100,)), facts_of((100,), (10, 10)), facts_of((100,), (100,), (3,))]
)
def test_other_tensors_or_shapes_are_never_accepted_at_a_glance(other: tuple[Facts, ...]) -> None:
    plan = Plan([facts_of((100,), (100,)), other], None)
    assert not plan.accepts([np.zeros((2, 66)), np.zeros((len(other), 66))])


def test_another_number_of_nans_is_never_accepted_at_a_glance() -> None:
    rows = np.stack([sketch_of(np.arange(5.0))])
    other = rows.copy()
    other[0, 1] = 1
    plan = Plan([facts_of((5,)), facts_of((5,))], None)
    assert plan.accepts([rows, rows])
    assert not plan.accepts([rows, other])
