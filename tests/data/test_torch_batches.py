"""``polyhvd.torch.data`` on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import batches_cases as cases
import numpy as np
import polyhvd.torch as hvd
import pytest
import torch
from polyhvd.torch.data import Batches

pytestmark = pytest.mark.ranks(2, framework="torch")

KINDS = pytest.mark.parametrize("kind", ["arrays", "files"])


def numpy_of(tensor: Any) -> Any:
    assert torch.is_tensor(tensor)
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


def test_tensors_share_the_memory_of_the_arrays(tmp_path: Path) -> None:
    made: list[Any] = []

    def keep(batch: dict[str, Any]) -> Any:
        made.append(batch["x"])
        return batch

    for batch in Batches(cases.make_loader("files", tmp_path, transform=keep)):
        assert any(np.shares_memory(batch["x"].numpy(), array) for array in made)


@pytest.mark.filterwarnings("error")
def test_arrays_that_cannot_be_shared_are_copied(tmp_path: Path) -> None:
    def change(batch: dict[str, Any]) -> Any:
        constant = np.broadcast_to(np.float32(3), (len(batch["y"]),))
        swapped, text = batch["y"].astype(">i8"), batch["y"].astype(str)
        return {"reversed": batch["x"][:, ::-1], "constant": constant, "swapped": swapped, "text": text}

    for batch in Batches(cases.make_loader("files", tmp_path, transform=change), pin_memory=True):
        assert batch["reversed"].tolist() == cases.COLUMNS["x"][batch.indices][:, ::-1].tolist()
        assert set(batch["constant"].tolist()) == {3.0}
        assert batch["swapped"].tolist() == batch.indices.tolist()
        assert batch["text"].tolist() == [str(index) for index in batch.indices]


class _Dataset(torch.utils.data.IterableDataset[Any]):
    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        for batch in self.batches:
            yield batch["x"]


@KINDS
@pytest.mark.parametrize("wrapped", [False, True])
def test_workers_that_would_repeat_each_batch_are_refused(kind: str, wrapped: bool, tmp_path: Path) -> None:
    place = (hvd.rank(), hvd.size())
    for placement, workers in ((None, 1), (None, 2), (lambda: place, 2)):
        loader = cases.make_loader(kind, tmp_path, placement=placement)
        data = _Dataset(Batches(loader) if wrapped else loader)
        with pytest.raises(
            RuntimeError, match=f"in worker 0 of a torch DataLoader with num_workers={workers}:"
        ):
            list(torch.utils.data.DataLoader(data, batch_size=None, num_workers=workers))
    found = list(torch.utils.data.DataLoader(data, batch_size=None, num_workers=1))
    assert len(found) == loader.steps_per_epoch
