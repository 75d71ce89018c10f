"""Handlers for ``mxnet.gluon.contrib.estimator``: ranks start with equal weights and report equal metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mxnet.gluon.contrib.estimator import BatchEnd, EpochEnd, TrainBegin
from mxnet.metric import PCC, CompositeEvalMetric, EvalMetric
from polyhvd.mxnet.errors import InvalidArgumentError, RankMismatchError, as_mxnets
from polyhvd.mxnet.kvstore import Horovod
from polyhvd.mxnet.optimizer import DistributedOptimizer
from polyhvd.mxnet.state import broadcast_optimizer_state, broadcast_parameters
from polyhvd.mxnet.trainer import DistributedTrainer
from polyhvd.mxnet.weights import DRIFT_REMEDY, hyperparameters_of, values_of

from polyhvd.collectives.objects import allgather_object
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.runtime import current
from polyhvd.training.drift import compare_now, report
from polyhvd.training.metrics_log import MetricsLog
from polyhvd.training.naming import gather_by_name, numbered

__all__ = ["BroadcastHandler", "LogMetricsHandler", "MetricAverageHandler", "average_metrics"]

#: What the metrics of MXNet divide one by the other, whatever they make of it then.
SUMS = ("sum_metric", "num_inst", "global_sum_metric", "global_num_inst")
_PLAIN = "the trainer is not distributed, so that each rank trains a separate model"
_DISTRIBUTE = "give the estimator a trainer of hvd.DistributedTrainer"
_ADVICE = "use the same metrics on every rank; Loss(name='validation loss') gives one a name"


class BroadcastHandler(TrainBegin):  # type: ignore[misc]
    """Gives every rank the root's parameters and optimizer states when training begins.

    Parameters that are not initialised yet are broadcast right after their initialisation. It logs a warning
    if the estimator's trainer is not distributed: ``POLYHVD_CHECK_DRIFT``.

    Args:
        root_rank: world rank of the sender.
        process_set: the ranks that take part.

    Raises:
        RankMismatchError: when training begins, the ranks' parameters or optimizers differ, or only some
            ranks have initialised all parameters; or, with ``POLYHVD_CHECK_DRIFT=error``, the trainer is
            not distributed.

    Example::

        estimator.fit(data, epochs=5, event_handlers=[BroadcastHandler(root_rank=0)])
    """

    def __init__(self, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> None:
        self._root_rank = root_rank
        self._process_set = process_set
        self.priority = -3000  # before any other handler looks at the parameters

    def train_begin(self, estimator: Any, *_: Any, **__: Any) -> None:
        """Broadcast both."""
        ranks = self._process_set
        if ranks.size() > 1 and not _is_distributed(estimator.trainer):
            with as_mxnets():
                report(
                    current.world(), f"BroadcastHandler: {_PLAIN}", _DISTRIBUTE, is_reporter=ranks.rank() == 0
                )
        parameters = estimator.net.collect_params()
        is_deferred = any(parameter._deferred_init for parameter in parameters.values())
        _require_same_initialisation(is_deferred, ranks)
        broadcast_parameters(parameters, self._root_rank, process_set=self._process_set)
        if not is_deferred:
            broadcast_optimizer_state(estimator.trainer, self._root_rank, self._process_set)


def _require_same_initialisation(is_deferred: bool, process_set: ProcessSet) -> None:
    """Raise RankMismatchError unless all ranks have initialised all parameters, or none has.

    Some would wait in the broadcast of optimizer states, and others in their first step.
    """
    own = current.world().placement.rank, is_deferred
    with as_mxnets():
        by_rank = dict(allgather_object(own, "BroadcastHandler", process_set))
    deferred = [rank for rank, each in by_rank.items() if each]
    if deferred and len(deferred) < len(by_rank):
        raise RankMismatchError(
            f"BroadcastHandler: ranks {deferred} have parameters without values, and ranks "
            f"{[rank for rank in by_rank if rank not in deferred]} have none; run the network once on every "
            "rank before fit(), as in net(mx.nd.zeros(shape))"
        )


class MetricAverageHandler(TrainBegin, EpochEnd):  # type: ignore[misc]
    """Replaces metrics by those over all ranks at the end of each epoch.

    It compares the weights that the ranks train, too: ``POLYHVD_CHECK_DRIFT``. It runs after metrics and
    validation, before what reports, saves or stops. For logs of validation, pass
    another one to ``ValidationHandler(event_handlers=[...])``.

    Args:
        metrics: those to be averaged; None: the estimator's own, of training and validation.
        process_set: the ranks that take part.
        priority: as of the handlers of Gluon; lower ones run first.

    Raises:
        InvalidArgumentError: when training begins, a metric cannot be averaged; see :func:`average_metrics`.

    Example::

        estimator.fit(data, epochs=5, event_handlers=[BroadcastHandler(), MetricAverageHandler()])
    """

    def __init__(
        self,
        metrics: Sequence[EvalMetric] | None = None,
        process_set: ProcessSet = global_process_set,
        priority: float = -500,
    ) -> None:
        self.metrics = list(metrics or ())
        self.priority = priority
        self._process_set = process_set
        self._has_reported = False

    def _of(self, estimator: Any) -> list[EvalMetric]:
        return self.metrics or estimator.train_metrics + estimator.val_metrics

    def train_begin(self, estimator: Any, *_: Any, **__: Any) -> None:
        """Refuse metrics that cannot be averaged, before anything was computed."""
        list(_simple(self._of(estimator)))

    def epoch_end(self, estimator: Any, *_: Any, **__: Any) -> bool:
        """Average; training goes on."""
        self._compare(estimator.trainer)
        average_metrics(self._of(estimator), self._process_set)
        return False

    def _compare(self, trainer: Any) -> None:
        is_ours = isinstance(trainer, DistributedTrainer)
        weights = trainer.shared_values() if is_ours else values_of(trainer._params)
        sharing = trainer.process_set if is_ours else self._process_set
        with as_mxnets():
            values = (
                trainer.shared_hyperparameters()
                if is_ours
                else hyperparameters_of(trainer._optimizer, ((each.name, None) for each in trainer._params))
            )
            found = compare_now("MetricAverageHandler.drift", sharing, weights, self._process_set, values)
            if found is not None and not self._has_reported:
                self._has_reported = True
                remedy = DRIFT_REMEDY if _is_distributed(trainer) else f"{_PLAIN}: {_DISTRIBUTE}"
                remedy = found.remedy or remedy
                text = f"MetricAverageHandler: at the end of an epoch {found.text}"
                report(current.world(), text, remedy, is_reporter=found.is_reporter)


class LogMetricsHandler(BatchEnd):  # type: ignore[misc]
    """Passes ``hvd.metrics()`` to TensorBoard, MLflow, Weights & Biases or a function, on rank 0.

    Their names begin with ``polyhvd/``. They are those of rank 0.

    Args:
        writer: a SummaryWriter with ``add_scalar()``, the module ``mlflow``, the run of ``wandb.init()``, or
            a function that is called with a dict and the number of the step. Only rank 0 uses it; the other
            ranks may pass None.
        every_n_steps: batches between two entries.

    Raises:
        InvalidArgumentError: an argument cannot be used.

    Example::

        estimator.fit(data, epochs=5, event_handlers=[BroadcastHandler(), LogMetricsHandler(mlflow)])
    """

    def __init__(self, writer: Any, every_n_steps: int = 50) -> None:
        with as_mxnets():
            self._log = MetricsLog(writer, every_n_steps)

    def batch_end(self, estimator: Any, *_: Any, **__: Any) -> bool:
        """Write an entry if it is due; training goes on."""
        self._log.add_steps()
        return False


def _is_distributed(trainer: Any) -> bool:
    """Return whether gradients are reduced over ranks, by us or by a store of MXNet's."""
    store = trainer._kvstore_params["kvstore"]
    name = store if isinstance(store, str) else getattr(store, "type", "")
    return (
        isinstance(trainer, DistributedTrainer)
        or isinstance(trainer._optimizer, DistributedOptimizer)
        or isinstance(store, Horovod)
        or "dist" in name
        or name.lower() == "horovod"
    )


def average_metrics(
    metrics: EvalMetric | Sequence[EvalMetric], process_set: ProcessSet = global_process_set
) -> None:
    """Let metrics be of the samples of all ranks, in place, each weighted by its number of samples.

    Metrics are paired by name, those of one name by their order. A rank may have seen no sample. Metrics that
    average over batches rather than samples (F1 with ``average="macro"``) average over those of all ranks.

    Args:
        metrics: of ``mxnet.metric``, composite or not, the same ones on every rank.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: a metric is not a sum divided by a number, such as F1 with
            ``average="micro"``.
        RankMismatchError: the ranks' metrics have different names.

    Example::

        for x, y in my_part:
            accuracy.update(y, net(x))
        average_metrics(accuracy)
        print(accuracy.get())
    """
    simple = list(_simple([metrics] if isinstance(metrics, EvalMetric) else metrics))
    named = dict(zip(numbered(str(metric.name) for metric in simple), simple, strict=True))
    sums = {name: [float(getattr(metric, key)) for key in SUMS] for name, metric in named.items()}
    with as_mxnets():
        rows = gather_by_name("average_metrics", sums, process_set, _ADVICE)
    for name, metric in named.items():
        for key, total in zip(SUMS, rows[name].sum(axis=0).tolist(), strict=True):
            setattr(metric, key, total)


def _simple(metrics: Sequence[EvalMetric]) -> Iterator[EvalMetric]:
    """The metrics in metrics, each of which is a sum by a number."""
    for metric in metrics:
        if isinstance(metric, CompositeEvalMetric):
            yield from _simple(metric.metrics)
            continue
        average = getattr(metric, "average", getattr(metric, "_average", None))
        if average == "micro" or isinstance(metric, PCC) or not all(hasattr(metric, n) for n in SUMS):
            raise InvalidArgumentError(
                f"average_metrics: {type(metric).__name__} {metric.name!r} is not a sum over samples "
                "divided by their number; gather its values with allgather_object, or use average='macro'"
            )
        yield metric
