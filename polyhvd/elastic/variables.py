"""States of variables of TensorFlow and Keras: objects that can be read and assigned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyhvd import _core
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.elastic.memory import like, overwrite, receive, send
from polyhvd.elastic.state import Handler, HandlersState
from polyhvd.errors import InvalidArgumentError
from polyhvd.runtime import current

__all__ = ["KerasModelState", "VariablesHandler"]

_LOG = logging.getLogger("polyhvd")

Array = np.ndarray[Any, Any]
#: Until memory that variables had before is used again for others, rather than given back to the system.
_REHEARSALS = 3


class VariablesHandler(Handler):
    """Keeps the variables of something.

    Args:
        value: what it keeps.
        variables: those of it that there are now, in the same order on every rank.
        read: the value of one as a dense array, which is only looked at, and let go of before the next step:
            it may be the variable's own memory.
    """

    def __init__(
        self,
        value: Any,
        variables: Callable[[], Sequence[Any]],
        read: Callable[[Any], Array],
    ) -> None:
        super().__init__(value)
        self._variables = variables
        self._read = read
        self._copies: list[Array] = []
        self._spare: list[Array] = []  # of the commit before, so that an interrupted save harms neither
        self._is_spare_new = False  # whether the spare has the variables' values

    def form(self) -> str:
        """How many variables there are.

        Example::

            handler.form()
        """
        return f" of {len(self._variables())} variables"

    def save(self) -> None:
        """Keep a copy.

        Example::

            handler.save()
        """
        values = [self._read(variable) for variable in self._variables()]
        is_first = not self._copies and not self._spare
        spare = like(values, self._spare)
        overwrite(spare, values)
        self._copies, self._spare = spare, self._copies
        self._is_spare_new = False
        if is_first and values:
            del values
            self._rehearse()

    def _rehearse(self) -> None:
        """Touch memory that a sync will need, and assign once, while no other rank waits."""
        self._spare = like(self._copies, [])
        overwrite(self._spare, self._copies)
        for _ in range(_REHEARSALS):
            for variable, value in zip(self._variables(), self._copies, strict=True):
                variable.assign(value)

    def restore(self) -> None:
        """Restore the copy; variables created since then stay.

        Example::

            handler.restore()
        """
        values = [self._read(variable) for variable in self._variables()]
        del values[len(self._copies) :]
        self._assign(self._copies[: len(values)], values)

    def _assign(self, copies: list[Array], values: list[Array]) -> None:
        """Give the first variables these values; to compare costs less than to assign what they have.

        They have it where a collective of gradients has failed, which comes before the update.

        Args:
            copies: the values.
            values: those that they have. It is cleared: they are to get other memory.
        """
        others = _core.different(values, copies)
        values.clear()
        variables = self._variables()
        for number in others:
            variables[number].assign(copies[number])

    def exported(self) -> Any:
        """The values for a checkpoint.

        Example::

            values = handler.exported()
        """
        return [np.asarray(variable.numpy()) for variable in self._variables()]

    def imported(self, value: Any) -> None:
        """Take over what :meth:`exported` has returned.

        Args:
            value: an array for each variable.

        Raises:
            ValueError: there are others here.

        Example::

            handler.imported(values)
        """
        variables = self._variables()
        if [tuple(item.shape) for item in variables] != [item.shape for item in value]:
            raise ValueError(f"it has {len(value)} variables, here are {len(variables)}, or of other shapes")
        for variable, array in zip(variables, value, strict=True):
            variable.assign(array)

    def sync_from(self, root: int, *, among: ProcessSet | None) -> None:
        """Take the variables of a rank.

        Args:
            root: which.
            among: that rank and those that are to get them; None: this rank is none of them.

        Raises:
            HorovodInternalError: a rank was lost or has shut down.

        Example::

            handler.sync_from(0, among=hvd.global_process_set)
        """
        self._is_spare_new = False
        if among is None:
            return
        values = [self._read(variable) for variable in self._variables()]
        if not values:
            return
        self._spare = like(values, self._spare)
        if current.world().placement.rank == root:
            send(values, "elastic.state.variables", among)
            overwrite(self._spare, values)  # while others assign what they have received
        else:
            receive(self._spare, root, "elastic.state.variables", among)
            self._assign(self._spare, values)
        self._is_spare_new = True

    def keep_synced(self, *, kept: bool) -> None:
        """Make the values that were sent the last commit.

        Args:
            kept: whether they are that already.

        Example::

            handler.keep_synced(kept=False)
        """
        if self._is_spare_new:
            self._copies, self._spare = self._spare, self._copies
            self._is_spare_new = False
        elif not kept:
            if not self._spare:  # use the memory of the earlier commit, which is obsolete
                self._copies, self._spare = [], self._copies
            self.save()


class KerasModelState(HandlersState):
    """A model of Keras, its optimizer and other attributes, by name.

    Args:
        model: built; its weights are kept.
        optimizer: None: the model's own.
        kwargs: other attributes with their first values, which are pickled.

    Raises:
        InvalidArgumentError: the model has no weights yet.

    Example::

        state = hvd.elastic.KerasState(model, epoch=0, batch=0)

        @hvd.elastic.run
        def train(state):
            model.fit(data, epochs=10 - state.epoch, callbacks=[
                hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state)])
    """

    model: Any
    optimizer: Any
    #: See :class:`VariablesHandler`.
    _read: Callable[[Any], Array]

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", False) or not model.weights:
            raise InvalidArgumentError(
                f"the model {getattr(model, 'name', model)!r} has no weights yet, which an elastic state "
                "needs; begin it with an Input, or call model.build(input_shape) first"
            )
        self._is_given = optimizer is not None
        self._has_warned = False
        if optimizer is None:
            optimizer = getattr(model, "optimizer", None)
        read = self._read
        handlers: dict[str, Handler] = {"model": VariablesHandler(model, lambda: self.model.weights, read)}
        if optimizer is not None:
            handlers["optimizer"] = VariablesHandler(optimizer, self._of_optimizer, read)
        self._ready: Any = None  # the optimizer that was seen to have its variables
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "optimizer", optimizer)
        super().__init__(handlers, **kwargs)

    def save(self) -> None:
        """Also warn if the model has another optimizer than the state."""
        own = getattr(self.model, "optimizer", None)
        if not self._is_given and own is not self.optimizer and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "%s: the model was compiled after the state was created, so commits do not contain its "
                "optimizer; create the state after compile(), or pass optimizer=",
                type(self).__name__,
            )
        super().save()

    def _of_optimizer(self) -> list[Any]:
        """The optimizer's variables, created now if needed, so that new ranks have as many as the others."""
        optimizer = self.optimizer
        if self._ready is not optimizer:
            build = getattr(optimizer, "build", None)
            if build is not None and not getattr(optimizer, "built", False):
                build(self.model.trainable_variables)
                if hasattr(optimizer, "built"):
                    optimizer.built = True
            self._ready = optimizer
        variables = optimizer.variables
        return list(variables() if callable(variables) else variables)
