"""The interface of a framework to the ``polyhvd parity`` command: one model in training, step by step."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.parity.case import Case
from polyhvd.parity.models import reader_of
from polyhvd.training.mapping import Weight

__all__ = ["Session", "adam_epsilon", "begin", "first_values"]

Array = np.ndarray[Any, Any]
_SEED = 2027


class Session(abc.ABC):
    """A model of a case and its optimizer, in one framework.

    In a step the command calls :meth:`compute` for each part of the batch, then :meth:`reduce`, looks at
    the gradients, and calls :meth:`update`.

    Args:
        case: what to train.
        process_set: the ranks that train together; None: only this process, without polyhvd.
        synchronized: whether batch normalization is to use the joined batch of these ranks.
    """

    model: Any
    _optimizer: Any  # of the framework, as its parity.py takes it

    def __init__(self, case: Case, process_set: ProcessSet | None, *, synchronized: bool) -> None:
        self.case = case
        self.process_set = process_set
        self.synchronized = synchronized
        self.model = self.make()

    @abc.abstractmethod
    def make(self) -> Any:
        """The model of the case.

        Raises:
            LookupError: the case has none for this framework.
        """

    @functools.cached_property
    def _reader(self) -> Any:
        """The framework's module that reads the model."""
        return reader_of(self.model)

    def weights(self) -> list[Weight]:
        """Return the weights of the model, in the order of its layers."""
        found: list[Weight] = self._reader.weights_of(self.model)
        return found

    @abc.abstractmethod
    def prepare(self) -> None:
        """Make the optimizer, once the weights have their values."""

    def on_input(self, layer: Any, listener: Callable[[Any], None]) -> None:
        """Call ``listener`` with each input of a layer."""
        self._reader.on_input(layer, listener)

    def on_output(self, listener: Callable[[Any], None]) -> None:
        """Call ``listener`` with each output of the model."""
        self._reader.on_output(self.model, listener)

    @abc.abstractmethod
    def compute(self, inputs: Array, targets: Array, *, is_first: bool, is_last: bool) -> float:
        """Forward and backward; the gradients of the parts of a batch are added up, and averaged.

        Args:
            inputs, targets: of one part of ``case.optimizer.accumulate`` of a batch.
            is_first, is_last: of these parts.

        Returns:
            the loss, a mean over the part.
        """

    def local_gradient_of(self, weight: Weight) -> Any:
        """The gradient of a weight by this rank's part only, read before :meth:`reduce`; None: none."""
        return self.gradient_of(weight)

    @abc.abstractmethod
    def reduce(self) -> None:
        """Average the gradients over the ranks, if that is not done yet."""

    @abc.abstractmethod
    def gradient_of(self, weight: Weight) -> Any:
        """The gradient of a weight, as a tensor; None: it has none."""

    @abc.abstractmethod
    def update(self, rate: float) -> None:
        """Clip the gradients, and take a step of the optimizer.

        Args:
            rate: learning rate of the step.
        """

    def rate(self) -> float:
        """The learning rate that the optimizer has used last."""
        return float(self._reader.rate_of(self._optimizer))

    def states_of(self, weight: Weight) -> dict[str, Any]:
        """The state that the optimizer keeps for a weight, by kind: "momentum", "second moment".

        As arrays that lie as the weight does, by the formulas of ``polyhvd docs parity``.
        """
        found: dict[str, Any] = self._reader.states_of(self._optimizer, weight.source)
        return found

    def batch_norm_of(self, layer: Any) -> tuple[float, bool] | None:
        """How a layer updates its running statistics, and if its variance is unbiased; None: it has none."""
        found: tuple[float, bool] | None = self._reader.batch_norm_of(layer)
        return found


def first_values(weights: Sequence[Weight], seed: int = 0) -> list[Array]:
    """The values with which every framework begins, in common form.

    Args:
        weights: of a model. Those of others that are like it get the same.
        seed: of the values.
    """
    made = []
    for place, weight in enumerate(weights):
        rng, shape = np.random.default_rng([_SEED + seed, place]), weight.layout.common_shape
        if weight.role == "scale":
            values = rng.uniform(0.8, 1.2, shape)
        elif weight.role == "variance":
            values = np.ones(shape)
        elif weight.role in ("mean", "state bias"):
            values = np.zeros(shape)
        elif len(shape) < 2:
            values = rng.uniform(-0.1, 0.1, shape)
        else:
            terms = 1 if weight.role == "table" else int(np.prod(shape[1:]))
            values = rng.standard_normal(shape) / np.sqrt(terms)
        made.append(values.astype(np.float32))
    return made


def begin(weights: Sequence[Weight], seed: int = 0) -> None:
    """Write the values with which every framework begins into a model."""
    for weight, values in zip(weights, first_values(weights, seed), strict=True):
        lying = weight.layout.array_from_common(values)
        weight.write(np.array(lying, dtype=weight.dtype, order="C"))


def adam_epsilon(epsilon: float, beta_2: float, step: int) -> float:
    """Settings with which Adam of Gluon and Keras does what that of PyTorch does.

    They divide by ``sqrt(v) + epsilon`` and put the correction of ``v`` into the learning rate, so that
    their epsilon is divided by the root of the correction, too.

    Args:
        epsilon: of PyTorch.
        beta_2: the second of ``betas``.
        step: counted from 1.
    """
    return float(epsilon * np.sqrt(1.0 - beta_2**step))
