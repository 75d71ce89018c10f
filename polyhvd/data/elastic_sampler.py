"""Horovod's ElasticSampler, for any framework: it assigns samples, of which a loader makes batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from polyhvd.data.order import Indices, at_least, permutation
from polyhvd.data.position import current_place
from polyhvd.errors import NotInitializedError

__all__ = ["ElasticSampler"]


class ElasticSampler:
    """Assigns the samples of an epoch to the ranks, and what is left again when the world has changed.

    It has the interface of Horovod's class of that name. What it records is how many samples all ranks
    together have processed, in an order that depends only on seed and epoch; so nothing is lost with a rank,
    and its state is the same on every rank. A data loader makes the batches, of a size which the sampler
    does not know: so that all ranks have equally many, up to ``size() - 1`` samples are used twice at the
    end of an epoch, as in Horovod. :class:`polyhvd.data.DistributedBatchSampler` uses none twice.

    Args:
        dataset: what has a length.
        shuffle: whether the order differs from epoch to epoch.
        seed: of the order, an integer of at least 0, the same on every rank.

    Raises:
        NotInitializedError: before ``init()``.

    Example::

        sampler = hvd.elastic.ElasticSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = at_least(0, "seed", seed)
        self.epoch = 0
        #: Samples of this epoch that all ranks together have processed.
        self.processed_num = 0
        self._batch_idx = -1  # the latest that was recorded in this pass
        self._recorded: set[int] = set()  # by record_indices(), in this pass
        self._used = False  # something was recorded in this pass
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; if it is the current one, what was processed stays so.

        Horovod's forgets that, and uses the samples again, if a script calls it at the beginning of an
        epoch into which it has come back. Here both places for the call are right: the beginning and the end.

        Args:
            epoch: its number, from 0. With ``shuffle`` it selects the order.

        Raises:
            ValueError: it is not an integer of at least 0.

        Example::

            sampler.set_epoch(epoch)
        """
        epoch = at_least(0, "epoch", epoch)
        if epoch != self.epoch:
            self.epoch = epoch
            self.processed_num = 0
            self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch; a batch that is recorded again counts once.

        Args:
            batch_idx: the number of the batch in the current pass over the data loader, or another that
                grows with each batch.
            batch_size: of a rank, in samples.

        Raises:
            ValueError: a number is out of range.

        Example::

            for index, (x, y) in enumerate(loader):
                train(x, y)
                sampler.record_batch(index, batch_size=32)
        """
        if at_least(0, "batch_idx", batch_idx) > self._batch_idx:
            self._batch_idx = batch_idx
            self._record(at_least(1, "batch_size", batch_size))

    def record_indices(self, indices: Sequence[int]) -> None:
        """Record that this rank has processed samples, and every other one as many; a repetition counts once.

        Args:
            indices: samples of this rank's.

        Example::

            sampler.record_indices([17, 4, 23])
        """
        new = {int(index) for index in indices} - self._recorded
        self._recorded |= new
        self._record(len(new))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """This rank's samples in a batch of the current pass.

        Args:
            batch_idx: the number of the batch in the pass.
            batch_size: of a rank, in samples.

        Example::

            sampler.get_indices(0, 32)
        """
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, int]:
        """``epoch`` and ``processed_num``, the same on every rank.

        Example::

            saved = sampler.state_dict()
        """
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state, and assign what is left to the current ranks.

        Between two worlds of an elastic job, the next pass assigns it to the ranks of the next world.

        Args:
            state_dict: what :meth:`state_dict` returned, here or on another rank.

        Raises:
            ValueError: it is no such state.

        Example::

            sampler.load_state_dict(saved)
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(
                f"the sampler's state is {state_dict!r}; it has to be what state_dict() returned"
            )
        if missing := [name for name in self.state_dict() if name not in state_dict]:
            raise ValueError(f"the sampler's state lacks {', '.join(missing)}; it has {sorted(state_dict)}")
        epoch = at_least(0, "epoch", state_dict["epoch"])
        processed = at_least(0, "processed_num", state_dict["processed_num"])
        self.epoch = epoch
        self.processed_num = min(processed, len(self.dataset))
        try:
            self.reset()
        except NotInitializedError:
            self.num_replicas = 0  # of no world
            self._begin()

    def reset(self) -> None:
        """Assign what is left of the epoch to the ranks of the current world.

        Raises:
            NotInitializedError: before ``init()``.

        Example::

            sampler.reset()
        """
        self.rank, self.num_replicas = current_place()
        total = len(self.dataset)
        numbers = permutation(total, self.seed, self.epoch) if self.shuffle else np.arange(total)
        self._start = self.processed_num
        self._remaining: Indices = numbers[self._start :]
        self.num_samples = -(-len(self._remaining) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self.indices: list[int] = []
        self._begin()

    @property
    def remaining_indices(self) -> list[int]:
        """The samples of a pass, on all ranks."""
        return [int(index) for index in self._remaining]

    def _begin(self) -> None:
        self._batch_idx = -1
        self._recorded = set()
        self._used = False

    def _record(self, samples: int) -> None:
        self._used |= samples > 0
        self.processed_num = min(self.processed_num + samples * self.num_replicas, len(self.dataset))

    def __iter__(self) -> Iterator[int]:
        """This rank's samples of those that the latest :meth:`reset` has found left."""
        if self._used and self.processed_num == len(self.dataset):
            self.processed_num = 0  # after a whole epoch, another one
            self.reset()
        elif current_place() != (self.rank, self.num_replicas):
            self.reset()
        self.processed_num = self._start  # nothing of this pass has been processed
        self._begin()
        dealt = np.resize(self._remaining, self.total_size) if self.total_size else self._remaining
        self.indices = dealt[self.rank :: self.num_replicas].tolist()
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
