"""Writes the rows of a DataFrame as files of Parquet into a store: tasks of Spark, each its partition.

The files have fixed-size rows and small row groups, which polyhvd's loaders read fast.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from polyhvd.errors import DataError
from polyhvd.spark.estimators.columns import (
    Numbers,
    RefusedError,
    arrays_of,
    fingerprints,
    mixed,
    quoted,
    selected,
)

__all__ = ["Rows", "Written", "write"]

_ASIDE_BYTES_MAX = 16 << 20  # of validation rows, while training rows are written
_BITS = 64
_MARK = "polyhvd__validation"


class Rows(NamedTuple):
    """Files of a data set.

    Args:
        source: their paths, or that of their folder.
        filesystem: in which they are, of fsspec; None: the local one.
        lists: columns that are stored as lists, as those of files that Spark has written.
    """

    source: list[str] | str
    filesystem: Any
    lists: tuple[str, ...] = ()


class Written(NamedTuple):
    """The files that were written, and their rows.

    Args:
        train: files with rows for training.
        validation: files with rows for validation; None: there are none.
        train_rows: how many rows for training.
        checksum: of all rows and of the choice of those for validation, whatever their order.
    """

    train: Rows
    validation: Rows | None
    train_rows: int
    checksum: int


@dataclass(frozen=True)
class _Plan:
    columns: tuple[str, ...]
    fraction: float
    has_mark: bool
    seed: int
    folders: tuple[str, str]
    filesystem: Any


def write(
    frame: Any,
    types: Mapping[str, str],
    store: Any,
    folders: tuple[str, str],
    *,
    validation: float | str | None,
    partitions: int,
    seed: int,
) -> Written:
    """Write the columns of a DataFrame.

    Args:
        frame: the DataFrame.
        types: of the columns to write, by name.
        store: a :class:`polyhvd.spark.FilesystemStore`.
        folders: for the files of training and of validation.
        validation: the part of the rows for validation, or a column that is true, or not 0, for them.
        partitions: of the DataFrame, at most.
        seed: of the choice of rows for validation.

    Raises:
        ValueError: there are nulls, arrays of different lengths, no rows, or none for validation.
        DataError: a file cannot be written.
    """
    from pyspark.sql import functions

    columns = selected(types)
    if isinstance(validation, str):
        mark = functions.col(quoted(validation)).cast("double") != 0
        columns.append(mark.alias(_MARK))
    places = [store.locate(folder) for folder in folders]
    filesystem = places[0].filesystem
    plan = _Plan(
        columns=tuple(types),
        fraction=0.0 if validation is None or isinstance(validation, str) else float(validation),
        has_mark=isinstance(validation, str),
        seed=seed,
        folders=(places[0].path, places[1].path),
        filesystem=filesystem,
    )
    tasks = frame.select(*columns).coalesce(max(1, partitions)).mapInArrow(_task_of(plan), "report string")
    reports = sorted((json.loads(row.report) for row in tasks.collect()), key=lambda report: report["task"])
    for report in reports:
        if "refused" in report:
            raise ValueError(f"fit(): {report['refused']}")
        if "error" in report:
            raise DataError(f"fit(): rows cannot be written to {folders[0]!r}: {report['error']}")
    return _joined(reports, filesystem, validation)


def _joined(reports: Sequence[dict[str, Any]], filesystem: Any, validation: float | str | None) -> Written:
    """Return what all tasks together have written."""
    files: dict[str, list[str]] = {"train": [], "validation": []}
    counts = {"train": 0, "validation": 0}
    shapes: dict[str, Any] = {}
    for report in reports:
        for part in files:
            files[part] += report[part]
            counts[part] += report[f"{part}_rows"]
        for name, shape in report["shapes"].items():
            if shapes.setdefault(name, shape) != shape:
                raise ValueError(
                    f"fit(): column {name!r} has arrays of different lengths ({shapes[name][0]}, "
                    f"{shape[0]}); all rows need the same"
                )
    total = sum(counts.values())
    if not counts["train"]:
        found = "all of its rows are for validation" if total else "it is empty"
        raise ValueError(f"fit(): the DataFrame has no row for training: {found}")
    if validation is not None and not counts["validation"]:
        raise ValueError(f"fit(): validation={validation!r} selects none of the {total} rows")
    return Written(
        train=Rows(files["train"], filesystem),
        validation=Rows(files["validation"], filesystem) if files["validation"] else None,
        train_rows=counts["train"],
        checksum=sum(report["checksum"] for report in reports) % (1 << _BITS),
    )


def _task_of(plan: _Plan) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """The function that Spark calls in each task, for ``DataFrame.mapInArrow``."""

    def task(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow
        from pyspark import TaskContext

        context = TaskContext.get()
        writing = _Writing(plan, context.partitionId(), context.taskAttemptId())
        rest = iter(batches)
        try:
            writing.write(rest)
        except RefusedError as error:
            writing.report["refused"] = str(error)
        except OSError as error:
            writing.report["error"] = f"{type(error).__name__}: {error}"
        for _ in rest:  # which Spark would otherwise wait to hand over
            pass
        yield pyarrow.RecordBatch.from_pydict({"report": [json.dumps(writing.report)]})

    return task


class _Writing:
    """One task: a file with its rows for training, and as many as are needed with those for validation.

    Args:
        plan: of the driver.
        number: of the partition.
        attempt: of the task, which keeps names of several attempts apart.
    """

    def __init__(self, plan: _Plan, number: int, attempt: int) -> None:
        self._plan, self._number, self._attempt = plan, number, attempt
        self._aside: list[dict[str, Any]] = []
        self._aside_bytes = 0
        self.report: dict[str, Any] = {
            "task": number,
            "train": [],
            "validation": [],
            "train_rows": 0,
            "validation_rows": 0,
            "checksum": 0,
            "shapes": {},
        }

    def write(self, batches: Iterator[Any]) -> None:
        """Write all rows.

        Raises:
            RefusedError: they cannot be used.
            OSError: a file cannot be written.
        """
        parts = self._parts(batches)
        for first in parts:
            self._write("train", itertools.chain([first], parts))
        self._flush()

    def _parts(self, batches: Iterator[Any]) -> Iterator[dict[str, Any]]:
        """The rows for training, by batch; others are put aside."""
        for batch in batches:
            if not batch.num_rows:
                continue
            arrays = arrays_of(batch, self._plan.columns)
            for name, rows in arrays.items():
                shape = list(getattr(rows, "shape", (0,))[1:])
                if self.report["shapes"].setdefault(name, shape) != shape:
                    known = self.report["shapes"][name]
                    raise RefusedError(
                        f"column {name!r} has arrays of different lengths ({known[0]}, {shape[0]}); all rows "
                        "need the same"
                    )
            if self._plan.has_mark:
                mark = batch.column(batch.schema.get_field_index(_MARK))
                if mark.null_count:
                    raise RefusedError(
                        "the column that validation names has nulls; fill them or drop their rows"
                    )
                is_aside = mark.to_numpy(zero_copy_only=False).astype(bool)
                numbers = fingerprints({**arrays, _MARK: is_aside})
            else:
                numbers = fingerprints(arrays)
                is_aside = self._drawn(numbers)
            self.report["checksum"] += int(numbers.sum(dtype=np.uint64))
            if is_aside.any():
                self._put_aside(_taken(arrays, is_aside))
            if not is_aside.all():
                yield _taken(arrays, np.logical_not(is_aside))

    def _drawn(self, numbers: Numbers) -> Any:
        """Choose rows for validation by their values: a fit that resumes gets them in another order.

        Args:
            numbers: of the rows of a batch, as of :func:`fingerprints`.
        """
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        begins = np.flatnonzero(np.diff(ordered, prepend=~ordered[:1]))
        copies = np.empty(len(numbers), np.uint64)  # how many rows before it are the same
        copies[order] = np.arange(len(numbers)) - np.repeat(begins, np.diff(begins, append=len(numbers)))
        draws = mixed(numbers + mixed(copies + np.uint64(self._plan.seed % (1 << _BITS))))
        return draws < np.uint64(int(self._plan.fraction * (1 << _BITS)))

    def _put_aside(self, arrays: dict[str, Any]) -> None:
        self._aside.append(arrays)
        self._aside_bytes += sum(rows.nbytes for rows in arrays.values())
        if self._aside_bytes > _ASIDE_BYTES_MAX:
            self._flush()

    def _flush(self) -> None:
        if self._aside:
            self._write("validation", self._aside)
        self._aside, self._aside_bytes = [], 0

    def _write(self, part: str, rows: Iterable[dict[str, Any]]) -> None:
        from polyhvd.data import write_parquet

        files = self.report[part]
        folder = self._plan.folders[0 if part == "train" else 1]
        path = f"{folder}/part-{self._number:05d}-{len(files)}-{self._attempt}.parquet"
        self.report[f"{part}_rows"] += write_parquet(rows, path, filesystem=self._plan.filesystem)
        files.append(path)


def _taken(arrays: Mapping[str, Any], chosen: Any) -> dict[str, Any]:
    """The chosen rows of each column."""
    import pyarrow

    mask = pyarrow.array(chosen)
    return {
        name: rows[chosen] if isinstance(rows, np.ndarray) else rows.filter(mask)
        for name, rows in arrays.items()
    }
