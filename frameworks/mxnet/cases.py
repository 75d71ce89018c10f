"""Cases of ``polyhvd parity`` in Gluon: layers, losses and optimizers as polyhvd/parity describes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn, rnn
from polyhvd.mxnet import parity
from polyhvd.mxnet.batch_norm import SyncBatchNorm
from polyhvd.mxnet.trainer import DistributedTrainer

from polyhvd.parity.case import BadCaseError
from polyhvd.parity.layers import Layer
from polyhvd.parity.session import Session, adam_epsilon
from polyhvd.training.mapping import Weight

__all__ = ["GluonSession"]


class _Function(nn.HybridBlock):
    """Something without weights."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._function = function

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        return self._function(F, x)


class _Attention(nn.HybridBlock):
    def __init__(self, heads: int, layers: Sequence[Any]) -> None:
        super().__init__()
        self._heads = heads
        self.query, self.key, self.value, self.out = layers

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        query, key, value = (self._split(F, layer(x)) for layer in (self.query, self.key, self.value))
        units = x.shape[2] // self._heads
        weights = F.softmax(F.batch_dot(query, key, transpose_b=True) / units**0.5, axis=-1)
        mixed = F.batch_dot(weights, value)
        mixed = F.reshape(mixed, (-4, -1, self._heads, 0, 0))  # [batch, heads, steps, units]
        return self.out(F.reshape(F.transpose(mixed, (0, 2, 1, 3)), (0, 0, -3)))

    def _split(self, F: Any, x: Any) -> Any:
        x = F.transpose(F.reshape(x, (0, 0, -4, self._heads, -1)), (0, 2, 1, 3))
        return F.reshape(x, (-3, 0, 0))  # [batch * heads, steps, units]


class _Residual(nn.HybridBlock):
    def __init__(self, inner: Any, around: Any) -> None:
        super().__init__()
        self.inner, self.around = inner, around

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        return self.inner(x) + (x if self.around is None else self.around(x))


class GluonSession(Session):
    """A case in Gluon."""

    def make(self) -> Any:
        """A block."""
        made = self.case.of("mxnet")
        if made is None:
            raise LookupError
        if not isinstance(made, list):
            self._give_shapes(made)
            return made
        net = self._all(made)
        net.initialize()
        return net

    def _give_shapes(self, net: Any) -> None:
        """Run a block of the user's once, if shapes of its weights come from what it is given."""
        if all(parameter._data is not None for parameter in net.collect_params().values()):
            return
        inputs, _ = self.case.data("mxnet", 0)
        try:
            parity.outputs_of(net, [inputs])
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            raise BadCaseError(
                f"{self.case.name}: mxnet cannot compute the model of inputs {list(inputs.shape)}: "
                f"{type(error).__name__}: {first}"
            ) from error

    def _all(self, layers: Sequence[Layer]) -> Any:
        net = nn.HybridSequential()
        net.add(*map(self._one, layers))
        return net

    def _one(self, layer: Layer) -> Any:
        kind, given = layer.kind, layer.options
        if kind == "dense":
            return nn.Dense(given["units"], flatten=False, use_bias=given["bias"], in_units=given["inputs"])
        if kind == "convolution":
            return nn.Conv2D(
                given["units"],
                given["kernel"],
                strides=given["stride"],
                padding=given["padding"],
                use_bias=given["bias"],
                in_channels=given["inputs"],
            )
        if kind == "batch_normalization":
            options = {"in_channels": given["units"], "epsilon": given["epsilon"], "momentum": given["keep"]}
            if self.synchronized and self.process_set is not None:
                return SyncBatchNorm(**options, process_set=self.process_set)
            return nn.BatchNorm(**options)
        if kind == "layer_normalization":
            return nn.LayerNorm(epsilon=given["epsilon"], in_channels=given["units"])
        if kind == "activation":
            return nn.GELU() if given["function"] == "gelu" else nn.Activation(given["function"])
        if kind == "max_pool":
            return nn.MaxPool2D(given["size"])
        if kind == "embedding":
            return nn.Embedding(
                given["words"],
                given["units"],
                sparse_grad=given["sparse"] and self.case.optimizer.takes_sparse,
            )
        if kind in ("lstm", "gru"):
            cell = rnn.LSTM if kind == "lstm" else rnn.GRU
            made = cell(given["units"], layout="NTC", input_size=given["inputs"])
            if kind == "lstm":
                made.collect_params(".*h2h_bias").setattr("grad_req", "null")
            return made
        if kind == "attention":
            return _Attention(given["heads"], [self._one(item) for item in layer.inner])
        if kind == "residual":
            return _Residual(self._all(layer.inner), self._all(layer.around) if layer.around else None)
        if kind == "flatten":
            return nn.Flatten()
        if kind == "last":
            return _Function(lambda F, x: F.squeeze(F.slice_axis(x, axis=1, begin=-1, end=None), axis=1))
        axes = {"global_average_pool": (2, 3), "mean_over_time": (1,)}[kind]
        return _Function(lambda F, x: F.mean(x, axis=axes))

    def prepare(self) -> None:
        """A trainer."""
        parameters = self.model.collect_params()
        self._trained = [item for item in parameters.values() if item.grad_req != "null"]
        if self.case.optimizer.accumulate > 1:
            for item in self._trained:
                item.grad_req = "add"
        name, options = self._name_and_options()
        if self.process_set is None:
            self._optimizer = gluon.Trainer(parameters, name, options, kvstore=None)
        else:
            self._optimizer = DistributedTrainer(
                parameters, name, options, process_set=self.process_set, prefix=f"parity{self.synchronized}"
            )
        self._steps = 0

    def _name_and_options(self) -> tuple[str, dict[str, Any]]:
        wanted = self.case.optimizer
        options: dict[str, Any] = {"learning_rate": wanted.rate, "wd": wanted.coupled_decay}
        if wanted.name in ("sgd", "momentum"):
            return "sgd", {**options, "momentum": wanted.uses_momentum, "lazy_update": False}
        if wanted.name == "nesterov":
            return "nag", {**options, "momentum": wanted.momentum}
        if wanted.name in ("adam", "adamw"):
            first, second = wanted.betas
            return "adam", {**options, "beta1": first, "beta2": second, "lazy_update": False}
        if wanted.name == "rmsprop":
            return "rmsprop", {**options, "gamma1": wanted.rho, "epsilon": wanted.epsilon}
        return "adagrad", {**options, "wd": 0.0, "eps": wanted.epsilon}  # which would decouple it

    def compute(self, inputs: Any, targets: Any, *, is_first: bool, is_last: bool) -> float:
        """Return the loss, and compute the gradients with autograd."""
        if is_first and self.case.optimizer.accumulate > 1:
            for item in self._trained:
                item.zero_grad()
        with mx.autograd.record():
            outputs = self.model(mx.nd.array(inputs))
            if self.case.loss == "cross_entropy":
                loss = -mx.nd.pick(mx.nd.log_softmax(outputs), mx.nd.array(targets)).mean()
            else:
                loss = mx.nd.square(outputs - mx.nd.array(targets)).mean()
            total = loss / self.case.optimizer.accumulate
        total.backward()
        return float(loss.asscalar())

    def reduce(self) -> None:
        """DistributedTrainer's."""
        self._optimizer.allreduce_grads()

    def gradient_of(self, weight: Weight) -> Any:
        """The parameter's."""
        return weight.source.list_grad()[0]

    def update(self, rate: float) -> None:
        """A step of the optimizer, with the epsilon and the decay that it lacks."""
        wanted, optimizer = self.case.optimizer, self._optimizer.optimizer
        self._steps += 1
        if wanted.clip_norm is not None:
            gluon.utils.clip_global_norm([item.list_grad()[0] for item in self._trained], wanted.clip_norm)
        self._optimizer.set_learning_rate(rate)
        if wanted.name in ("adam", "adamw"):
            optimizer.epsilon = adam_epsilon(wanted.epsilon, wanted.betas[1], self._steps)
        for item in self._trained:
            if wanted.decoupled_decay:
                item.set_data(item.data() * (1.0 - rate * wanted.decoupled_decay))
            if wanted.coupled_decay and wanted.name == "adagrad":
                item.list_grad()[0][:] += wanted.coupled_decay * item.data()
        self._optimizer.update(1)
