"""Training of frameworks that leave the loop over batches to programs: what PyTorch and Gluon share."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import polyhvd
from polyhvd.collectives.adapter import OpKind, ReduceOp
from polyhvd.data.loader import Batch
from polyhvd.elastic.train import train
from polyhvd.runtime import current
from polyhvd.spark.estimators.training import Run, Trainer, require_columns_of

__all__ = ["LoopTrainer"]

Array = npt.NDArray[np.float64]


class _Rates(NamedTuple):
    """Learning rates of the optimizer.

    Args:
        base: for one rank.
        scaled: the same for ``size`` ranks, as the optimizer returns them.
        size: the number of ranks.
    """

    base: list[float]
    scaled: list[float]
    size: int


class LoopTrainer(Trainer):
    """Training on a rank."""

    run: Run
    features: list[str]
    labels: list[str]
    #: Shapes of the outputs of the last batch, without the axis of the rows.
    output_shapes: Sequence[Sequence[int]]
    #: Backward passes since the last update.
    passes = 0
    #: With an elastic job, model and optimizer with ``history``, ``shapes`` and ``rates``.
    _kept: Any = None

    def train(self, run: Run) -> None:
        """Train all epochs that are left."""
        params = run.params
        self.run = run
        self.features, self.labels = list(params["feature_cols"]), list(params["label_cols"])
        self.output_shapes = run.checkpoint.shapes
        weights = params["loss_weights"]
        self.loss_weights = [1.0 / len(self.labels)] * len(self.labels) if weights is None else weights
        self._seed(run.epochs.start)
        self._rates = _Rates([], [], 1)
        self.load()
        self._scale()
        self.start()
        history = list(run.checkpoint.history or ())
        if run.job.is_elastic:
            self._train_elastically(history)
            return
        for epoch in run.epochs:
            self._seed(epoch)
            self.begin_pass()
            self._go_through(run.train_batches(epoch), is_training=True)
            history.append(self._entry(epoch))
            run.finish_epoch(epoch, history, self.output_shapes, self.state)

    def _train_elastically(self, history: list[Any]) -> None:
        """The same, while ranks are lost or join."""
        run, first = self.run, self.run.epochs.start
        run.train.set_epoch(first)
        self._seed(first)
        self.begin_pass()
        nothing = self.sums()
        kept = self.elastic_state(
            history=history, shapes=self.output_shapes, rates=self._rates, sums=np.zeros_like(nothing)
        )
        kept.register_reset_callbacks([self._resize])
        self._kept = kept

        def step(batch: Batch) -> None:
            self.begin_pass()
            self._go_through([batch], is_training=True)
            kept.sums = kept.sums + _over_ranks(self.sums())  # those of a lost rank are in it, too
            kept.shapes = self.output_shapes

        def end_epoch(epoch: int) -> None:
            self.set_sums(kept.sums if polyhvd.rank() == 0 else nothing)
            kept.history = [*kept.history, self._entry(epoch)]
            run.finish_epoch(epoch, kept.history, kept.shapes, self.state)
            self._seed(epoch + 1)
            kept.sums = nothing

        train(step, kept, run.train, epochs=run.epochs.stop, on_epoch_end=end_epoch, progress=False)
        run.conclude(kept.history, kept.shapes, self.state)

    def _resize(self) -> None:
        """Change the learning rates to those of another number of ranks, from the last commit."""
        self.passes = 0
        self._rates = self._kept.rates
        self._scale()
        self._kept.rates = self._rates
        self._kept.save()  # all of it together: the next commit may not come

    def _entry(self, epoch: int) -> dict[str, Any]:
        """That of an epoch in the history, after its last step: validate."""
        run = self.run
        entry: dict[str, Any] = {"epoch": epoch, "train": self.end_pass(is_training=True)}
        if run.has_validation:
            self.begin_pass()
            self._go_through(run.validation_batches(), is_training=False)
            entry["validation"] = self.end_pass(is_training=False)
        if run.is_printing:
            print(entry, flush=True)
        return entry

    def _go_through(self, batches: Iterable[Batch], *, is_training: bool) -> None:
        weights = self.run.params["sample_weight_col"]
        columns = [*self.features, *self.labels, *([] if weights is None else [weights])]
        for batch in batches:
            require_columns_of(batch.arrays, columns)
            self.step(batch, is_training=is_training)

    def _seed(self, epoch: int) -> None:
        """Seed the framework for an epoch, so that one that is resumed is the same."""
        if self.run.params["random_seed"] is not None:
            self.seed(self.run.params["random_seed"] + epoch)

    def _scale(self) -> None:
        """Multiply the learning rates by the number of ranks."""
        size = polyhvd.size()
        base = self.base_rates()
        self.set_rates([rate * size for rate in base])
        self._rates = _Rates(base, self.rates(), size)

    def base_rates(self) -> list[float]:
        """The learning rates for one rank, which the program may have changed since they were scaled."""
        known, rates = self._rates if self._kept is None else self._kept.rates, self.rates()
        if not known.base:
            return rates
        return [
            base if rate == scaled else rate / known.size
            for rate, base, scaled in zip(rates, known.base, known.scaled, strict=True)
        ]

    def require_outputs(self, outputs: Sequence[Any]) -> None:
        """Raise ValueError unless the model has an output for each label column."""
        if len(outputs) != len(self.labels):
            raise ValueError(
                f"fit(): the model has {len(outputs)} outputs for the {len(self.labels)} label columns "
                f"{', '.join(self.labels)}"
            )

    def refused_inputs(self, inputs: Sequence[Any], error: Exception) -> ValueError:
        """The error for inputs that the model does not accept.

        Args:
            inputs: with shapes.
            error: of the framework.
        """
        columns = ", ".join(
            f"{name} {list(value.shape)}" for name, value in zip(self.features, inputs, strict=True)
        )
        return ValueError(f"fit(): the model does not accept batches of {columns}: {error}")

    def refused_labels(self, place: int, output: Any, label: Any, error: Exception) -> ValueError:
        """The error for outputs and labels that a loss does not accept.

        Args:
            place: of the label column.
            output: with shape and dtype.
            label: likewise.
            error: of the framework.
        """
        return ValueError(
            f"fit(): the loss of {self.labels[place]} does not accept outputs {list(output.shape)} "
            f"{output.dtype} and labels {list(label.shape)} {label.dtype}: {error}"
        )

    @abc.abstractmethod
    def seed(self, number: int) -> None:
        """Seed the framework."""

    @abc.abstractmethod
    def load(self) -> None:
        """Make the model, the optimizer and the losses, and load the state of the checkpoint."""

    @abc.abstractmethod
    def start(self) -> None:
        """Give all ranks the same values, and distribute the optimizer, whose learning rates are scaled."""

    @abc.abstractmethod
    def rates(self) -> list[float]:
        """The learning rates of the optimizer."""

    @abc.abstractmethod
    def set_rates(self, rates: Sequence[float]) -> None:
        """Replace the learning rates."""

    @abc.abstractmethod
    def elastic_state(self, **values: Any) -> Any:
        """A state of ``hvd.elastic`` with model and optimizer, and these values."""

    @abc.abstractmethod
    def begin_pass(self) -> None:
        """Begin a pass over rows: there are no sums of losses and metrics yet."""

    @abc.abstractmethod
    def sums(self) -> Array:
        """The sums, float64: numbers that are added up over ranks and steps."""

    @abc.abstractmethod
    def set_sums(self, values: Array) -> None:
        """Replace the sums."""

    @abc.abstractmethod
    def step(self, batch: Batch, *, is_training: bool) -> None:
        """Train or validate on a batch that has all columns, and add to the sums."""

    @abc.abstractmethod
    def end_pass(self, *, is_training: bool) -> dict[str, Any]:
        """Finish what is left of a pass; return the averages over the rows of all ranks."""

    @abc.abstractmethod
    def state(self) -> bytes:
        """Return the state of model and optimizer, with :meth:`base_rates`."""


def _over_ranks(values: Array) -> Array:
    """The sum over all ranks."""
    total = values.copy()
    engine = current.world().engine
    engine.submit(
        OpKind.ALLREDUCE, "fit().sums", (total,), (total,), op=ReduceOp.Sum, process_set=0, blocking=True
    ).wait()
    return total
