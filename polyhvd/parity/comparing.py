"""Comparing one tensor between ranks: fingerprints first, the tensors themselves only where these differ."""

from __future__ import annotations

import numbers
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polyhvd import _core
from polyhvd.collectives.adapter import OpKind
from polyhvd.collectives.objects import allgather_object
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.errors import HorovodInternalError, InvalidArgumentError, RankMismatchError
from polyhvd.parity import log
from polyhvd.parity.axes import layout_of
from polyhvd.parity.fingerprints import Fingerprint, Tolerance, norm_of, tolerance_of
from polyhvd.parity.models import framework_of, reader_of
from polyhvd.runtime import current
from polyhvd.training.layouts import Layout

__all__ = ["Comparison", "Difference", "ParityError", "array_of", "compare"]

Array = np.ndarray[Any, Any]


class ParityError(AssertionError):
    """Ranks, or models, have different values where they should have the same; raised on all ranks.

    Args:
        found: the comparison of a tensor, or a sentence.
    """

    def __init__(self, found: Comparison | str) -> None:
        super().__init__(str(found))
        #: None: no tensor was compared.
        self.comparison = None if isinstance(found, str) else found


@dataclass(frozen=True)
class Difference:
    """How the tensor of one rank differs from the reference, the first rank's.

    Args:
        rank: world rank.
        kind: "shape", "dtype", "not finite" or "values".
        count: elements beyond the tolerance.
        at: the worst of them, as an index in common form.
        value: that element on this rank.
        reference: that element on the first rank.
        relative: the norm of the difference over that of the reference.
    """

    rank: int
    kind: str
    count: int = 0
    at: tuple[int, ...] = ()
    value: float = 0.0
    reference: float = 0.0
    relative: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`, the same on every rank.

    Args:
        name: of the comparison.
        ranks: world ranks that took part; the first is the reference.
        frameworks: of each rank.
        fingerprints: of each rank's tensor.
        tolerance: for elements.
        differences: one for each rank that differs; empty: all agree.
        relative: the largest difference of norms by that of the reference; None: shapes or dtypes differ.
        margin: the largest difference of an element by what is allowed for it; None: likewise.
    """

    name: str
    ranks: tuple[int, ...]
    frameworks: tuple[str, ...]
    fingerprints: tuple[Fingerprint, ...]
    tolerance: Tolerance
    differences: tuple[Difference, ...] = ()
    relative: float | None = None
    margin: float | None = None

    @property
    def agree(self) -> bool:
        """Whether all ranks have the same values, within the tolerance."""
        return not self.differences

    def __str__(self) -> str:
        if self.agree:
            return f"parity.compare {self.name!r}: ranks {list(self.ranks)} agree"
        sides = "\n  ".join(self._side(difference) for difference in self.differences)
        return f"parity.compare {self.name!r}: ranks differ\n  {sides}"

    def _side(self, difference: Difference) -> str:
        place = self.ranks.index(difference.rank)
        sides = " and ".join(
            f"rank {self.ranks[i]} ({self.frameworks[i]}) has {self.fingerprints[i]}" for i in (place, 0)
        )
        if difference.kind in ("shape", "dtype"):
            return f"in {difference.kind}: {sides}"
        size = int(np.prod(self.fingerprints[0].shape))
        worst = f"{difference.value:.7g} instead of {difference.reference:.7g} at {list(difference.at)}"
        beyond = f"rtol={self.tolerance.rtol:.2g}, atol={self.tolerance.atol:.2g}"
        return (
            f"in {difference.kind}: {difference.count} of {size} elements beyond {beyond}, the worst {worst},"
            f" in norm {difference.relative:.2g}: {sides}"
        )


def array_of(tensor: Any, layout: Layout | str | None = None) -> tuple[str, Array]:
    """The framework of a tensor, and its values in common form.

    Args:
        tensor: of any framework; waited for.
        layout: how it lies; see :func:`compare`.

    Raises:
        InvalidArgumentError: it is not a tensor, or the layout does not fit.
    """
    framework = framework_of(tensor)
    if framework is None and isinstance(tensor, (bool, int, float)):
        return "python", np.asarray(tensor)
    if framework is None or isinstance(tensor, type) or not hasattr(tensor, "shape"):
        raise InvalidArgumentError(
            f"parity.compare: expected a tensor of a framework, or a number, found {type(tensor).__name__}"
        )
    array = reader_of(tensor).to_numpy(tensor)
    if array.dtype.kind in "cOSUMm":
        raise InvalidArgumentError(
            f"parity.compare: expected a tensor of numbers or bools, found {array.dtype}; of complex ones, "
            "compare the real and the imaginary parts"
        )
    return framework, np.ascontiguousarray(layout_of(layout, tuple(array.shape)).array_to_common(array))


def compare(
    name: str,
    tensor: Any,
    rtol: float | None = None,
    atol: float | None = None,
    layout: Layout | str | None = None,
    *,
    terms: int | None = None,
    raises: bool = True,
    process_set: ProcessSet = global_process_set,
) -> Comparison:
    """Compare a tensor between ranks, each of which may have another framework.

    Every rank calls it with its own tensor under the same name. Fingerprints are exchanged first. If these
    show that the bits are the same, or that shape or dtype are not, nothing else is sent. Otherwise the first
    rank's tensor travels to the others, each of which compares it with its own.

    Args:
        name: of the comparison; matches the calls of the ranks.
        tensor: of any framework, or a number.
        rtol: elements may differ by ``atol + rtol * abs(reference)``; None: by dtype and ``terms``, as
            described in ``polyhvd docs parity``.
        atol: likewise.
        layout: how the tensor lies on this rank: letters such as "NHWC" or "HWIO", or a :class:`Layout`;
            None: in common form, NCHW and OIHW.
        terms: products that are added up for one element, at most; None: 4096.
        raises: whether a difference is an error. Else it is in what is returned.
        process_set: the ranks that take part.

    Returns:
        what was found, the same on every rank.

    Raises:
        ParityError: ranks differ; on all of them.
        InvalidArgumentError: no tensor, a layout that does not fit, a tolerance below zero.
        RankMismatchError: the ranks compare under different names; on all of them.
        HorovodInternalError: a rank was lost.

    Example::

        logits = model(x)
        parity.compare("logits", logits, terms=512)
        parity.compare("features", features, layout="NHWC")  # in Keras; a rank of PyTorch leaves it out
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"parity.compare: name={name!r}: expected a text, such as 'logits'")
    for what, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not (isinstance(value, numbers.Real) and value >= 0):
            raise InvalidArgumentError(f"parity.compare {name!r}: {what}={value!r}: expected 0 or more")
    if terms is not None and not (isinstance(terms, numbers.Integral) and terms >= 1):
        raise InvalidArgumentError(f"parity.compare {name!r}: terms={terms!r}: expected 1 or more")
    framework, array = array_of(tensor, layout)
    mine = (framework, Fingerprint.of(array), (rtol, atol, terms))
    named = _exchanged(str(name), mine, process_set)
    ranks = tuple(process_set.ranks or range(len(named)))
    _check_names([each[0] for each in named], ranks)
    sides = [each[1] for each in named]
    reference: Fingerprint = sides[0][1]
    rtol, atol, terms = sides[0][2]
    usual = tolerance_of(reference.dtype, terms, reference.scale)
    tolerance = Tolerance(usual.rtol if rtol is None else rtol, usual.atol if atol is None else atol)
    found = Comparison(
        name, ranks, tuple(side[0] for side in sides), tuple(side[1] for side in sides), tolerance
    )
    found = _measured(found, array, process_set)
    log.note(_entry(found), ranks[0])
    if raises and not found.agree:
        raise ParityError(found)
    return found


def _exchanged(name: str, mine: Any, process_set: ProcessSet) -> list[tuple[str, Any]]:
    """The tensors that every rank compares, and its side.

    All comparisons of the main thread use one operation name, so that ranks that compare different things
    get an error instead of waiting for each other. Comparisons of other threads run at the same time, in an
    order that differs between ranks, and are matched by their names.
    """
    is_main = threading.current_thread() is threading.main_thread()
    operation = "parity.compare" if is_main else f"parity.compare.{name}"
    try:
        return allgather_object((name, mine), name=operation, process_set=process_set)
    except HorovodInternalError as error:
        error.args = (f"parity.compare {name!r}: {error}",)
        raise


def _check_names(names: Sequence[str], ranks: Sequence[int]) -> None:
    if len(set(names)) == 1:
        return
    compared = ", ".join(f"rank {rank} compares {name!r}" for rank, name in zip(ranks, names, strict=True))
    raise RankMismatchError(
        f"parity.compare: the ranks compare different things: {compared}; call it on every rank with the "
        "same names in the same order"
    )


def _entry(found: Comparison) -> dict[str, Any]:
    """Return the entry of a comparison in the log."""
    first: dict[str, Any] = {}
    if found.differences:
        worst = found.differences[0]
        mine, other = (found.fingerprints[found.ranks.index(rank)] for rank in (found.ranks[0], worst.rank))
        is_batch = worst.kind == "shape" and mine.shape[1:] == other.shape[1:] and mine.shape and other.shape
        first = {"kind": "batch" if is_batch else worst.kind, "rank": worst.rank, "at": list(worst.at)}
    return {
        "name": found.name,
        "agree": found.agree,
        "first": first,
        "text": "" if found.agree else str(found),
        "worst": {} if found.relative is None else {"values": found.relative},
        "margin": found.margin,
        "frameworks": found.frameworks,
    }


def _measured(found: Comparison, mine: Array, process_set: ProcessSet) -> Comparison:
    reference = found.fingerprints[0]
    unlike = []
    for rank, fingerprint in zip(found.ranks, found.fingerprints, strict=True):
        for kind in ("shape", "dtype"):
            if getattr(fingerprint, kind) != getattr(reference, kind):
                unlike.append(Difference(rank, kind))
                break
    if unlike:
        return replace(found, differences=tuple(unlike))
    if all(each.digest == reference.digest for each in found.fingerprints):
        return replace(found, relative=0.0, margin=0.0)
    whole = _broadcast(found.name, mine, found.ranks[0], process_set)
    rank = current.world().placement.rank
    own = _difference(rank, mine, whole, found.tolerance)
    measured = allgather_object(own, name=f"parity.{found.name}.differences", process_set=process_set)
    return replace(
        found,
        differences=tuple(each for each, _ in measured if each.count),
        relative=max(each.relative for each, _ in measured),
        margin=max(margin for _, margin in measured),
    )


def _broadcast(name: str, mine: Array, root: int, process_set: ProcessSet) -> Array:
    whole = np.array(mine, order="C")
    flat = whole.reshape(-1)
    tensor = _core.TensorRef(flat.ctypes.data, flat.shape, whole.dtype.name, flat)
    current.world().engine.submit(
        OpKind.BROADCAST,
        f"parity.{name}.whole",
        (tensor,),
        (tensor,),
        root=root,
        process_set=process_set_id(process_set),
        blocking=True,
    ).wait()
    return whole


def _difference(rank: int, mine: Array, reference: Array, tolerance: Tolerance) -> tuple[Difference, float]:
    """Return the difference of arrays of one shape and dtype, and the largest error by what is allowed.

    Its ``count`` is 0 if no element is beyond the tolerance.
    """
    a, b = mine.astype(np.float64), reference.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        finite = np.isfinite(a) & np.isfinite(b)
        same = (mine == reference) | (np.isnan(a) & np.isnan(b))
        distance = np.abs(a - b)
        if mine.dtype.kind in "iu":  # float64 does not have all of 64 bits
            least, most = np.minimum(mine, reference), np.maximum(mine, reference)
            distance = (most.astype(np.uint64) - least.astype(np.uint64)).astype(np.float64)
        error = np.where(same | ~finite, 0.0, distance)
        allowed = tolerance.atol + tolerance.rtol * np.abs(b)
        beyond = np.where(finite, error > allowed, ~same)
        margins = np.where(same, 0.0, np.where(finite, error / allowed, np.inf))
    odd = beyond & ~finite
    worst = np.argmax(odd) if odd.any() else np.argmax(np.where(beyond, error, -1.0))
    at = np.unravel_index(int(worst), a.shape)
    norm, apart = norm_of(b[finite]), norm_of(error)
    found = Difference(
        rank=rank,
        kind="not finite" if odd.any() else "values",
        count=int(beyond.sum()),
        at=tuple(int(i) for i in at),
        value=float(a[at]),
        reference=float(b[at]),
        relative=apart / norm if norm else float("inf") if apart or odd.any() else 0.0,
    )
    return found, float(margins.max())
