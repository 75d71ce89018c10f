"""TensorFlow: polyhvd in functions and in Keras, MultiWorkerMirroredStrategy, and a rank by itself.

The Keras step is one of Keras 2 (tf_keras) for all of them: the strategy does not train models of Keras 3.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from benchmarks.peers.base import Call, Meets, Peer, Reducer, plain_place
from benchmarks.workloads import Workload

tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.threading.set_intra_op_parallelism_threads(1)

BATCH, CLASSES = 16, 100
STEPS_PER_CALL = 5


def keras_step(
    scope: Any, wrap: Callable[[Any], Any], first: tuple[Any, ...] = (), each: tuple[Any, ...] = ()
) -> Call:
    """Steps of ``model.fit`` on a small convolutional network; a call is STEPS_PER_CALL steps.

    ``first`` are callbacks of the first fit(), ``each`` of all.
    """
    tf.keras.utils.set_random_seed(1)
    layers = tf.keras.layers
    with scope:
        model = tf.keras.Sequential([layers.Input((32, 32, 3))])
        for channels in (32, 64, 128):
            model.add(layers.Conv2D(channels, 3, padding="same", activation="relu"))
            model.add(layers.MaxPool2D())
        model.add(layers.Flatten())
        model.add(layers.Dense(1024, activation="relu"))
        model.add(layers.Dense(CLASSES))
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        model.compile(wrap(tf.keras.optimizers.SGD(1e-5, momentum=0.9)), loss)
    data = tf.data.Dataset.from_tensors(
        (np.random.randn(BATCH, 32, 32, 3).astype(np.float32), np.random.randint(0, CLASSES, BATCH))
    ).repeat()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # The thread that tunes a pipeline looks 10, 30, 70, 150, 310 ms after its start, and the end of
    # fit() waits for the next of these times: steps would seem to take 150 or 310 ms.
    options.autotune.enabled = False
    data = data.with_options(options)
    model.fit(data, steps_per_epoch=2, verbose=0, callbacks=[*first, *each])

    def steps() -> None:
        model.fit(data, steps_per_epoch=STEPS_PER_CALL, verbose=0, callbacks=list(each))

    return steps


def computing(reduce: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], Any]:
    """A function that computes gradients, as training does, reduces them and needs all: the ends of each."""

    @tf.function
    def run(tensors: list[Any]) -> Any:
        gradients = reduce([tf.nn.relu(tensor) for tensor in tensors])
        with tf.control_dependencies(gradients):
            return tf.stack([tf.stack([gradient[0], gradient[-1]]) for gradient in gradients])

    return run


class PolyhvdTensorflow(Reducer):
    """polyhvd.tensorflow: "blocking" is an eager call, everything else a tf.function."""

    def __init__(self) -> None:
        import polyhvd.tensorflow

        self.hvd = polyhvd.tensorflow
        self.hvd.init()
        self.rank, self.size = self.hvd.rank(), self.hvd.size()
        self.functions: dict[str, Any] = {}
        self.queue = tf.queue.FIFOQueue(1, tf.float32)

    def make(self, elements: int, dtype: str, value: int) -> Any:
        return tf.fill([elements], tf.cast(value, dtype))

    def fill(self, tensor: Any, value: int) -> Any:
        return tf.fill(tensor.shape, tf.cast(value, tensor.dtype))

    def ends(self, tensor: Any) -> tuple[float, float]:
        return float(tensor[0]), float(tensor[-1])

    def function(self, name: str, body: Callable[[list[Any]], Any]) -> Any:
        """The compiled function of that name, traced once."""
        if name not in self.functions:
            self.functions[name] = tf.function(body)
        return self.functions[name]

    def eager(self, tensors: list[Any], name: str) -> list[Any]:
        return [self.hvd.allreduce(tensors[0], name=name, op=self.hvd.Sum)]

    def separate(self, tensors: list[Any], name: str) -> Any:
        return self.function(name, lambda tensors: self.one_by_one(tensors, name))(tensors)

    def one_by_one(self, tensors: list[Any], name: str) -> list[Any]:
        hvd = self.hvd
        return [hvd.allreduce(t, name=f"{name}.{i}", op=hvd.Sum) for i, t in enumerate(tensors)]

    def computed(self, tensors: list[Any], name: str) -> Any:
        if name not in self.functions:
            self.functions[name] = computing(lambda gradients: self.one_by_one(gradients, name))
        return self.functions[name](tensors)

    def grouped(self, tensors: list[Any], name: str) -> Any:
        return self.function(
            name, lambda tensors: self.hvd.grouped_allreduce(tensors, name=name, op=self.hvd.Sum)
        )(tensors)

    def noop(self, tensors: list[Any], name: str) -> Any:
        """TensorFlow's own price of an asynchronous kernel: the size of a queue, in a function."""

        def body(tensors: list[Any]) -> Any:
            with tf.control_dependencies([self.queue.size()]):
                return [tf.identity(tensors[0])]

        return self.function(name, body)(tensors)

    def paths(self) -> dict[str, Callable[[list[Any], str], Any]]:
        return {
            "blocking": self.eager,
            "async": self.separate,
            "separate": self.separate,
            "grouped": self.grouped,
            "computed": self.computed,
            "noop": self.noop,
        }

    def call(self, workload: Workload) -> Call | None:
        if workload.path != "step":
            return super().call(workload)
        if workload.model != "Keras":
            return None
        import polyhvd.tensorflow.keras as keras_hvd

        callback = keras_hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        return keras_step(contextlib.nullcontext(), keras_hvd.DistributedOptimizer, (callback,))

    def close(self) -> None:
        self.hvd.shutdown()


class TensorflowAlone(Peer):
    """The same gradients computed with no communication."""

    def __init__(self) -> None:
        self.rank, self.size = plain_place()

    def call(self, workload: Workload) -> Call | None:
        if workload.path != "computed":
            return None
        tensors = [tf.zeros([elements]) for elements in workload.elements]
        run = computing(lambda gradients: gradients)
        return lambda: run(tensors)


class TensorflowMeeting(Meets, TensorflowAlone):
    """Ranks that wait for each other after that."""


class KerasAlone(Peer):
    """The same step with no communication."""

    def __init__(self) -> None:
        self.rank, self.size = plain_place()

    def call(self, workload: Workload) -> Call | None:
        if workload.model != "Keras":
            return None
        return keras_step(contextlib.nullcontext(), lambda optimizer: optimizer, each=self.each())

    def each(self) -> tuple[Any, ...]:
        """Callbacks of every fit()."""
        return ()


class KerasMeeting(KerasAlone):
    """Ranks that wait for each other after each step."""

    def each(self) -> tuple[Any, ...]:
        return (tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_: self.meeting.wait()),)


class Mirrored(Peer):
    """MultiWorkerMirroredStrategy with one worker a rank, on gRPC."""

    def __init__(self) -> None:
        self.rank, self.size = plain_place()
        workers = os.environ["BENCH_WORKERS"].split(",")
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": workers}, "task": {"type": "worker", "index": self.rank}}
        )
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def call(self, workload: Workload) -> Call | None:
        if workload.model != "Keras":
            return None
        return keras_step(self.strategy.scope(), lambda optimizer: optimizer)
