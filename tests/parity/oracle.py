"""What the collectives should return, by NumPy alone. Imports nothing of polyhvd."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["adasum", "allow_rounding_of_partial_sums", "check", "contribution", "digest", "reduce"]

Array = np.ndarray[Any, Any]

#: Relative and absolute tolerance: a few roundings of terms near 1. Half types are rounded once.
_TOLERANCES = {
    "float16": (1e-3, 1e-4),
    "bfloat16": (8e-3, 1e-3),
    "float32": (2e-6, 2e-6),
    "float64": (4 * 2.0**-52, 4 * 2.0**-52),
}
_COMBINE = {
    "Sum": np.add,
    "Average": np.add,
    "Min": np.minimum,
    "Max": np.maximum,
    "Product": np.multiply,
}
#: Random elements by kind, rank and number. Tensors are slices of them: drawing the elements of each one
#: takes longer than the collectives do.
_random: dict[tuple[str, int, int], Array] = {}
_RANDOM_MIN = 1 << 19


def contribution(dtype: np.dtype[Any], shape: Sequence[int], rank: int, seed: int = 0) -> Array:
    """A rank's tensor: integers from the type's whole range, floats near 1, no two ranks alike. Read-only."""
    size = math.prod(shape)
    if dtype.kind in "biu":
        elements = _elements("bytes", rank, size * dtype.itemsize)
        elements = elements if dtype.kind == "b" else elements.view(dtype)
    else:
        elements = _elements("floats", rank, size)
    # The start depends on the case, so that tensors of one rank differ, too.
    case = f"{dtype.name} {list(shape)} {seed}"
    start = zlib.crc32(case.encode()) % (len(elements) - size)
    values = elements[start : start + size]
    values = (values & 1 if dtype.kind == "b" else values).astype(dtype).reshape(shape)
    values.flags.writeable = False
    return values


def _elements(kind: str, rank: int, needed: int) -> Array:
    """At least twice as many random elements as are needed, and as many on every rank."""
    count = max(_RANDOM_MIN, 2 << needed.bit_length())
    key = (kind, rank, count)
    if key not in _random:
        random = np.random.default_rng([rank, count])
        if kind == "bytes":
            _random[key] = np.frombuffer(random.bytes(count), np.uint8)
        else:
            _random[key] = random.standard_normal(count, np.float32)
    return _random[key]


def reduce(
    op: str,
    terms: Sequence[Array],
    prescale: float = 1.0,
    postscale: float = 1.0,
    hosts: Sequence[int] | None = None,
) -> Array:
    """The reduction over ranks, added in rank order on each host, then in host order."""
    dtype = terms[0].dtype
    if op == "Average":
        postscale /= len(terms)
    wide = _wide(dtype)
    with np.errstate(all="ignore"):
        scaled = [_scaled(term.astype(wide), prescale) for term in terms]
        partials, first = [], 0
        for count in hosts or [len(terms)]:
            partials.append(_combine(op, scaled[first : first + count]))
            first += count
        return _scaled(_combine(op, partials), postscale).astype(dtype)


def adasum(terms: Sequence[Array]) -> Array:
    """Adasum in a tree over neighbours: with parallel terms their average, with orthogonal ones their sum."""
    vectors = [term.astype(np.float64) for term in terms]
    while len(vectors) > 1:
        pairs = [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
        vectors = [pair[0] if len(pair) == 1 else _adasum_of_two(*pair) for pair in pairs]
    return vectors[0].astype(terms[0].dtype)


def _adasum_of_two(a: Array, b: Array) -> Array:
    both, of_a, of_b = (float(np.vdot(x, y)) for x, y in ((a, b), (a, a), (b, b)))
    weight_a = 1 - both / (2 * of_a) if of_a > 0 else 1.0
    weight_b = 1 - both / (2 * of_b) if of_b > 0 else 1.0
    return np.asarray(weight_a * a + weight_b * b)


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which terms are added."""
    return np.dtype(np.float32) if dtype.name in ("float16", "bfloat16") else dtype


def _combine(op: str, terms: Sequence[Array]) -> Array:
    total = terms[0]
    for term in terms[1:]:
        total = np.asarray(_COMBINE[op](total, term))
    return total


def _scaled(values: Array, factor: float) -> Array:
    if factor == 1.0:
        return values
    if values.dtype.kind in "iu":
        return np.asarray(np.trunc(values.astype(np.float64) * factor)).astype(values.dtype)
    return np.asarray(values * values.dtype.type(factor))


def allow_rounding_of_partial_sums() -> None:
    """In this process from now on, for what rounds to the tensor's type after each term, as NCCL does."""
    _TOLERANCES.update(float16=(4e-3, 4e-3), bfloat16=(3e-2, 3e-2))


def check(case: str, actual: Array, expected: Array, *, exact: bool = False) -> None:
    """Fail, naming the case, unless type and shape are equal and the values are as close as may be."""
    assert actual.dtype == expected.dtype, f"{case}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{case}: shape {actual.shape}, expected {expected.shape}"
    equal = _bits(actual) == _bits(expected)
    if not (exact or np.all(equal) or expected.dtype.name not in _TOLERANCES):
        relative, absolute = _TOLERANCES[expected.dtype.name]
        equal = np.isclose(
            actual.astype(np.float64),
            expected.astype(np.float64),
            rtol=relative,
            atol=absolute,
            equal_nan=True,
        )
    if np.all(equal):
        return
    wrong = np.flatnonzero(~np.asarray(equal).reshape(-1))
    i = wrong[0]
    raise AssertionError(
        f"{case}: {wrong.size} of {expected.size} elements differ, the first at {i}: "
        f"{actual.reshape(-1)[i]!r}, expected {expected.reshape(-1)[i]!r}"
    )


def _bits(array: Array) -> Array:
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[array.dtype.itemsize]
    return np.ascontiguousarray(array).view(unsigned).reshape(array.shape)


def digest(array: Array) -> int:
    """A number that is equal for equal bits of one type and shape."""
    header = zlib.crc32(f"{array.dtype.name} {array.shape}".encode())
    return zlib.crc32(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)), header)
