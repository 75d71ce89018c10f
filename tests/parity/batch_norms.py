"""Batch normalization over the ranks on hard batches, in every framework, and the same in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

CHANNELS = 3
EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    """A joined batch."""

    rows: tuple[int, ...]  # of each rank; the last number stands for all others, too
    mean: float = 0.0
    deviation: float = 1.0
    dtype: str = "float32"
    tolerance: float = 1e-4  # of what is normal, thus about 1 in size


CASES = {
    "large mean, small variance": Case((5, 3), mean=1000.0, deviation=0.1, tolerance=2e-2),
    "means of ranks far apart": Case((4, 6), mean=-300.0, deviation=1.0, tolerance=1e-3),
    "a single element on one rank": Case((6, 1)),
    "single elements": Case((1, 1)),
    "an empty rank": Case((4, 0)),
    "a large mean and an empty rank": Case((0, 5), mean=1000.0, deviation=0.1, tolerance=2e-2),
    "float16": Case((64, 31), mean=2.0, dtype="float16", tolerance=2e-2),
    "float16, whose squares overflow": Case(
        (16, 9), mean=3000.0, deviation=64.0, dtype="float16", tolerance=5e-2
    ),
}


def parts(case: Case, ranks: int) -> tuple[list[Array], list[Array]]:
    """Samples and weights of the loss of each rank, ``[rows, channels, 2, 2]``."""
    random = np.random.default_rng(23)
    shape = (CHANNELS, 2, 2)
    samples, weights = [], []
    for rank in range(ranks):
        rows = case.rows[min(rank, len(case.rows) - 1)]
        x = case.mean + case.deviation * random.standard_normal((rows, *shape))
        if "apart" in name_of(case):
            x += 600.0 * rank
        samples.append(x.astype(case.dtype))
        weights.append(random.standard_normal((rows, *shape)).astype(case.dtype))
    return samples, weights


def name_of(case: Case) -> str:
    return next(name for name, known in CASES.items() if known is case)


def by_hand(case: Case, ranks: int) -> list[dict[str, Array]]:
    """What each rank has to find, in float64, of samples as they were rounded."""
    samples, weights = parts(case, ranks)
    x = np.concatenate(samples).astype(np.float64)
    w = np.concatenate(weights).astype(np.float64)
    axes, wide = (0, 2, 3), (1, CHANNELS, 1, 1)
    mean, variance = x.mean(axes), x.var(axes)
    inverse = 1 / np.sqrt(variance + EPSILON)
    normal = (x - mean.reshape(wide)) * inverse.reshape(wide)
    of_x = w - w.mean(axes).reshape(wide) - normal * (w * normal).mean(axes).reshape(wide)
    of_x *= inverse.reshape(wide)
    borders = np.cumsum([len(part) for part in samples])[:-1]
    return [
        {"y": y, "of_x": gradient, "mean": mean, "variance": variance}
        for y, gradient in zip(np.split(normal, borders), np.split(of_x, borders), strict=True)
    ]


def _torch(x: Array, w: Array) -> dict[str, Array]:
    import polyhvd.torch as hvd
    import torch

    # With momentum 1 the running statistics are those of the batch; the variance is the unbiased one.
    layer = hvd.SyncBatchNorm(CHANNELS, eps=EPSILON, momentum=1.0)
    samples = torch.from_numpy(x).requires_grad_()
    y = layer(samples)
    (y * torch.from_numpy(w)).sum().backward()
    assert samples.grad is not None
    assert layer.running_mean is not None
    assert layer.running_var is not None
    count = int(hvd.allreduce(len(x), op=hvd.Sum, name="rows")) * 4
    return {
        "y": y.detach().numpy(),
        "of_x": samples.grad.numpy(),
        "mean": layer.running_mean.numpy(),
        "variance": layer.running_var.numpy() * (count - 1) / count,
    }


def _mxnet(x: Array, w: Array) -> dict[str, Array]:
    import polyhvd.mxnet as hvd  # isort: skip
    import mxnet as mx

    layer = hvd.SyncBatchNorm(in_channels=CHANNELS, epsilon=EPSILON, momentum=0.0)
    layer.cast(x.dtype)
    layer.initialize()
    with mx.util.np_shape(True):
        samples = mx.nd.array(x, dtype=x.dtype)
        samples.attach_grad()
        with mx.autograd.record():
            loss = layer(samples)
        loss.backward(mx.nd.array(w, dtype=w.dtype))
        return {
            "y": loss.asnumpy(),
            "of_x": samples.grad.asnumpy(),
            "mean": layer.running_mean.data().asnumpy(),
            "variance": layer.running_var.data().asnumpy(),
        }


def _tensorflow(x: Array, w: Array) -> dict[str, Array]:
    import polyhvd.keras as hvd
    import tensorflow as tf

    layer = hvd.SyncBatchNormalization(
        axis=1, epsilon=EPSILON, momentum=0.0, dtype="mixed_float16" if x.dtype == np.float16 else "float32"
    )
    layer.build((None, CHANNELS, 2, 2))

    @tf.function
    def step(samples: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(samples)
            y = layer(samples, training=True)
            loss = tf.reduce_sum(tf.cast(y, tf.float32) * w.astype(np.float32))
        return y, tape.gradient(loss, samples)

    y, of_x = step(tf.constant(x))
    return {
        "y": y.numpy(),
        "of_x": of_x.numpy(),
        "mean": layer.moving_mean.numpy(),
        "variance": layer.moving_variance.numpy(),
    }


def normalize(driver: str, name: str, rank_count: int) -> dict[str, Array]:
    """This rank's outputs, derivatives by its samples, and statistics."""
    from polyhvd.runtime import current

    rank = current.world().placement.rank
    samples, weights = parts(CASES[name], rank_count)
    layers = {"torch": _torch, "mxnet": _mxnet, "tensorflow": _tensorflow}
    return layers[driver](samples[rank], weights[rank])
