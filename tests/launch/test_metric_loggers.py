"""``hvd.metrics()`` in MLflow, Weights & Biases (offline), TensorBoard, OpenTelemetry: tools/matrix.py."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("mlflow", "opentelemetry", "tensorboard", "wandb")
DOCUMENT = Path(__file__).parents[2] / "docs" / "watching.md"
PROGRAM = """
import os, sys
import numpy as np
import polyhvd.numpy as hvd
from polyhvd.training.metrics_log import MetricsLog

tool, folder = sys.argv[1:]
hvd.init()
writer = None
if hvd.rank() == 0 and tool == "mlflow":
    import mlflow as writer
    writer.set_tracking_uri(f"file://{folder}/runs")
    writer.start_run()
if hvd.rank() == 0 and tool == "torch":
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(folder)
if hvd.rank() == 0 and tool == "tensorflow":
    import tensorflow as tf
    writer = tf.summary.create_file_writer(folder)
if hvd.rank() == 0 and tool == "wandb":
    import wandb
    writer = wandb.init(mode="offline", dir=folder, project="test")
log = MetricsLog(writer, every_n_steps=2)  # as callbacks use it
for step in range(6):
    hvd.allreduce(np.ones(3), name="gradient")
    log.add_steps()
if hvd.rank() == 0 and tool == "mlflow":
    writer.log_metrics(hvd.metrics(), step=step)  # as a loop does
    run = writer.active_run().info.run_id
    found = writer.tracking.MlflowClient().get_metric_history(run, "polyhvd/operations_total")
    print([(item.step, item.value) for item in found])
    print(writer.tracking.MlflowClient().get_metric_history(run, "operations_total")[0].value)
    writer.end_run()
if hvd.rank() == 0 and tool in ("torch", "tensorflow"):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util
    writer.close()
    events = EventAccumulator(folder).Reload()
    if tool == "torch":
        found = [(item.step, item.value) for item in events.Scalars("polyhvd/operations_total")]
    else:
        found = events.Tensors("polyhvd/operations_total")
        found = [(item.step, float(tensor_util.make_ndarray(item.tensor_proto))) for item in found]
    print(found)
if hvd.rank() == 0 and tool == "wandb":
    writer.log(hvd.metrics(), step=step + 1, commit=True)
    print(writer.summary["polyhvd/operations_total"], writer.summary["operations_total"])
    writer.finish()
"""

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NAMES)),
    reason="needs MLflow, OpenTelemetry, TensorBoard and wandb; tools/matrix.py metric-loggers",
)


@pytest.mark.parametrize(
    ("tool", "printed"),
    [
        ("mlflow", ["[(2, 2.0), (4, 4.0), (6, 6.0)]", "6.0"]),
        ("wandb", ["6 6"]),
        ("torch", ["[(2, 2.0), (4, 4.0), (6, 6.0)]"]),
        ("tensorflow", ["[(2, 2.0), (4, 4.0), (6, 6.0)]"]),
    ],
)
def test_real_tool_takes_the_metrics(tool: str, printed: list[str], tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    env = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_MODE": "offline"}
    command = [
        sys.executable,
        "-m",
        "polyhvd.launch",
        "-np",
        "2",
        "--no-tag",
        sys.executable,
        str(program),
        tool,
    ]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line in printed] == printed, done.stdout


AROUND = """
import json
import numpy as np
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
PROGRAM
for _ in range(6):
    hvd.allreduce(np.ones(3), name="gradient")
found = json.loads(reader.get_metrics_data().to_json())["resource_metrics"][0]["scope_metrics"][0]["metrics"]
named = {metric["name"]: metric["data"]["data_points"][0] for metric in found}
if hvd.rank() == 1:
    point = named["polyhvd.operations_total"]
    print(len(named) == len(hvd.metrics()), point["value"], point["attributes"])
hvd.shutdown()
print(reader.get_metrics_data())
"""


def test_opentelemetry_reads_the_metrics_with_the_program_of_the_documentation(tmp_path: Path) -> None:
    (block,) = re.findall(
        r"^```python\n((?:(?!```).*\n)*?.*opentelemetry(?:(?!```).*\n)*)```", DOCUMENT.read_text(), re.M
    )
    program = tmp_path / "train.py"
    program.write_text(AROUND.replace("PROGRAM", block))
    command = [sys.executable, "-m", "polyhvd.launch", "-np", "2", "--no-tag", sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["None", "None", "True 6 {'rank': 1}"], done.stdout
