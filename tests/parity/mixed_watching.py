"""polyhvd.parity.watch over ranks of different frameworks, with mistakes that it has to find."""

from __future__ import annotations

import drivers
import mixed_training
from mixed_training import Net

from polyhvd import parity

__all__ = ["DEFECTS", "ends", "found"]

#: Of each mistake, which rank 1 makes: the kind and the layers where it may show first.
DEFECTS = {
    "none": None,
    "another batch": ("input", {0}),
    "another weight in the third layer": ("weights", {2}),
    "another weight in the convolution": ("weights", {0}),
    "another epsilon in batch normalization": ("activation", {1}),
    "a slightly other epsilon in batch normalization": ("activation", {1}),
    "another learning rate": ("learning rate", {0}),
    "a loss that is a sum": ("gradient", {3}),
}


def _spoil(net: Net, framework: str, defect: str) -> None:
    weights = parity.models.weights_of(net.model)
    if defect == "another weight in the third layer":
        weights[6].write(weights[6].read() * 1.01)
    if defect == "another weight in the convolution":
        weights[0].write(weights[0].read()[..., ::-1].copy())
    if defect == "another learning rate":
        net.rate *= 0.99
    if "epsilon" in defect:
        layer = weights[2].layer
        epsilon = 0.001005 if "slightly" in defect else 0.02
        if framework == "mxnet":
            layer._kwargs["eps"] = epsilon
        elif framework == "torch":
            layer.eps = epsilon
        else:
            layer.epsilon = epsilon


def found(name: str, defect: str) -> tuple[str, int, int, str] | None:
    """Kind, layer, step and text of the first divergence."""
    driver = drivers.get(name)
    rank = driver.hvd.rank()
    net = mixed_training.net_of(driver.framework)
    net.runs_eagerly = True
    parity.load(net.model, from_=0)
    if rank == 1:
        _spoil(net, driver.framework, defect)
    net.prepare(None)
    with parity.watch(net.model, net.optimizer) as watched:
        for step in range(5):
            source = 1 if rank == 1 and defect == "another batch" else 0
            images, labels = mixed_training.batch_of([source], step)
            net.step(images, labels, scale=len(images) if rank == 1 and "sum" in defect else 1.0)
    first = watched.first
    assert (first is None) == (watched.divergences == [])
    assert watched.steps == 5
    return None if first is None else (first.kind, first.layer, first.step, str(watched))


def ends(name: str) -> None:
    """A watch that has ended sees nothing, and model and optimizer are what they were."""
    driver = drivers.get(name)
    net = mixed_training.net_of(driver.framework)
    net.runs_eagerly = True
    net.prepare(None)
    watched = parity.watch(net.model, net.optimizer)
    watched.close()
    watched.close()
    if driver.hvd.rank() == 0:  # alone: nothing is exchanged
        net.step(*mixed_training.batch_of([0], 0))
    assert watched.steps == 0
    driver.hvd.barrier()
