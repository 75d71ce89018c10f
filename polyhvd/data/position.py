"""Where a job is in its data: the epoch, and how many of its rows the finished steps have used.

The position moves when a step is done and not before, whatever was read ahead, and it is the same on every
rank. Its
state is therefore what belongs to the weights of the same moment: it is saved, restored and broadcast with
them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from polyhvd.data.agreement import Agreement
from polyhvd.data.order import LAST, Indices, Order, Step, at_least
from polyhvd.errors import InvalidArgumentError
from polyhvd.runtime import current

__all__ = ["Place", "Position", "current_place"]

T = TypeVar("T")
_LOG = logging.getLogger("polyhvd")


class Place(NamedTuple):
    """Which rank of how many."""

    rank: int
    size: int


def current_place() -> Place:
    """That of this process in the current world.

    Raises:
        NotInitializedError: before ``init()``, so that no rank of a job takes itself for a world of one.
    """
    placement = current.world().placement
    return Place(placement.rank, placement.size)


class Position:
    """The base class of loaders and the batch sampler; users see it through these.

    Args:
        order: that of the rows of the data.
        batch_size: rows of a step for each rank. With more ranks a step has more rows.
        global_batch_size: rows of a step over all ranks, whatever their number. One of the two is given.
        last: what becomes of the rows that fill no step, as in :meth:`polyhvd.data.Order.step`.
        placement: returns rank and size; None: those of the current world. It is called before each step.

    Raises:
        ValueError: an argument is out of range.

    Example::

        isinstance(ArrayLoader([images, labels], batch_size=32), Position)
    """

    _agreement: Agreement | None = None  # the constructors of the classes that users make set it
    _is_asked_again = False  # set_epoch() was called with the epoch in which this process had gone on

    def __init__(
        self,
        order: Order,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        last: str = "even",
        placement: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        if (batch_size is None) == (global_batch_size is None):
            raise ValueError(
                "give either batch_size, the rows of a step for each rank, or global_batch_size, those of all"
            )
        if last not in LAST:
            raise ValueError(f"last is {last!r}; it has to be one of {', '.join(map(repr, LAST))}")
        self._batch_size = None if batch_size is None else at_least(1, "batch_size", batch_size)
        self._global_batch_size = at_least(1, "global_batch_size", global_batch_size or batch_size or 0)
        self._last = last
        if placement is not None and not callable(placement):
            raise ValueError(
                f"placement is {placement!r}; it has to be a function that returns rank and size"
            )
        self._placement = placement or current_place
        self._order = order
        self._epoch = 0
        self._cursor = 0
        self._used = (
            False  # this process itself has gone on in this epoch, and did not merely restore a position
        )
        #: Steps that were handed out and are not done, oldest first, with the places for which they were cut.
        self._under_way: deque[tuple[Step, Place]] = deque()
        self._iteration = 0  # number of the latest iteration, the only one that may go on
        self._moves = 0  # how often the position was set, which makes what was sampled ahead invalid
        self._has_warned = False
        self._owner = ""  # the only object that may move it; empty: any

    def _described(self) -> dict[str, dict[str, str]]:
        """Properties that must be equal on all ranks at the start, as text: rows, arguments and position."""
        order = self._order
        arguments = {
            "seed": order.seed,
            "batch_size": self._batch_size,
            "global_batch_size": self._global_batch_size,
            "shuffle": order.shuffle,
            "last": self._last,
            "streams": order.streams,
            "window": order.window,
        }
        position = {"cursor": self._cursor, **({"epoch": self._epoch} if order.shuffle else {})}
        return {
            "number of": {"rows": str(order.total)},
            "argument": {name: str(value) for name, value in arguments.items()},
            "position": {name: str(value) for name, value in position.items()},
        }

    def _require_agreement(self, *, at_end: bool = False) -> None:
        """Raise DataError if the ranks are found to read different data; ``at_end``: of an epoch."""
        if self._agreement is not None:
            self._agreement.check(at_end=at_end)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, whose position moves separately."""
        return {**self.__dict__, "_under_way": deque(self._under_way)}

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0."""
        return self._epoch

    @property
    def cursor(self) -> int:
        """How many rows of the epoch the steps that are done have used, over all ranks."""
        return self._cursor

    def __len__(self) -> int:
        """The number of steps that are left in this epoch, if the world stays as it is."""
        return self._steps_from(self._cursor)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of a whole epoch, if the world stays as it is."""
        return self._steps_from(0)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; if it is the current one, stay where it is.

        Call it before each epoch, as for the samplers of other libraries. After a restart or a recovery in
        the middle of an epoch the same call does not change the restored position.

        Args:
            epoch: its number, from 0; it selects the order of the rows.

        Raises:
            ValueError: it is not an integer of at least 0.

        Example::

            for epoch in range(10):
                loader.set_epoch(epoch)
        """
        epoch = at_least(0, "epoch", epoch)
        if epoch != self._epoch:
            self._move(epoch, 0)
        self._is_asked_again |= self._used
        self._used = False

    def advance(self) -> None:
        """Say that the step under way is done: its rows are in the weights, and the position moves past them.

        Call it after the update of the weights and before a commit.

        Raises:
            RuntimeError: no step is under way.
            InvalidArgumentError: within ``hvd.elastic.train``, which does that itself.

        Example::

            optimizer.step()
            loader.advance()
            state.commit()
        """
        if self._owner:
            raise InvalidArgumentError(f"advance(): leave it to {self._owner}")
        self._move_on()

    def _move_on(self) -> None:
        """:meth:`advance`, of who owns the position; raises RuntimeError."""
        if not self._under_way:
            raise RuntimeError("advance() was called, but no step is under way: each is advanced once")
        step, _ = self._under_way.popleft()
        self._cursor = step.after
        self._used = True

    def _undone(self) -> int:
        """The number of steps that were handed out and are not done; 0 if the program advances no steps."""
        return len(self._under_way) if self._used else 0

    def state_dict(self) -> dict[str, int]:
        """The position, as plain numbers that are the same on every rank.

        They are ``seed``, ``epoch``, ``cursor`` and ``streams``, ``rows`` to recognise other data, and
        ``shuffle``. Of data in row groups they are also ``window``, and ``groups``, a checksum of the sizes
        of these groups and the names of their files.

        Example::

            torch.save({"model": model.state_dict(), "data": loader.state_dict()}, path)
        """
        order = self._order
        state = {
            "seed": order.seed,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "streams": order.streams,
            "rows": order.total,
            "shuffle": int(order.shuffle),
        }
        if order.window is not None:
            state.update(window=order.window, groups=order.checksum)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position. A step that is under way does not count, and an iteration over a sampler must
        start again.

        The number of ranks may be another than when it was saved.

        Args:
            state: what :meth:`state_dict` returned, here or on another rank.

        Raises:
            ValueError: it is no such state, or that of data with another number of rows, or one within an
                epoch whose rows are shuffled where these are not, or the other way round. Nothing has changed
                then.

        Example::

            loader.load_state_dict(torch.load(path)["data"])
        """
        if not isinstance(state, Mapping):
            raise ValueError(
                f"the state of the data's position is {state!r}; it has to be what state_dict() returned"
            )
        # States of before may lack "shuffle".
        names = tuple(name for name in self.state_dict() if name != "shuffle" or name in state)
        if missing := [name for name in names if name not in state]:
            raise ValueError(
                f"the state of the data's position lacks {', '.join(missing)}; it has {sorted(state)}"
            )
        loaded = {name: at_least(0, name, state[name]) for name in names}
        order, rows, cursor = self._order, loaded["rows"], loaded["cursor"]
        if rows != order.total:
            raise ValueError(
                f"the state is that of data with {rows} rows, but these have {order.total}: load the "
                "state of the same data"
            )
        if "groups" in loaded and loaded["groups"] != order.checksum:
            raise ValueError(
                f"the state is that of data whose {rows} rows are in other row groups or files, or whose "
                "files are in another order: load the state of the same files"
            )
        if cursor > rows:
            raise ValueError(f"cursor is {cursor}, but the data has {rows} rows")
        if 0 < cursor < rows and bool(loaded.get("shuffle", order.shuffle)) != order.shuffle:
            raise ValueError(
                f"the state is within an epoch of a loader with shuffle={not order.shuffle}, whose rows come "
                f"in another order than with shuffle={order.shuffle}: some would be left out and others be "
                f"repeated; pass shuffle={not order.shuffle} until that epoch has ended"
            )
        seed, streams, window = loaded["seed"], loaded["streams"], loaded.get("window")
        if (seed, streams, window) != (order.seed, order.streams, order.window):
            self._order = order.with_options(seed=seed, streams=streams, window=window)
        self._move(loaded["epoch"], cursor)

    def _move(self, epoch: int, cursor: int) -> None:
        self._epoch, self._cursor = epoch, cursor
        self._used = self._is_asked_again = False
        self._under_way.clear()
        self._moves += 1

    def _begin(self) -> int:
        """Begin an iteration at the position, or in the next epoch if this one has ended; its number."""
        if self._used and self._next(self._cursor, self._place()) is None:
            self._move(self._epoch + 1, 0)
        self._under_way.clear()
        self._iteration += 1
        return self._iteration

    def _place(self) -> Place:
        return Place(*self._placement())

    def _rows(self, place: Place) -> int:
        """Rows of a full step of all ranks."""
        return self._global_batch_size if self._batch_size is None else self._batch_size * place.size

    def _require_rows_for(self, size: int) -> None:
        """Raise InvalidArgumentError where a world of so many ranks would have too few rows in a step."""
        if self._batch_size is None and self._global_batch_size < size:
            raise InvalidArgumentError(
                f"global_batch_size={self._global_batch_size} is too few for the {size} ranks that --max-np "
                f"allows: a rank would have no row; use at least {size}, or batch_size, the rows of each rank"
            )

    def _go_ahead(self, own: int, load: Callable[[Step, Place], T]) -> Iterator[T]:
        """Load the steps that are left, for a pipeline that reads ahead of the current step.

        Only :meth:`advance` moves the position.
        """
        place = self._place()
        cursor, moves = self._cursor, self._moves
        while True:
            step = self._next(cursor, place)
            if step is None:
                self._report_no_step(cursor, place)
                is_done = not self._under_way and cursor == self._cursor
                self._used |= is_done and (self._iteration, self._moves) == (own, moves)
                return
            self._require_iteration(own, moves)
            self._require(place)
            loaded = load(step, place)
            self._require_iteration(own, moves)  # it may be another thread that has changed it
            cursor = step.after
            self._under_way.append((step, place))
            yield loaded

    def _require_iteration(self, own: int, moves: int) -> None:
        if (self._iteration, self._moves) != (own, moves):
            raise RuntimeError(
                "the position in the data was changed, or a second iteration over it has begun: begin a new "
                "iteration over the data loader"
            )

    def _require(self, place: Place) -> None:
        now = self._place()
        if now != place:
            raise RuntimeError(
                f"batches were sampled for rank {place.rank} of {place.size}, but this is rank {now.rank} of "
                f"{now.size} now: begin a new iteration over the data loader"
            )

    def _report_no_step(self, cursor: int, place: Place) -> None:
        """Warn once of an epoch that has no step, which a loop over it would not show."""
        is_over = self._is_asked_again and not self._used and not self._under_way
        if (cursor and not is_over) or self._has_warned:
            return
        self._has_warned = True
        label = self._agreement.label if self._agreement is not None else type(self).__name__
        if cursor:
            _LOG.warning(
                "%s: epoch %d has no step left: set_epoch(%d) does not begin it again; pass the number of "
                "another epoch",
                *(label, self._epoch, self._epoch),
            )
            return
        rows = self._order.total
        needed = f", of which a step with last='drop' needs {self._rows(place)}: use smaller batches"
        _LOG.warning(
            "%s: the epoch has no step: there are %d rows%s",
            label,
            rows,
            needed if rows else "; check the source, and filter= if it is given",
        )

    def _steps_from(self, cursor: int) -> int:
        place = self._place()
        return self._order.steps(cursor, self._rows(place), place.size, self._last)

    def _next(self, cursor: int, place: Place) -> Step | None:
        return self._order.step(cursor, self._rows(place), place.size, self._last)

    def _rows_of(self, step: Step, place: Place) -> tuple[Indices, float]:
        """The numbers of a rank's rows of a step, and their weight."""
        runs, weight = self._order.dealt(step, place.rank)
        return self._order.rows(self._epoch, runs), weight
