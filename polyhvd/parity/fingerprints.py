"""Fingerprints, sent before, and mostly instead of, the tensors themselves. Pure, on NumPy's arrays."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["TERMS", "Fingerprint", "Tolerance", "norm_of", "roundoff_of", "tolerance_of"]

Array = np.ndarray[Any, Any]

#: Unit roundoff: half the distance from 1 to the next number.
_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
#: Half types are added up in float32, and rounded once at the end.
_ADDED_IN = {"bfloat16": "float32", "float16": "float32"}
#: Terms of an element where the caller does not give them: a dense layer of so many inputs, or a convolution
#: of 3 x 3 over 455 channels.
TERMS = 4096
#: How many roundings of each kind are granted: of the two results, of their operands, and of factors.
_ROUNDINGS = 4.0


@dataclass(frozen=True)
class Tolerance:
    """Elements may differ by ``atol + rtol * abs(reference)``."""

    rtol: float
    atol: float


def roundoff_of(dtype: str) -> float:
    """Unit roundoff of a type of numbers; 0 of whole ones."""
    return _ROUNDOFF.get(dtype, 0.0)


def tolerance_of(dtype: str, terms: int | None = None, scale: float = 1.0) -> Tolerance:
    """How far two frameworks may differ in one element that both have computed rightly.

    The rounding error of a sum of n products in any order is below ``n * u`` times the sum of their absolute
    values, and with a probability near 1 below a small multiple of ``sqrt(n) * u`` times it (Higham and Mary,
    "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019). Where terms
    cancel, that is large beside the sum, so that the same fraction of the tensor's root mean square is
    granted, too.

    Args:
        dtype: of the tensor, NumPy's name. Integers and bools have no tolerance.
        terms: that are added up for one element; None: 4096.
        scale: root mean square of the tensor.
    """
    if dtype not in _ROUNDOFF:
        return Tolerance(0.0, 0.0)
    adds = _ROUNDOFF[_ADDED_IN.get(dtype, dtype)] * float(np.sqrt(TERMS if terms is None else terms))
    rtol = _ROUNDINGS * (adds + (_ROUNDOFF[dtype] if dtype in _ADDED_IN else 0.0))
    return Tolerance(rtol, rtol * scale)


def norm_of(array: Array) -> float:
    """The root of the sum of squares of a float64 array, also where the squares are too large for float64."""
    with np.errstate(over="ignore"):
        norm = float(np.sqrt(np.square(array).sum()))
    if norm != np.inf:
        return norm
    largest = float(np.abs(array).max())
    return largest * norm_of(array / largest) if largest != np.inf else norm


@dataclass(frozen=True)
class Fingerprint:
    """A tensor in common form, in a few numbers.

    Args:
        shape: in common form.
        dtype: NumPy's name.
        digest: of dtype, shape and bits; zeros of both signs count as equal.
        norm: the root of the sum of squares, of what is finite.
        least: smallest finite element; 0 if there is none.
        most: largest finite element; likewise.
        not_finite: how many NaNs and infinities.
    """

    shape: tuple[int, ...]
    dtype: str
    digest: str
    norm: float
    least: float
    most: float
    not_finite: int

    @classmethod
    def of(cls, array: Array) -> Fingerprint:
        """That of an array; reads it a few times."""
        dtype = array.dtype.name
        dense = np.ascontiguousarray(array)
        bits = hashlib.blake2b(f"{dtype} {array.shape}".encode(), digest_size=16)
        is_floating = dtype in _ROUNDOFF
        plain = dense + dense.dtype.type(0) if is_floating else dense  # -0.0 + 0.0 is 0.0
        bits.update(plain.reshape(-1).view(np.uint8).data)
        wide = dense.astype(np.float64)
        finite = wide[np.isfinite(wide)] if is_floating else wide.reshape(-1)
        return cls(
            shape=tuple(array.shape),
            dtype=dtype,
            digest=bits.hexdigest(),
            norm=norm_of(finite),
            least=float(finite.min(initial=np.inf)) if finite.size else 0.0,
            most=float(finite.max(initial=-np.inf)) if finite.size else 0.0,
            not_finite=int(array.size - finite.size),
        )

    @property
    def scale(self) -> float:
        """Root mean square."""
        count = int(np.prod(self.shape)) - self.not_finite
        return self.norm / float(np.sqrt(count)) if count else 0.0

    def __str__(self) -> str:
        odd = f", {self.not_finite} not finite" if self.not_finite else ""
        extremes = f"from {self.least:.6g} to {self.most:.6g}"
        return f"{self.dtype} {list(self.shape)}, norm {self.norm:.6g}, {extremes}{odd}"
