"""Callbacks of Keras as far as they need no tensors, without their base class: there are several Keras."""

from __future__ import annotations

import abc
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from polyhvd.collectives.objects import allgather_object
from polyhvd.collectives.process_sets import global_process_set
from polyhvd.data.position import Position
from polyhvd.errors import InvalidArgumentError
from polyhvd.runtime import current
from polyhvd.runtime.world import World
from polyhvd.training.drift import compare_now, report
from polyhvd.training.keras.optimizers import is_distributed
from polyhvd.training.keras.weights import DRIFT_REMEDY, hyperparameters_of, values_of
from polyhvd.training.metrics_log import MetricsLog
from polyhvd.training.naming import gather_by_name

__all__ = [
    "BestModel",
    "BroadcastGlobalVariables",
    "DataPosition",
    "LearningRateSchedule",
    "LearningRateWarmup",
    "MetricAverage",
]

# Optimizers whose velocity has the learning rate in it.
_WITH_VELOCITY = frozenset({"SGD", "RMSprop"})
_PLAIN = "the optimizer is not distributed, so that each rank trains a separate model"
_DISTRIBUTE = (
    "compile the model with hvd.DistributedOptimizer(optimizer), and load it with hvd.load_model(), not "
    "keras.models.load_model()"
)
#: By model, references of the variables that each rank keeps for itself.
_local_variables: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()
_METRIC_ADVICE = (
    "name the model's outputs, as in Dense(1, name='score'), and use the same metrics and validation data "
    "on every rank"
)


class BroadcastGlobalVariables(abc.ABC):
    """Starts all ranks with the root's weights and optimizer state.

    It logs a warning if the model's optimizer is not distributed: ``POLYHVD_CHECK_DRIFT``.

    Before the first step if every rank has built the model and its layers, else after it. Seeds of random
    layers stay as they are, so that ranks drop out different units.

    Args:
        root_rank: world rank of the sender.
        device: accepted for compatibility with Horovod.
        local_variables: variables that stay as they are on each rank.

    Raises:
        InvalidArgumentError: ``device`` is not the host.
        RankMismatchError: when training begins, the ranks' models differ; or, with
            ``POLYHVD_CHECK_DRIFT=error``, the optimizer is not distributed.

    Example::

        model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    """

    model: Any

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__()
        self._accept_device(device)
        self.root_rank = root_rank
        self.broadcast_done = False
        self._world: weakref.ref[World] | None = None  # in which it was done
        self._local = {self._reference(variable) for variable in local_variables or ()}

    @abc.abstractmethod
    def _accept_device(self, device: str) -> None:
        """Refuse what is not the host."""

    @abc.abstractmethod
    def _reference(self, variable: Any) -> Any:
        """The same object for a variable and its wrappers."""

    @abc.abstractmethod
    def _send(self, variables: Sequence[Any]) -> None:
        """Overwrite variables with the root's."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, if there is something to broadcast."""
        world = current.world()
        if self._world is not None and self._world() is not world:
            self.broadcast_done = False  # ranks that are new in this world wait for all
        _local_variables[self.model] = self._local
        if world.placement.size > 1 and _trains_apart(self.model):
            text = f"BroadcastGlobalVariablesCallback: {_PLAIN}"
            report(world, text, _DISTRIBUTE, is_reporter=world.placement.rank == 0)
        model, optimizer = self.model, self.model.optimizer
        build = getattr(optimizer, "build", None)
        if self.broadcast_done or build is None:
            return
        # The root may have loaded a model that the other ranks build in their first step, in which they need
        # the root.
        are_built = allgather_object(_is_built(model), "BroadcastGlobalVariablesCallback")
        if not all(are_built):
            return
        if not getattr(optimizer, "built", False):
            build(model.trainable_variables)
            if hasattr(optimizer, "built"):
                optimizer.built = True
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast, if it was too early at the beginning."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer
        state = getattr(optimizer, "variables", ())
        variables = [*self.model.weights, *(state() if callable(state) else state)]
        unique = {self._reference(variable): variable for variable in variables}
        self._send([variable for reference, variable in unique.items() if reference not in self._local])
        self.broadcast_done, self._world = True, weakref.ref(current.world())


class DataPosition:
    """Moves the position in the data after each step of ``fit``, and to the next epoch after the last one.

    It goes with ``Batches(loader).dataset()``, and stands in the list before callbacks that save the
    position. Without it, every epoch of ``fit`` begins at the same position, with the same order of rows.

    Args:
        loader: the loader that ``fit`` has its data from.

    Raises:
        InvalidArgumentError: it is not a loader.

    Example::

        model.fit(batches.dataset(), initial_epoch=loader.epoch, epochs=10,
                  callbacks=[hvd.callbacks.DataPositionCallback(loader)])
    """

    def __init__(self, loader: Position) -> None:
        super().__init__()
        if not isinstance(loader, Position):
            raise InvalidArgumentError(
                f"DataPositionCallback(loader={type(loader).__qualname__}): expected an ArrayLoader or "
                "ParquetLoader of polyhvd.data"
            )
        self._loader = loader
        self._first = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note which steps are executed together."""
        self._first = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Move the position past them; the last execution of an epoch may have fewer."""
        steps = batch - self._first + 1
        for _ in range(max(1, min(steps, len(self._loader)))):
            self._loader.advance()
        if len(self._loader) == 0:
            self._loader.set_epoch(self._loader.epoch + 1)


class MetricAverage(abc.ABC):
    """Averages the metrics of an epoch over the ranks; callbacks that follow see the averages.

    Metrics are paired by name. Keras numbers layers without a name within each process, so name the outputs
    of a model that has several. A metric that is an array is averaged element by element.

    With the metrics it compares the weights that the ranks train: ``POLYHVD_CHECK_DRIFT``.

    Args:
        device: accepted for compatibility with Horovod.

    Raises:
        InvalidArgumentError: ``device`` is not the host, or, at the end of an epoch, a metric is not a
            number.
        RankMismatchError: at the end of an epoch, the ranks' metrics have different names or shapes; or, with
            ``POLYHVD_CHECK_DRIFT=error``, their weights differ.

    Example::

        model.fit(data, callbacks=[hvd.callbacks.MetricAverageCallback(), keras.callbacks.EarlyStopping()])
    """

    model: Any

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self._accept_device(device)
        self._has_reported = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Overwrite the metrics."""
        if logs is None:
            return
        self._compare(epoch)
        for name, rows in gather_by_name("MetricAverageCallback", logs, advice=_METRIC_ADVICE).items():
            mean = rows.mean(axis=0)
            logs[name] = mean if mean.ndim else float(mean)

    def _compare(self, epoch: int) -> None:
        """Compare the ranks' weights, of models whose training method is known."""
        if self.model is None:  # called by a loop of the user's own
            return
        reducer, variables = _reducer_of(self.model.optimizer), self.model.trainable_variables
        sharing = global_process_set if reducer is None else reducer.process_set
        kept = _local_variables.get(self.model, set())
        local = [self._reference(variable) in kept for variable in variables]
        if reducer is not None and reducer.options.mapping is None:
            local = [a or b for a, b in zip(local, reducer.are_local(variables), strict=True)]
        elif not _trains_apart(self.model):
            local = [True] * len(variables)
        weights = values_of(variables, local)
        values = hyperparameters_of(self.model.optimizer, variables, local)
        found = compare_now("MetricAverageCallback.drift", sharing, weights, global_process_set, values)
        if found is not None and not self._has_reported:
            self._has_reported = True
            text = f"MetricAverageCallback: at the end of epoch {epoch + 1} {found.text}"
            remedy = f"{_PLAIN}: {_DISTRIBUTE}" if reducer is None else DRIFT_REMEDY
            remedy = found.remedy or remedy
            report(current.world(), text, remedy, is_reporter=found.is_reporter)

    @abc.abstractmethod
    def _reference(self, variable: Any) -> Any:
        """The same object for a variable and its wrappers."""

    @abc.abstractmethod
    def _accept_device(self, device: str) -> None:
        """Refuse what is not the host."""


class LearningRateSchedule:
    """Sets the learning rate to ``initial_lr * multiplier``, in epochs from ``start_epoch`` to ``end_epoch``.

    Outside of them it stays as it is. At the end of an epoch, ``logs["lr"]`` is the rate.

    When the rate changes, the velocity of SGD and RMSprop with momentum, which has the rate in it, is
    multiplied by new / old (momentum correction: Goyal et al., 2017, arXiv:1706.02677, equation 10). That
    also holds in a compiled step, where another momentum would have no effect.

    Args:
        initial_lr: the rate that ``multiplier`` is relative to; for all ranks together.
        multiplier: a number; or a function of the epoch, which is a whole number with ``staircase``, and has
            the part of the epoch that is done (batch / steps_per_epoch) in it without.
        start_epoch: first epoch.
        end_epoch: the epoch after the last one; None: no end.
        staircase: change the rate at the beginning of an epoch, instead of each batch. True for a number.
        momentum_correction: whether to correct velocities.
        steps_per_epoch: number of batches; None: as Keras knows.

    Raises:
        InvalidArgumentError: the number of batches is needed, and Keras does not know it.

    Example::

        hvd.callbacks.LearningRateScheduleCallback(0.1 * hvd.size(), 1e-1, start_epoch=30, end_epoch=60)
    """

    model: Any
    params: dict[str, Any] | None

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise InvalidArgumentError(f"{type(self).__name__}: initial_lr is None; pass the learning rate")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier: Callable[[float], float] = multiplier
            self.staircase = staircase
        else:
            factor = float(multiplier)
            self.multiplier = lambda epoch: factor
            self.staircase = True

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out how many batches an epoch has."""
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise InvalidArgumentError(
                f"{type(self).__name__}: Keras does not know how many batches an epoch has; pass "
                "steps_per_epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Change the rate, if this is the epoch and the batch for it."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set_rate(self.multiplier(epoch + batch / self.steps_per_epoch))
        elif batch == 0:
            self._set_rate(self.multiplier(epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the rate to the logs."""
        if logs is not None:
            logs["lr"] = _number(self.model.optimizer.learning_rate)

    def _set_rate(self, multiplier: float) -> None:
        optimizer = self.model.optimizer
        old, new = _number(optimizer.learning_rate), float(self.initial_lr * multiplier)
        if new == old:
            return
        optimizer.learning_rate = new
        if self.momentum_correction and old > 0:
            for velocity in _velocities(optimizer, self.model):
                velocity.assign(velocity * (new / old))


class LearningRateWarmup(LearningRateSchedule):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr`` over the first epochs.

    Gradual warm-up (Goyal et al., 2017, arXiv:1706.02677, section 2.2): by the same amount in each batch,
    ``initial_lr / size * (epoch * (size - 1) / warmup_epochs + 1)``, where ``epoch`` has the part of the
    epoch in it that is done when the batch is: the last batch of the warm-up has ``initial_lr``. With
    ``steps_per_execution``, all batches of an execution have the rate of its first one.

    Args:
        initial_lr: the rate to reach, such as ``0.01 * hvd.size()``.
        warmup_epochs: number of epochs.
        momentum_correction, steps_per_epoch: as of :class:`LearningRateSchedule`.
        verbose: 1: print a line when it is over.

    Raises:
        InvalidArgumentError: ``initial_lr`` is None, or the number of batches is needed, and Keras does not
            know it.

    Example::

        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.01 * hvd.size(), warmup_epochs=3)
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            done = min(epoch + 1.0 / self.steps_per_epoch, warmup_epochs)
            size = current.world().placement.size
            return (done * (size - 1) / warmup_epochs + 1.0) / size

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Run the base class's method; after the last epoch, set the rate, and print a line."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is None or epoch != math.ceil(self.end_epoch) - 1:
            return
        self._set_rate(1.0)  # the last execution began with a batch before the last one
        if self.verbose > 0:
            rate = _number(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class LogMetrics:
    """Passes ``hvd.metrics()`` to TensorBoard, MLflow, Weights & Biases or a function, on rank 0.

    Their names begin with ``polyhvd/``. They are those of rank 0.

    Args:
        writer: the SummaryWriter of ``tf.summary.create_file_writer()`` or of PyTorch, the module ``mlflow``,
            the run of ``wandb.init()``, or a function that is called with a dict and the number of the
            step. Only rank 0 uses it; the other ranks may pass None.
        every_n_steps: steps between two entries.

    Raises:
        InvalidArgumentError: an argument cannot be used.

    Example::

        writer = tf.summary.create_file_writer("logs") if hvd.rank() == 0 else None
        model.fit(x, y, callbacks=[hvd.callbacks.LogMetricsCallback(writer)])
    """

    def __init__(self, writer: Any, every_n_steps: int = 50) -> None:
        super().__init__()
        self._metrics = MetricsLog(writer, every_n_steps)
        self._first = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note which steps are executed together."""
        self._first = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Write an entry if it is due."""
        self._metrics.add_steps(max(1, batch - self._first + 1))


class BestModel:
    """Saves the model of rank 0 whenever the monitored metric has become better.

    Other ranks write nothing: they have the same model, and often the same disk. Put MetricAverageCallback
    before it, so that the metric is that of all ranks.

    Args:
        monitor, verbose, mode, save_freq: as of ``keras.callbacks.ModelCheckpoint``.
        filepath: where to; it is also an attribute that can be set later, as in Horovod. None:
            ``best_model.keras``, or ``best_model.weights.h5`` of only weights.
        save_weights_only: save no more than the weights.

    Raises:
        OSError: on rank 0, the file cannot be written.

    Example::

        checkpoint = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath="best.keras")
        model.fit(data, callbacks=[hvd.callbacks.MetricAverageCallback(), checkpoint])
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: Any = None,
        save_weights_only: bool = False,
    ) -> None:
        if filepath is None:
            filepath = "best_model.weights.h5" if save_weights_only else "best_model.keras"
        arguments: dict[str, Any] = {
            "monitor": monitor,
            "verbose": verbose,
            "save_best_only": True,
            "save_weights_only": save_weights_only,
            "mode": mode,
            "save_freq": save_freq,
        }
        super().__init__(filepath, **arguments)  # type: ignore[call-arg]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call the base class on rank 0."""
        if current.world().placement.rank == 0:
            super().on_train_batch_end(batch, logs)  # type: ignore[misc]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Call the base class on rank 0."""
        if current.world().placement.rank == 0:
            super().on_epoch_end(epoch, logs)  # type: ignore[misc]
        else:
            self._note_best(logs or {})

    def _note_best(self, logs: dict[str, Any]) -> None:
        """Keep the best value on each rank: in an elastic job it may become rank 0."""
        own: Any = self
        value = logs.get(own.monitor)
        if value is None or np.ndim(value) or own.save_freq != "epoch":
            return  # rank 0 keeps no best value then
        if own.monitor_op is None:
            own._set_monitor_op()  # of Keras 3, as in its on_epoch_end()
        is_better = getattr(own, "_is_improvement", own.monitor_op)  # Keras 2 has only the operator
        if is_better(value, own.best):
            own.best = value


def _reducer_of(optimizer: Any) -> Any:
    """The reducer of an optimizer, or of the one that it scales losses for; None: there is none."""
    both: list[Any] = [optimizer, getattr(optimizer, "inner_optimizer", None)]
    return next((each._polyhvd for each in both if is_distributed(each)), None)


def _trains_apart(model: Any) -> bool:
    """Return whether nothing reduces gradients: the optimizer does not, and ``train_step`` is Keras' own."""
    if model.optimizer is None or _reducer_of(model.optimizer) is not None:
        return False
    step = getattr(type(model), "train_step", None)
    return getattr(step, "__module__", "").partition(".")[0] in ("keras", "tf_keras")


def _is_built(model: Any) -> bool:
    """Return whether all variables exist: a model may report itself as built while a layer has none yet."""
    layers = model._flatten_layers() if hasattr(model, "_flatten_layers") else model.layers
    return bool(model.built) and all(getattr(layer, "built", True) for layer in layers)


def _number(variable: Any) -> float:
    return float(variable.numpy() if hasattr(variable, "numpy") else variable)


def _velocities(optimizer: Any, model: Any) -> list[Any]:
    """Variables that are changed by the momentum rule, of Keras 3, Keras 2 or its older optimizers."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if _WITH_VELOCITY.isdisjoint(cls.__name__ for cls in type(optimizer).__mro__):
        return []
    names = optimizer.get_slot_names() if hasattr(optimizer, "get_slot_names") else ()
    if "momentum" in names:
        return [optimizer.get_slot(variable, "momentum") for variable in model.trainable_variables]
    known = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or ()
    return [velocity for velocity in known if velocity is not None]
