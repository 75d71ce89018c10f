"""The state of an elastic program: committed to memory, restored, and sent to new ranks."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from polyhvd.collectives.objects import allgather_object, broadcast_object
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.elastic import process
from polyhvd.elastic.receivers import UNCOMMITTED, Version, exchange, has_gpus, lacking, newest, require_alike
from polyhvd.errors import CheckpointError, HorovodInternalError, HostsUpdatedInterrupt, InvalidArgumentError
from polyhvd.runtime import current

__all__ = ["Handler", "HandlersState", "ObjectState", "State", "copied", "copied_by_name", "own_rank"]

_DEVICES_POLL_S = 50e-6


class State:
    """The state that :func:`run` passes to a training function. Subclasses define its contents.

    Args:
        bcast_object: as ``broadcast_object`` of a framework.
        get_rank: as ``hvd.rank``.

    Example::

        class Counter(hvd.elastic.State):
            def save(self): self._saved = self.count
            def restore(self): self.count = self._saved
            def sync(self): self.count = hvd.broadcast_object(self.count)
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commits = UNCOMMITTED  # number of the last; the same for the same commit on all ranks
        self._is_commit = False  # whether the values are those of the last commit
        self._is_adapted = False  # whether functions of the user may have changed them for the present world
        self._saved: Any = None  # the copy; each save() makes another object
        self._commit_copy: Any = None  # the copy of the last commit; a program may call save() after it
        self._has_just_committed = False  # by commit(), which calls check_host_updates() next
        self._checks = 0  # since the last commit or sync()
        #: The world that all its ranks have left between two steps, and after which check; None: none.
        self._boundary: tuple[int, int] | None = None
        self._owner = ""  # the only caller that may commit, if set

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Register functions to call after each change of the world, before the state is sent to new ranks.

        They are called on ranks that stay and on ranks that have loaded a checkpoint, but not on new ranks,
        so they must not call collectives.

        Args:
            callbacks: functions without arguments, called in this order, for example to adapt a learning rate
                to ``hvd.size()``.

        Example::

            state.register_reset_callbacks([lambda: set_learning_rate(0.01 * hvd.size())])
        """
        self._reset_callbacks.extend(callbacks)

    def commit(self) -> None:
        """Keep a copy of the present values to restore. Local, but it raises on all ranks together.

        Every rank calls it after the same steps. It is :meth:`save` and :meth:`check_host_updates`.

        Raises:
            HostsUpdatedInterrupt: processes are waiting to join, or are to leave; on all ranks at one commit.
            InvalidArgumentError: within ``hvd.elastic.train``, which commits the state itself.

        Example::

            for state.batch in range(state.batch, 1000):
                step()
                state.commit()
        """
        if self._owner:
            raise InvalidArgumentError(f"state.commit(): leave it to {self._owner}")
        self._commit()
        self._has_just_committed = True
        self.check_host_updates()
        self._is_commit = False

    def _commit(self) -> None:
        _await_devices()
        _require_whole_step()
        self.save()
        self._commit_copy = self._saved
        self._commits += 1
        self._checks = 0
        member = process.find()
        if member is not None:
            member.progress()
        self._committed()
        self._is_commit = True

    def _committed(self) -> None:
        """Hook for subclasses: called by a commit before the world may change."""

    def check_host_updates(self) -> None:
        """Let the world change here, if it is to; costs next to nothing. Before a change it commits.

        Raises:
            HostsUpdatedInterrupt: processes are waiting to join, or are to leave; raised on all ranks.

        Example::

            if batch % 10 == 0: state.commit()
            else: state.check_host_updates()
        """
        is_commit, self._has_just_committed = self._has_just_committed, False
        member = process.find()
        if member is None:
            return
        _require_whole_step()
        self._end_background()
        member.step()
        self._checks += 1
        checks = self._checks  # a commit resets it
        if member.is_awaited():
            if not is_commit:  # a program may have called restore() and changed the values since
                self._commit()  # the next world may fail before it has sent these values
            if member.meet("elastic.boundary"):
                self._at_boundary()
                self._boundary = member.launcher.reply.generation, checks
            raise HostsUpdatedInterrupt

    def _at_boundary(self) -> None:
        """Hook: all ranks are at the same place in their programs, where they leave the world."""

    def _end_background(self) -> None:
        """Wait for collectives that the framework runs on its own threads.

        Only then do all ranks know at the same place whether the world is to change.
        """

    def waiting(self) -> AbstractContextManager[None]:
        """A context for the wait for a place in the next world.

        Example::

            with state.waiting():
                rejoin()
        """
        return nullcontext()

    def on_reset(self) -> None:
        """Called after a change of the world: :meth:`reset`, and the registered functions.

        Raises:
            Exception: what they raise ends the program.

        Example::

            state.on_reset()
        """
        self.reset()
        for callback in self._reset_callbacks:
            callback()
        methods = type(self).reset, type(self).on_reset
        are_ours = all(method.__module__.startswith("polyhvd.") for method in methods)
        self._is_adapted = not are_ours or bool(self._reset_callbacks)

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Does nothing: Horovod's driver calls it, while here :meth:`check_host_updates` checks by itself.

        Args:
            timestamp: when.
            update_res: what.

        Example::

            state.on_hosts_updated(time.time(), 0)
        """

    def reset(self) -> None:
        """Adapt what depends on the world, after it has changed.

        Example::

            state.reset()
        """

    def save(self) -> None:
        """Keep a copy of the values.

        Raises:
            NotImplementedError: the subclass does not define it.

        Example::

            state.save()
        """
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the values from the copy.

        Raises:
            NotImplementedError: the subclass does not define it.

        Example::

            state.restore()
        """
        raise NotImplementedError

    def sync(self) -> None:
        """Make the values the same on all ranks.

        Raises:
            NotImplementedError: the subclass does not define it.

        Example::

            state.sync()
        """
        raise NotImplementedError


class ObjectState(State):
    """Attributes of any type that can be pickled, by name.

    Args:
        bcast_object: as ``broadcast_object`` of a framework.
        get_rank: as ``hvd.rank``.
        kwargs: the attributes with their first values.

    Example::

        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0, batch=0)
        state.epoch += 1
        state.commit()
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved: dict[str, Any] = {}
        #: Folder and number of steps of the last ``train()`` that has ended with this state.
        self._ended: tuple[Path | None, int] = (None, -1)
        self._local: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self._names = list(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.save()

    def save(self) -> None:
        """Keep a copy of the attributes.

        Raises:
            InvalidArgumentError: one of them cannot be copied. The copy of before stays.

        Example::

            state.save()
        """
        self._saved = self._copied()

    def _copied(self) -> dict[str, Any]:
        return copied_by_name({name: getattr(self, name) for name in self._names})

    def restore(self) -> None:
        """Give the attributes the values of the copy.

        Example::

            state.restore()
        """
        for name, value in self._saved.items():
            setattr(self, name, copied(value))
        self._is_commit = self._saved is self._commit_copy

    def sync(self) -> None:
        """Give all ranks the values of the newest commit that one of them has, and keep them as a commit.

        Where no rank has committed they are rank 0's. Every rank calls it.

        Raises:
            HorovodInternalError: a rank was lost or has shut down.
            InvalidArgumentError: an attribute cannot be pickled; or ranks keep different ones, on every rank.

        Example::

            state.sync()
        """
        if current.world().engine.behind:
            return  # before an elastic function, in which it is synced
        mine = Version(self._commits, self._is_commit, self._boundary, self._is_adapted)
        kept_by = self._kept_names(), self._kept_forms()
        gathered = allgather_object((mine, *kept_by, has_gpus()), name="elastic.state.commits")
        versions = [version for version, *_ in gathered]
        root = newest(versions)
        if all(version.commits == UNCOMMITTED for version in versions):
            self._nothing_kept()
        require_alike({rank: names for rank, (_, names, *_) in enumerate(gathered)}, root)
        receivers = lacking(versions, root)
        require_alike({rank: gathered[rank][2] for rank in (root, *receivers)}, root)
        kept = self._is_commit and not self._is_adapted and self._rank() not in receivers
        with exchange(root, receivers, gpus=any(gpus for *_, gpus in gathered)) as among:
            self._sync_from(root, among=among)
        self._keep_synced(kept=kept)
        self._commit_copy = self._saved
        self._commits = versions[root].after_sync
        self._is_commit = self._is_adapted = False
        self._checks, self._boundary = 0, None

    def _nothing_kept(self) -> None:
        """Called if no rank has a commit: in the first world, or after the loss of all that had the state."""
        if (member := process.find()) is not None and member.state_lost and self._rank() == 0:
            member.send_message(
                "all processes that had the committed state were lost; training starts from initial values"
            )

    def register_local(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """Register a value that differs by rank and is not overwritten by another rank's.

        ``hvd.elastic.train`` copies it at each commit, and sends a copy to the next rank. The replacement of
        a lost rank receives that copy.

        Args:
            name: the same on every rank.
            get: returns the value: numbers, texts and arrays, in dicts, lists and tuples.
            put: restores it.

        Example::

            state.register_local("bias", lambda: net.bias.numpy(), net.bias.assign)
        """
        self._local[name] = (get, put)

    def exported(self) -> dict[str, Any]:
        """The values as a checkpoint keeps them: of numbers, texts and arrays. They are not copied.

        Raises:
            CheckpointError: one of them cannot be in a checkpoint.

        Example::

            values = state.exported()
        """
        return {name: getattr(self, name) for name in self._names}

    def imported(self, values: dict[str, Any]) -> None:
        """Take over what :meth:`exported` has returned, in this process or another.

        Args:
            values: by name.

        Raises:
            Exception: they are those of another state.

        Example::

            state.imported(values)
        """
        for name in self._names:
            setattr(self, name, values[name])

    def _kept_names(self) -> list[str]:
        """The names of what it keeps, which have to be the same on every rank."""
        return sorted(self._names)

    def _kept_forms(self) -> list[str]:
        """Descriptions that have to be the same on ranks that send and receive tensors."""
        return []

    def _keep_synced(self, *, kept: bool) -> None:
        """Make the values that were sent the last commit.

        Args:
            kept: whether they are that already, except for attributes that are pickled.
        """
        self.save()

    def _sync_from(self, root: int, *, among: ProcessSet | None) -> None:
        """Take the values of a rank. Every rank calls it.

        Args:
            root: which.
            among: that rank and those that lack its commit, who exchange tensors; None: this rank is none of
                them, and has the tensors.
        """
        if self._names:
            values = {name: getattr(self, name) for name in self._names}
            received = self._bcast_object(values, root_rank=root, name="elastic.state.objects")
            for name in self._names:
                setattr(self, name, received[name])


class Handler:
    """How a state keeps a value that is not pickled. Subclasses define it.

    Args:
        value: what it keeps.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def set_value(self, value: Any) -> None:
        """Keep another value from now on.

        Args:
            value: in place of the one before.

        Example::

            handler.set_value(model)
        """
        self.value = value

    def form(self) -> str:
        """A description of what has to be the same on all ranks."""
        return ""

    def save(self) -> None:
        """Keep a copy. Raises NotImplementedError if the subclass does not define it.

        Example::

            handler.save()
        """
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the copy. Raises NotImplementedError if the subclass does not define it.

        Example::

            handler.restore()
        """
        raise NotImplementedError

    def exported(self) -> Any:
        """The value for a checkpoint: numbers, texts and arrays, in dicts, lists and tuples.

        Raises:
            CheckpointError: the subclass does not define it.

        Example::

            value = handler.exported()
        """
        raise CheckpointError(
            f"{type(self).__qualname__} cannot keep a {type(self.value).__qualname__} in a checkpoint: "
            "give it the methods exported() and imported()"
        )

    def imported(self, value: Any) -> None:
        """Take over what :meth:`exported` has returned. Raises NotImplementedError if it is not defined.

        Args:
            value: the same, or that of another process.

        Example::

            handler.imported(value)
        """
        raise NotImplementedError

    def sync(self) -> None:
        """Take rank 0's value. Raises NotImplementedError if the subclass does not define it.

        Example::

            handler.sync()
        """
        raise NotImplementedError

    def sync_from(self, root: int, *, among: ProcessSet | None) -> None:
        """Take the value of a rank. Without a method of the subclass it is :meth:`sync`, and rank 0's.

        Every rank calls it.

        Args:
            root: which.
            among: that rank and those that lack its commit, who exchange tensors; None: this rank is none of
                them, and has the tensors.

        Raises:
            HorovodInternalError: a rank was lost or has shut down.

        Example::

            handler.sync_from(0, among=hvd.global_process_set)
        """
        self.sync()

    def keep_synced(self, *, kept: bool) -> None:
        """Make the values that were sent the last commit.

        Args:
            kept: whether they are that already, except for values that are not tensors.

        Example::

            handler.keep_synced(kept=False)
        """
        self.save()


class HandlersState(ObjectState):
    """Attributes that are kept by handlers, and others that are pickled.

    Args:
        handlers: of attributes, by their names.
        kwargs: the others with their first values.
    """

    def __init__(self, handlers: dict[str, Handler], **kwargs: Any) -> None:
        self._handlers: dict[str, Handler] = {}
        super().__init__(broadcast_object, own_rank, **kwargs)
        self._handlers = handlers
        for name, handler in handlers.items():
            object.__setattr__(self, name, handler.value)
            handler.save()

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            handlers[name].set_value(value)
        object.__setattr__(self, name, value)

    def save(self) -> None:
        """Keep a copy of all attributes.

        Raises:
            InvalidArgumentError: one of them cannot be copied.

        Example::

            state.save()
        """
        copies = self._copied()  # first: if a value cannot be copied, all copies stay as they were
        for handler in self._handlers.values():
            handler.save()
        self._saved = copies

    def restore(self) -> None:
        """Give all attributes the values of the copy.

        Example::

            state.restore()
        """
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def exported(self) -> dict[str, Any]:
        """See :meth:`ObjectState.exported`."""
        return {
            **super().exported(),
            **{name: handler.exported() for name, handler in self._handlers.items()},
        }

    def imported(self, values: dict[str, Any]) -> None:
        """See :meth:`ObjectState.imported`."""
        for name, handler in self._handlers.items():
            handler.imported(values[name])
        super().imported(values)

    def _kept_names(self) -> list[str]:
        return sorted([*self._names, *self._handlers])

    def _kept_forms(self) -> list[str]:
        return [f"{name}{self._handlers[name].form()}" for name in sorted(self._handlers)]

    def _keep_synced(self, *, kept: bool) -> None:
        for handler in self._handlers.values():
            handler.keep_synced(kept=kept)
        super().save()

    def _sync_from(self, root: int, *, among: ProcessSet | None) -> None:
        for name in sorted(self._handlers):
            self._handlers[name].sync_from(root, among=among)
        super()._sync_from(root, among=among)


def _await_devices() -> None:
    """Wait until GPUs have computed the results of all collectives, or a rank is lost."""
    world = current.find()
    if process.find() is not None and world is not None:
        while not world.engine.are_devices_done and not world.engine.has_lost_results:
            time.sleep(_DEVICES_POLL_S)


def _require_whole_step() -> None:
    """Raise HorovodInternalError if a collective of this step has failed: there is nothing to commit."""
    world = current.find()
    if process.find() is not None and world is not None and world.engine.has_lost_results:
        raise HorovodInternalError(
            f"rank {world.placement.rank}: state.commit() or check_host_updates() after a collective of this "
            "world has failed: the step is incomplete, and the last commit is restored; if the program "
            "catches "
            "errors of a step, raise HorovodInternalError again there"
        )


def own_rank() -> int:
    """The rank of this process in the current world."""
    return current.world().placement.rank


def copied(value: Any) -> Any:
    """A copy that shares nothing with the value."""
    return value.copy() if type(value) is np.ndarray and not value.dtype.hasobject else copy.deepcopy(value)


def copied_by_name(values: dict[str, Any]) -> dict[str, Any]:
    """Copies of attributes; raises InvalidArgumentError, with the name of one that cannot be copied."""
    copies = {}
    for name, value in values.items():
        try:
            copies[name] = copied(value)
        except Exception as error:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise InvalidArgumentError(
                f"the state's {name!r}, a {kind}, cannot be copied: {error}; a state can keep only "
                "objects that can be pickled: leave it out of the state"
            ) from error
    return copies
