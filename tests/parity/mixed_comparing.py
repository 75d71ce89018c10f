"""polyhvd.parity.compare between ranks of different frameworks, as every rank uses it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import drivers
import numpy as np
import pytest
from drivers import Driver

from polyhvd import parity
from polyhvd.parity.comparing import Comparison

__all__ = ["by_layout", "equal", "far", "in_threads", "near", "not_finite", "unlike"]

Array = np.ndarray[Any, Any]


def _values(shape: tuple[int, ...], dtype: str = "float32") -> Array:
    return np.random.default_rng(3).standard_normal(shape).astype(dtype)


def _bytes(driver: Driver) -> int:
    counters = driver.hvd.counters()
    return sum(count for counter, count in counters.items() if counter.endswith("_bytes"))


def equal(name: str) -> int:
    """Equal tensors agree, of all element types; returns the bytes that a large one moved."""
    driver = drivers.get(name)
    for dtype in driver.dtypes:
        assert parity.compare("same", driver.from_numpy(_values((5, 7)).astype(dtype))).agree
    assert parity.compare("nothing", driver.from_numpy(_values((0, 3)))).agree
    assert parity.compare("zeros", driver.from_numpy(np.full(3, 0.0 if driver.hvd.rank() else -0.0))).agree
    large = driver.from_numpy(_values((1000, 1000)))
    before = _bytes(driver)
    assert parity.compare("large", large).agree
    return _bytes(driver) - before


def in_threads(name: str) -> None:
    """Threads compare at the same time, and meet those of other ranks by the names of what they compare."""
    driver = drivers.get(name)

    def go(thread: int) -> bool:
        values = _values((3, 4)) + thread
        return all(parity.compare(f"of {thread}", driver.from_numpy(values)).agree for _ in range(10))

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(go, range(2)))


def near(name: str) -> None:
    """What rounding may do is no difference by default, and is one if it is not tolerated."""
    driver = drivers.get(name)
    values = _values((50, 20))
    if driver.hvd.rank() == 1:
        values = values * np.float32(1 + 2e-6)
    tensor = driver.from_numpy(values)
    assert parity.compare("near", tensor).agree
    found = parity.compare("near", tensor, rtol=0, atol=1e-9, raises=False)
    assert [difference.rank for difference in found.differences] == [1]
    assert found.differences[0].relative == pytest.approx(2e-6, rel=0.1)
    assert not parity.compare("near", tensor, terms=1, raises=False).agree


def _raised(name: str, tensor: Any, **options: Any) -> Comparison:
    with pytest.raises(parity.ParityError) as caught:
        parity.compare(name, tensor, **options)
    text = str(caught.value)
    assert repr(name) in text
    assert "rank 1" in text
    found = caught.value.comparison
    assert isinstance(found, Comparison)
    return found


def far(name: str) -> None:
    """A difference is found on all ranks, with its place."""
    driver = drivers.get(name)
    rank = driver.hvd.rank()
    values = _values((4, 3, 6))
    expected = float(values[2, 1, 5])
    values[2, 1, 5] += 0.25 * (rank == 1)
    values[0, 0, 0] += 0.01 * (rank == 1)
    found = _raised("far", driver.from_numpy(values))
    (difference,) = found.differences
    assert (difference.rank, difference.kind, difference.count) == (1, "values", 2)
    assert difference.at == (2, 1, 5)
    assert difference.reference == pytest.approx(expected)
    assert difference.value == pytest.approx(expected + 0.25)
    assert parity.compare("far", driver.from_numpy(values), atol=0.3).agree


def not_finite(name: str) -> None:
    """NaNs and infinities agree with the same in the same places, and with nothing else."""
    driver = drivers.get(name)
    rank = driver.hvd.rank()
    values = _values((6,)) * np.float32(1 + 1e-7 * rank)
    values[1], values[2] = np.nan, -np.inf
    assert parity.compare("odd", driver.from_numpy(values)).agree
    values[4] = np.nan if rank == 1 else 1.0
    found = _raised("odd", driver.from_numpy(values))
    assert (found.differences[0].kind, found.differences[0].at) == ("not finite", (4,))


def unlike(name: str) -> int:
    """Shapes and element types that differ are found without sending a tensor; returns the bytes moved."""
    driver = drivers.get(name)
    rank = driver.hvd.rank()
    tensor = driver.from_numpy(_values((1000, 1000 + rank)))
    before = _bytes(driver)
    assert _raised("shapes", tensor).differences[0].kind == "shape"
    moved = _bytes(driver) - before
    typed = driver.from_numpy(_values((2, 2), "float16" if rank == 1 else "float32"))
    assert _raised("types", typed).differences[0].kind == "dtype"
    with pytest.raises(driver.hvd.InvalidArgumentError, match="NHWC"):
        parity.compare("mine", driver.from_numpy(_values((2, 2))), layout="NHWC")
    return moved


def by_layout(name: str) -> None:
    """Tensors that lie in other layouts meet in common form."""
    driver = drivers.get(name)
    images, kernel = _values((2, 3, 4, 5)), _values((8, 3, 2, 2))
    if driver.hvd.rank() == 1:
        permuted = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
        assert parity.compare("images", driver.from_numpy(permuted), layout="NHWC").agree
        permuted = np.ascontiguousarray(kernel.transpose(2, 3, 1, 0))
        assert parity.compare("kernel", driver.from_numpy(permuted), layout="HWIO").agree
    else:
        assert parity.compare("images", driver.from_numpy(images)).agree
        assert parity.compare("kernel", driver.from_numpy(kernel)).agree
