"""``polyhvd.tensorflow.data`` on real ranks, and ``polyhvd.keras.data`` with Keras on TensorFlow."""

from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path
from typing import Any

import batches_cases as cases
import keras
import numpy as np
import polyhvd.keras as hvd_keras
import polyhvd.tensorflow as hvd
import polyhvd.tensorflow.keras as hvd_tf_keras
import pyarrow as pa
import pytest
import tensorflow as tf
from launching import DEADLINE_S  # tests/harness, on the path by tests/conftest.py
from polyhvd.keras.data import Batches as KerasBatches
from polyhvd.tensorflow.data import Batches, _Passes

from polyhvd.data import ParquetLoader, write_parquet

pytestmark = pytest.mark.ranks(2, framework="tensorflow", timeout_s=400, env={"TF_NUM_INTEROP_THREADS": "2"})

KINDS = pytest.mark.parametrize("kind", ["arrays", "files"])


def numpy_of(tensor: Any) -> Any:
    assert tf.is_tensor(tensor)
    return tensor.numpy()


@KINDS
def test_every_row_comes_once_over_a_failure(kind: str, tmp_path: Path) -> None:
    cases.every_row_comes_once_over_a_failure(Batches, cases.make_loader(kind, tmp_path), numpy_of)


@KINDS
def test_batches_have_the_columns_of_the_loader(kind: str, tmp_path: Path) -> None:
    cases.batches_have_the_columns_of_the_loader(Batches, cases.make_loader(kind, tmp_path), numpy_of)


def test_inputs_can_be_several_columns(tmp_path: Path) -> None:
    cases.inputs_can_be_several_columns(Batches, cases.make_loader("arrays", tmp_path), numpy_of)


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    cases.a_column_that_is_not_there_is_named(Batches, cases.make_loader("arrays", tmp_path))


def test_masked_entries_are_an_error(tmp_path: Path) -> None:
    cases.masked_entries_are_an_error(Batches, tmp_path)


def test_an_error_of_a_transform_is_raised_in_the_loop(tmp_path: Path) -> None:
    cases.an_error_of_a_transform_is_raised_in_the_loop(Batches, tmp_path)


def test_elastic_train_counts_each_row_once(tmp_path: Path) -> None:
    loader = cases.make_loader("files", tmp_path)
    cases.elastic_train_counts_each_row_once(hvd.elastic, Batches, loader, numpy_of)


@pytest.mark.parametrize("ahead", [0, 3])
@KINDS
def test_fit_uses_each_row_once_over_a_restart(kind: str, ahead: int, tmp_path: Path) -> None:
    cases.fit_uses_each_row_once_over_a_restart(
        keras,
        hvd_keras.callbacks.DataPositionCallback,
        KerasBatches,
        lambda: cases.make_loader(kind, tmp_path),
        lambda data: data.prefetch(ahead) if ahead else data,
    )


def test_dataset_has_lists_that_are_padded_to_another_length_in_each_batch(tmp_path: Path) -> None:
    folder = tmp_path / str(hvd.rank())
    lists = pa.array([[row] * (row % 5) for row in range(24)], pa.list_(pa.int32()))
    write_parquet(pa.table({"x": lists, "y": np.arange(24)}), folder / "x.parquet")
    loader = ParquetLoader(folder, batch_size=3, pad={"x": -1})
    seen = []
    for x, y, _ in Batches(loader, x="x", y="y").dataset():
        assert x.shape[1] == max(y.numpy() % 5)
        for row, padded in zip(y.numpy(), x.numpy(), strict=True):
            assert [value for value in padded if value >= 0] == [row] * (row % 5)
            seen.append(int(row))
    assert cases.of_all_ranks(seen) == list(range(24))


def test_the_callback_of_tf_keras_counts_steps_that_are_executed_together(tmp_path: Path) -> None:
    loader = cases.make_loader("arrays", tmp_path)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=3)
    callback = hvd_tf_keras.callbacks.DataPositionCallback(loader)
    model.fit(Batches(loader, x="x", y="w").dataset(), epochs=2, verbose=0, callbacks=[callback])
    assert (loader.epoch, loader.cursor) == (2, 0)


@KINDS
def test_a_dataset_knows_its_types_and_its_length_before_it_is_read(kind: str, tmp_path: Path) -> None:
    loader = cases.make_loader(kind, tmp_path)
    data = Batches(loader, x={"a": "x", "b": "w"}, y="y", sample_weight="w").dataset()
    assert data.element_spec == (
        {"a": tf.TensorSpec((None, 2), tf.float32), "b": tf.TensorSpec((None,), tf.float32)},
        tf.TensorSpec((None,), tf.int64),
        tf.TensorSpec((None,), tf.float32),
    )
    assert int(data.prefetch(1).cardinality()) == cases.STEPS
    assert kind == "arrays" or loader.groups_read == 0


def test_a_transform_decides_the_types(tmp_path: Path) -> None:
    def change(batch: dict[str, Any]) -> Any:
        return batch["x"][:, :, None].astype(np.float16), batch["y"].astype(str).astype(object)

    data = Batches(cases.make_loader("files", tmp_path, transform=change)).dataset()
    assert data.element_spec[:2] == (
        tf.TensorSpec((None, 2, 1), tf.float16),
        tf.TensorSpec((None,), tf.string),
    )
    assert len(list(data)) == cases.STEPS


def test_the_position_does_not_move_with_what_is_read_ahead(tmp_path: Path) -> None:
    loader = cases.make_loader("arrays", tmp_path)
    data = Batches(loader, x="x", y="y").dataset().prefetch(3)
    for done, (x, _, _) in enumerate(data):
        assert loader.cursor == 8 * done
        assert x.shape[0] in (4, 5)
        loader.advance()
    assert loader.cursor == cases.ROWS
    assert len(list(data)) == cases.STEPS, "the next epoch"


def test_repeat_before_prefetch_is_an_error_instead_of_steps_that_come_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[Any] = []
    second_has_begun = threading.Event()
    read = _Passes.read

    def watched(self: _Passes, number: Any) -> Any:
        passes.extend([number] if number == 0 else [])
        try:
            return read(self, number)
        finally:
            if len(passes) == 2:
                second_has_begun.set()

    monkeypatch.setattr(_Passes, "read", watched)
    loader = cases.make_loader("arrays", tmp_path)
    data = Batches(loader, x="x", y="y").dataset().repeat().prefetch(cases.STEPS - 1)
    seen = []

    def train() -> None:
        for _, y, _ in islice(data, 2 * cases.STEPS):
            assert loader.cursor == 0 or second_has_begun.wait(DEADLINE_S)
            seen.extend(y.numpy().tolist())
            loader.advance()
            if len(loader) == 0:
                loader.set_epoch(loader.epoch + 1)

    with pytest.raises(tf.errors.OpError, match=r"3 steps of the last one are not done: .*repeat\(\)"):
        train()
    assert cases.of_all_ranks(seen) == list(range(cases.ROWS))


def test_a_dataset_of_another_world_is_refused(tmp_path: Path) -> None:
    size = 2
    loader = cases.make_loader("arrays", tmp_path, placement=lambda: (0, size))
    data = Batches(loader, x="x", y="y").dataset()
    size = 1
    with pytest.raises(tf.errors.OpError, match=r"an epoch has 9 steps .* and had 4 .* call Batches.dataset"):
        list(data)


def test_weights_of_rows_are_multiplied_with_that_of_the_batch(tmp_path: Path) -> None:
    loader, other = (cases.make_loader("arrays", tmp_path) for _ in range(2))
    elements = Batches(loader, x="x", y="y", sample_weight="w").dataset()
    for (_, _, weights), batch in zip(elements, other, strict=True):
        assert np.allclose(weights.numpy(), batch["w"] * batch.weight)


def test_an_error_of_a_transform_ends_the_loop_over_a_dataset(tmp_path: Path) -> None:
    def fail(batch: dict[str, Any]) -> Any:
        if 32 in batch["y"]:
            raise cases.StopError("of the user")
        return batch

    loader = cases.make_loader("files", tmp_path, transform=fail, shuffle=False, placement=lambda: (0, 1))
    data = Batches(loader, x="x", y="y").dataset()
    with pytest.raises(tf.errors.OpError, match="StopError: of the user"):
        list(data)
    with pytest.raises(tf.errors.OpError, match="StopError: of the user"):
        list(data)  # not the error of a reader that has ended


def test_a_dataset_needs_columns_if_the_loader_has_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name those of the inputs and the targets"):
        Batches(cases.make_loader("arrays", tmp_path)).dataset()
