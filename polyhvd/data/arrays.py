"""Batches of arrays that lie in memory, the same arrays on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polyhvd.data.agreement import Agreement
from polyhvd.data.columns import Column, NullsError, array_of, require_pyarrow
from polyhvd.data.loader import Batch, Loader
from polyhvd.data.order import Indices, Order, Step
from polyhvd.data.position import Place
from polyhvd.data.writing import is_pandas

__all__ = ["ArrayLoader", "Batch"]


class ArrayLoader(Loader):
    """Loads batches of arrays in memory: every row of an epoch once over all ranks, however their number
    changes.

    Before each step the rank and size of the world are looked up. A step counts when :meth:`advance` is
    called, or else when the next batch is asked for; one that ends in an exception does not. All ranks have
    equally many steps. Going over the loader again after the end of an epoch begins the next one, unless
    :meth:`set_epoch` says which.

    Args:
        arrays: a sequence of arrays, or a mapping to arrays, of equally many rows. An array is what has a
            ``shape`` and can be indexed with an array of integers. Or a DataFrame of pandas or Polars, or an
            Arrow table or record batch, whose columns become arrays as those of files do; columns of numbers
            in one piece are not copied. Every rank has the same.
        batch_size: rows of a step for each rank. With more ranks a step has more rows.
        global_batch_size: rows of a step over all ranks, whatever their number. One of the two is given.
        shuffle: whether the order differs from epoch to epoch.
        seed: of the order, an integer of at least 0, the same on every rank.
        last: what happens to the rows at the end of an epoch that fill no step. "even" splits them as evenly
            as possible; if they are fewer than ranks, together with those of the step before. "short" keeps
            them apart: no batch is larger than asked for, but ranks may be left without a row, and get one
            of weight 0. "drop" leaves them out of this epoch.
        streams: into how many streams an epoch is cut; None: 64 if rows are shuffled, else 1, which keeps
            their order.
        placement: returns rank and size; None: those of the current world.

    Raises:
        ValueError: an argument is out of range, the arrays have different numbers of rows, or a column of a
            table has nulls or a type that cannot be an array.
        ModuleNotFoundError: an Arrow table of another library needs pyarrow, which is not installed.

    Example::

        loader = ArrayLoader([images, labels], batch_size=32, seed=1)
        for epoch in range(10):
            loader.set_epoch(epoch)
            for batch in loader:
                train(*batch, weight=batch.weight)
    """

    def __init__(
        self,
        arrays: Any,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        last: str = "even",
        streams: int | None = None,
        placement: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        if is_pandas(arrays) and hasattr(arrays, "columns"):
            arrays = _of_pandas(arrays)
        elif _is_arrow(arrays) and not is_pandas(arrays):
            arrays = _of_arrow(arrays)
        if hasattr(arrays, "shape"):
            raise ValueError("arrays is an array; put it into a list: [array]")
        self._names = list(arrays) if isinstance(arrays, Mapping) else None
        values = self._values(arrays)
        self._arrays = [_array(*item) for item in zip(self._names or range(len(values)), values, strict=True)]
        if not self._arrays or any(len(array.shape) == 0 for array in self._arrays):
            raise ValueError("arrays needs at least one array, and each array at least one row")
        counts = [int(array.shape[0]) for array in self._arrays]
        if len(set(counts)) > 1:
            raise ValueError(
                f"the arrays have {', '.join(map(str, counts))} rows; they must have the same number"
            )
        super().__init__(
            Order.of_rows(counts[0], seed=seed, streams=streams, shuffle=shuffle),
            batch_size,
            global_batch_size=global_batch_size,
            last=last,
            placement=placement,
        )
        if placement is None:
            self._agreement = Agreement(type(self).__name__, self._described)

    def _described(self) -> dict[str, dict[str, str]]:
        """The arrays, and what all loaders have."""
        names = range(len(self._arrays)) if self._names is None else self._names
        forms = [f"{getattr(a, 'dtype', '')}{list(a.shape[1:])}" for a in self._arrays]
        return {"array": dict(zip(map(str, names), forms, strict=True)), **super()._described()}

    @staticmethod
    def _values(arrays: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        return list(arrays.values() if isinstance(arrays, Mapping) else arrays)

    def _load(self, step: Step, place: Place) -> Batch:
        return self._batch(*self._rows_of(step, place))

    def _template(self) -> Batch:
        return self._batch(np.empty(0, np.int64), 1.0)

    def _batch(self, indices: Indices, weight: float) -> Batch:
        taken = [array[indices] for array in self._arrays]
        named = tuple(taken) if self._names is None else dict(zip(self._names, taken, strict=True))
        return Batch(named, indices, weight)


def _is_arrow(data: Any) -> bool:
    return hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__")


def _array(name: Any, values: Any) -> Any:
    """Values as an array whose indices are the positions of rows, as those of pandas are not."""
    if is_pandas(values):
        array = values.to_numpy()
        is_numpy = isinstance(getattr(values, "dtype", array.dtype), np.dtype) and not array.dtype.hasobject
        if nulls := 0 if is_numpy else int(np.count_nonzero(values.isna())):
            raise _nulls(name, f"{nulls} null{'s' * (nulls > 1)}")
        return array
    if _is_arrow(values) and not hasattr(values, "columns"):  # a Series, and not a DataFrame
        return _of_arrow({str(name): values})[str(name)]
    if hasattr(values, "shape"):
        return values
    return array_of(f"column {name!r} of arrays", values)


def _of_pandas(frame: Any) -> dict[str, Any]:
    arrays = {}
    for name, (_, column) in zip(frame.columns, frame.items(), strict=True):
        if name in arrays:
            raise ValueError(f"arrays is a DataFrame with two columns {name!r}; rename one of them")
        arrays[name] = _array(name, column)
    return arrays


def _of_arrow(data: Any) -> dict[str, Any]:
    require_pyarrow("ArrayLoader of a table")
    import pyarrow as pa

    if isinstance(data, dict):  # pa.table() iterates over the values of a Series, which loses their types
        data = {
            name: pa.chunked_array(values) if hasattr(values, "__arrow_c_stream__") else values
            for name, values in data.items()
        }
    table = pa.table(data)
    arrays = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        if field.name in arrays:
            raise ValueError(f"arrays is a table with two columns {field.name!r}; rename one of them")
        try:
            arrays[field.name] = Column(field).decode(column)
        except NullsError as error:
            raise _nulls(field.name, error) from error
        except ValueError as error:
            raise ValueError(
                f"arrays is a table whose column {field.name!r} has the type {field.type}, which cannot be "
                "made an array; leave it out, as by table.drop_columns()"
            ) from error
    return arrays


def _nulls(name: Any, found: object) -> ValueError:
    return ValueError(f"column {name!r} of arrays has {found}; replace them or leave their rows out")
