"""A compute job of tf.data's service on two executors, beside this process as the training job."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from polyhvd.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service
from spark_common import BUSY_S

from polyhvd.spark.tensorflow import compute_worker

SLOTS = 2


def test_tasks_produce_the_elements_until_the_job_is_asked_to_end(session: Any, tmp_path: Path) -> None:
    file = tmp_path / "compute.json"
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            compute_worker.main(1, "compute", str(file), timeout=int(BUSY_S))
        except BaseException as error:
            errors.append(error)

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    config = TfDataServiceConfig.read(str(file), wait_for_file_creation=True)
    assert config.workers_per_dispatcher == SLOTS
    with tf_data_service(config, 0) as address:
        data = tf.data.Dataset.range(60).map(lambda x: x + 1)
        data = data.apply(tf.data.experimental.service.distribute("distributed_epoch", address))
        assert sorted(int(x) for x in data) == list(range(1, 61))
    with config.compute_client() as client:
        client.shutdown()
    serving.join(BUSY_S)
    assert not serving.is_alive()
    assert not errors
    assert not file.exists()


@pytest.mark.usefixtures("session")
def test_too_few_slots_are_an_error_after_the_timeout(tmp_path: Path) -> None:
    file = tmp_path / "compute.json"
    with pytest.raises(TimeoutError, match="not started 3 tasks at once within 1 s"):
        compute_worker.main(1, "compute", str(file), timeout=1, num_proc=SLOTS + 1)
    assert not file.exists()
