"""Cases of ``polyhvd parity`` in NumPy: the formulas themselves, for frameworks to be held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from polyhvd.numpy import layers as made_here
from polyhvd.numpy import verbs

from polyhvd.parity.layers import Layer
from polyhvd.parity.session import Session
from polyhvd.training.layouts import Layout
from polyhvd.training.mapping import Weight

__all__ = ["NumpySession"]

Array = np.ndarray[Any, Any]
Block = made_here.Block


class NumpySession(Session):
    """A case in NumPy, which has to be described by layers."""

    def make(self) -> Any:
        """Blocks of this folder."""
        made = self.case.of("numpy")
        if not isinstance(made, list):
            raise LookupError
        return self._all(made)

    def _all(self, layers: Sequence[Layer]) -> Block:
        return made_here.Chain([self._one(layer) for layer in layers])

    def _one(self, layer: Layer) -> Block:
        kind, given = layer.kind, layer.options
        made: dict[str, Callable[..., Block]] = {
            "dense": made_here.Dense,
            "convolution": made_here.Convolution,
            "layer_normalization": made_here.LayerNorm,
            "max_pool": made_here.MaxPool,
            "lstm": made_here.Lstm,
            "gru": made_here.Gru,
        }
        if kind in made:
            block = made[kind](**given)
            if self.case.precision != "float32" and kind in ("dense", "convolution", "lstm", "gru"):
                block = made_here.rounded(block, self.case.precision)
            return block
        if kind == "batch_normalization":
            return made_here.BatchNorm(**given, average=self._averager())
        if kind == "activation":
            return made_here.Function(made_here.FUNCTIONS[given["function"]])
        if kind == "embedding":
            return made_here.Embedding(given["words"], given["units"])
        if kind == "attention":
            return made_here.Attention(given["heads"], [self._one(item) for item in layer.inner])
        if kind == "residual":
            return made_here.Residual(self._all(layer.inner), self._all(layer.around))
        return _view(kind)

    def _averager(self) -> Callable[[Array], Array]:
        """Over the ranks whose batches are joined."""
        if self.process_set is None or not self.synchronized:
            return lambda array: array
        self._averages = getattr(self, "_averages", 0) + 1
        name, process_set = f"parity.norm.{self._averages}", self.process_set
        return lambda array: verbs.allreduce(array, name=name, process_set=process_set)

    def weights(self) -> list[Weight]:
        """Return the weights of the blocks."""
        return [
            _weight(f"{number}.{role.replace(' ', '_')}", role, block)
            for number, block in enumerate(self.model.blocks())
            for role in block.weights
        ]

    def on_input(self, layer: Any, listener: Callable[[Any], None]) -> None:
        """By a list of the block."""
        layer.input_listeners.append(listener)

    def on_output(self, listener: Callable[[Any], None]) -> None:
        """By a list of this session."""
        self._output_listener = listener

    def prepare(self) -> None:
        """States of zeros."""
        self._trained = [
            (block, role)
            for block in self.model.blocks()
            for role in block.weights
            if role not in ("mean", "variance")
            and not (role == "state bias" and isinstance(block, made_here.Lstm))
        ]
        self._first = [np.zeros_like(block.weights[role]) for block, role in self._trained]
        self._second = [np.zeros_like(block.weights[role]) for block, role in self._trained]
        self._steps = 0

    def compute(self, inputs: Array, targets: Array, *, is_first: bool, is_last: bool) -> float:
        """Forward and backward."""
        if is_first:
            for block, role in self._trained:
                block.gradients[role][...] = 0
        outputs = self.model(inputs)
        self._output_listener(outputs)
        count = len(inputs)
        if self.case.loss == "cross_entropy":
            raised = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
            likely = raised / raised.sum(axis=-1, keepdims=True)
            loss = -np.log(likely[np.arange(count), targets]).mean()
            likely[np.arange(count), targets] -= 1
            slope = likely / count
        else:
            slope = outputs - targets
            loss = np.square(slope).mean()
            slope = 2 * slope / slope.size
        factor = self.case.loss_scale / self.case.optimizer.accumulate
        self.model.backward((slope * factor).astype(np.float32))
        return float(loss)

    def reduce(self) -> None:
        """An allreduce of each."""
        for number, (block, role) in enumerate(self._trained):
            gradient = block.gradients[role]
            if self.process_set is not None:
                name = f"parity.gradient.{number}"
                gradient[...] = verbs.allreduce(gradient, name=name, process_set=self.process_set)
            gradient /= self.case.loss_scale

    def local_gradient_of(self, weight: Weight) -> Any:
        """The block's."""
        return self.gradient_of(weight) / self.case.loss_scale

    def gradient_of(self, weight: Weight) -> Any:
        """The block's."""
        return weight.source.gradients[weight.role]

    def update(self, rate: float) -> None:
        """The formulas of ``polyhvd docs parity``."""
        wanted = self.case.optimizer
        self._steps += 1
        self._rate = rate
        gradients = [block.gradients[role] for block, role in self._trained]
        factor = 1.0
        if wanted.clip_norm is not None:
            norm = np.sqrt(sum(float(np.square(g, dtype=np.float64).sum()) for g in gradients))
            factor = min(1.0, wanted.clip_norm / norm) if norm else 1.0
        for place, (block, role) in enumerate(self._trained):
            weight = block.weights[role]
            gradient = gradients[place] * np.float32(factor) + np.float32(wanted.coupled_decay) * weight
            weight *= np.float32(1.0 - rate * wanted.decoupled_decay)
            weight -= self._change(place, gradient, rate).astype(np.float32)

    def rate(self) -> float:
        """Return the learning rate of the last step."""
        return self._rate

    def states_of(self, weight: Weight) -> dict[str, Any]:
        """Both sums, where the optimizer has them."""
        place = next(
            (
                i
                for i, (block, role) in enumerate(self._trained)
                if block is weight.source and role == weight.role
            ),
            None,
        )
        name = self.case.optimizer.name
        if place is None or name == "sgd":
            return {}
        found = {}
        if name in ("momentum", "nesterov", "adam", "adamw"):
            found["momentum"] = self._first[place]
        if name not in ("momentum", "nesterov"):
            found["second moment"] = self._second[place]
        return found

    def batch_norm_of(self, layer: Any) -> tuple[float, bool] | None:
        """By the batch's own variance."""
        return (layer.keep, False) if isinstance(layer, made_here.BatchNorm) else None

    def _change(self, place: int, g: Array, rate: float) -> Array:
        wanted, first, second = self.case.optimizer, self._first[place], self._second[place]
        if wanted.name in ("sgd", "momentum", "nesterov"):
            first[...] = wanted.uses_momentum * first + rate * g
            return np.asarray(wanted.momentum * first + rate * g) if wanted.name == "nesterov" else first
        if wanted.name in ("adam", "adamw"):
            beta_1, beta_2 = wanted.betas
            first[...] = beta_1 * first + (1 - beta_1) * g
            second[...] = beta_2 * second + (1 - beta_2) * g * g
            root = np.sqrt(second / (1 - beta_2**self._steps)) + wanted.epsilon
            return np.asarray(rate * first / (1 - beta_1**self._steps) / root)
        if wanted.name == "rmsprop":
            second[...] = wanted.rho * second + (1 - wanted.rho) * g * g
        else:
            second += g * g
        return np.asarray(rate * g / np.sqrt(second + wanted.epsilon))


def _view(kind: str) -> Block:
    if kind == "flatten":
        return made_here.View(lambda x: x.reshape(len(x), -1), lambda g, shape: g.reshape(shape))
    if kind == "last":

        def back(g: Array, shape: tuple[int, ...]) -> Array:
            made = np.zeros(shape, g.dtype)
            made[:, -1] = g
            return made

        return made_here.View(lambda x: x[:, -1], back)
    axes = {"global_average_pool": (2, 3), "mean_over_time": (1,)}[kind]

    def spread(g: Array, shape: tuple[int, ...]) -> Array:
        count = np.prod([shape[axis] for axis in axes])
        return np.broadcast_to(np.expand_dims(g / count, axes), shape)

    return made_here.View(lambda x: x.mean(axis=axes), spread)


def _weight(name: str, role: str, block: Block) -> Weight:
    array = block.weights[role]

    def write(values: Array) -> None:
        array[...] = values

    is_frozen = role in ("mean", "variance") or (role == "state bias" and isinstance(block, made_here.Lstm))
    return Weight(
        name=name,
        role=role,
        source=block,
        layout=Layout(array.shape),
        dtype=array.dtype.name,
        trainable=not is_frozen,
        read=array.copy,
        write=write,
        layer=block,
    )
