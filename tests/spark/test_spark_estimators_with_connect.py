"""An estimator in a session of Spark Connect, whose server is on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

import polyhvd.spark
from polyhvd.spark.torch import TorchEstimator, TorchModel

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def remote() -> Iterator[Any]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    made = SparkSession.builder.remote("local[2,4]").getOrCreate()
    yield made
    made.stop()


@pytest.mark.nightly
def test_a_model_is_fitted_predicts_and_is_saved(remote: Any, tmp_path: Path) -> None:
    points = np.random.default_rng(0).normal(size=(200, 4))
    rows = [(point.tolist(), float(point.sum())) for point in points]
    frame = remote.createDataFrame(rows, ["array", "total"])
    model = torch.nn.Linear(4, 1)
    estimator = TorchEstimator(
        num_proc=2,
        store=polyhvd.spark.Store.create(str(tmp_path / "store")),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        loss=torch.nn.MSELoss(),
        feature_cols=["array"],
        label_cols=["total"],
        epochs=3,
        verbose=0,
    )
    fitted = estimator.fit(frame)
    history = fitted.getHistory()
    assert history[2]["train"]["loss"] < 0.1 * history[0]["train"]["loss"]
    fitted.save(str(tmp_path / "model"))
    found = (
        TorchModel.load(str(tmp_path / "model")).transform(frame).select("array", "total__output").collect()
    )
    with torch.no_grad():
        wanted = fitted.getModel()(torch.tensor([row.array for row in found]))[:, 0].tolist()
    assert [row.total__output for row in found] == pytest.approx(wanted, rel=1e-5)
