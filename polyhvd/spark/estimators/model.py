"""The model that those of all frameworks derive from: it adds predictions to a DataFrame."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import numpy as np
from pyspark.ml import Model

from polyhvd.spark.estimators.columns import require_columns, selected, simple_types
from polyhvd.spark.estimators.saving import Persistent
from polyhvd.spark.estimators.training import stacked, transformed

__all__ = ["FrameworkModel", "Predict"]

#: Makes a list of arrays, one for each output, of a list with an array for each feature column.
Predict = Callable[[list[Any]], list[Any]]
#: Types of whole numbers, with their bits.
_WHOLE = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_OUTPUTS = "polyhvd__outputs"


class FrameworkModel(Model, Persistent):  # type: ignore[misc]
    """A trained model; users see it through the classes derived from it."""

    _framework = ""

    def getOutputCols(self) -> list[str]:
        """The names of the columns of predictions."""
        given = self.getOrDefault("outputCols")
        return list(given or (f"{name}__output" for name in self.getOrDefault("label_columns")))

    @abc.abstractmethod
    def _predictor(self) -> Callable[[], Predict]:
        """A function that tasks of Spark call once, pickled: it makes the one that predicts."""

    def _transform(self, dataset: Any) -> Any:
        features, outputs = list(self.getOrDefault("feature_columns") or ()), self.getOutputCols()
        function = self.getOrDefault("transformation_fn")
        types = require_columns(
            simple_types(dataset.schema), {"feature_columns": features}, is_transformed=function is not None
        )
        if taken := [name for name in outputs if name in dataset.columns]:
            raise ValueError(
                f"transform(): the DataFrame has a column {taken[0]!r} already; call setOutputCols()"
            )
        labels = list(self.getOrDefault("label_columns"))
        if len(set(outputs)) != len(labels):
            raise ValueError(
                f"transform(): outputCols are {', '.join(outputs)}; expected a name for each of the label "
                f"columns {', '.join(labels)}"
            )
        kinds = self._kinds(dataset, types)
        return _with_predictions(dataset, types, kinds, dict(zip(outputs, kinds, strict=True)), self._task())

    def _task(self) -> _Task:
        return _Task(
            self._predictor(),
            tuple(self.getOrDefault("feature_columns")),
            self.getOrDefault("transformation_fn"),
            self.getOrDefault("batch_size"),
        )

    def _kinds(self, dataset: Any, types: dict[str, str]) -> list[str]:
        """The type of each column of predictions: "vector", or a scalar's, which is that of the label."""
        metadata = self.getOrDefault("_metadata") or {}
        shapes, labels = metadata.get("shapes"), metadata.get("labels", {})
        if shapes is None:  # the model was not made by fit()
            row = dataset.select(*selected(types, "transform()")).first()
            if row is None:
                raise ValueError(
                    "transform(): the DataFrame is empty, and the shapes of outputs are not known"
                )
            arrays = {name: np.asarray([row[name]]) for name in types}
            shapes = [output.shape[1:] for output in self._task().predictions(arrays)]
        names = self.getOrDefault("label_columns")
        if len(shapes) < len(names):
            raise ValueError(
                f"transform(): the model has {len(shapes)} outputs for the {len(names)} label columns "
                f"{', '.join(names)}"
            )
        found = []
        for name, shape in zip(names, shapes, strict=False):
            label = labels.get(name, "double")
            is_scalar = None not in shape and int(np.prod(shape)) == 1  # None: it differs from batch to batch
            is_scalar &= label in (*_WHOLE, "float", "double", "boolean")
            found.append(label if is_scalar else "vector")
        return found


class _Task:
    """The work of a task of Spark on its batches.

    Args:
        make: makes the function that predicts.
        features: the feature columns.
        function: the user's ``transformation_fn``; None: there is none.
        batch_size: rows of a batch, at most.
    """

    def __init__(
        self,
        make: Callable[[], Predict],
        features: tuple[str, ...],
        function: Callable[[dict[str, Any]], Any] | None,
        batch_size: int,
    ) -> None:
        self._make, self._features = make, features
        self._function, self._batch_size = function, batch_size
        self._predict: Predict | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by cloudpickle, as ``fit`` does: Spark's copy lacks the modules registered with it."""
        return _task, (cloudpickle.dumps((self._make, self._features, self._function, self._batch_size)),)

    def predictions(self, arrays: dict[str, Any]) -> list[Any]:
        """The outputs for rows, in batches."""
        if self._predict is None:
            self._predict = self._make()
        rows = len(next(iter(arrays.values())))
        parts = []
        for begin in range(0, rows, self._batch_size):
            part = {name: values[begin : begin + self._batch_size] for name, values in arrays.items()}
            if self._function is not None:
                part = transformed(self._function, part)
            parts.append(self._predict([_found(part, name) for name in self._features]))
        return [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]


def _task(data: bytes) -> _Task:
    return _Task(*cloudpickle.loads(data))


def _found(arrays: dict[str, Any], name: str) -> Any:
    if name not in arrays:
        raise ValueError(
            f"transformation_fn returned the columns {', '.join(arrays)}; feature column {name!r} is missing"
        )
    return np.asarray(arrays[name])


def _with_predictions(
    dataset: Any, types: dict[str, str], kinds: Sequence[str], outputs: dict[str, str], task: _Task
) -> Any:
    """The DataFrame with a column for each output.

    Args:
        dataset: the DataFrame.
        types: of the feature columns.
        kinds: of the outputs.
        outputs: the same, by the names of the columns.
        task: what tasks of Spark do.
    """
    import pandas as pd
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions

    names = list(types)
    fields = [f"f{number}" for number in range(len(kinds))]

    def predict(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:
        for batch in batches:
            columns = [batch] if isinstance(batch, pd.Series) else list(batch)
            arrays = {name: _array(name, column) for name, column in zip(names, columns, strict=True)}
            found = task.predictions(arrays) if len(columns[0]) else [np.empty(0)] * len(kinds)
            yield pd.DataFrame(
                {
                    field: _series(name, output, kind)
                    for field, output, (name, kind) in zip(fields, found, outputs.items(), strict=False)
                }
            )

    series = tuple[(pd.Series, ...)] if len(names) > 1 else pd.Series
    predict.__annotations__ = {"batches": Iterator[series], "return": Iterator[pd.DataFrame]}  # type: ignore[valid-type]
    struct = ", ".join(
        f"{field} {'array<double>' if kind == 'vector' else kind}"
        for field, kind in zip(fields, kinds, strict=True)
    )
    made = functions.pandas_udf(predict, returnType=struct)(*selected(types, "transform()"))
    added = []
    for field, (name, kind) in zip(fields, outputs.items(), strict=True):
        column = functions.col(_OUTPUTS).getField(field)
        added.append((array_to_vector(column) if kind == "vector" else column).alias(name))
    return dataset.select("*", made.alias(_OUTPUTS)).select("*", *added).drop(_OUTPUTS)


def _array(name: str, column: Any) -> Any:
    """The rows of a series of pandas."""
    values = column.to_numpy()
    if values.dtype.kind == "O" and len(values) and isinstance(values[0], (np.ndarray, list)):
        return stacked(name, values)
    return values


def _series(name: str, output: Any, kind: str) -> Any:
    """The predictions of a batch as a series of pandas.

    Raises:
        ValueError: the column cannot hold one of them; Spark would write another value.
    """
    import pandas as pd

    rows = np.asarray(output)
    flat = rows.reshape(len(rows), int(np.prod(rows.shape[1:]))).astype(np.float64)
    if kind == "vector":
        return pd.Series(list(flat), dtype=object)
    values = flat[:, 0]
    if kind in ("float", "double"):
        return pd.Series(values)
    whole, limit = np.rint(values), 2.0 ** (_WHOLE[kind] - 1) if kind in _WHOLE else np.inf
    is_good = (-limit <= whole) & (whole < limit)  # which NaN is not
    if not is_good.all():
        raise ValueError(
            f"transform(): the model's output for a row is {values[~is_good][0]:g}, which column {name!r} of "
            f"type {kind}, that of its label, cannot hold; cast the label to double before fit()"
        )
    return pd.Series(values >= 0.5 if kind == "boolean" else whole.astype(np.int64))
