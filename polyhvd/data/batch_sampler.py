"""A batch sampler for the data loaders of frameworks, which read ahead of the steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sized

from polyhvd.data.agreement import Agreement
from polyhvd.data.order import Order, Step
from polyhvd.data.position import Place, Position

__all__ = ["DistributedBatchSampler"]

_LOG = logging.getLogger("polyhvd")


class DistributedBatchSampler(Position):
    """Samples batches for a data loader: every row of an epoch once over all ranks, however their number
    changes.

    It goes to the argument ``batch_sampler`` of PyTorch's or Gluon's ``DataLoader``, with or without
    workers. Loaders ask for batches ahead of the steps, so only :meth:`advance` moves the position. All
    ranks have equally many steps. When the world has changed, or a state was loaded, begin a new iteration
    over the loader: what it has read ahead was cut for other ranks, and an error says so if it is used.

    Args:
        data: the data set, or its number of rows.
        batch_size: rows of a step for each rank. With more ranks a step has more rows.
        global_batch_size: rows of a step over all ranks, whatever their number. One of the two is given.
        shuffle: whether the order differs from epoch to epoch.
        seed: of the order, an integer of at least 0, the same on every rank.
        last: "even", "short" or "drop", as of :class:`polyhvd.data.ArrayLoader`.
        streams: into how many streams an epoch is cut; None: 64 if rows are shuffled, else 1, which keeps
            their order.
        placement: returns rank and size; None: those of the current world.

    Raises:
        ValueError: an argument is out of range.

    Example::

        sampler = DistributedBatchSampler(dataset, batch_size=32, seed=1)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        for x, y in loader:
            (sampler.weight * loss(model(x), y)).backward()
            optimizer.step()
            sampler.advance()
    """

    _weight_uses = 0  # in the latest pass, with a step under way
    _has_warned_of_weight = False

    def __init__(
        self,
        data: Sized | int,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        last: str = "even",
        streams: int | None = None,
        placement: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        rows = len(data) if isinstance(data, Sized) else data
        super().__init__(
            Order.of_rows(rows, seed=seed, streams=streams, shuffle=shuffle),
            batch_size,
            global_batch_size=global_batch_size,
            last=last,
            placement=placement,
        )
        if placement is None:
            self._agreement = Agreement(type(self).__name__, self._described)

    @property
    def weight(self) -> float:
        """The factor of the loss of the current step, so that the average over ranks is the mean
        over rows.

        It is 1.0 in steps in which all ranks have as many rows, and outside steps. The current step is the
        oldest one for which :meth:`advance` was not called; a warning is logged if it is not called at all.
        """
        if not self._under_way:
            return 1.0
        self._weight_uses += 1
        step, place = self._under_way[0]
        return step.weight(place.rank)

    def advance(self) -> None:
        """Say that the oldest step that was sampled is done: its rows are in the weights.

        Call it once for each batch, after the update of the weights and before a commit.

        Raises:
            RuntimeError: no step is under way, or it was cut for another world.
            InvalidArgumentError: within ``hvd.elastic.train``, which does that itself.

        Example::

            optimizer.step()
            sampler.advance()
            state.commit()
        """
        super().advance()

    def _move_on(self) -> None:
        """:meth:`advance`, of who owns the position; raises RuntimeError."""
        if self._under_way:
            self._require(self._under_way[0][1])
        super()._move_on()

    def __iter__(self) -> Iterator[list[int]]:
        """The indices of this rank's batches in the steps that are left in this epoch."""
        return self._sampled(self._begin())

    def _sampled(self, own: int) -> Iterator[list[int]]:
        first = self._cursor
        self._weight_uses = 0
        yield from self._go_ahead(own, self._indices)
        self._require_agreement()
        if (self._iteration, self._cursor) == (own, first):
            self._report_stale_weight()

    def _report_stale_weight(self) -> None:
        """Warn once if the weight of the first step was used in other steps of a pass that differ from it."""
        weights = {step.weight(place.rank) for step, place in self._under_way}
        # One use can be in the first step, if a data loader reads ahead to the end.
        if self._weight_uses < 2 or len(weights) < 2 or self._has_warned_of_weight:
            return
        self._has_warned_of_weight = True
        _LOG.warning(
            "%s: weight was used in several steps, but was always that of the first one, since advance() was "
            "not called; call sampler.advance() after each step",
            self._agreement.label if self._agreement is not None else type(self).__name__,
        )

    def _indices(self, step: Step, place: Place) -> list[int]:
        self._require_agreement()
        indices: list[int] = self._rows_of(step, place)[0].tolist()
        return indices
