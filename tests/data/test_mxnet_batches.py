"""``polyhvd.mxnet.data`` on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import batches_cases as cases
import mxnet as mx
import numpy as np
import polyhvd.mxnet as hvd
import pytest
from polyhvd.mxnet.data import Batches

pytestmark = pytest.mark.ranks(2, framework="mxnet")

KINDS = pytest.mark.parametrize("kind", ["arrays", "files"])


def numpy_of(array: Any) -> Any:
    assert isinstance(array, mx.nd.NDArray)
    return array.asnumpy()


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


def test_strings_and_dtypes_that_mxnet_lacks_stay_arrays_of_numpy(tmp_path: Path) -> None:
    def change(batch: dict[str, Any]) -> Any:
        return {"text": batch["y"].astype(str), "number": batch["y"].astype(np.uint32)}

    for batch in Batches(cases.make_loader("files", tmp_path, transform=change)):
        assert batch["text"].tolist() == [str(index) for index in batch.indices]
        assert batch["number"].dtype == np.uint32
        assert batch["number"].tolist() == batch.indices.tolist()


def test_arrays_are_those_of_mx_np_where_it_is_used(tmp_path: Path) -> None:
    with mx.util.np_array(True):
        batch = next(iter(Batches(cases.make_loader("arrays", tmp_path))))
    assert isinstance(batch["x"], mx.np.ndarray)
