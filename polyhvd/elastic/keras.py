"""Callbacks of Keras for elastic jobs, without their base class, which differs by Keras version."""

from __future__ import annotations

import math
from typing import Any

from polyhvd.elastic.state import State
from polyhvd.errors import InvalidArgumentError
from polyhvd.training.passes import passes_held

__all__ = ["CommitState", "UpdateBatchState", "UpdateEpochState"]


class CommitState:
    """Commits the state after batches, and after each epoch. Put it after callbacks that change the state.

    The last batch of an epoch is committed with the end of the epoch.

    Args:
        state: of the job.
        batches_per_commit: number of batches between two commits; 0: commit only at the end of epochs.

    Raises:
        InvalidArgumentError: ``batches_per_commit`` is below 0.
        HostsUpdatedInterrupt: from ``fit``, for ``hvd.elastic.run`` to catch.

    Example::

        callbacks = [hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.CommitStateCallback(state)]
        model.fit(data, callbacks=callbacks)
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 0:
            raise InvalidArgumentError(f"batches_per_commit={batches_per_commit}: expected 0 or more")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._batches = self._first = self._held = 0
        self._is_due = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Reset the count: all ranks begin here together."""
        self._batches = self._held = 0
        self._is_due = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note which batches are executed together."""
        self._first = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, if it is time."""
        batches = max(1, batch - self._first + 1)
        self._batches += batches
        self._held += batches
        if batch + 1 >= _steps(self):
            return  # a commit that has all batches of an epoch, but not its end, would begin with a whole one
        self._is_due |= 0 < self.batches_per_commit <= self._batches
        self._commit_if_due()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit; after the next update if gradients of earlier batches wait for it."""
        self._is_due = True
        self._commit_if_due()

    def on_train_end(self, logs: Any = None) -> None:
        """Commit what is due, whatever waits for an update."""
        if self._is_due:
            self._commit()

    def _commit_if_due(self) -> None:
        if self._held < passes_held():
            return  # these gradients are in no state
        self._held = 0
        if self._is_due:
            self._commit()

    def _commit(self) -> None:
        self._batches, self._is_due = 0, False
        self.state.commit()


class UpdateBatchState:
    """Has ``state.batch`` be the number of batches of the current epoch that are done.

    A ``fit`` that begins with ``state.batch`` above 0 continues within an epoch. Give it as many steps
    fewer: ``model.fit(data, steps_per_epoch=steps - state.batch, epochs=1, ...)``.

    Args:
        state: with an attribute ``batch``.

    Example::

        model.fit(data, callbacks=[hvd.elastic.UpdateBatchStateCallback(state)])
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Go on in the middle of an epoch, if that is where the state is."""
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """The batches up to this one are done; the last execution of an epoch may have fewer."""
        self.state.batch = self._before + int(min(batch + 1, _steps(self)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The next epoch begins with its first batch."""
        self._before = self.state.batch = 0


def _steps(callback: Any) -> float:
    """Batches of an epoch, as far as Keras knows."""
    return (getattr(callback, "params", None) or {}).get("steps") or math.inf


class UpdateEpochState:
    """Has ``state.epoch`` be the number of epochs that are done.

    Both ``fit(initial_epoch=state.epoch, epochs=epochs)`` and ``fit(epochs=epochs - state.epoch)`` go on
    where the state is.

    Args:
        state: with an attribute ``epoch``.

    Example::

        model.fit(data, epochs=10 - state.epoch, callbacks=[hvd.elastic.UpdateEpochStateCallback(state)])
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before = 0
        self._first: int | None = None  # epoch of this fit, as Keras counts

    def on_train_begin(self, logs: Any = None) -> None:
        """Count from where the state is."""
        self._before = self.state.epoch
        self._first = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See how Keras counts."""
        if self._first is None:
            self._first = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """One epoch more is done."""
        self.state.epoch = self._before + epoch - (self._first or 0) + 1
