"""The part of a fit that runs on each rank: loaders, epochs, averages over ranks, checkpoints."""

from __future__ import annotations

import abc
import json
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import polyhvd
from polyhvd.data import ParquetLoader
from polyhvd.data.loader import Batch
from polyhvd.spark.estimators.checkpoint import Checkpoint
from polyhvd.spark.estimators.preparing import Rows
from polyhvd.training.naming import gather_by_name

__all__ = [
    "Job",
    "Run",
    "Shaping",
    "Trainer",
    "groups_of",
    "require_columns_of",
    "stacked",
    "transformed",
    "work",
]

_VALIDATION_STREAMS = 64  # so that each row group is read once; the order does not matter


@dataclass(frozen=True)
class Job:
    """The driver's message to all ranks.

    Args:
        imported: a module that ranks import before those of polyhvd's adapter; None: there is none.
        trainer: class of the framework's part.
        payload: model, optimizer, losses and what else the framework needs, pickled.
        train: files with rows for training.
        validation: files with rows for validation; None: there are none.
        columns: to read.
        params: values of the estimator's parameters, without those in ``payload``.
        run: what identifies the fit.
        run_id: name of the run.
        store: for checkpoints.
        resumes: whether there is a checkpoint of this run.
        is_elastic: whether ranks may be lost and join.
        payload_path: of the file in the store that has the payload, if it is too large for a message.
    """

    imported: Any  # the first attribute, since attributes are unpickled in their order
    trainer: type[Trainer]
    payload: bytes
    train: Rows
    validation: Rows | None
    columns: tuple[str, ...]
    params: dict[str, Any]
    run: dict[str, Any]
    run_id: str
    store: Any
    resumes: bool
    is_elastic: bool = False
    payload_path: str = ""


class Trainer(abc.ABC):
    """A framework's part of a fit."""

    @abc.abstractmethod
    def train(self, run: Run) -> None:
        """Train from ``run.checkpoint`` on, and call :meth:`Run.finish_epoch` after each epoch.

        Args:
            run: of this rank.
        """

    @staticmethod
    def preparing(job: Job) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
        """A function that batches go through after the user's ``transformation_fn``; None: there is none.

        Args:
            job: of the driver.
        """
        return None


def require_columns_of(arrays: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ValueError if a batch lacks columns, since a ``transformation_fn`` has not returned them."""
    if missing := [name for name in names if name not in arrays]:
        raise ValueError(
            f"fit(): transformation_fn returned the columns {', '.join(arrays)}; the column {missing[0]!r} "
            "is missing"
        )


def groups_of(rows: Rows, columns: Sequence[str]) -> int:
    """Return the checksum of file names and row groups that the loaders of the ranks have."""
    pad = dict.fromkeys(rows.lists)
    loader = ParquetLoader(rows.source, columns=columns, batch_size=1, pad=pad, filesystem=rows.filesystem)
    return loader.state_dict()["groups"]


def work(job: Job) -> Checkpoint | None:
    """Be a rank; return the last checkpoint on rank 0, without the state if the store has it.

    The limits of results, such as ``spark.driver.maxResultSize``, would end a fit of a large model at its
    end.

    Args:
        job: of the driver.
    """
    polyhvd.init()
    try:
        if job.payload_path:
            job = replace(job, payload=job.store.read(job.payload_path))
        run = Run(job)
        job.trainer().train(run)
        run.end()
        return run.checkpoint if polyhvd.rank() == 0 else None
    finally:
        polyhvd.shutdown()


class Run:
    """A fit on this rank.

    Args:
        job: of the driver.

    Raises:
        ValueError: there are fewer rows than ranks, or the checkpoint is one of other files.
        DataError: the files or the checkpoint cannot be read.
    """

    #: Whether the store has :attr:`checkpoint` as it is.
    is_stored = False

    def __init__(self, job: Job) -> None:
        self.job, self.params = job, job.params
        batch_size = self.params["batch_size"]
        self._prepare = job.trainer.preparing(job)
        #: The loader of the rows for training.
        self.train = self._loader(job.train, batch_size, "train_reader_num_workers", is_shuffled=True)
        #: The loader of those for validation; None: there are none.
        self.validation: ParquetLoader | None = None
        if job.validation is not None:
            rows = self.params["val_batch_size"] or batch_size
            self.validation = self._loader(job.validation, rows, "val_reader_num_workers", is_shuffled=False)
        rows = self.train.state_dict()["rows"]
        if rows < polyhvd.size():
            raise ValueError(
                f"fit(): the training data has {rows} row{'s' * (rows != 1)}, fewer than the "
                f"{polyhvd.size()} ranks; use more rows, or a smaller num_proc"
            )
        self.checkpoint = polyhvd.broadcast_object(self._found(), root_rank=0)

    def _found(self) -> Checkpoint | None:
        """The checkpoint, on rank 0."""
        if polyhvd.rank() != 0:
            return None
        job, path = self.job, self.job.store.get_checkpoint_path(self.job.run_id)
        run = dict(job.run)
        if run["checksum"] is None:  # files that fit() has not written
            loaders = filter(None, (self.train, self.validation))
            run["files"] = [loader.state_dict()["groups"] for loader in loaders]
        # All ranks of an elastic job may have been lost after they had written one.
        if job.resumes or (job.is_elastic and path is not None and job.store.exists(path)):
            found = Checkpoint.load(job.store.read(path), path)
            found.require(run, job.run_id)
            found.ended_epochs = 0
            return found
        return Checkpoint(run)

    @property
    def has_validation(self) -> bool:
        """Whether there are rows for validation."""
        return self.validation is not None

    @property
    def epochs(self) -> range:
        """The numbers of the epochs that are left."""
        return range(self.checkpoint.epochs, self.params["epochs"])

    @property
    def is_printing(self) -> bool:
        """Whether this rank prints metrics."""
        return polyhvd.rank() == 0 and bool(self.params["verbose"])

    def _loader(self, rows: Rows, batch_size: int, workers: str, *, is_shuffled: bool) -> ParquetLoader:
        params = self.params
        shaping = Shaping(rows.lists, params["transformation_fn"], self._prepare)
        return ParquetLoader(
            rows.source,
            columns=self.job.columns,
            batch_size=batch_size,
            shuffle=is_shuffled and params["shuffle"] and params["shuffle_buffer_size"] != 0,
            seed=params["random_seed"] or 0,
            streams=None if is_shuffled else _VALIDATION_STREAMS,
            pad=dict.fromkeys(rows.lists),
            transform=shaping if shaping.has_effect else None,
            workers=params[workers] if params["reader_pool_type"] == "process" else 0,
            cache="memory" if params["inmemory_cache_all"] else None,
            filesystem=rows.filesystem,
        )

    def train_batches(self, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch of training; all ranks have equally many.

        With ``train_steps_per_epoch``, an epoch has that many, of as many passes over the rows as it takes.
        """
        steps = self.params["train_steps_per_epoch"]
        passes = 1 if steps is None else -(-steps // self.train.steps_per_epoch)
        done = 0
        for number in range(epoch * passes, (epoch + 1) * passes):
            self.train.set_epoch(number)
            for batch in self.train:
                if done == steps:
                    return
                yield batch
                done += 1

    def validation_batches(self) -> Iterator[Batch]:
        """The batches of a validation; all ranks have equally many."""
        assert self.validation is not None
        steps = self.params["validation_steps_per_epoch"]
        self.validation.load_state_dict({**self.validation.state_dict(), "epoch": 0, "cursor": 0})
        for number, batch in enumerate(self.validation):
            if number == steps:
                return
            yield batch

    def averaged(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Averages over the rows of all ranks.

        Args:
            sums: by name, the sum of the values of this rank's rows, and their number.
        """
        rows = gather_by_name("fit()", {name: list(pair) for name, pair in sums.items()})
        totals = {name: values.sum(axis=0) for name, values in rows.items()}
        return {name: float(value / count) if count else 0.0 for name, (value, count) in totals.items()}

    def finish_epoch(
        self, epoch: int, history: Any, shapes: Sequence[Sequence[int]], state: Callable[[], bytes]
    ) -> None:
        """Note an epoch; rank 0 writes a checkpoint, and the history beside the run's logs.

        Args:
            epoch: its number, from 0.
            history: the metrics of all epochs, which JSON can hold.
            shapes: of the model's outputs, without the axis of the rows.
            state: returns the state of model and optimizer; it is called on rank 0.

        Raises:
            DataError: the store cannot be written.
        """
        self.checkpoint.epochs = epoch + 1
        self.conclude(history, shapes, state)
        if polyhvd.rank() == 0:
            self._write()

    def conclude(self, history: Any, shapes: Sequence[Sequence[int]], state: Callable[[], bytes]) -> None:
        """Keep what rank 0 returns to the driver, without writing it; as :meth:`finish_epoch`."""
        checkpoint, self.is_stored = self.checkpoint, False
        checkpoint.history = history
        checkpoint.shapes = [list(shape) for shape in shapes]
        if polyhvd.rank() == 0:
            checkpoint.state = state()

    def replace_state(self, state: Callable[[], bytes]) -> None:
        """Replace the state of the last epoch, on rank 0; as :meth:`finish_epoch`."""
        if polyhvd.rank() == 0:
            self.checkpoint.state = state()
            self._write()

    def end(self) -> None:
        """Note that training has ended, if it was before the last epoch; rank 0 writes what is not stored."""
        checkpoint, epochs = self.checkpoint, self.params["epochs"]
        if polyhvd.rank() != 0:
            return
        if checkpoint.epochs < epochs:
            checkpoint.ended_epochs, self.is_stored = epochs, False
        if not self.is_stored:
            self._write()
        if self.is_stored:
            checkpoint.state = b""

    def keep_files(self, folder: Path) -> None:
        """Copy what loggers and callbacks have written to the run's logs in the store, on rank 0.

        Args:
            folder: with the files.

        Raises:
            DataError: the store cannot be written.
        """
        store, run_id = self.job.store, self.job.run_id
        if polyhvd.rank() != 0 or not store.saving_runs():
            return
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = posixpath.join(store.get_logs_path(run_id), path.relative_to(folder).as_posix())
            store.write(name, path.read_bytes())

    def _write(self) -> None:
        store, run_id, checkpoint = self.job.store, self.job.run_id, self.checkpoint
        if store.saving_runs():
            store.write(store.get_checkpoint_path(run_id), checkpoint.dump())  # which has the history, too
            logs = posixpath.join(store.get_logs_path(run_id), "history.json")
            store.write_text(logs, json.dumps(checkpoint.history, indent=1))
            self.is_stored = True


class Shaping:
    """Makes arrays of the lists of a batch, and applies the user's ``transformation_fn``.

    Args:
        lists: columns whose rows are lists.
        function: of the user; None: there is none.
        prepare: of the framework, likewise.
    """

    def __init__(
        self,
        lists: Sequence[str],
        function: Callable[[dict[str, Any]], Any] | None,
        prepare: Callable[[dict[str, Any]], dict[str, Any]] | None,
    ) -> None:
        self._lists, self._function, self._prepare = lists, function, prepare

    @property
    def has_effect(self) -> bool:
        """Whether it changes batches."""
        return bool(self._lists or self._function or self._prepare)

    def __call__(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The batch.

        Raises:
            ValueError: rows have different lengths, or the function returns no mapping.
        """
        for name in self._lists:
            arrays[name] = stacked(name, arrays[name])
        if self._function is not None:
            arrays = transformed(self._function, arrays)
        return arrays if self._prepare is None else self._prepare(arrays)


def stacked(name: str, rows: Sequence[Any]) -> Any:
    """Rows that are arrays in one array.

    Raises:
        ValueError: they have different lengths.
    """
    try:
        return np.stack([np.asarray(row) for row in rows])
    except ValueError as error:
        raise ValueError(
            f"column {name!r} has arrays of different lengths; all rows need the same: {error}"
        ) from None


def transformed(function: Callable[[dict[str, Any]], Any], arrays: dict[str, Any]) -> dict[str, Any]:
    """Apply a ``transformation_fn`` to a batch.

    Raises:
        ValueError: it returns no mapping.
    """
    result = function(dict(arrays))
    if not isinstance(result, Mapping):
        raise ValueError(
            f"transformation_fn returned a {type(result).__qualname__}; expected a dict of arrays by column"
        )
    return dict(result)
