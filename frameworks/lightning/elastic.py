"""Elastic training with Lightning: ``hvd.elastic``."""

from __future__ import annotations

import copy
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from polyhvd.lightning.base import pl
from polyhvd.torch.adapter import copy_all
from polyhvd.torch.elastic import TorchState, blank
from polyhvd.torch.state import broadcast_parameters

from polyhvd.collectives.objects import broadcast_object
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.data.position import Position
from polyhvd.elastic import exports
from polyhvd.elastic.exports import *
from polyhvd.elastic.loop import run, run_fn
from polyhvd.errors import InvalidArgumentError
from polyhvd.training.state import put_tensors, take_tensors

__all__ = ["LightningState", "run", "run_fn"]
__all__ += exports.__all__

Tensor = torch.Tensor

#: What stands for a path in ``Trainer.fit(ckpt_path=...)``, with the state whose commit it means.
_PREFIX = "polyhvd-elastic-commit-"
_states: weakref.WeakValueDictionary[str, LightningState] = weakref.WeakValueDictionary()


class LightningState(TorchState):
    """A Trainer with its module, optimizers, schedulers, callbacks and loops, and other attributes, by name.

    With ``sampler=``, the :class:`polyhvd.data.DistributedBatchSampler` of the ``DataLoader``, it commits
    after each batch, and every row of an epoch is used once. Without, the position in the data is unknown: it
    commits after each epoch, which begins again after a failure.

    Args:
        trainer: with ``strategy="polyhvd"``, and with ``use_distributed_sampler=False`` where there is a
            ``sampler``.
        module: what the trainer is to fit.
        kwargs: ``sampler``, and other attributes with their first values, as of ``TorchState``.

    Raises:
        InvalidArgumentError: the trainer has another strategy.

    Example::

        state = hvd.elastic.LightningState(trainer, module, sampler=sampler)

        @hvd.elastic.run
        def train(state):
            state.trainer.fit(state.module, loader, ckpt_path=state.ckpt_path)

        train(state)
    """

    trainer: Any
    module: Any

    def __init__(self, trainer: Any, module: Any, **kwargs: Any) -> None:
        strategy = getattr(trainer, "strategy", None)
        if getattr(strategy, "strategy_name", "") != "polyhvd":
            raise InvalidArgumentError(
                f"LightningState(trainer): its strategy is {type(strategy).__name__}; make it with "
                'Trainer(strategy="polyhvd")'
            )
        self._rest: Any = None  # of the last commit within fit(), without its tensors; None: there was none
        self._tensors: list[Tensor] = []
        self._spare: list[Tensor] = []  # of the commit before: one that is cut short harms neither
        self._first: Any = copy.deepcopy(module.state_dict())  # of the module, until the first commit
        self._path = f"{_PREFIX}{id(self):x}"
        _states[self._path] = self
        object.__setattr__(self, "trainer", trainer)
        object.__setattr__(self, "module", module)
        super().__init__(**kwargs)
        samplers = [value for value in kwargs.values() if isinstance(value, Position)]
        self._sampler: Position | None = samplers[0] if samplers else None
        if self._sampler is not None:  # how many batches an epoch has is asked at the beginning of each
            trainer.reload_dataloaders_every_n_epochs = 1
        trainer.callbacks.append(_Commits(self))

    @property
    def ckpt_path(self) -> str | None:
        """The state that ``fit`` resumes from: the last commit, or None if there is none."""
        return None if self._rest is None else self._path

    def save(self) -> None:
        """Keep a copy of all of it."""
        super().save()
        if not self.trainer.training or not self.trainer.optimizers:
            return
        rest, tensors = take_tensors(self._dumped(), torch.is_tensor)
        spare = self._spare
        if [(t.shape, t.dtype) for t in spare] != [(t.shape, t.dtype) for t in tensors]:
            spare = blank(tensors)
        copy_all(spare, tensors)
        saved = copy.deepcopy(rest)
        self._rest, self._tensors, self._spare, self._first = saved, spare, self._tensors, None

    def restore(self) -> None:
        """Go back to the copy, which the next ``fit`` gives to the trainer."""
        if self._first is not None:
            self.module.load_state_dict(self._first)
        super().restore()

    def waiting(self) -> AbstractContextManager[None]:
        """Optimizers of the interrupted ``fit`` go: the next one makes its own, as on ranks that are new."""
        strategy = self.trainer.strategy
        strategy.lr_scheduler_configs = []
        strategy.optimizers = []
        return super().waiting()

    def on_reset(self) -> None:
        """The trainer's files and lines are those of rank 0, which another may be now."""
        self.trainer.strategy.set_world_ranks()
        super().on_reset()

    def checkpoint(self) -> dict[str, Any]:
        """The last commit, as Lightning reads it; the strategy hands it out.

        Example::

            checkpoint = state.checkpoint()
        """
        tensors = [tensor.clone() for tensor in self._tensors]
        value: dict[str, Any] = put_tensors(copy.deepcopy(self._rest), tensors)
        return value

    def _keep_synced(self, *, kept: bool) -> None:
        super().save()  # not the trainer's tensors: those were broadcast

    def _sync_from(self, root: int, *, among: ProcessSet | None) -> None:
        super()._sync_from(root, among=among)
        if among is None:
            return
        likes = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in self._tensors]
        received = broadcast_object((self._rest, likes), root, "elastic.state.lightning", among)
        if self._rank() != root:
            self._rest, likes = received
            self._tensors = [
                torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in likes
            ]
        if self._tensors:
            broadcast_parameters({str(i): tensor for i, tensor in enumerate(self._tensors)}, root, among)

    def _dumped(self) -> dict[str, Any]:
        """The checkpoint as Lightning writes it to files, so that a restart resumes after a whole step."""
        checkpoint: dict[str, Any] = self.trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        if self._sampler is not None:
            # The rest of the epoch counts as an epoch: its loader counts the remaining batches.
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            total = progress["total"]
            total["completed"] = total["processed"]
            progress["current"] = dict.fromkeys(progress["current"], 0)
            progress["is_last_batch"] = False
        return checkpoint


class _Commits(pl.callbacks.Checkpoint):  # type: ignore[misc]
    """Commits when a step is whole. It comes last, after callbacks that change what is committed.

    Lightning calls ``on_train_epoch_end`` of checkpoint callbacks after that of the module.
    """

    #: Makes ``ckpt_path="best"`` the same error as without this callback.
    best_model_path = ""

    def __init__(self, state: LightningState) -> None:
        self._state = weakref.proxy(state)
        self._updates = 0  # of the optimizer, as of the last commit

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Move behind the callbacks of the module."""
        trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._updates = trainer.global_step
        if self._state.ckpt_path is None:  # a failure of the first step is one of a whole state
            self._state.save()

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        sampler = self._state._sampler
        if sampler is None:
            return
        sampler.advance()
        # Gradients that wait for an update are not part of the state, whose next fit() begins without them.
        is_whole = trainer.global_step != self._updates or not module.automatic_optimization
        if len(sampler) and is_whole:  # the end of the epoch commits its last batch
            self._updates = trainer.global_step
            self._state.commit()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        sampler = self._state._sampler
        if sampler is not None:
            sampler.set_epoch(sampler.epoch + 1)
        self._state.commit()


def kept_as(path: Any) -> dict[str, Any] | None:
    """The commit that a path stands for, or None: it is one."""
    state = _states.get(path) if isinstance(path, str) and path.startswith(_PREFIX) else None
    return None if state is None else state.checkpoint()


def __dir__() -> list[str]:
    return __all__
