"""Keras 3 on PyTorch, against one process with the joined batch."""

# ruff: noqa: E402
from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"
# Nothing of ours may need it; and Keras would import it in fit(), which takes seconds.
sys.modules["tensorflow"] = None  # type: ignore[assignment]

# isort: split
import keras
import numpy as np
import polyhvd.keras as hvd
import torch
from drift_reports import drift_reports
from torch_common import raises

from polyhvd import InvalidArgumentError, RankMismatchError

BATCH, STEPS, FEATURES = 4, 4, 5


def dataset() -> tuple[Any, Any]:
    numbers = np.random.default_rng(3)
    x = numbers.normal(size=(BATCH * hvd.size() * STEPS, FEATURES)).astype(np.float32)
    return x, (x @ numbers.normal(size=(FEATURES, 1)) + 0.1).astype(np.float32)


def mine(array: Any) -> Any:
    """This rank's share of every joined batch."""
    return array.reshape(STEPS, hvd.size(), BATCH, -1)[:, hvd.rank()].reshape(STEPS * BATCH, -1)


def make_model(seed: int = 1, norm: Any = None) -> Any:
    keras.utils.set_random_seed(seed)
    middle = [] if norm is None else [norm]
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((FEATURES,)), dense(7, activation="tanh"), *middle, dense(1)])


def sgd(**arguments: Any) -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9, **arguments)


def alone(optimizer: Any = None, epochs: int = 2, norm: Any = None, batches: int = 1) -> Any:
    model = make_model(norm=norm)
    model.compile(optimizer or sgd(), loss="mse")
    size = BATCH * hvd.size() * batches
    model.fit(*dataset(), batch_size=size, epochs=epochs, shuffle=False, verbose=0)
    return model


def together(model: Any, optimizer: Any, callbacks: Any = (), epochs: int = 2, **arguments: Any) -> Any:
    model.compile(optimizer, loss="mse", **arguments)
    return fit(model, callbacks, epochs)


def fit(model: Any, callbacks: Any = (), epochs: int = 2) -> Any:
    data = map(mine, dataset())
    options = {"batch_size": BATCH, "epochs": epochs, "shuffle": False, "verbose": 0}
    return model.fit(*data, callbacks=list(callbacks), **options).history


def assert_same(values: list[Any]) -> None:
    everybody = hvd.allgather_object([np.asarray(v).tobytes() for v in values])
    assert all(other == everybody[0] for other in everybody), "ranks differ"


def assert_equal(model: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert_same(model.get_weights())
    for found, wanted in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


def fit_equals_one_process() -> None:
    expected = alone()
    cases: list[tuple[Any, int, float]] = [
        (lambda _: {}, 1, 1e-5),
        (lambda _: {"gradient_predivide_factor": 2.0, "name": "mine"}, 1, 1e-5),
        (lambda _: {"compression": hvd.Compression.fp16}, 1, 1e-2),
        (lambda _: {"num_groups": 3}, 3, 1e-5),
        (lambda v: {"groups": [v[:2]]}, 3, 1e-5),
    ]
    for arguments, operations, tolerance in cases:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(), **arguments(model.trainable_variables))
        before = hvd.counters()["operations"]
        together(model, optimizer)
        assert hvd.counters()["operations"] - before == 2 * STEPS * operations
        assert_equal(model, expected, tolerance)


def other_optimizers_clip_after_averaging() -> None:
    for make in (
        lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
        lambda: sgd(clipvalue=0.01),
        lambda: sgd(gradient_accumulation_steps=2),
    ):
        model = make_model()
        together(model, hvd.DistributedOptimizer(make()))
        assert_equal(model, alone(make()), 2e-4)


def several_passes_make_a_step() -> None:
    model = make_model()
    arguments = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    together(model, hvd.DistributedOptimizer(sgd(), **arguments))
    # The same rows in a step, since a joined batch of two steps holds those of two passes.
    assert_equal(model, alone(batches=2))
    assert int(model.optimizer.iterations.numpy()) == STEPS
    summed = make_model()
    together(summed, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=2))
    assert_equal(summed, alone(keras.optimizers.SGD(0.1), batches=2))
    # Calls for other variables make passes, too, and do not mix their gradients.
    variables = [keras.Variable([0.0]) for _ in range(2)]
    several = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    several.build(variables)
    for number, gradient in ((0, 1.0), (1, 10.0), (0, 1.0), (0, 1.0)):
        several.apply([torch.tensor([gradient])], [variables[number]])
    assert [variable.numpy().item() for variable in variables] == [-3.0, -10.0]


def other_weights_are_reported() -> None:
    broadcast, average = hvd.callbacks.BroadcastGlobalVariablesCallback, hvd.callbacks.MetricAverageCallback
    expected = {
        "DistributedOptimizer: 2 of 4 weights differ between ranks": (hvd.DistributedOptimizer(sgd()), []),
        "BroadcastGlobalVariablesCallback: the optimizer is not distributed": (sgd(), [broadcast(0)]),
        "at the end of epoch 1 4 of 4 weights differ between ranks": (sgd(), [average()]),
        "": (hvd.DistributedOptimizer(sgd()), [broadcast(0), average()]),
    }
    for text, (optimizer, callbacks) in expected.items():
        with drift_reports() as reports:
            together(make_model(seed=hvd.rank()), optimizer, callbacks)
        found = [report for some in hvd.allgather_object(reports) for report in some]
        assert len(found) == bool(text), found
        assert all(text in report for report in found), found


def metrics_of_several_threads_are_averaged() -> None:
    """As of models that train beside each other; here, all of them have seen the same."""
    logs = [{"loss": float(hvd.rank()), "mae": 1.0} for _ in range(100)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda mine: hvd.callbacks.MetricAverageCallback().on_epoch_end(0, mine), logs))
    mean = (hvd.size() - 1) / 2
    assert logs == [{"loss": mean, "mae": 1.0}] * 100


def metrics_are_paired_by_name() -> None:
    """Keras numbers the layers of each process, and rank 1 has made one more."""
    keras.backend.clear_session()
    if hvd.rank() == 1:
        keras.layers.Dense(1)
    x, y = dataset()

    def model_of(*names: str | None) -> Any:
        inputs = keras.Input((FEATURES,))
        return keras.Model(inputs, [keras.layers.Dense(1, name=name)(inputs) for name in names])

    def fitted(model: Any) -> Any:
        model.compile(sgd(), loss="mse")
        targets = [mine(y), 100 * mine(y)]
        average = hvd.callbacks.MetricAverageCallback()
        return model.fit(mine(x), targets, batch_size=BATCH, verbose=0, callbacks=[average]).history

    with raises(
        RankMismatchError, "MetricAverageCallback: ", "name the model's outputs", "rank 1 has 'dense"
    ):
        fitted(model_of(None, None))
    history = fitted(model_of("near", "far"))
    assert history["far_loss"][0] > 100 * history["near_loss"][0]
    logs = {"matrix": np.full((2, 2), float(hvd.rank())), "loss": np.float32(hvd.rank())}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    mean = (hvd.size() - 1) / 2
    assert (logs["loss"], logs["matrix"].tolist()) == (mean, [[mean, mean]] * 2)
    with raises(
        RankMismatchError, "MetricAverageCallback: the shape of 'loss' differs between ranks: (1,) on"
    ):
        hvd.callbacks.MetricAverageCallback().on_epoch_end(0, {"loss": np.ones(1 + hvd.rank())})
    with raises(InvalidArgumentError, "MetricAverageCallback: 'loss' is not a number: rank 0 has str: 'low'"):
        hvd.callbacks.MetricAverageCallback().on_epoch_end(0, {"loss": "low" if hvd.rank() == 0 else 1.0})


def callbacks_do_what_they_do_elsewhere(folder: str) -> None:
    model = make_model(seed=1 + hvd.rank())
    optimizer = hvd.DistributedOptimizer(sgd())
    optimizer.learning_rate = 0.05 if hvd.rank() == 0 else 0.5
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    best.filepath = str(Path(folder) / f"{hvd.rank()}.keras")
    send = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    history = together(model, optimizer, [send, hvd.callbacks.MetricAverageCallback(), best], metrics=["mae"])
    assert_equal(model, alone())
    assert_same([v.numpy() for v in optimizer.variables])
    everybody = hvd.allgather_object(history)
    assert all(other == everybody[0] for other in everybody)
    hvd.barrier()
    assert os.listdir(folder) == ["0.keras"]
    # A rate that rises to 0.05, and then falls, with the velocity along.
    model, rates = make_model(), []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate.numpy()))

    warmup = hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=2)
    fall = hvd.callbacks.LearningRateScheduleCallback(0.05, 0.1, start_epoch=2)
    history = together(model, hvd.DistributedOptimizer(sgd()), [warmup, fall, Rates()], epochs=3)
    size = hvd.size()
    rise = [0.05 / size * ((k + 1) / STEPS * (size - 1) / 2 + 1) for k in range(2 * STEPS)]
    np.testing.assert_allclose(rates, rise + [0.005] * STEPS, rtol=1e-5)
    assert_same(model.get_weights())
    # A model that its first batch builds.
    keras.utils.set_random_seed(10 + hvd.rank())
    late = keras.Sequential([keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
    together(late, hvd.DistributedOptimizer(sgd()), [hvd.callbacks.BroadcastGlobalVariablesCallback(1)])
    assert_same(late.get_weights())


def a_saved_model_keeps_the_optimizers_state(folder: str) -> None:
    model = make_model()
    together(model, hvd.DistributedOptimizer(sgd()))
    path = Path(folder) / f"{hvd.rank()}.keras"
    model.save(path)
    plain = keras.models.load_model(path)  # as in a script without polyhvd
    assert isinstance(plain.optimizer, keras.optimizers.SGD)
    assert not hasattr(plain.optimizer, "register_local_var")
    again = hvd.load_model(path)
    assert again.optimizer.get_config() == model.optimizer.get_config()
    fit(again)
    assert_equal(again, alone(epochs=4))
    with raises(hvd.InvalidArgumentError, "wrap it once"):
        hvd.DistributedOptimizer(again.optimizer)


def overflow_on_one_rank_is_everybodys() -> None:
    rank = hvd.rank()
    variable = keras.Variable(1.0)
    inner = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    scaled.build([variable])
    scaled.apply([torch.tensor(float("inf") if rank == 1 else 4.0)], [variable])
    assert float(variable.numpy()) == 1.0
    assert float(scaled.dynamic_scale.numpy()) == 2.0
    scaled.apply([torch.tensor(2.0 * (rank + 1))], [variable])
    mean = (hvd.size() + 1) / 2
    assert float(variable.numpy()) == 1.0 - mean
    own = keras.Variable([1.0, 1.0])
    local = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    local.register_local_var(own)
    scaled = keras.optimizers.LossScaleOptimizer(local, initial_scale=4.0)
    wrapped = hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    )
    wrapped.register_local_var(own)
    for optimizer in (scaled, wrapped):
        optimizer.build([own, variable])
        gradient = torch.tensor([1.0, float("nan") if rank == 1 else 1.0])
        optimizer.apply([gradient, torch.tensor(1.0)], [own, variable])
        assert (own.numpy().tolist(), float(variable.numpy())) == ([1.0, 1.0], 1.0 - mean)
        assert float(optimizer.dynamic_scale.numpy()) == 2.0
    outside = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)))
    outside.build([variable])
    outside.apply([torch.tensor(float("inf") if rank == 0 else 1.0)], [variable])
    assert float(variable.numpy()) == 1.0 - mean


def gradients_of_a_custom_loop() -> None:
    rank, mean = hvd.rank(), (hvd.size() + 1) / 2
    a, b, unused = (keras.Variable(np.zeros(3, np.float32)) for _ in range(3))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    # The same tensor for both, all of whose elements are one number in memory.
    gradient = torch.tensor(rank + 1.0).expand(3)
    optimizer.apply([gradient, gradient, None], [a, b, unused])
    for variable, wanted in ((a, -mean), (b, -mean), (unused, 0.0)):
        assert variable.numpy().tolist() == [wanted] * 3
    assert gradient.tolist() == [rank + 1.0] * 3
    optimizer.apply_gradients([(torch.full((3,), rank + 1.0), a), (torch.zeros(3), b)])
    assert a.numpy().tolist() == [-2 * mean] * 3


def gradients_of_other_variables_are_an_error() -> None:
    """As of layers that a rank skips at random."""
    rank = hvd.rank()
    variables = [keras.Variable(np.ones(2, np.float32), name=name) for name in ("shared", "first", "second")]
    for arguments in ({}, {"groups": [variables[:1]]}, {"num_groups": 3}):
        for variable in variables:
            variable.assign(np.ones(2, np.float32))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **arguments)
        given = [torch.ones(2) if i in (0, 1 + rank) else None for i in range(len(variables))]
        with raises(
            RankMismatchError,
            "'first' is on rank 0 and not on rank 1; 'second' is on rank 1 and not on rank 0",
            "pass zeros for a variable that a rank does not use",
        ):
            optimizer.apply(given, variables)
        given = [torch.ones(2) if i <= 1 + rank else None for i in range(len(variables))]
        with raises(RankMismatchError, "'second' is on rank 1 and not on rank 0"):
            optimizer.apply(given, variables)
        optimizer.apply([torch.ones(2), None, torch.full((2,), rank + 1.0)], variables)
        assert [variable.numpy()[0] for variable in variables] == [0.0, 1.0, -0.5]


def local_layers_stay_on_their_rank() -> None:
    rank, size = hvd.rank(), hvd.size()
    layer, other, third = (keras.layers.Dense(1, use_bias=False) for _ in range(3))
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=[layer])
    for made in (layer, other, third):
        made.build((None, 1))
        made.set_weights([np.zeros((1, 1), np.float32)])
    optimizer.register_local_var(third.kernel)
    gradients = [torch.full((1, 1), rank + 1.0) for _ in range(3)]
    optimizer.apply(gradients, [layer.kernel, other.kernel, third.kernel])
    assert layer.kernel.numpy().item() == -(rank + 1) / size
    assert other.kernel.numpy().item() == -(size + 1) / 2
    assert third.kernel.numpy().item() == -(rank + 1) / size


def batch_normalization_is_that_of_the_joined_batch() -> None:
    model, expected = make_model(norm=hvd.SyncBatchNormalization()), keras.layers.BatchNormalization()
    together(model, hvd.DistributedOptimizer(sgd()))
    assert_equal(model, alone(norm=expected), 2e-4)
    # One rank without rows, one with a mask, and the gradient of inputs.
    size = hvd.size()
    x = torch.randn(size, 6, 3, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(size, 6, dtype=torch.bool)
    mask[-1, 2:] = False
    x[0] = 0.0
    mask[0] = False
    whole, part = keras.layers.BatchNormalization(), hvd.SyncBatchNormalization()
    inputs = x.clone().requires_grad_()
    wanted = whole(inputs, training=True, mask=mask)
    wanted[1:].pow(3).sum().backward()
    rows = slice(0, 0) if hvd.rank() == 0 else slice(hvd.rank(), hvd.rank() + 1)
    own = x[rows].clone().requires_grad_()
    before = hvd.counters()["operations"]
    found = part(own, training=True, mask=mask[rows])
    found.pow(3).sum().backward()
    assert hvd.counters()["operations"] - before == 2
    torch.testing.assert_close(found, wanted[rows], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own.grad, inputs.grad[rows], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(part.moving_variance.numpy(), whole.moving_variance.numpy(), rtol=1e-4)
    assert part.get_config()["momentum"] == whole.get_config()["momentum"]


def values_and_refusals() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert float(hvd.allreduce(1.0 + rank)) == (size + 1) / 2
    assert hvd.allgather(np.array([rank])).tolist() == list(range(size))
    assert int(hvd.broadcast(rank, 1)) == 1
    assert hvd.reducescatter(np.ones((size, 2), np.float32), op=hvd.Sum).tolist() == [[size, size]]
    variable = keras.Variable(float(rank))
    hvd.broadcast_variables([variable], 1)
    assert float(variable.numpy()) == 1.0
    others = [keras.Variable(float(rank), name=name) for name in ("first", "second")]
    with raises(RankMismatchError, "different orders: at position 0, "):
        hvd.broadcast_variables(others if rank != 1 else others[::-1], 0)
    assert [float(other.numpy()) for other in others] == [rank, rank]
    with raises(RankMismatchError, "different numbers of variables: rank"):
        hvd.broadcast_variables([] if rank == 1 else others, 0)
    with raises(RuntimeError, "broadcast_variables"):
        hvd.broadcast_global_variables(0)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"device_dense": "/gpu:0"}, "host"),
        ({"op": hvd.Max}, "Average, Sum or Adasum"),
        ({"backward_passes_per_step": 0}, "1 or more"),
        ({"groups": "all"}, "groups"),
        ({"num_groups": 2, "groups": 2}, "exclude"),
    ]
    for arguments, message in refused:
        with raises(hvd.InvalidArgumentError, message):
            hvd.DistributedOptimizer(sgd(), **arguments)
    with raises(hvd.InvalidArgumentError, "register_local_var"):
        hvd.PartialDistributedOptimizer(sgd(), local_layers=[variable])
    with raises(hvd.InvalidArgumentError, "Keras 3"):
        hvd.DistributedOptimizer(torch.optim.SGD([torch.zeros(1)], 0.1))
    # A group is all or none: on every rank.
    with raises(hvd.HorovodInternalError, "Mismatched"):
        optimizer = hvd.DistributedOptimizer(sgd())
        optimizer.apply([torch.zeros(2 + rank)], [keras.Variable(np.zeros(2 + rank))])
    assert set(hvd.__all__) <= set(dir(hvd))


def ranks_outside_of_the_process_set_keep_their_gradients() -> None:
    """The last rank is no member."""
    members = hvd.add_process_set(range(hvd.size() - 1))
    for passes in (1, 2):
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        layer.build((None, 2))
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), process_set=members, backward_passes_per_step=passes
        )
        for _ in range(passes):
            optimizer.apply([torch.full((2, 1), hvd.rank() + 1.0)], [layer.kernel])
        ranks = range(members.size()) if members.included() else [hvd.rank()]
        expected = -passes * sum(rank + 1.0 for rank in ranks) / len(ranks)
        assert np.asarray(layer.kernel.numpy()).tolist() == [[expected]] * 2
    hvd.remove_process_set(members)
