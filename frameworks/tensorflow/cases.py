"""Cases of ``polyhvd parity`` in Keras on TensorFlow: what polyhvd/parity describes, made of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from polyhvd.tensorflow.batch_norm import sync_batch_normalization
from polyhvd.tensorflow.wrappers import DistributedGradientTape

from polyhvd.parity.layers import Layer
from polyhvd.parity.session import Session, adam_epsilon
from polyhvd.training.mapping import Weight

__all__ = ["KerasSession"]


class Convolution(keras.layers.Conv2D):
    """Pads all sides with zeros; with strides, TensorFlow's "same" pads other sides than other frameworks."""

    def __init__(self, edge: int, **options: Any) -> None:
        super().__init__(**options)
        self.edge = edge

    def call(self, x: Any) -> Any:
        """Pad the input with zeros, and convolve it."""
        sides = (self.edge, self.edge)
        return super().call(tf.pad(x, ((0, 0), sides, sides, (0, 0))))

    def compute_output_shape(self, shape: Any) -> Any:
        """Return the shape for the padded image."""
        batch, height, width, channels = shape
        return super().compute_output_shape((batch, height + 2 * self.edge, width + 2 * self.edge, channels))


class Attention(keras.layers.Layer):
    """Self-attention with several heads."""

    def __init__(self, heads: int, layers: Sequence[Any]) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = layers

    def call(self, x: Any) -> Any:
        """Self-attention."""
        steps, units = x.shape[1:]
        query, key, value = (
            tf.transpose(tf.reshape(layer(x), (-1, steps, self.heads, units // self.heads)), (0, 2, 1, 3))
            for layer in (self.query, self.key, self.value)
        )
        scores = tf.matmul(query, key, transpose_b=True) / (units // self.heads) ** 0.5
        mixed = tf.matmul(tf.nn.softmax(scores), value)
        return self.out(tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), (-1, steps, units)))


class Residual(keras.layers.Layer):
    """The sum of two paths."""

    def __init__(self, inner: Any, around: Any) -> None:
        super().__init__()
        self.inner, self.around = inner, around

    def call(self, x: Any) -> Any:
        """The sum of both paths."""
        made, beside = x, x
        for layer in self.inner:
            made = layer(made)
        for layer in self.around:
            beside = layer(beside)
        return made + beside


class _Tape(tf.GradientTape):  # type: ignore[misc]
    """Keeps what it returns, which a tape that is made of it reduces."""

    def gradient(self, *args: Any, **kwargs: Any) -> Any:
        """Return the gradients of the tape, and keep them."""
        self.local = super().gradient(*args, **kwargs)
        return self.local


class KerasSession(Session):
    """A case in Keras, in a loop of TensorFlow's own."""

    def make(self) -> Any:
        """A model."""
        half = self.case.precision != "float32"
        keras.config.set_dtype_policy(f"mixed_{self.case.precision}" if half else "float32")
        made = self.case.of("tensorflow")
        if made is None:
            raise LookupError
        self._channels_last = "tensorflow" in self.case.channels_last or isinstance(made, list)
        if not isinstance(made, list):
            return made
        inputs = self._given(self.case.data("tensorflow", 0)[0])
        model = keras.Sequential([keras.layers.Input(inputs.shape[1:], dtype=inputs.dtype.name)])
        for layer in made:
            model.add(self._one(layer))
        return model

    def _given(self, inputs: Any) -> Any:
        return np.moveaxis(inputs, 1, -1) if inputs.ndim == 4 and self._channels_last else inputs

    def _one(self, layer: Layer) -> Any:
        kind, given = layer.kind, layer.options
        if kind == "dense":
            return keras.layers.Dense(given["units"], use_bias=given["bias"])
        if kind == "convolution":
            return Convolution(
                given["padding"],
                filters=given["units"],
                kernel_size=given["kernel"],
                strides=given["stride"],
                use_bias=given["bias"],
            )
        if kind == "batch_normalization":
            options = {"epsilon": given["epsilon"], "momentum": given["keep"]}
            if self.synchronized and self.process_set is not None:
                return sync_batch_normalization(keras)(**options, process_set=self.process_set)
            return keras.layers.BatchNormalization(**options)
        if kind == "layer_normalization":
            return keras.layers.LayerNormalization(epsilon=given["epsilon"])
        if kind == "activation":  # whose GELU is the exact one
            return keras.layers.Activation(given["function"])
        if kind == "max_pool":
            return keras.layers.MaxPooling2D(given["size"])
        if kind == "embedding":
            return keras.layers.Embedding(given["words"], given["units"])
        if kind in ("lstm", "gru"):
            cell = keras.layers.LSTM if kind == "lstm" else keras.layers.GRU
            return cell(given["units"], return_sequences=True)
        if kind == "attention":
            return Attention(given["heads"], [self._one(item) for item in layer.inner])
        if kind == "residual":
            return Residual(*([self._one(item) for item in side] for side in (layer.inner, layer.around)))
        if kind == "flatten":
            return keras.layers.Flatten()
        if kind == "last":
            return keras.layers.Lambda(lambda x: x[:, -1])
        axes = {"global_average_pool": (1, 2), "mean_over_time": (1,)}[kind]
        return keras.layers.Lambda(lambda x: tf.reduce_mean(x, axis=axes))

    def prepare(self) -> None:
        """An optimizer of Keras."""
        self._trained = self.model.trainable_variables
        self._optimizer = self._make_optimizer()
        self._optimizer.build(self._trained)
        self._steps = 0
        self._gradients: list[Any] = []

    def _make_optimizer(self) -> Any:
        wanted, made = self.case.optimizer, keras.optimizers
        if wanted.name in ("sgd", "momentum", "nesterov"):
            nesterov = wanted.name == "nesterov"
            return made.SGD(wanted.rate, momentum=wanted.uses_momentum, nesterov=nesterov)
        if wanted.name == "adam":
            return made.Adam(wanted.rate, *wanted.betas)
        if wanted.name == "adamw":
            return made.AdamW(wanted.rate, wanted.weight_decay, *wanted.betas)
        if wanted.name == "rmsprop":
            return made.RMSprop(wanted.rate, wanted.rho, epsilon=wanted.epsilon)
        return made.Adagrad(wanted.rate, initial_accumulator_value=0.0, epsilon=wanted.epsilon)

    def compute(self, inputs: Any, targets: Any, *, is_first: bool, is_last: bool) -> float:
        """Use a tape, not compiled, because hooks would see nothing. The last part reduces the sum."""
        wanted = tf.constant(targets)
        with _Tape() as tape:
            outputs = self.model(tf.constant(self._given(inputs)), training=True)
            outputs = tf.cast(outputs, tf.float32)
            if self.case.loss == "cross_entropy":
                each = tf.nn.sparse_softmax_cross_entropy_with_logits(wanted, outputs)
                loss = tf.reduce_mean(each)
            else:
                loss = tf.reduce_mean(tf.square(outputs - wanted))
            total = loss * (self.case.loss_scale / self.case.optimizer.accumulate)
            if not is_first:  # whose gradient is what was added up
                kept = self._gradients
                for gradient, variable in zip(kept, self._trained, strict=True):
                    total += tf.reduce_sum(tf.stop_gradient(tf.convert_to_tensor(gradient)) * variable)
        if is_last and self.process_set is not None:
            tape = DistributedGradientTape(tape, process_set=self.process_set)
        self._gradients = tape.gradient(total, [variable.value for variable in self._trained])
        self._local_gradients = tape.__dict__["local"]
        if is_last and self.case.loss_scale != 1.0:
            self._gradients, self._local_gradients = (
                [tf.convert_to_tensor(gradient) / self.case.loss_scale for gradient in gradients]
                for gradients in (self._gradients, self._local_gradients)
            )
        return float(loss)

    def reduce(self) -> None:
        """DistributedGradientTape has done it."""

    def gradient_of(self, weight: Weight) -> Any:
        """The gradients that the tape has returned."""
        return self._of(weight, self._gradients)

    def local_gradient_of(self, weight: Weight) -> Any:
        """The gradients that it has reduced."""
        return self._of(weight, self._local_gradients)

    def _of(self, weight: Weight, gradients: Sequence[Any]) -> Any:
        for variable, gradient in zip(self._trained, gradients, strict=True):
            if variable is weight.source:
                return gradient
        return None

    def update(self, rate: float) -> None:
        """A step of the optimizer, with the epsilon and the decay that it lacks."""
        wanted = self.case.optimizer
        self._steps += 1
        if not wanted.takes_sparse:  # Keras takes rows that come twice one by one, also where it squares them
            self._gradients = [tf.convert_to_tensor(gradient) for gradient in self._gradients]
        if wanted.clip_norm is not None:
            self._gradients, _ = tf.clip_by_global_norm(self._gradients, wanted.clip_norm)
        if wanted.coupled_decay:
            self._gradients = [
                gradient + wanted.coupled_decay * variable
                for gradient, variable in zip(self._gradients, self._trained, strict=True)
            ]
        self._optimizer.learning_rate = rate
        if wanted.name in ("adam", "adamw"):
            self._optimizer.epsilon = adam_epsilon(wanted.epsilon, wanted.betas[1], self._steps)
        self._optimizer.apply(self._gradients, self._trained)
