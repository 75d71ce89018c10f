"""Saving and loading of estimators and models, in any file system that Spark can write to.

A saved folder has the metadata that Spark ML expects of each stage of a pipeline, and the values of the
parameters, pickled, in a folder ``values``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import cloudpickle
import pyspark
from pyspark.ml.param import Params
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

from polyhvd.spark.estimators.params import Parameter

__all__ = ["Persistent"]

_PART_BYTES = 4 << 20  # of a row
_VALUES = "values"


class Persistent(Params, MLWritable, MLReadable):  # type: ignore[misc]
    """Parameters of :mod:`polyhvd.spark.estimators.params`, with ``save`` and ``load``."""

    #: The class's parameters by name.
    _table: ClassVar[Mapping[str, Parameter]] = {}
    #: Parameters that are set again after loading.
    _not_saved: ClassVar[tuple[str, ...]] = ()

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._setDefault(**{name: parameter.default for name, parameter in self._table.items()})
        self.setParams(**values)

    def setParams(self, **values: Any) -> Any:
        """Set several parameters.

        Raises:
            TypeError: there is no such parameter, or a value has a wrong type.
        """
        if unknown := [name for name in values if name not in self._table]:
            raise TypeError(
                f"{type(self).__name__} has no parameter {unknown[0]!r}; expected some of "
                f"{', '.join(self._table)}"
            )
        return self._set(**{name: value for name, value in values.items() if value is not None})

    def write(self) -> MLWriter:
        """The writer, as of other classes of Spark ML: ``write().overwrite().save(path)``."""
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader:
        """The reader. Loading runs code that the files contain: load what you trust."""
        return _Reader(cls)

    def _packed(self, values: dict[str, Any]) -> dict[str, Any]:
        """Values of parameters in a form that can be pickled."""
        return values

    def _unpacked(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values again, of what :meth:`_packed` returned."""
        return values


class _Writer(MLWriter):  # type: ignore[misc]
    def __init__(self, instance: Persistent) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        instance = self._instance
        given = {
            param.name: value
            for param, value in instance._paramMap.items()
            if param.name not in instance._not_saved
        }
        data = cloudpickle.dumps(instance._packed(given))
        DefaultParamsWriter.saveMetadata(instance, path, _session_of(self), paramMap={})
        parts = [
            (number, data[begin : begin + _PART_BYTES])
            for number, begin in enumerate(range(0, len(data), _PART_BYTES))
        ]
        frame = self.sparkSession.createDataFrame(parts, "number int, data binary")
        frame.coalesce(1).write.parquet(f"{path}/{_VALUES}")


class _Reader(MLReader):  # type: ignore[misc]
    def __init__(self, cls: type[Persistent]) -> None:
        super().__init__()
        self._class = cls

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, _session_of(self))
        rows = self.sparkSession.read.parquet(f"{path}/{_VALUES}").orderBy("number").collect()
        instance = self._class()
        instance._resetUid(metadata["uid"])
        instance._set(**instance._unpacked(cloudpickle.loads(b"".join(bytes(row.data) for row in rows))))
        return instance


def _session_of(files: MLReader | MLWriter) -> Any:
    """Return the session; before Spark 4, whose metadata need it, its context, which Spark Connect lacks."""
    return files.sparkSession if int(pyspark.__version__.partition(".")[0]) >= 4 else files.sc
