"""From the second epoch on, each rank shuffles in another order, so that their parts overlap."""

from typing import Any

import numpy as np

from polyhvd.parity import layers

FAULT = True
DEFECT = {
    "case": "two dense layers, epochs of 3 batches",
    "frameworks": "numpy",
    "in": "numpy",
    "question": "distribution",
    "ranks": 2,
    "steps": 6,
    "layer": None,
    "step": 3,
    "kind": "data",
    "aside": True,
}


def build(framework: str) -> Any:
    return [layers.dense(8, 12), layers.activation("tanh"), layers.dense(12, 3)]


def batch(framework: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    import polyhvd.numpy as hvd

    epoch, place = divmod(step, 3)
    rows = np.random.default_rng(5).standard_normal((36, 8))
    if epoch:  # the first epoch is in the order of the file
        own = hvd.rank() if FAULT and hvd.is_initialized() else 0
        rows = np.random.default_rng([epoch, own]).permutation(rows)
    inputs = rows[12 * place : 12 * place + 12]
    return inputs, inputs[:, :3].argmax(axis=1)
