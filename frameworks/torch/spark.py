"""Spark ML estimator for models of PyTorch; users import it as ``polyhvd.spark.torch``."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch
from polyhvd.torch.elastic import TorchState
from polyhvd.torch.state import broadcast_optimizer_state, broadcast_parameters
from polyhvd.torch.wrappers import DistributedOptimizer

import polyhvd
from polyhvd.spark.estimators.checkpoint import Checkpoint
from polyhvd.spark.estimators.estimator import FrameworkEstimator, per_column, shapes_of
from polyhvd.spark.estimators.looping import LoopTrainer
from polyhvd.spark.estimators.model import FrameworkModel, Predict
from polyhvd.spark.estimators.params import ESTIMATORS, MODELS, has_params
from polyhvd.spark.estimators.training import Trainer

__all__ = ["TorchEstimator", "TorchModel", "called", "input_of", "predictor_of", "tensor_of"]

#: Losses whose labels are numbers of classes.
_OF_CLASSES = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss, torch.nn.MultiMarginLoss)


@has_params(MODELS, "torch")
class TorchModel(FrameworkModel):
    """A trained model of PyTorch, which adds predictions to a DataFrame.

    ``transform(df)`` returns the DataFrame with a column for each label column: of the label's type if the
    output has one number for each row, else vectors of Spark ML. Tasks predict on their processors.

    Args:
        values: of the parameters, by name; see ``polyhvd docs spark``.

    Example::

        model = TorchModel.load("hdfs://host/model")
        model.transform(df).select("label__output")
    """

    _framework = "torch"

    def _predictor(self) -> Callable[[], Predict]:
        return predictor_of(self)


def predictor_of(fitted: FrameworkModel) -> Callable[[], Predict]:
    """Return the result of :meth:`FrameworkModel._predictor` for a model with modules of PyTorch.

    Args:
        fitted: the model.
    """
    model = copy.deepcopy(fitted.getOrDefault("model")).cpu()
    columns = list(fitted.getOrDefault("feature_columns"))
    shapes = shapes_of(fitted.getOrDefault("input_shapes"), columns)
    whole = frozenset(fitted.getOrDefault("categorical_cols") or ())
    return _Predictor(cloudpickle.dumps(model), columns, shapes, whole)


class _Predictor:
    """Makes the function that predicts, in a task of Spark."""

    def __init__(self, model: bytes, columns: list[str], shapes: list[Any], whole: frozenset[str]) -> None:
        self._model, self._columns, self._shapes, self._whole = model, columns, shapes, whole

    def __call__(self) -> Predict:
        model = cloudpickle.loads(self._model).eval()

        def predict(arrays: list[Any]) -> list[Any]:
            inputs = [
                input_of(array, shape, name in self._whole)
                for array, shape, name in zip(arrays, self._shapes, self._columns, strict=True)
            ]
            with torch.no_grad():
                outputs = model(*inputs)
            return [output.numpy() for output in _listed(outputs)]

        return predict


@has_params(ESTIMATORS, "torch")
class TorchEstimator(FrameworkEstimator):
    """Fits a model of PyTorch to a DataFrame, on ranks that tasks of Spark start.

    Rows are written to the store, and read by the ranks. Feature columns are float32, in the order of the
    arguments of the model's ``forward``. Label columns are float32; integers stay integers for
    ``CrossEntropyLoss``, ``NLLLoss`` and ``MultiMarginLoss``. The learning rate is multiplied by the number
    of ranks.

    Args:
        values: of the parameters, by name; see ``polyhvd docs spark``.

    Raises:
        TypeError: there is no such parameter, or a value has a wrong type.

    Example::

        estimator = TorchEstimator(num_proc=2, store=store, model=model, optimizer=optimizer,
                                   loss=torch.nn.MSELoss(), feature_cols=["x"], label_cols=["y"], epochs=5)
        predictions = estimator.fit(df).transform(df)
    """

    _framework = "torch"
    _model_class = TorchModel

    def __init__(self, **values: Any) -> None:
        if values.get("loss") is not None and values.get("loss_constructors") is not None:
            raise ValueError("TorchEstimator: pass loss or loss_constructors, not both")
        super().__init__(**values)

    @property
    def _trainer(self) -> type[Trainer]:
        return _TorchTrainer

    def _payload(self) -> bytes:
        model, optimizer = self._model_and_optimizer()
        names = ("loss", "loss_constructors", "metrics", "gradient_compression", "train_minibatch_fn")
        values = {
            name: self.getOrDefault(name) for name in (*names, "input_shapes", "backward_passes_per_step")
        }
        if values["loss"] is None and values["loss_constructors"] is None:
            raise ValueError("fit(): loss is missing")
        labels = self._list("label_cols")
        per_column(values["loss"] or values["loss_constructors"], labels)
        for group in _groups(values["metrics"]):
            if len(group) not in (1, len(labels)):
                raise ValueError(
                    f"fit(): a group of metrics has {len(group)} functions; expected one, or one for each of "
                    f"the {len(labels)} label columns"
                )
        shapes_of(values["input_shapes"], self._list("feature_cols"))
        return bytes(cloudpickle.dumps((model, optimizer, values)))

    def _model_and_optimizer(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Copies, of which the optimizer has the parameters of the model."""
        model, optimizer = self.getOrDefault("model"), self.getOrDefault("optimizer")
        if not isinstance(model, torch.nn.Module):
            raise ValueError(f"fit(): model is a {type(model).__qualname__}; expected a torch.nn.Module")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"fit(): optimizer is a {type(optimizer).__qualname__}; expected one of torch.optim, such as "
                "torch.optim.SGD(model.parameters(), lr=0.1)"
            )
        model, optimizer = copy.deepcopy((model, optimizer))
        own = {id(parameter) for parameter in model.parameters()}
        optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if own.issuperset(map(id, optimized)):
            return model, optimizer
        # It is that of a copy of the model, as after loading.
        parameters = list(model.parameters())
        if [tuple(p.shape) for p in parameters] != [tuple(p.shape) for p in optimized]:
            raise ValueError(
                f"fit(): the optimizer has {len(optimized)} parameters that are not the model's, which "
                f"has {len(parameters)}; make it with model.parameters()"
            )
        rest = iter(parameters)
        for group in optimizer.param_groups:
            group["params"] = [next(rest) for _ in group["params"]]
        states = dict(zip(optimized, parameters, strict=True))
        for old, state in list(optimizer.state.items()):
            del optimizer.state[old]
            optimizer.state[states[old]] = state
        return model, optimizer

    def _identity_of_framework(self) -> dict[str, Any]:
        model, optimizer = self.getOrDefault("model"), self.getOrDefault("optimizer")
        return {
            "model": {name: list(value.shape) for name, value in model.state_dict().items()},
            "optimizer": [
                type(optimizer).__qualname__,
                *(
                    {name: repr(value) for name, value in group.items() if name != "params"}
                    for group in optimizer.param_groups
                ),
            ],
        }

    def _fitted(self, payload: bytes, checkpoint: Checkpoint) -> dict[str, Any]:
        model, optimizer, values = cloudpickle.loads(payload)
        _load(checkpoint.state, model, optimizer)
        names = ("input_shapes", "loss", "loss_constructors")
        return {"model": model.eval(), "optimizer": optimizer, **{name: values[name] for name in names}}


class _TorchTrainer(LoopTrainer):
    """Training on a rank."""

    def load(self) -> None:
        """Implement :meth:`LoopTrainer.load`."""
        params = self.run.params
        self._model, self._optimizer, self._values = cloudpickle.loads(self.run.job.payload)
        self._input_shapes = shapes_of(self._values["input_shapes"], self.features)
        self._label_shapes = shapes_of(params["label_shapes"], self.labels)
        self._whole = frozenset(params["categorical_cols"] or ())
        self._groups = _groups(self._values["metrics"])
        self._names = [
            [f"group_{number}_{label}" for label in self.labels] for number, _ in enumerate(self._groups)
        ]
        self._device = torch.device("cpu")
        if params["use_gpu"] and torch.cuda.is_available():
            self._device = torch.device("cuda", polyhvd.local_rank() % torch.cuda.device_count())
            torch.cuda.set_device(self._device)
        _load(self.run.checkpoint.state, self._model, self._optimizer)
        self._place()
        self._losses = self._made_losses()

    def start(self) -> None:
        """Implement :meth:`LoopTrainer.start`."""
        broadcast_parameters(self._model.state_dict(), root_rank=0)
        broadcast_optimizer_state(self._optimizer, root_rank=0)
        options = {"backward_passes_per_step": self._values["backward_passes_per_step"]}
        if self._values["gradient_compression"] is not None:
            options["compression"] = self._values["gradient_compression"]
        self._optimizer = DistributedOptimizer(self._optimizer, self._model.named_parameters(), **options)

    def seed(self, number: int) -> None:
        """Implement :meth:`LoopTrainer.seed`."""
        torch.manual_seed(number)

    def rates(self) -> list[float]:
        """Implement :meth:`LoopTrainer.rates`."""
        return [group["lr"] for group in self._optimizer.param_groups]

    def set_rates(self, rates: Sequence[float]) -> None:
        """Implement :meth:`LoopTrainer.set_rates`."""
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _place(self) -> None:
        """Move model and optimizer to the device."""
        self._model.to(self._device)
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and name != "step":
                    state[name] = value.to(self._device)

    def _made_losses(self) -> list[Any]:
        constructors = self._values["loss_constructors"]
        if constructors is None:
            return per_column(self._values["loss"], self.labels)
        known = {"model": self._model, "label_columns": self.labels, "feature_columns": self.features}
        return [called(make, known) for make in per_column(constructors, self.labels)]

    def elastic_state(self, **values: Any) -> TorchState:
        """Implement :meth:`LoopTrainer.elastic_state`."""
        return TorchState(self._model, self._optimizer, **values)

    def begin_pass(self) -> None:
        """Implement :meth:`LoopTrainer.begin_pass`."""
        names = ["loss", *(name for group in self._names for name in group)]
        self._sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in names}

    def sums(self) -> Any:
        """Implement :meth:`LoopTrainer.sums`."""
        return np.array(list(self._sums.values()))

    def set_sums(self, values: Any) -> None:
        """Implement :meth:`LoopTrainer.set_sums`."""
        self._sums = dict(zip(self._sums, values.tolist(), strict=True))

    def step(self, batch: Any, *, is_training: bool) -> None:
        """Implement :meth:`LoopTrainer.step`."""
        if self._model.training != is_training:
            self._model.train(is_training)
        inputs, labels, weights = self._tensors(batch)
        loss_fn = self._loss_function(batch.weight if is_training else 1.0)
        if is_training:
            step = self._values["train_minibatch_fn"] or self._minibatch
            outputs, loss = step(self._model, self._optimizer, self._shaped, loss_fn, inputs, labels, weights)
            loss = loss.detach() / (batch.weight or 1.0)
        else:
            with torch.no_grad():
                outputs, labels = self._shaped(self._outputs(inputs), labels)
                loss = loss_fn(outputs, labels, weights)
        outputs, labels = self._shaped(outputs, labels)
        self.output_shapes = [list(output.shape[1:]) for output in outputs]
        rows = len(batch.indices) if batch.weight else 0
        if not rows:
            return
        values = {"loss": loss}
        with torch.no_grad():
            for group, functions in zip(self._names, self._groups, strict=True):
                for place, name in enumerate(group):
                    function = functions[place if len(functions) > 1 else 0]
                    values[name] = function(outputs[place].detach(), labels[place])
        for name, value in values.items():
            self._sums[name][0] += float(value) * rows
            self._sums[name][1] += rows

    def end_pass(self, *, is_training: bool) -> dict[str, Any]:
        """Implement :meth:`LoopTrainer.end_pass`."""
        if is_training and self.passes:
            self._step()
        averages = self.run.averaged({name: (pair[0], pair[1]) for name, pair in self._sums.items()})
        return {
            "loss": averages["loss"],
            "all_metrics": [{name: averages[name] for name in group} for group in self._names],
        }

    def _minibatch(
        self,
        model: Any,
        optimizer: Any,
        transform_outputs: Callable[..., Any],
        loss_fn: Callable[..., Any],
        inputs: list[Any],
        labels: list[Any],
        sample_weights: Any,
    ) -> tuple[Any, Any]:
        """A step, or with ``backward_passes_per_step`` a part of one; ``train_minibatch_fn`` replaces it."""
        outputs, labels = transform_outputs(self._outputs(inputs), labels)
        loss = loss_fn(outputs, labels, sample_weights)
        loss.backward()
        self.passes += 1
        if self.passes == self._values["backward_passes_per_step"]:
            self._step()
        return outputs, loss

    def _step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.passes = 0

    def _tensors(self, batch: Any) -> tuple[list[Any], list[Any], Any]:
        """Inputs, labels and weights of the rows."""
        arrays = batch.arrays
        inputs = [
            input_of(arrays[name], shape, name in self._whole).to(self._device)
            for name, shape in zip(self.features, self._input_shapes, strict=True)
        ]
        labels = []
        for name, shape, loss in zip(self.labels, self._label_shapes, self._losses, strict=True):
            label = tensor_of(arrays[name], isinstance(loss, _OF_CLASSES)).to(self._device)
            labels.append(label if shape is None else label.reshape(len(label), *shape))
        column = self.run.params["sample_weight_col"]
        weights = None if column is None else tensor_of(arrays[column], False).to(self._device)
        return inputs, labels, weights

    def _outputs(self, inputs: list[Any]) -> Any:
        try:
            return self._model(*inputs)
        except (RuntimeError, TypeError) as error:
            if isinstance(error, (polyhvd.HorovodInternalError, torch.OutOfMemoryError)):
                raise
            raise self.refused_inputs(inputs, error) from error

    def _shaped(self, outputs: Any, labels: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Outputs as a list, and labels in the shapes of outputs that have as many numbers."""
        outputs = _listed(outputs)
        self.require_outputs(outputs)
        return outputs, [
            label.reshape(output.shape) if output.numel() == label.numel() else label
            for output, label in zip(outputs, labels, strict=True)
        ]

    def _loss_function(self, factor: float) -> Callable[..., Any]:
        """The weighted sum of the losses, times a factor, of outputs, labels and weights of rows."""

        def loss_of(outputs: Sequence[Any], labels: Sequence[Any], weights: Any = None) -> Any:
            total: Any = 0.0
            for place, loss in enumerate(self._losses):
                output, label = outputs[place], labels[place]
                try:
                    value = (
                        loss(output, label) if weights is None else _weighted(loss, output, label, weights)
                    )
                except (RuntimeError, TypeError, ValueError, IndexError) as error:
                    raise self.refused_labels(place, output, label, error) from error
                total = total + self.loss_weights[place] * value
            return factor * total

        return loss_of

    def state(self) -> bytes:
        """Implement :meth:`LoopTrainer.state`."""
        optimizer = self._optimizer.state_dict()
        for group, rate in zip(optimizer["param_groups"], self.base_rates(), strict=True):
            group["lr"] = rate
        data = io.BytesIO()
        torch.save({"model": self._model.state_dict(), "optimizer": optimizer}, data)
        return data.getvalue()


def _load(state: bytes, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load what :meth:`_TorchTrainer.state` returned; nothing, if it is empty."""
    if state:
        # Optimizers of users may keep objects of any class.
        loaded = torch.load(io.BytesIO(state), map_location="cpu", weights_only=False)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])


def _weighted(loss: Any, output: Any, label: Any, weights: Any) -> Any:
    """The mean of a loss over rows with weights."""
    if isinstance(loss, torch.nn.Module) and hasattr(loss, "reduction"):
        single = copy.copy(loss)
        setattr(single, "reduction", "none")  # noqa: B010 - a module's attributes have types
        values = single(output, label)
    else:
        values = loss(output, label, reduction="none")
    rows = values.reshape(len(values), -1).mean(dim=1)
    return (rows * weights.reshape(-1)).mean()


def called(function: Callable[..., Any], known: dict[str, Any]) -> Any:
    """Call a function with those of the arguments that it takes."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    return function(**{name: value for name, value in known.items() if takes_all or name in names})


def _groups(metrics: Any) -> list[list[Any]]:
    """Metrics as groups, each of one function for all labels, or one for each."""
    return [list(group) if isinstance(group, (list, tuple)) else [group] for group in metrics or ()]


def input_of(array: Any, shape: Any, is_whole: bool) -> torch.Tensor:
    """A tensor as of :func:`tensor_of`, in a shape unless that is None."""
    tensor = tensor_of(array, is_whole)
    return tensor if shape is None else tensor.reshape(tuple(shape))


def tensor_of(array: Any, is_whole: bool) -> torch.Tensor:
    """A tensor of float32, or of int64 if integers are to stay integers."""
    array = np.asarray(array)
    stays = is_whole and array.dtype.kind in "iu"
    return torch.from_numpy(np.array(array, np.int64 if stays else np.float32))


def _listed(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
