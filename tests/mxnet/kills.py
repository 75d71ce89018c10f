"""A rank that is killed while gradients are in flight, and what the others make of it; run in pools."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from polyhvd.testing.worker import note

#: How a program waits for an array, and looks at it: of MXNet's module and the array.
Touch = Callable[[Any, Any], None]

STEPS_BEFORE = 2  # before the one in which the rank is killed


def by_copy(mx: Any, array: Any) -> None:
    """MXNet's Python asks for the elements."""
    array.asnumpy()


def by_save(mx: Any, array: Any) -> None:
    """MXNet's own code waits, as it writes a file."""
    mx.nd.save("/dev/null", array)


def by_pickle(mx: Any, array: Any) -> None:
    """MXNet's own code waits, as it makes bytes."""
    array.__getstate__()


def by_mask(mx: Any, array: Any) -> None:
    """MXNet's own code waits for the shape of a result."""
    mx.nd.contrib.boolean_mask(array, mx.nd.ones(len(array))).shape  # noqa: B018 - which is what waits


def by_dlpack(mx: Any, array: Any) -> None:
    """Another framework gets the memory."""
    array.to_dlpack_for_read()


def by_copy_of_rows(mx: Any, array: Any) -> None:
    """MXNet's own code waits, as it makes a row_sparse array."""
    mx.nd.sparse.row_sparse_array((array.reshape((-1, 1)), np.arange(len(array))), shape=(len(array), 1))


def _plain(mx: Any, parameters: list[Any], factor: float) -> Any:
    return sum((p.data() * factor).sum() for p in parameters)


def _sparse(mx: Any, parameters: list[Any], factor: float) -> Any:
    return sum(
        mx.nd.Embedding(mx.nd.arange(p.shape[0]), p.data(), *p.shape, sparse_grad=i % 2 == 0).sum() * factor
        for i, p in enumerate(parameters)
    )


def _hybridized(mx: Any, parameters: list[Any]) -> Any:
    class Net(mx.gluon.HybridBlock):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            with self.name_scope():
                for i, parameter in enumerate(parameters):
                    self.params.update({parameter.name: parameter})
                    self._reg_params[f"p{i}"] = parameter

        def hybrid_forward(self, F: Any, x: Any, **arrays: Any) -> Any:
            return F.add_n(*[F.broadcast_mul(array.sum(), x) for array in arrays.values()])

    net = Net()
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def train_until_killed(
    seed: int, arrays: int, victim: int, kind: str, touch: Touch, reads: bool
) -> dict[str, object]:
    """Train until the job fails; what was caught, and which parameters are no sum of averages.

    The gradient of every element is rank + 1, so that the average of n ranks is (n + 1) / 2 and the learning
    rate makes each step take exactly 1 from every element.
    """
    import polyhvd.mxnet as hvd  # isort: skip - first, and in the ranks alone
    import mxnet as mx
    from mxnet import autograd, gluon

    chance = random.Random(seed)
    parameters = [
        gluon.Parameter(
            f"p{i}",
            shape=(chance.choice((8, 300, 5000)), *([1] if kind == "sparse" else [])),
            init=mx.init.Zero(),
            grad_stype="row_sparse" if kind == "sparse" and i % 2 == 0 else "default",
        )
        for i in range(arrays)
    ]
    for parameter in parameters:
        parameter.initialize()
    options: dict[str, Any] = {}
    beside: list[Any] = []  # arrays that other ranks reduce as well
    if kind == "grouped":
        options["num_groups"] = chance.choice((1, 2))
    if kind == "process set":
        others = hvd.add_process_set(
            sorted({victim, hvd.size() - 1 - victim}) if hvd.size() > 2 else [victim]
        )
        if others.included():
            beside = [mx.nd.ones(300) for _ in range(10)]
    learning_rate = 2.0 / (hvd.size() + 1)
    trainer = hvd.DistributedTrainer(
        parameters, "sgd", {"learning_rate": learning_rate}, prefix=f"kill{seed}", **options
    )
    net = _hybridized(mx, parameters) if kind == "hybridized" else None
    over, readers = threading.Event(), []
    if reads:
        readers.append(threading.Thread(target=_read, args=(mx, parameters, touch, over)))
        readers[0].start()
    caught: Exception | None = None
    steps = 0
    try:
        while True:
            if steps == STEPS_BEFORE:
                note("about to be killed")
            factor = hvd.rank() + 1
            with autograd.record():
                if net is not None:
                    loss = net(mx.nd.array([factor]))
                else:
                    loss = (_sparse if kind == "sparse" else _plain)(mx, parameters, factor)
            loss.backward()
            for i, array in enumerate(beside):
                hvd.allreduce_async_(array, name=f"beside.{i}", process_set=others)
            steps += 1
            trainer.step(1)
            if hvd.rank() != victim and chance.random() < 0.5:
                touch(mx, chance.choice(parameters).grad())
            if chance.random() < 0.3:
                loss.asnumpy()
    except Exception as error:
        caught = error
    over.set()
    for reader in readers:
        reader.join()
    return {
        "class": type(caught).__name__,
        "is_ours": isinstance(caught, hvd.HorovodInternalError),
        "is_mxnets": isinstance(caught, mx.base.MXNetError),
        "text": str(caught),
        "wrong": _wrong(parameters, steps),
    }


def _read(mx: Any, parameters: list[Any], touch: Touch, over: threading.Event) -> None:
    while not over.is_set():
        for parameter in parameters:
            with contextlib.suppress(Exception):
                touch(mx, parameter.grad())


def _wrong(parameters: list[Any], steps: int) -> list[tuple[str, float, float]]:
    wrong = []
    for parameter in parameters:
        while True:
            try:
                found = parameter.data().asnumpy()
                break
            except Exception:  # each error is reported once, and what failed may share one
                continue
        updates = np.round(-found.flat[0])
        if not (np.allclose(found, -updates, atol=1e-3) and 0 <= updates <= steps):
            wrong.append((parameter.name, float(found.min()), float(found.max())))
    return wrong
