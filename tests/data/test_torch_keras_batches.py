"""``polyhvd.keras.data`` with Keras on PyTorch, on real ranks."""

# ruff: noqa: E402
from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"
# Nothing of ours may need it; and Keras would import it in fit(), which takes seconds.
sys.modules["tensorflow"] = None  # type: ignore[assignment]

# isort: split
import batches_cases as cases
import keras
import numpy as np
import polyhvd.keras as hvd
import pytest
import torch
from polyhvd.keras.data import Batches

pytestmark = [
    pytest.mark.ranks(2, framework="torch"),
    pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed"),
]

KINDS = pytest.mark.parametrize("kind", ["arrays", "files"])


def numpy_of(tensor: Any) -> Any:
    assert torch.is_tensor(tensor)
    return tensor.numpy()


def test_every_row_comes_once_over_a_failure(tmp_path: Path) -> None:
    cases.every_row_comes_once_over_a_failure(Batches, cases.make_loader("files", tmp_path), numpy_of)


@KINDS
def test_fit_uses_each_row_once_over_a_restart(kind: str, tmp_path: Path) -> None:
    cases.fit_uses_each_row_once_over_a_restart(
        keras,
        hvd.callbacks.DataPositionCallback,
        Batches,
        lambda: cases.make_loader(kind, tmp_path),
        lambda data: data,
    )


def test_weights_of_rows_are_multiplied_with_that_of_the_batch(tmp_path: Path) -> None:
    loader, other = (cases.make_loader("arrays", tmp_path) for _ in range(2))
    elements = Batches(loader, x="x", y="y", sample_weight="w").dataset()
    assert len(elements) == cases.STEPS
    for (_, _, weights), batch in zip(elements, other, strict=True):
        assert np.allclose(weights.numpy(), batch["w"] * batch.weight)


def test_an_error_of_a_transform_is_raised_by_fit(tmp_path: Path) -> None:
    def fail(batch: dict[str, Any]) -> Any:
        if batch["y"].size:
            raise cases.StopError("of the user")
        return batch

    loader = cases.make_loader("files", tmp_path, transform=fail)
    with pytest.raises(cases.StopError, match="of the user"):
        Batches(loader, x="x", y="y").dataset()
