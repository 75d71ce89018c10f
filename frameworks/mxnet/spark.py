"""Spark ML estimator for networks of Gluon; users import it as ``polyhvd.spark.mxnet``."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import mxnet as mx
import numpy as np
import polyhvd.mxnet
from mxnet import autograd, gluon
from polyhvd.mxnet.elastic import GluonState
from polyhvd.mxnet.estimator import SUMS, average_metrics
from polyhvd.mxnet.state import broadcast_optimizer_state, broadcast_parameters, optimizer_of
from polyhvd.mxnet.trainer import DistributedTrainer

from polyhvd.spark.estimators.checkpoint import Checkpoint
from polyhvd.spark.estimators.estimator import FrameworkEstimator, per_column, shapes_of
from polyhvd.spark.estimators.looping import LoopTrainer
from polyhvd.spark.estimators.model import FrameworkModel, Predict
from polyhvd.spark.estimators.params import ESTIMATORS, MODELS, has_params
from polyhvd.spark.estimators.training import Trainer

__all__ = ["GluonEstimator", "GluonModel"]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves out what a hybridized network has compiled, which its next call makes again."""

    def reducer_override(self, value: Any) -> Any:
        return (_nothing, ()) if isinstance(value, mx.nd.CachedOp) else super().reducer_override(value)


def _nothing() -> None:
    return None


def _pickled(value: Any) -> bytes:
    """Anything with networks in it, as bytes for :func:`pickle.loads`."""
    data = io.BytesIO()
    _Pickler(data).dump(value)
    return data.getvalue()


class _OfGluon:
    """How estimators and models keep networks when they are saved."""

    def _packed(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"pickled": _pickled(values)}

    def _unpacked(self, values: dict[str, Any]) -> dict[str, Any]:
        return dict(pickle.loads(values["pickled"]))


@has_params(MODELS, "mxnet")
class GluonModel(_OfGluon, FrameworkModel):
    """A trained network of Gluon, which adds predictions to a DataFrame.

    ``transform(df)`` returns the DataFrame with a column for each label column: of the label's type if the
    output has one number for each row, else vectors of Spark ML. Tasks predict on their processors.

    Args:
        values: of the parameters, by name; see ``polyhvd docs spark``.

    Example::

        model = GluonModel.load("hdfs://host/model")
        model.transform(df).select("label__output")
    """

    _framework = "mxnet"

    def _predictor(self) -> Callable[[], Predict]:
        columns = list(self.getOrDefault("feature_columns"))
        shapes = shapes_of(self.getOrDefault("input_shapes"), columns)
        whole = [name in (self.getOrDefault("categorical_cols") or ()) for name in columns]
        return _Predictor(_pickled(self.getOrDefault("model")), shapes, whole)


class _Predictor:
    """Makes the function that predicts, in a task of Spark."""

    def __init__(self, model: bytes, shapes: list[Any], whole: list[bool]) -> None:
        self._model, self._shapes, self._whole = model, shapes, whole

    def __call__(self) -> Predict:
        net = pickle.loads(self._model)

        def predict(arrays: list[Any]) -> list[Any]:
            inputs = [_input(*one) for one in zip(arrays, self._shapes, self._whole, strict=True)]
            return [output.asnumpy() for output in _listed(net(*inputs))]

        return predict


@has_params(ESTIMATORS, "mxnet")
class GluonEstimator(_OfGluon, FrameworkEstimator):
    """Fits a network of Gluon to a DataFrame, on ranks that tasks of Spark start.

    Rows are written to the store, and read by the ranks. Feature columns are float32, in the order of the
    network's arguments, and label columns are float32. The optimizer is one of ``mxnet.optimizer``, or its
    name; its learning rate is multiplied by the number of ranks, unless it has a scheduler. A loss is one of
    ``mxnet.gluon.loss``, or a function of output and label that returns the loss of each row. Metrics are
    those of ``mxnet.metric``, or their names.

    Args:
        values: of the parameters, by name; see ``polyhvd docs spark``.

    Raises:
        TypeError: there is no such parameter, or a value has a wrong type.

    Example::

        estimator = GluonEstimator(num_proc=2, store=store, model=net, optimizer="adam",
                                   loss=gluon.loss.L2Loss(), feature_cols=["x"], label_cols=["y"], epochs=5)
        predictions = estimator.fit(df).transform(df)
    """

    _framework = "mxnet"
    _model_class = GluonModel

    @property
    def _trainer(self) -> type[Trainer]:
        return _GluonTrainer

    def _imported(self) -> Any:
        return polyhvd.mxnet  # it gives MXNet names that NumPy has no more

    def _payload(self) -> bytes:
        net, optimizer = self.getOrDefault("model"), self.getOrDefault("optimizer")
        if not isinstance(net, gluon.Block):
            raise ValueError(f"fit(): model is a {type(net).__qualname__}; expected a mxnet.gluon.Block")
        if mx.util.is_np_array():
            raise ValueError("fit(): networks of mx.np cannot be used; call mx.npx.reset_np() first")
        if missing := [name for name, item in net.collect_params().items() if item._data is None]:
            raise ValueError(
                f"fit(): {missing[0]} of the model has no value yet; initialize the network, and call it "
                "once: net(mx.nd.zeros(shape))"
            )
        if not isinstance(optimizer, (str, mx.optimizer.Optimizer)):
            raise ValueError(
                f"fit(): optimizer is a {type(optimizer).__qualname__}; expected the name of one, such as "
                '"sgd", or one of mxnet.optimizer'
            )
        if self.getOrDefault("loss") is None:
            raise ValueError("fit(): loss is missing")
        per_column(self.getOrDefault("loss"), self._list("label_cols"))
        shapes_of(self.getOrDefault("input_shapes"), self._list("feature_cols"))
        names = ("loss", "metrics", "gradient_compression", "input_shapes", "backward_passes_per_step")
        values = {name: self.getOrDefault(name) for name in names}
        values["metrics"] = [mx.metric.create(metric) for metric in values["metrics"] or ()]
        return _pickled((net, self._optimizer(), values))

    def _optimizer(self) -> Any:
        given = self.getOrDefault("optimizer")
        return mx.optimizer.create(given) if isinstance(given, str) else given

    def _identity_of_framework(self) -> dict[str, Any]:
        optimizer = self._optimizer()
        plain = {
            name: value
            for name, value in vars(optimizer).items()
            if isinstance(value, (bool, int, float, str, type(None)))
        }
        return {
            "model": [
                list(parameter.shape) for parameter in self.getOrDefault("model").collect_params().values()
            ],
            "optimizer": [type(optimizer).__qualname__, plain],
        }

    def _fitted(self, payload: bytes, checkpoint: Checkpoint) -> dict[str, Any]:
        net, _, values = pickle.loads(payload)
        net.collect_params().reset_ctx(mx.cpu())  # this gives them gradients, too
        GluonState(net).imported({"net": pickle.loads(checkpoint.state)["net"]})
        return {"model": net, "input_shapes": values["input_shapes"]}


class _GluonTrainer(LoopTrainer):
    """Training on a rank."""

    def load(self) -> None:
        """Implement :meth:`LoopTrainer.load`."""
        params = self.run.params
        self._net, optimizer, values = pickle.loads(self.run.job.payload)
        self._device = mx.cpu()
        if params["use_gpu"] and (gpus := mx.context.num_gpus()):
            self._device = mx.gpu(polyhvd.local_rank() % gpus)
        self._net.collect_params().reset_ctx(self._device)  # this gives them gradients, too
        self._input_shapes = shapes_of(values["input_shapes"], self.features)
        self._label_shapes = shapes_of(params["label_shapes"], self.labels)
        self._whole = [name in (params["categorical_cols"] or ()) for name in self.features]
        self._losses = per_column(values["loss"], self.labels)
        self._loss = mx.metric.Loss("loss")
        self._metrics = [
            (place, _named(metric, label if len(self.labels) > 1 else ""))
            for place, label in enumerate(self.labels)
            for metric in values["metrics"]
        ]
        self._per_step = values["backward_passes_per_step"]
        options = {"backward_passes_per_step": self._per_step}
        if values["gradient_compression"] is not None:
            options["compression"] = values["gradient_compression"]
        self._trainer = DistributedTrainer(self._net.collect_params(), optimizer, **options)
        if self.run.checkpoint.state:
            self.elastic_state().imported(pickle.loads(self.run.checkpoint.state))

    def start(self) -> None:
        """Implement :meth:`LoopTrainer.start`."""
        broadcast_parameters(self._net.collect_params(), root_rank=0)
        broadcast_optimizer_state(self._trainer, root_rank=0)

    def seed(self, number: int) -> None:
        """Implement :meth:`LoopTrainer.seed`."""
        mx.random.seed(number)

    def rates(self) -> list[float]:
        """Implement :meth:`LoopTrainer.rates`."""
        _, optimizer = optimizer_of(self._trainer)
        return [] if optimizer.lr_scheduler is not None else [optimizer.lr]

    def set_rates(self, rates: Sequence[float]) -> None:
        """Implement :meth:`LoopTrainer.set_rates`."""
        _, optimizer = optimizer_of(self._trainer)
        for rate in rates:
            optimizer.lr = rate

    def elastic_state(self, **values: Any) -> GluonState:
        """Implement :meth:`LoopTrainer.elastic_state`."""
        return GluonState(self._net, self._trainer, **values)

    def begin_pass(self) -> None:
        """Implement :meth:`LoopTrainer.begin_pass`."""
        for metric in self._all_metrics():
            metric.reset()

    def _all_metrics(self) -> list[Any]:
        return [self._loss, *(metric for _, metric in self._metrics)]

    def sums(self) -> Any:
        """Implement :meth:`LoopTrainer.sums`."""
        return np.array([[float(getattr(metric, name)) for name in SUMS] for metric in self._all_metrics()])

    def set_sums(self, values: Any) -> None:
        """Implement :meth:`LoopTrainer.set_sums`."""
        for metric, numbers in zip(self._all_metrics(), values.tolist(), strict=True):
            for name, number in zip(SUMS, numbers, strict=True):
                setattr(metric, name, number)

    def step(self, batch: Any, *, is_training: bool) -> None:
        """Implement :meth:`LoopTrainer.step`."""
        inputs, labels, weights = self._arrays(batch)
        with autograd.record() if is_training else autograd.pause():
            outputs = self._outputs(inputs)
            labels = [
                label.reshape(output.shape) if output.size == label.size else label
                for output, label in zip(outputs, labels, strict=True)
            ]
            loss = self._total(outputs, labels, weights)
            weighted = batch.weight * loss
        if is_training:
            weighted.backward()
            self._update()
        self.output_shapes = [list(output.shape[1:]) for output in outputs]
        if not batch.weight:
            return
        rows = len(batch.indices)
        self._loss.update(None, [loss.broadcast_to((rows,))])
        for place, metric in self._metrics:
            metric.update([labels[place]], [outputs[place]])

    def _update(self) -> None:
        self._trainer.step(1)  # the loss is a mean
        self.passes = (self.passes + 1) % self._per_step

    def end_pass(self, *, is_training: bool) -> dict[str, Any]:
        """Implement :meth:`LoopTrainer.end_pass`."""
        while is_training and self.passes:  # without further gradients
            for parameter in self._net.collect_params().values():
                parameter.zero_grad()
            self._update()
        metrics = self._all_metrics()
        average_metrics(metrics)
        return {name: float(value) for metric in metrics for name, value in metric.get_name_value()}

    def _arrays(self, batch: Any) -> tuple[list[Any], list[Any], Any]:
        """Inputs, labels and weights of the rows."""
        arrays = batch.arrays
        inputs = [
            _input(arrays[name], shape, is_whole).as_in_context(self._device)
            for name, shape, is_whole in zip(self.features, self._input_shapes, self._whole, strict=True)
        ]
        labels = []
        for name, shape in zip(self.labels, self._label_shapes, strict=True):
            label = _input(arrays[name], None, False).as_in_context(self._device)
            labels.append(label if shape is None else label.reshape((len(label), *shape)))
        column = self.run.params["sample_weight_col"]
        weights = None if column is None else _input(arrays[column], (-1,), False).as_in_context(self._device)
        return inputs, labels, weights

    def _outputs(self, inputs: list[Any]) -> list[Any]:
        try:
            outputs = _listed(self._net(*inputs))
        except (mx.MXNetError, TypeError, ValueError, AssertionError) as error:
            if isinstance(error, polyhvd.HorovodInternalError):
                raise
            raise self.refused_inputs(inputs, error) from error
        self.require_outputs(outputs)
        return outputs

    def _total(self, outputs: list[Any], labels: list[Any], weights: Any) -> Any:
        """The weighted sum of the losses, each a mean over the rows, as an array of one number."""
        total: Any = 0.0
        for place, (loss, output, label) in enumerate(zip(self._losses, outputs, labels, strict=True)):
            try:
                rows = loss(output, label)
                rows = rows.reshape((len(output), -1)).mean(axis=1)
            except (mx.MXNetError, TypeError, ValueError, AssertionError) as error:
                if isinstance(error, polyhvd.HorovodInternalError):
                    raise
                raise self.refused_labels(place, output, label, error) from error
            if weights is not None:
                rows = rows * weights
            total = total + self.loss_weights[place] * rows.mean()
        return total

    def state(self) -> bytes:
        """Implement :meth:`LoopTrainer.state`."""
        values = self.elastic_state().exported()
        for rate in self.base_rates():
            values["trainer"]["attributes"] = {**values["trainer"]["attributes"], "lr": rate}
        return pickle.dumps(values)


def _named(metric: Any, label: str) -> Any:
    """A copy of a metric; with a label, its name begins with that."""
    found = copy.deepcopy(metric)
    if label:
        found.name = f"{label}_{found.name}"
    return found


def _input(array: Any, shape: Any, is_whole: bool) -> Any:
    """An array of float32, or of int64 if integers are to stay integers; in a shape unless that is None."""
    array = np.asarray(array)
    kind = np.int64 if is_whole and array.dtype.kind in "iu" else np.float32
    made = mx.nd.array(array.astype(kind), dtype=kind)
    return made if shape is None else made.reshape(tuple(shape))


def _listed(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
