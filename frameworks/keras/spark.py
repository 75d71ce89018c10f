"""Spark ML estimator for models of Keras; users import it as ``polyhvd.spark.keras``."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np
from polyhvd.keras import callbacks as hvd_callbacks
from polyhvd.keras import elastic
from polyhvd.keras.data import Batches
from polyhvd.keras.wrappers import DistributedOptimizer

import polyhvd
from polyhvd.elastic.train import Training
from polyhvd.spark.estimators.checkpoint import Checkpoint
from polyhvd.spark.estimators.estimator import FrameworkEstimator, shapes_of
from polyhvd.spark.estimators.model import FrameworkModel, Predict
from polyhvd.spark.estimators.params import ESTIMATORS, MODELS, has_params
from polyhvd.spark.estimators.training import Run, Trainer, require_columns_of

__all__ = ["KerasEstimator", "KerasModel"]


class _Saved:
    """A model or another object of Keras as bytes, since objects of its frameworks cannot be pickled.

    Args:
        data: of a file of Keras, or the configuration of another object.
    """

    def __init__(self, data: bytes | dict[str, Any]) -> None:
        self._data = data

    @staticmethod
    def of(value: Any) -> Any:
        """The same value, with objects of Keras within it as bytes."""
        if isinstance(value, keras.Model):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.keras"
                value.save(path)
                return _Saved(path.read_bytes())
        if isinstance(value, Mapping):
            return {name: _Saved.of(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [_Saved.of(item) for item in value]
        kinds = (keras.optimizers.Optimizer, keras.losses.Loss, keras.metrics.Metric)
        return _Saved(keras.saving.serialize_keras_object(value)) if isinstance(value, kinds) else value

    @staticmethod
    def load(value: Any, custom_objects: Mapping[str, Any] | None) -> Any:
        """The value again."""
        if isinstance(value, Mapping):
            return {name: _Saved.load(item, custom_objects) for name, item in value.items()}
        if isinstance(value, list):
            return [_Saved.load(item, custom_objects) for item in value]
        if not isinstance(value, _Saved):
            return value
        known = dict(custom_objects or {})
        if not isinstance(value._data, bytes):
            return keras.saving.deserialize_keras_object(value._data, custom_objects=known)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.keras"
            path.write_bytes(value._data)
            return keras.models.load_model(path, custom_objects=known, compile=False)


class _OfKeras:
    """How estimators and models keep objects of Keras when they are saved."""

    def _packed(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: _Saved.of(value) for name, value in values.items()}

    def _unpacked(self, values: dict[str, Any]) -> dict[str, Any]:
        custom = values.get("custom_objects")
        return {name: _Saved.load(value, custom) for name, value in values.items()}


@has_params(MODELS, "keras")
class KerasModel(_OfKeras, FrameworkModel):
    """A trained model of Keras, which adds predictions to a DataFrame.

    ``transform(df)`` returns the DataFrame with a column for each label column: of the label's type if the
    output has one number for each row, else vectors of Spark ML.

    Args:
        values: of the parameters, by name; see ``polyhvd docs spark``.

    Example::

        model = KerasModel.load("hdfs://host/model")
        model.transform(df).select("label__output")
    """

    _framework = "keras"

    def _predictor(self) -> Callable[[], Predict]:
        model = self.getOrDefault("model")
        columns = list(self.getOrDefault("feature_columns"))
        whole = frozenset(self.getOrDefault("categorical_cols") or ())
        return _Predictor(_Saved.of(model), self.getOrDefault("custom_objects"), columns, whole)


class _Predictor:
    """Makes the function that predicts, in a task of Spark."""

    def __init__(self, model: Any, custom_objects: Any, columns: list[str], whole: frozenset[str]) -> None:
        self._model, self._custom_objects = model, custom_objects
        self._columns, self._whole = columns, whole

    def __call__(self) -> Predict:
        model = _Saved.load(self._model, self._custom_objects)
        shapes = _shapes_of(model.inputs, self._columns)

        def predict(arrays: list[Any]) -> list[Any]:
            inputs = [
                _shaped(array, shape, name in self._whole)
                for array, shape, name in zip(arrays, shapes, self._columns, strict=True)
            ]
            outputs = model(inputs[0] if len(inputs) == 1 else inputs, training=False)
            # In the order of model.outputs, which is that of the labels; a dict may have another one.
            return [keras.ops.convert_to_numpy(output) for output in keras.tree.flatten(outputs)]

        return predict


@has_params(ESTIMATORS, "keras")
class KerasEstimator(_OfKeras, FrameworkEstimator):
    """Fits a model of Keras to a DataFrame, on ranks that tasks of Spark start.

    Rows are written to the store, and read by the ranks. Feature columns are float32, in the shapes of the
    model's inputs. The learning rate is multiplied by the number of ranks.

    Args:
        values: of the parameters, by name; see ``polyhvd docs spark``.

    Raises:
        TypeError: there is no such parameter, or a value has a wrong type.

    Example::

        estimator = KerasEstimator(num_proc=2, store=store, model=model, optimizer="adam", loss="mse",
                                   feature_cols=["x"], label_cols=["y"], epochs=5)
        predictions = estimator.fit(df).transform(df)
    """

    _framework = "keras"
    _model_class = KerasModel

    @property
    def _trainer(self) -> type[Trainer]:
        return _KerasTrainer

    def _payload(self) -> bytes:
        model = self.getOrDefault("model")
        if not isinstance(model, keras.Model):
            raise ValueError(f"fit(): model is a {type(model).__qualname__}; expected a keras.Model")
        if not model.built:
            raise ValueError("fit(): the model has no weights yet; begin it with keras.Input(shape)")
        if self.getOrDefault("loss") is None:
            raise ValueError("fit(): loss is missing")
        features, labels = self._list("feature_cols"), self._list("label_cols")
        _shapes_of(model.inputs, features)
        if len(model.outputs) != len(labels):
            raise ValueError(
                f"fit(): the model has {len(model.outputs)} outputs for the {len(labels)} label columns "
                f"{', '.join(labels)}"
            )
        optimizer = self._optimizer()
        names = ("loss", "loss_weights", "metrics", "gradient_compression", "backward_passes_per_step")
        values = {name: self.getOrDefault(name) for name in names}
        values |= {"model": model, "optimizer": optimizer, "policy": model.dtype_policy.name}
        custom = self.getOrDefault("custom_objects")
        callbacks = [*(self.getOrDefault("callbacks") or ())]
        return bytes(
            cloudpickle.dumps(
                (_Saved.of(values), custom, callbacks, self.getOrDefault("checkpoint_callback"))
            )
        )

    def _optimizer(self) -> Any:
        given = self.getOrDefault("optimizer") or getattr(self.getOrDefault("model"), "optimizer", None)
        if given is None:
            raise ValueError("fit(): optimizer is missing, and the model is not compiled with one")
        return keras.optimizers.get(given) if isinstance(given, str) else given

    def _identity_of_framework(self) -> dict[str, Any]:
        model, optimizer = self.getOrDefault("model"), self._optimizer()
        config = _nameless(optimizer.get_config())
        return {
            "model": [list(weight.shape) for weight in model.weights],
            "optimizer": [type(optimizer).__name__, {name: repr(value) for name, value in config.items()}],
        }

    def _fitted(self, payload: bytes, checkpoint: Checkpoint) -> dict[str, Any]:
        saved, custom, _, _ = cloudpickle.loads(payload)
        model = _Saved.load(saved["model"], custom)
        with np.load(io.BytesIO(checkpoint.state)) as arrays:
            model.set_weights([arrays[f"weight{number}"] for number, _ in enumerate(model.weights)])
        return {"model": model, "custom_objects": custom}


class _KerasTrainer(Trainer):
    """Training on a rank."""

    def train(self, run: Run) -> None:
        """Train all epochs that are left."""
        params = run.params
        if params["random_seed"] is not None:
            keras.utils.set_random_seed(params["random_seed"])
        saved, custom, callbacks, checkpoint_callback = cloudpickle.loads(run.job.payload)
        if saved["policy"] == "mixed_float16":  # saved models lack it, and compile() scales losses for it
            keras.config.set_dtype_policy(saved["policy"])
        values = _Saved.load(saved, custom)
        model = values["model"]
        features, labels = list(params["feature_cols"]), list(params["label_cols"])
        steps, all_steps = params["train_steps_per_epoch"], run.train.steps_per_epoch
        if steps is not None and steps > all_steps:
            raise ValueError(
                f"fit(): train_steps_per_epoch is {steps}, but the rows suffice for {all_steps} steps; "
                "expected no more"
            )
        options = {"backward_passes_per_step": values["backward_passes_per_step"]}
        if values["gradient_compression"] is not None:
            options["compression"] = values["gradient_compression"]
        model.compile(
            optimizer=DistributedOptimizer(values["optimizer"], **options),
            loss=values["loss"],
            loss_weights=values["loss_weights"],
            metrics=values["metrics"] or None,
        )
        optimizer = model.optimizer  # in a LossScaleOptimizer, for mixed precision
        optimizer.build(model.trainable_variables)
        rate = _Rate(optimizer)
        _load(run.checkpoint.state, model, optimizer)
        rate.scale()
        shapes = [list(output.shape[1:]) for output in model.outputs]
        noting = _Noting(run, rate, shapes)
        if run.job.is_elastic:
            first = [hvd_callbacks.DataPositionCallback(run.train)]
        else:
            first = [_Position(run), hvd_callbacks.BroadcastGlobalVariablesCallback(0)]
        given = [*first, hvd_callbacks.MetricAverageCallback(), *callbacks]
        if checkpoint_callback is not None and polyhvd.rank() == 0:
            given.append(checkpoint_callback)
        given.append(noting)

        def fit(epoch: int, callbacks: Sequence[Any]) -> None:
            validation = None
            if run.has_validation:
                validation = self._data(run, run.validation, features, labels)
                validation = _limited(validation, params, "validation_steps_per_epoch")
            train = self._data(run, run.train, features, labels)
            model.fit(
                _limited(train, params, "train_steps_per_epoch"),
                initial_epoch=epoch,
                epochs=run.epochs.stop,
                validation_data=validation,
                callbacks=callbacks,
                shuffle=False,  # the loader shuffles
                verbose=params["verbose"] and 2 if polyhvd.rank() == 0 else 0,
            )

        if run.job.is_elastic:
            _fit_elastically(fit, given, noting, model)
        else:
            fit(run.epochs.start, given)
        if callbacks:  # which may have restored better weights
            run.replace_state(noting.state)

    @staticmethod
    def _data(run: Run, loader: Any, features: list[str], labels: list[str]) -> Any:
        weights = run.params["sample_weight_col"]
        x = features[0] if len(features) == 1 else tuple(features)
        y = labels[0] if len(labels) == 1 else tuple(labels)
        return Batches(loader, x=x, y=y, sample_weight=weights).dataset()

    @staticmethod
    def preparing(job: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """Implement :meth:`Trainer.preparing`."""
        _select_gpu(job.params["use_gpu"])  # TensorFlow cannot change its GPUs after it has made a variable
        saved, custom, _, _ = cloudpickle.loads(job.payload)
        model, params = _Saved.load(saved["model"], custom), job.params
        labels = params["label_cols"]
        return _Preparing(
            dict(zip(params["feature_cols"], _shapes_of(model.inputs, params["feature_cols"]), strict=True)),
            dict(zip(labels, (tuple(output.shape[1:]) for output in model.outputs), strict=True)),
            dict(zip(labels, shapes_of(params["label_shapes"], labels), strict=True)),
            frozenset(params["categorical_cols"] or ()),
            params["sample_weight_col"],
        )


class _Preparing:
    """Gives the arrays of a batch the dtypes and shapes that the model needs."""

    def __init__(
        self,
        inputs: dict[str, Any],
        outputs: dict[str, tuple[int, ...]],
        labels: dict[str, Any],
        whole: frozenset[str],
        weight: str | None,
    ) -> None:
        self._inputs, self._outputs, self._labels = inputs, outputs, labels
        self._whole, self._weight = whole, weight

    def __call__(self, arrays: dict[str, Any]) -> dict[str, Any]:
        require_columns_of(arrays, [*self._inputs, *self._outputs])
        found = {}
        for name, shape in self._inputs.items():
            try:
                found[name] = _shaped(arrays[name], shape, name in self._whole)
            except ValueError as error:
                raise ValueError(
                    f"fit(): the model does not accept batches of {name} {list(arrays[name].shape)}; its "
                    f"input has the shape {[None, *shape]}: {error}"
                ) from None
        for name, shape in self._outputs.items():
            label = np.asarray(arrays[name])
            label = label if label.dtype.kind in "iu" else label.astype(np.float32)
            wanted = self._labels[name]
            if wanted is None and None not in shape and label[:1].size == np.prod(shape):
                wanted = shape
            found[name] = label if wanted is None else label.reshape(len(label), *wanted)
        if self._weight is not None:
            found[self._weight] = np.asarray(arrays[self._weight], np.float32)
        return found


class _Rate:
    """The learning rate of an optimizer, which ranks multiply by their number."""

    def __init__(self, optimizer: Any) -> None:
        #: The optimizer with the learning rate, which is inside of a LossScaleOptimizer.
        self.optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        rate = getattr(self.optimizer, "_learning_rate", None)
        self._is_plain = not callable(rate) or hasattr(rate, "assign")
        #: That of one rank, what it is for all of them, and how many they are.
        self.known = 0.0, 0.0, 1

    def _value(self) -> float:
        return float(keras.ops.convert_to_numpy(self.optimizer.learning_rate))

    def scale(self) -> None:
        """Multiply it, unless it is a schedule."""
        if self._is_plain:
            base = self.unscaled(self._value())
            self.optimizer.learning_rate = base * polyhvd.size()
            self.known = base, self._value(), polyhvd.size()

    def unscaled(self, value: float) -> float:
        """The rate of one rank for that of the optimizer."""
        base, scaled, size = self.known
        return base if value == scaled else value / size


def _fit_elastically(
    fit: Callable[[int, Sequence[Any]], None], callbacks: Sequence[Any], noting: _Noting, model: Any
) -> None:
    """Fit while ranks are lost or join.

    Args:
        fit: of an epoch to begin with, and callbacks.
        callbacks: in their order.
        noting: one of them.
        model: that is compiled.
    """
    run, rate = noting.run, noting.rate
    run.train.set_epoch(run.epochs.start)
    kept: Any = elastic.KerasState(model, history=dict(run.checkpoint.history or {}), rate=rate.known)
    noting.kept = kept

    def resize() -> None:
        rate.known = kept.rate
        rate.scale()
        kept.rate = rate.known
        kept.save()  # all of it together: the next commit may not come

    kept.register_reset_callbacks([resize])

    @elastic.run
    def loop(state: Training) -> None:
        rate.known = kept.rate
        state.begin_again()
        fit(run.train.epoch, [*callbacks, _Committing(state)])

    loop(Training(kept, run.train))
    run.conclude(kept.history, noting.shapes, noting.state)


class _Position(keras.callbacks.Callback):  # type: ignore[misc]
    """Begins each epoch at its rows."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._run.train.set_epoch(epoch)


class _Noting(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes a checkpoint after each epoch."""

    def __init__(self, run: Run, rate: _Rate, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.run, self.rate, self.shapes = run, rate, shapes
        #: Of an elastic job, with the history.
        self.kept: Any = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        before = self.run.checkpoint.history if self.kept is None else self.kept.history
        history = dict(before or {})
        for name, value in (logs or {}).items():
            history[name] = [*history.get(name, ()), float(value)]
        if self.kept is not None:
            self.kept.history = history
        self.run.finish_epoch(epoch, history, self.shapes, self.state)

    def state(self) -> bytes:
        """Return the state of model and optimizer, with the learning rate for one rank."""
        optimizer = self.model.optimizer
        rate = getattr(self.rate.optimizer, "_learning_rate", None)
        arrays = {f"weight{number}": value for number, value in enumerate(self.model.get_weights())}
        for number, variable in enumerate(optimizer.variables):
            value = keras.ops.convert_to_numpy(variable)
            if variable is rate:
                value = np.asarray(self.rate.unscaled(float(value)), value.dtype)
            arrays[f"optimizer{number}"] = value
        data = io.BytesIO()
        np.savez(data, **arrays)
        return data.getvalue()


class _Committing(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits after each step; at the end of an epoch all ranks stop if the first of them does.

    Args:
        state: of the job.
    """

    def __init__(self, state: Training) -> None:
        super().__init__()
        self._state = state
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._state.position.epoch == self._epoch:
            self._state.end_step(epoch_ended=False)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        stops = bool(self.model.stop_training)  # callbacks of new ranks have not seen earlier epochs
        self.model.stop_training = polyhvd.broadcast_object(stops, name="fit().stop")
        self._state.end_step(epoch_ended=True)


def _load(state: bytes, model: Any, optimizer: Any) -> None:
    """Load what :meth:`_Noting.state` returned; nothing, if it is empty."""
    if state:
        with np.load(io.BytesIO(state)) as arrays:
            model.set_weights([arrays[f"weight{number}"] for number, _ in enumerate(model.weights)])
            for number, variable in enumerate(optimizer.variables):
                variable.assign(arrays[f"optimizer{number}"])


def _limited(data: Any, params: Mapping[str, Any], name: str) -> Any:
    """The first steps of a data set, as many as the parameter of this name has."""
    if params[name] is None:
        return data
    if not hasattr(data, "take"):
        raise ValueError(f"fit(): {name} needs Keras on TensorFlow")
    return data.take(params[name])


def _select_gpu(is_used: bool) -> None:
    """Use the GPU of this rank, if there are any.

    Args:
        is_used: False: TensorFlow uses no GPU.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        if gpus := tf.config.list_physical_devices("GPU"):
            own = gpus[polyhvd.local_rank() % len(gpus)]
            tf.config.set_visible_devices([own] if is_used else [], "GPU")
    elif keras.backend.backend() == "torch" and is_used:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(polyhvd.local_rank() % torch.cuda.device_count())


def _shapes_of(inputs: Sequence[Any], columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """The shape of a row of each input."""
    if len(inputs) != len(columns):
        raise ValueError(
            f"the model has {len(inputs)} inputs for the {len(columns)} feature columns {', '.join(columns)}"
        )
    return [tuple(value.shape[1:]) for value in inputs]


def _shaped(array: Any, shape: tuple[Any, ...], is_whole: bool) -> Any:
    """The array of an input, of float32, or of integers if these are to stay."""
    array = np.asarray(array)
    array = array if is_whole and array.dtype.kind in "iu" else array.astype(np.float32)
    return array.reshape(len(array), *(-1 if size is None else size for size in shape))


def _nameless(config: Any) -> Any:
    """The configuration of an object of Keras without names, which Keras counts up."""
    if not isinstance(config, Mapping):
        return config
    return {name: _nameless(value) for name, value in config.items() if name != "name"}
