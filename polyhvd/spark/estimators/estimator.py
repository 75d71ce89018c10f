"""The estimator that those of all frameworks derive from: it prepares data, and starts or resumes a fit."""

from __future__ import annotations

import abc
import contextlib
import json
import logging
import posixpath
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyspark.ml import Estimator

from polyhvd.errors import DataError
from polyhvd.spark.backend import Backend, SparkBackend
from polyhvd.spark.estimators.checkpoint import Checkpoint
from polyhvd.spark.estimators.columns import require_columns, simple_types, spark_type
from polyhvd.spark.estimators.model import FrameworkModel
from polyhvd.spark.estimators.params import ESTIMATORS, without_effect
from polyhvd.spark.estimators.preparing import Rows, write
from polyhvd.spark.estimators.saving import Persistent
from polyhvd.spark.estimators.training import Job, Trainer, groups_of, work
from polyhvd.spark.store import FilesystemStore

__all__ = ["FrameworkEstimator", "per_column", "shapes_of"]

_LOG = logging.getLogger("polyhvd")
#: Parameters that make a fit another one, so that it cannot resume.
_IDENTIFYING = (
    *("batch_size", "train_steps_per_epoch", "random_seed", "shuffle", "feature_cols", "label_cols"),
    *("categorical_cols", "sample_weight_col", "loss_weights", "validation", "backward_passes_per_step"),
)
#: Parameters that ranks need as they are.
_OF_RANKS = (
    *_IDENTIFYING,
    *("val_batch_size", "validation_steps_per_epoch", "epochs", "shuffle_buffer_size", "verbose"),
    *("transformation_fn", "train_reader_num_workers", "val_reader_num_workers", "reader_pool_type"),
    *("label_shapes", "inmemory_cache_all", "use_gpu"),
)
_NOT_SAVED = ("backend", "store")
#: A larger payload goes through the store: a message has 256 MiB at most, or 128 MiB under Spark Connect.
_SENT_BYTES_MAX = 100 << 20
#: Not in names of runs, of which folders are made: some file systems take them as patterns.
_NOT_IN_NAMES = frozenset("/\\*?[]")
#: Paths that fits of this process use, of which threads may run several.
_CLAIMED: set[str] = set()
_LOCK = threading.Lock()


class FrameworkEstimator(Estimator, Persistent):  # type: ignore[misc]
    """Fits a framework's model to a DataFrame; users see it through the classes derived from it."""

    _framework = ""
    _model_class: type[FrameworkModel]
    _not_saved = _NOT_SAVED

    def fit_on_parquet(self, params: Mapping[Any, Any] | None = None, dataset_idx: int | None = None) -> Any:
        """Train on files of Parquet that are in the store, without Spark.

        The files are those of ``store.get_train_data_path()``, and of ``store.get_val_data_path()`` if there
        are any. Vectors of Spark ML have to be stored as arrays: ``pyspark.ml.functions.vector_to_array``.

        Args:
            params: values of parameters, for this call.
            dataset_idx: the argument of both methods of the store.

        Returns:
            The model.

        Raises:
            ValueError: a parameter or column cannot be used.
            DataError: the store cannot be read or written.
        """
        if params:
            return self.copy(params).fit_on_parquet(dataset_idx=dataset_idx)
        store = self._checked_store()
        self._require_params()
        payload, _ = self._payload(), self._backend()
        rows, types = self._stored(store, store.get_train_data_path(dataset_idx))
        validation = None
        path = store.get_val_data_path(dataset_idx)
        if store.exists(path) and store.get_parquet_dataset(path).files:
            validation = self._stored(store, path)[0]
        run_id = self._run_id()
        with _claimed(run_id, store.get_run_path(run_id)):
            return self._train(payload, rows, validation, types, None, run_id)

    def _fit(self, dataset: Any) -> Any:
        store = self._checked_store()
        self._require_params()
        payload, backend = self._payload(), self._backend()
        validation, run_id = self.getOrDefault("validation") or None, self._run_id()
        known = simple_types(dataset.schema)
        types = self._types(known)
        if isinstance(validation, str):
            require_columns(known, {"validation": [validation]}, is_transformed=False)
        if self._has_epochs_left(self._found(run_id)):
            backend.require_usable(is_elastic=self._is_elastic(), **self._limits())
        folders = _folders(store, run_id)
        claimed = _claimed(run_id, store.get_run_path(run_id), *folders)
        with claimed, contextlib.ExitStack() as undone:
            for folder in folders:
                undone.callback(_remove, store, folder)
                store.remove(folder)  # of a fit that was killed
            written = write(
                dataset,
                types,
                store,
                folders,
                validation=validation,
                partitions=max(1, backend.num_processes()) * self.getOrDefault("partitions_per_process"),
                seed=self.getOrDefault("random_seed") or 0,
            )
            ranks = max(backend.num_processes(), self.getOrDefault("max_num_proc") or 0)
            if written.train_rows < ranks:
                raise ValueError(
                    f"fit(): the training data has {written.train_rows} "
                    f"row{'s' * (written.train_rows != 1)}, fewer than the {ranks} ranks; use more rows, or "
                    "a smaller num_proc"
                )
            if not store.exists(written.train.source[0]):
                raise DataError(
                    f"fit(): tasks of Spark have written rows to {folders[0]!r}, and this process finds none "
                    "there; use a store that executors and driver share"
                )
            return self._train(payload, written.train, written.validation, types, written.checksum, run_id)

    def _train(
        self,
        payload: bytes,
        train: Rows,
        validation: Rows | None,
        types: Mapping[str, str],
        checksum: int | None,
        run_id: str,
    ) -> Any:
        """Run the job, unless all of its epochs are done, and make the model."""
        run = {**self._identity(), "checksum": checksum}
        found, epochs = self._found(run_id), self.getOrDefault("epochs")
        if found is not None:
            if checksum is None:  # files that fit() has not written
                parts = filter(None, (train, validation))
                run = {**run, "files": [groups_of(rows, tuple(types)) for rows in parts]}
            found.require(run, run_id)
            if found.epochs < epochs <= found.ended_epochs:
                _LOG.warning(
                    "fit(): a callback has ended run_id %r after %d of %d epochs; to train it further, "
                    "increase epochs",
                    *(run_id, found.epochs, found.ended_epochs),
                )
        if found is None or self._has_epochs_left(found):
            found = self._trained(
                Job(
                    imported=self._imported(),
                    trainer=self._trainer,
                    payload=payload,
                    train=train,
                    validation=validation,
                    columns=tuple(types),
                    params={name: self.getOrDefault(name) for name in _OF_RANKS},
                    run={**self._identity(), "checksum": checksum},
                    run_id=run_id,
                    store=self._checked_store(),
                    resumes=found is not None,
                    is_elastic=self._is_elastic(),
                )
            )
        labels = {name: types[name] for name in self._list("label_cols")}
        return self._model_class(
            history=found.history,
            feature_columns=self._list("feature_cols"),
            label_columns=list(labels),
            run_id=run_id,
            _metadata={"labels": labels, "shapes": found.shapes or None},
            batch_size=self.getOrDefault("val_batch_size") or self.getOrDefault("batch_size"),
            transformation_fn=self.getOrDefault("transformation_fn"),
            categorical_cols=self.getOrDefault("categorical_cols"),
            **self._fitted(payload, found),
        )

    def _trained(self, job: Job) -> Checkpoint:
        """Run the job; return the checkpoint of its end.

        Raises:
            DataError: that is not in the store of this process.
        """
        store, run_id = job.store, job.run_id
        backend, env = self._backend(), dict(self.getOrDefault("backend_env"))
        with contextlib.ExitStack() as undone:
            if len(job.payload) > _SENT_BYTES_MAX:
                path = posixpath.join(store.get_run_path(run_id), "model")
                undone.callback(_remove, store, path)
                store.write(path, job.payload)
                job = replace(job, payload=b"", payload_path=path)
            try:
                if job.is_elastic:
                    results = backend.run_elastic(work, (job,), env=env, **self._limits())
                else:
                    results = backend.run(work, (job,), env=env)
            except BaseException:
                with contextlib.suppress(Exception):  # of the store
                    kept = None if self.getOrDefault("run_id") else store.get_checkpoint_path(run_id)
                    if kept is not None and store.exists(kept):
                        _LOG.warning("fit(): the completed epochs are kept; resume with run_id=%r", run_id)
                raise
        last: Checkpoint = results[0]
        if last.state:
            return last
        found = self._found(run_id)
        if found is None or found.epochs != last.epochs:
            place, others = store.get_checkpoint_path(run_id), "none" if found is None else "another one"
            raise DataError(
                f"fit(): rank 0 has written the checkpoint {place!r}, and this process finds {others} there; "
                "use a store that executors and driver share"
            )
        return found

    @property
    @abc.abstractmethod
    def _trainer(self) -> type[Trainer]:
        """The framework's part on the ranks."""

    def _imported(self) -> Any:
        """A module that ranks import before those of the adapter, which reads from it what they use."""
        return None

    @abc.abstractmethod
    def _payload(self) -> bytes:
        """Model, optimizer, losses and metrics, pickled together.

        Raises:
            ValueError: they cannot be used.
        """

    @abc.abstractmethod
    def _identity_of_framework(self) -> dict[str, Any]:
        """Values that identify model and optimizer in a checkpoint."""

    @abc.abstractmethod
    def _fitted(self, payload: bytes, checkpoint: Checkpoint) -> dict[str, Any]:
        """The trained model, and values of the model's parameters that only this framework has.

        Args:
            payload: of :meth:`_payload`.
            checkpoint: the last one.
        """

    def _identity(self) -> dict[str, Any]:
        values = {name: self.getOrDefault(name) for name in _IDENTIFYING}
        identity = {**values, **self._identity_of_framework()}
        return dict(json.loads(json.dumps(identity)))  # as it comes from a checkpoint

    def _found(self, run_id: str) -> Checkpoint | None:
        """The checkpoint of the run, if there is one.

        Raises:
            ValueError: it is one of a fit with other parameters.
        """
        store = self._checked_store()
        path = store.get_checkpoint_path(run_id)
        if path is None or not store.exists(path):
            return None
        found = Checkpoint.load(store.read(path), path)
        for name, value in self._identity().items():
            if found.run.get(name) != value:
                raise ValueError(
                    f"fit(): the store has a checkpoint of run_id {run_id!r}, with other values of {name}: "
                    f"{found.run.get(name)!r}, not {value!r}; pass another run_id, or the same values"
                )
        return found

    def _run_id(self) -> str:
        given = self.getOrDefault("run_id")
        return given or f"{self._framework}_{int(time.time())}_{uuid.uuid4().hex[:8]}"

    def _list(self, name: str) -> list[str]:
        value = self.getOrDefault(name)
        return [value] if isinstance(value, str) else list(value or ())

    def _types(self, known: Mapping[str, str]) -> dict[str, str]:
        """The types of the columns to read, of those of all columns; raises ValueError."""
        named = {name: self._list(name) for name in ("feature_cols", "label_cols", "sample_weight_col")}
        is_transformed = self.getOrDefault("transformation_fn") is not None
        return require_columns(known, named, is_transformed=is_transformed)

    def _backend(self) -> Backend:
        given, size = self.getOrDefault("backend"), self.getOrDefault("num_proc")
        if given is not None and size is not None:
            raise ValueError("fit(): pass num_proc or backend, not both")
        if given is not None and not isinstance(given, Backend):
            raise ValueError(f"fit(): backend is {given!r}; expected a SparkBackend or LocalBackend")
        return SparkBackend(size, verbose=self.getOrDefault("verbose")) if given is None else given

    def _has_epochs_left(self, found: Checkpoint | None) -> bool:
        return found is None or max(found.epochs, found.ended_epochs) < self.getOrDefault("epochs")

    def _limits(self) -> dict[str, Any]:
        return {name: self.getOrDefault(name) for name in ("min_num_proc", "max_num_proc")}

    def _is_elastic(self) -> bool:
        sizes = self._limits().values()
        return bool(self.getOrDefault("elastic")) or any(size is not None for size in sizes)

    def _checked_store(self) -> FilesystemStore:
        store = self.getOrDefault("store")
        if not isinstance(store, FilesystemStore):
            raise ValueError(
                f"fit(): store is {store!r}; expected a store such as "
                'polyhvd.spark.Store.create("hdfs://host/folder")'
            )
        return store

    def _require_params(self) -> None:
        """Raise ValueError for values that cannot be used."""
        for name in ("model", "feature_cols", "label_cols"):
            if not self.getOrDefault(name):
                raise ValueError(f"fit(): {name} is missing")
        if self._is_elastic() and self.getOrDefault("train_steps_per_epoch") is not None:
            raise ValueError(
                "fit(): pass train_steps_per_epoch or elastic=True, not both: an epoch of an elastic fit has "
                "each row once"
            )
        for name in ("num_proc", "min_num_proc", "max_num_proc"):
            _require_positive(name, self.getOrDefault(name))
        for name in ("batch_size", "val_batch_size", "epochs", "partitions_per_process"):
            _require_positive(name, self.getOrDefault(name))
        for name in ("train_steps_per_epoch", "validation_steps_per_epoch", "backward_passes_per_step"):
            _require_positive(name, self.getOrDefault(name))
        validation = self.getOrDefault("validation")
        if validation is not None and not isinstance(validation, str) and not 0 <= validation < 1:
            raise ValueError(
                f"fit(): validation is {validation!r}; expected a part from 0 to below 1, or a column's name"
            )
        if self.getOrDefault("reader_pool_type") not in ("thread", "process", "dummy"):
            raise ValueError(
                f"fit(): reader_pool_type is {self.getOrDefault('reader_pool_type')!r}; expected 'thread' or "
                "'process'"
            )
        run_id = self.getOrDefault("run_id") or ""
        if run_id in (".", "..") or not _NOT_IN_NAMES.isdisjoint(run_id):
            raise ValueError(
                f"fit(): run_id is {run_id!r}; expected the name of a folder, without "
                f"{' '.join(sorted(_NOT_IN_NAMES))}"
            )
        weights, labels = self.getOrDefault("loss_weights"), self._list("label_cols")
        if weights is not None and len(weights) != len(labels):
            raise ValueError(f"fit(): there are {len(weights)} loss_weights for {len(labels)} label_cols")
        for name, reason in without_effect(ESTIMATORS, self._framework).items():
            if self.isSet(name):
                _LOG.info("fit(): %s has no effect: %s", name, reason)

    def _stored(self, store: FilesystemStore, path: str) -> tuple[Rows, dict[str, str]]:
        """Files that are there, and the types of their columns."""
        schema = store.get_parquet_dataset(path).schema
        types = self._types({field.name: spark_type(field.type) for field in schema})
        lists = tuple(
            name for name in types if str(schema.field(name).type).startswith(("list<", "large_list<"))
        )
        place = store.locate(path)
        return Rows(place.path, place.filesystem, lists), types


@contextlib.contextmanager
def _claimed(run_id: str, *paths: str) -> Iterator[None]:
    """Keep other fits of this process from the same paths.

    Args:
        run_id: for the message.
        paths: of the rows and the checkpoint of a fit.

    Raises:
        ValueError: another fit uses one of them.
    """
    with _LOCK:
        if not _CLAIMED.isdisjoint(paths):
            raise ValueError(
                f"fit(): another fit with run_id {run_id!r} is running in this process with the same store; "
                "pass another run_id, or none, as for CrossValidator"
            )
        _CLAIMED.update(paths)
    try:
        yield
    finally:
        with _LOCK:
            _CLAIMED.difference_update(paths)


def _folders(store: FilesystemStore, run_id: str) -> tuple[str, str]:
    """The folders of the rows of a fit; those of ``fit_on_parquet(dataset_idx=)`` end in a number."""
    return f"{store.get_train_data_path()}.run-{run_id}", f"{store.get_val_data_path()}.run-{run_id}"


def _remove(store: FilesystemStore, path: str) -> None:
    """Remove the rows or the model of a fit; the fit does not fail if that fails."""
    try:
        store.remove(path)
    except DataError as error:
        _LOG.warning("fit(): %s is left there: %s", path, error)


def _require_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"fit(): {name} is {value}; expected at least 1")


def per_column(value: Any, columns: Sequence[str]) -> list[Any]:
    """A value for each column, of a parameter that is one for all, or a list."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * len(columns)
    if len(values) != len(columns):
        raise ValueError(f"fit(): there are {len(values)} values for the columns {', '.join(columns)}")
    return values


def shapes_of(shapes: Any, columns: Sequence[str]) -> list[Any]:
    """A shape for each column, or None."""
    if shapes is None:
        return [None] * len(columns)
    if shapes and isinstance(shapes[0], int):
        shapes = [shapes]
    return per_column(list(shapes), columns)
