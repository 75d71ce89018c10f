"""What ``Batches`` does in every framework, over arrays and over Parquet files, on real ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.numpy as hvd

from polyhvd.data import ArrayLoader, ParquetLoader, write_parquet

ROWS = 33  # with batches of 4 on 2 ranks, the last step of an epoch has 5 rows and 4
STEPS = 4
COLUMNS = {
    "x": np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, 2),
    "y": np.arange(ROWS, dtype=np.int64),
    "w": np.linspace(1, 2, ROWS, dtype=np.float32),
}


class StopError(Exception):
    """Ends a loop."""


def make_loader(kind: str, folder: Path, **options: Any) -> Any:
    """A loader of the columns, the same on every rank."""
    options = {"batch_size": 4, "seed": 2, **options}
    if kind == "arrays":
        return ArrayLoader(COLUMNS, **options)
    write_parquet(COLUMNS, folder / f"{hvd.rank()}" / "x.parquet", rows_per_group=4)
    return ParquetLoader(folder / f"{hvd.rank()}", **options)


def of_all_ranks(rows: list[int]) -> list[int]:
    return sorted(chain(*hvd.allgather_object(rows)))


def every_row_comes_once_over_a_failure(make: Any, loader: Any, numpy_of: Callable[[Any], Any]) -> None:
    batches = make(loader, x="x", y="y")
    assert len(batches) == STEPS
    seen: list[int] = []
    total = 0.0
    for attempt in range(2):
        with suppress(StopError):
            for step, batch in enumerate(batches):
                if attempt == 0 and step == 2:
                    raise StopError
                x, y = batch
                assert np.array_equal(numpy_of(x), COLUMNS["x"][batch.indices])
                mean = hvd.allreduce(batch.weight * numpy_of(y).mean(), name=f"mean.{attempt}.{step}")
                before = loader.cursor
                loader.advance()
                total += float(mean) * (loader.cursor - before)
                seen += numpy_of(y).tolist()
        if attempt == 0:
            assert loader.cursor == 16
    assert of_all_ranks(seen) == list(range(ROWS))
    assert np.isclose(total, sum(range(ROWS)))
    batches.set_epoch(1)
    assert len(batches) == STEPS


def batches_have_the_columns_of_the_loader(make: Any, loader: Any, numpy_of: Callable[[Any], Any]) -> None:
    for batch in make(loader):
        assert list(batch) == list(COLUMNS)
        for name, column in COLUMNS.items():
            value = numpy_of(batch[name])
            assert value.dtype == column.dtype
            assert np.array_equal(value, column[batch.indices])


def inputs_can_be_several_columns(make: Any, loader: Any, numpy_of: Callable[[Any], Any]) -> None:
    for batch in make(loader, x={"a": "x", "b": "w"}, y=["y", "w"], sample_weight="w"):
        x, y, weights = batch
        assert sorted(x) == ["a", "b"]
        assert np.array_equal(numpy_of(x["a"]), COLUMNS["x"][batch.indices])
        assert [numpy_of(value).tolist() for value in y] == [
            COLUMNS[name][batch.indices].tolist() for name in ("y", "w")
        ]
        assert np.array_equal(numpy_of(weights), COLUMNS["w"][batch.indices])


def a_column_that_is_not_there_is_named(make: Any, loader: Any) -> None:
    raised = ""
    try:
        for _ in make(loader, x="x", y="z"):
            pass
    except ValueError as error:
        raised = str(error)
    assert raised == "Batches(y='z'): there is no such column; expected one of ['x', 'y', 'w']"


def masked_entries_are_an_error(make: Any, folder: Path) -> None:
    def mask(batch: dict[str, Any]) -> Any:
        return {"x": np.ma.masked_greater_equal(batch["y"], 0), "y": batch["y"]}

    for loader in (ArrayLoader(mask(COLUMNS), batch_size=4), make_loader("files", folder, transform=mask)):
        for columns, named in (({}, "Batches: column 'x'"), ({"x": "x"}, "Batches(x='x'): the column")):
            raised = ""
            try:
                for _ in make(loader, **columns):
                    pass
            except ValueError as error:
                raised = str(error)
            assert raised.startswith(f"{named} has masked entries, which are not values; fill them"), raised


def an_error_of_a_transform_is_raised_in_the_loop(make: Any, folder: Path) -> None:
    def fail(batch: dict[str, Any]) -> Any:
        raise StopError

    raised = False
    try:
        for _ in make(make_loader("files", folder, transform=fail)):
            pass
    except StopError:
        raised = True
    assert raised


def elastic_train_counts_each_row_once(elastic: Any, make: Any, loader: Any, numpy_of: Any) -> None:
    seen: list[int] = []

    def step(batch: Any) -> None:
        _, y = batch
        seen.extend(numpy_of(y).tolist())
        hvd.allreduce(np.ones(1), name="step")

    state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, weights=0)
    elastic.train(step, state, make(loader, x="x", y="y"), epochs=2, progress=False)
    assert of_all_ranks(seen) == sorted([*range(ROWS)] * 2)
    assert loader.epoch == 2


def fit_uses_each_row_once_over_a_restart(
    keras: Any, callback: Any, make: Any, loaders: Callable[[], Any], prepare: Callable[[Any], Any]
) -> None:
    """The bias after two calls of fit is the sum over the steps of the mean of the rows of each."""
    seen: list[int] = []

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self, stop_at: int) -> None:
            super().__init__()
            self.stop_at = stop_at

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)
            if len(seen) == self.stop_at:
                raise StopError

    def loss(y: Any, predicted: Any) -> Any:
        """The gradient of the bias is the number of the row."""
        return keras.ops.cast(y, "float32") * predicted

    def make_model() -> Any:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.layers[0].kernel.trainable = False
        model.compile(keras.optimizers.SGD(1.0), loss)
        return model

    model = make_model()
    loader = loaders()
    data = prepare(make(loader, x="x", y="y").dataset())
    with suppress(StopError):
        model.fit(data, epochs=2, verbose=0, callbacks=[callback(loader), Watch(STEPS + 2)])
    assert (loader.epoch, loader.cursor) == (1, 16), "a step counts when it is done"
    resumed = loaders()
    resumed.load_state_dict(loader.state_dict())
    data = prepare(make(resumed, x="x", y="y").dataset())
    with warnings.catch_warnings(action="ignore"):  # Keras: the input has ended early
        model.fit(
            data, initial_epoch=resumed.epoch, epochs=3, verbose=0, callbacks=[callback(resumed), Watch(-1)]
        )
    assert (resumed.epoch, resumed.cursor) == (3, 0)
    assert len(seen) == 3 * STEPS
    total = -float(np.asarray(model.get_weights()[1]).sum())
    expected = 0.0
    reference = loaders()
    for epoch in range(3):
        reference.set_epoch(epoch)
        expected += sum(batch.weight * batch["y"].mean() for batch in reference)
    assert np.isclose(total, expected)
