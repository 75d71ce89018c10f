"""``train``: the whole loop of an elastic training; the user provides the step.

Weights, optimizer and the position in the data are committed together after steps, so a failure undoes the
same steps in all of them.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from polyhvd.collectives.objects import allgather_object, broadcast_object
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.data.position import Position
from polyhvd.elastic import process
from polyhvd.elastic.checkpoint import Folder, TornError, pack
from polyhvd.elastic.leaving import Leave, leaving_with
from polyhvd.elastic.limits import RESUME_STATUS
from polyhvd.elastic.local import LocalParts, random_states
from polyhvd.elastic.loop import looped
from polyhvd.elastic.progress import Progress
from polyhvd.elastic.state import ObjectState, own_rank
from polyhvd.errors import CheckpointError, InvalidArgumentError
from polyhvd.runtime import current
from polyhvd.training.passes import passes_held

__all__ = ["Training", "train", "train_translating"]

_LOG = logging.getLogger("polyhvd")

#: A process that has waited so long for a place in the next world writes a checkpoint: the job may end.
_WAITS_BEFORE_CHECKPOINT_S = 3.0
#: Each of so many ranks waits a second longer than the one before it, which has usually written the same
#: commit by then. The next ones begin again without a delay: the first ranks may be those that were lost.
_NEXT_WRITER_S, _WRITERS = 1.0, 8


def train(
    step: Callable[[Any], Any],
    state: ObjectState,
    data: Any,
    *,
    epochs: int,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    commit_every: int = 1,
    on_epoch_end: Callable[[int], Any] | None = None,
    progress: bool = True,
) -> None:
    """Train to the end, while ranks are lost or join and the job is restarted.

    Every row of every epoch is in the final weights once: weights, optimizer and the position in the data
    are committed together after a step, sent together to new ranks, and written together to disk. A failure
    undoes the step in progress. When the world changes, this process keeps what it has in memory, and the
    remaining rows are distributed among the new world's ranks.

    Every rank calls it, with the same arguments. The job is elastic with ``polyhvdrun --min-np``; in others,
    and without a launcher, it trains and writes checkpoints as well, and a lost rank ends it.

    Args:
        step: trains on one batch: computes gradients, has them reduced and updates the weights that ``state``
            keeps. Its result, a loss or a dict of numbers or None, is shown. An exception ends the job,
            unless it is due to a lost rank. It does not call ``state.commit()``.
        state: what is trained, one of ``hvd.elastic``: an ``ArrayState``, ``TorchState``, ``KerasState`` ...
        data: a :class:`polyhvd.data.ArrayLoader` or :class:`polyhvd.data.ParquetLoader`, the framework's
            ``data.Batches`` of one, or a ``DataLoader`` of PyTorch or Gluon over a
            :class:`polyhvd.data.DistributedBatchSampler`.
        epochs: passes over the data in all, those before a restart included.
        checkpoint: a folder of this job on a file system shared by all hosts. Rank 0 writes there after
            each epoch, and when all ranks leave with notice; if the job fails, one of the other ranks does. A
            restarted job resumes from the newest checkpoint. Then ``state`` may keep only arrays, numbers and
            texts, in dicts, lists and tuples, since nothing is pickled.
        checkpoint_every: also write after each of so many steps.
        commit_every: steps between two copies of the state in memory. With more, a failure undoes up to as
            many steps, which are made again; their rows count once all the same.
        on_epoch_end: is called on every rank with the number of the epoch, from 0, before its last step is
            committed: for learning rates, or an evaluation. It is called again when that step is undone.
        progress: whether rank 0 shows how far it is: a bar on a terminal where rich or tqdm is installed,
            else a line per epoch, on the standard error.

    Raises:
        InvalidArgumentError: an argument cannot be used.
        CheckpointError: a checkpoint cannot be written, for example because the disk is full, none of the
            existing ones can be read, or another job has been started with the folder. Earlier checkpoints
            stay.
        HorovodInternalError: a rank was lost, and the job is not elastic.

    Example::

        loader = ArrayLoader([images, labels], batch_size=32)
        state = hvd.elastic.ArrayState(weights=weights)

        def step(batch):
            state.weights -= 0.1 * hvd.allreduce(batch.weight * gradient(state.weights, *batch), name="g")

        hvd.elastic.train(step, state, loader, epochs=10, checkpoint="run")
    """
    options = {"checkpoint": checkpoint, "checkpoint_every": checkpoint_every, "commit_every": commit_every}
    _train(step, state, data, epochs, on_epoch_end, progress, lambda error: error, options)


def train_translating(translate: Callable[[BaseException], BaseException]) -> Callable[..., None]:
    """:func:`train` of a framework whose errors stand for polyhvd's.

    Args:
        translate: which of polyhvd's errors one of a framework's stands for.
    """

    @functools.wraps(train)
    def wrapper(
        step: Callable[[Any], Any],
        state: ObjectState,
        data: Any,
        *,
        epochs: int,
        on_epoch_end: Callable[[int], Any] | None = None,
        progress: bool = True,
        **options: Any,
    ) -> None:
        _train(step, state, data, epochs, on_epoch_end, progress, translate, options)

    return wrapper


def _train(
    step: Callable[[Any], Any],
    state: ObjectState,
    data: Any,
    epochs: int,
    on_epoch_end: Callable[[int], Any] | None,
    progress: bool,
    translate: Callable[[BaseException], BaseException],
    options: dict[str, Any],
) -> None:
    if not callable(step):
        raise InvalidArgumentError(f"train(step={step!r}): expected a function of one batch")
    if type(epochs) is not int or epochs < 0:
        raise InvalidArgumentError(f"train(epochs={epochs!r}): expected an integer of at least 0")
    if not isinstance(state, ObjectState):
        raise InvalidArgumentError(
            f"train(state={state!r}): expected a state of hvd.elastic such as ObjectState, which says "
            "what is trained"
        )
    training = Training(state, position_of(data), **options)
    if (member := process.find()) is not None:
        training.position._require_rows_for(member.launcher.reply.max_size)
    shown = Progress(epochs, enabled=progress)

    def go_on(training: Training) -> None:
        training.begin_again()
        position = training.position
        if position.epoch < epochs:
            training.require_folder()
        while position.epoch < epochs:
            _go_through_epoch(step, data, training, on_epoch_end, shown)
        training.end()
        allgather_object(None, name="elastic.train.end")  # no rank leaves while another may need its state

    with training.owning(), leaving_with(training.write_leaving):
        try:
            looped(go_on, translate=translate)(training)
        finally:
            shown.close()


def _go_through_epoch(
    step: Callable[[Any], Any],
    data: Any,
    training: Training,
    on_epoch_end: Callable[[int], Any] | None,
    shown: Progress,
) -> None:
    """Run the remaining steps of an epoch. The position is in the next epoch afterwards."""
    position, epoch = training.position, training.position.epoch
    shown.begin_epoch(epoch, len(position))
    ended = False
    for batch in data:
        result = step(batch)
        position._move_on()
        ended = len(position) == 0
        if ended:
            _end_epoch(training, epoch, on_epoch_end)
        training.end_step(epoch_ended=ended)
        shown.step(result)
        if ended:
            break
    if not ended:  # no row was left: there are none at all, or too few for a step with last="drop"
        _end_epoch(training, epoch, on_epoch_end)
        training.end_epoch()
    shown.end_epoch(current.world().placement.size)


def _end_epoch(training: Training, epoch: int, on_epoch_end: Callable[[int], Any] | None) -> None:
    if on_epoch_end is not None:
        on_epoch_end(epoch)
    training.position.set_epoch(epoch + 1)


def position_of(data: Any) -> Position:
    """The position of a loader in its data.

    Args:
        data: as of :func:`train`.

    Raises:
        InvalidArgumentError: it has no position.

    Example::

        position_of(DataLoader(dataset, batch_sampler=sampler)) is sampler
    """
    for name in ("", "loader", "batch_sampler", "_batch_sampler"):
        found = getattr(data, name, None) if name else data
        if isinstance(found, Position):
            return found
    raise InvalidArgumentError(
        f"train(data={type(data).__qualname__}): it has no position in its data; expected an "
        "ArrayLoader or ParquetLoader of polyhvd.data, the Batches of one, or a "
        "DataLoader(dataset, batch_sampler=DistributedBatchSampler(...))"
    )


class Training(ObjectState):
    """A state with the position in the data and the number of steps, which change together.

    Args:
        inner: what is trained.
        position: in its data.
        checkpoint, checkpoint_every, commit_every: as of :func:`train`.

    Raises:
        InvalidArgumentError: an argument is out of range.
    """

    steps: int

    def __init__(
        self,
        inner: ObjectState,
        position: Position,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        commit_every: int = 1,
    ) -> None:
        for name, value in {"checkpoint_every": checkpoint_every, "commit_every": commit_every}.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InvalidArgumentError(f"train({name}={value!r}): expected an integer of at least 1")
        if checkpoint is None and checkpoint_every is not None:
            raise InvalidArgumentError(
                f"train(checkpoint_every={checkpoint_every}) without checkpoint=: pass a folder, too"
            )
        self._inner = inner
        self.position = position
        self._folder = None if checkpoint is None else Folder(checkpoint)
        self._is_starting = False  # whether no rank had a commit in the last sync()
        self._checkpoint_every = checkpoint_every
        self._commit_every = commit_every
        self._is_due = False  # whether the next commit is written to disk
        self._commit_is_due = False
        self._held = 0  # steps in a row with which no update was whole
        self._last_rank = 0  # in the last world
        self._completed: int | None = None  # steps of this rank, whether committed or not, when one failed
        self.parts = LocalParts({**random_states(), **inner._local})
        ended, steps = inner._ended
        is_same = self._folder is not None and ended == self._folder.path.absolute()
        #: Of a train() that has ended with this state and folder: no checkpoint is newer than the state.
        self._former_steps = steps if is_same else -1
        steps = max(0, self._former_steps)
        super().__init__(broadcast_object, own_rank, steps=steps, data=position.state_dict())
        self._unfit = ""  # why the state cannot be in a checkpoint, which sync() raises on all ranks
        if self._folder is not None:
            try:
                pack(self.exported())
            except CheckpointError as error:
                self._unfit = str(error)

    @contextmanager
    def owning(self) -> Iterator[None]:
        """Within this context, only this object may commit the trained state."""
        self._inner._owner = "elastic.train(), which commits it together with the position in the data"
        self.position._owner = "elastic.train(), which moves the position when the step has returned"
        try:
            yield
        finally:
            self._inner._owner = self.position._owner = ""

    def begin_again(self) -> None:
        """Discard what was read ahead for another world. All ranks call it together."""
        self._is_due, self._commit_is_due, self._held = False, False, 0
        self.position.load_state_dict(self.position.state_dict())

    def require_folder(self) -> None:
        """Raise CheckpointError before the job's first step if this rank could not write checkpoints."""
        if self._folder is not None and self._rank() == 0 and self._is_starting:
            self._folder.require_writable()

    def end_step(self, *, epoch_ended: bool) -> None:
        """Commit and write what is due after a step, when gradients of earlier passes wait for no update.

        Args:
            epoch_ended: whether it was the last one of its epoch.

        Raises:
            HostsUpdatedInterrupt: the world is to change.
            CheckpointError: the checkpoint could not be written.
        """
        self.steps += 1
        every = self._checkpoint_every
        self._is_due |= epoch_ended or (every is not None and self.steps % every == 0)
        self._commit_is_due |= self._is_due or self.steps % self._commit_every == 0
        self._held += 1
        if self._held < passes_held():
            return
        self._held = 0
        if self._commit_is_due:
            self.commit()
        else:
            self.check_host_updates()

    def end_epoch(self) -> None:
        """Commit and write after an epoch without a step; raises as :meth:`end_step` does."""
        self._is_due = True
        self.commit()

    def end(self) -> None:
        """Commit and write what is due, whatever waits for an update; raises as :meth:`end_step` does."""
        if self._commit_is_due:
            self.commit()
        self.parts.finish()
        if self._folder is not None:
            self._inner._ended = self._folder.path.absolute(), self.steps

    # What the loop calls

    def save(self) -> None:
        """Keep a copy of all of it."""
        self.data = self.position.state_dict()
        self._inner.save()
        self._inner_copy = self._inner._saved
        super().save()

    def restore(self) -> None:
        """Restore all of it from the copy."""
        self._completed = self.steps
        self._inner.restore()
        super().restore()
        self._is_commit &= self._inner._saved is self._inner_copy  # unless a step has called state.save()
        self.parts.abandon()
        self.parts.restore()
        self.position.load_state_dict(self.data)

    def _at_boundary(self) -> None:
        """Send the local parts before the world is left."""
        if self._is_commit:
            self.parts.finish()  # they are being sent
        else:
            self.parts.hand_over()

    def _end_background(self) -> None:
        self._inner._end_background()

    def on_reset(self) -> None:
        """The objects that the user has registered with the state."""
        self._inner.on_reset()
        self._is_adapted = self._inner._is_adapted

    def sync(self) -> None:
        """Give all ranks the newest commit, or where there is none yet, the newest checkpoint.

        Raises:
            CheckpointError: the state cannot be in a checkpoint, or none can be read; on all ranks.
        """
        if self._folder is not None:
            member = process.find()  # whose world may have one rank, and no name
            self._folder.job = current.world().job if member is None else member.job
            mine = self._commits, self._unfit, self._folder.owner()
            found = allgather_object(mine, name="elastic.train.commits")
            for rank, (_, unfit, _) in enumerate(found):
                if unfit:
                    raise self._error_of(rank, unfit)
            self._is_starting = max(commits for commits, *_ in found) < 0
            if self._is_starting:
                self._resume(self._folder)
            elif self._commits < 0:
                self._folder.make()
                # A later job may have taken over a folder that hosts share.
                if all(owner == self._folder.job for commits, _, owner in found if commits >= 0):
                    self._folder.claim()
        super().sync()
        self.parts.settle()
        self._last_rank = self._rank()
        if self._completed is not None and self._rank() == 0 and (member := process.find()) is not None:
            again = max(0, self._completed - self.steps)
            repeats = f"; {again} completed step{'s are' if again != 1 else ' is'} repeated" if again else ""
            member.send_message(f"the training continues from the commit of step {self.steps}{repeats}")
        self._completed = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While this process waits for a place: when that takes long, the job may end, and it writes."""
        if self._folder is None or self._commits < 0:
            yield
            return
        later_s = _NEXT_WRITER_S * (self._last_rank % _WRITERS)
        timer = threading.Timer(_WAITS_BEFORE_CHECKPOINT_S + later_s, self._write_waiting)
        timer.daemon = True
        timer.start()
        try:
            yield
        except SystemExit as error:
            member = process.find()
            if error.code == RESUME_STATUS:  # the launcher is gone
                self._write_waiting()
            elif member is not None and member.launcher.reply.saves:
                self._write_waiting("the job has failed", level=logging.WARNING)
            raise
        finally:
            timer.cancel()
            timer.join()

    def _kept_names(self) -> list[str]:
        return sorted([*super()._kept_names(), *self._inner._kept_names()])

    def _kept_forms(self) -> list[str]:
        return self._inner._kept_forms()

    def _keep_synced(self, *, kept: bool) -> None:
        self._inner._keep_synced(kept=kept)
        self._inner_copy = self._inner._saved
        super().save()

    def _sync_from(self, root: int, *, among: ProcessSet | None) -> None:
        self.data = self.position.state_dict()
        self._inner._sync_from(root, among=among)
        super()._sync_from(root, among=among)
        self.position.load_state_dict(self.data)

    def _nothing_kept(self) -> None:
        member = process.find()
        if member is None or not (policy := member.state_lost):
            return
        lost = "all processes that had the trained state were lost, and there is no checkpoint"
        if policy == "restart":
            if self._rank() == 0:
                member.send_message(f"{lost}; the training starts from step 0 again")
            return
        if self._rank() == 0:
            _LOG.error(
                "elastic: %s: the job ends. Pass checkpoint= to train(), or --on-state-lost restart to start "
                "from step 0 in such a case",
                lost,
            )
        raise SystemExit(RESUME_STATUS)

    # Checkpoints

    def exported(self) -> dict[str, Any]:
        """The content of a checkpoint."""
        return {"state": self._inner.exported(), "data": self.position.state_dict(), "steps": self.steps}

    def imported(self, values: dict[str, Any]) -> None:
        """Take over what a checkpoint has kept."""
        self.position.load_state_dict(values["data"])
        self._inner.imported(values["state"])
        self.steps = values["steps"]

    def _committed(self) -> None:
        if self._is_due and self._folder is not None and self._rank() == 0:
            self._folder.write(self.steps, self.exported())
        self._is_due = self._commit_is_due = False
        self.parts.keep()

    def write_leaving(self, leave: Leave) -> None:
        """Write the state if every rank leaves with notice and this one has the newest commit.

        Args:
            leave: which ranks leave.

        Raises:
            CheckpointError: it could not be written.
        """
        folder = self._folder
        if folder is None or not leave.everyone or leave.rank != 0 or self._commits < 0:
            return
        if self.steps not in folder.numbers():
            folder.write(self.steps, self.exported())
            _LOG.info("elastic: checkpoint of step %d written, since every rank leaves", self.steps)

    def _write_waiting(self, why: str = "too few ranks are left", level: int = logging.INFO) -> None:
        folder = self._folder
        try:
            if folder is not None and self.steps and self.steps not in folder.numbers():
                folder.write(self.steps, self.exported())
                _LOG.log(level, "elastic: checkpoint of step %d written, since %s", self.steps, why)
        except Exception as error:
            _LOG.error("elastic: %s", error)

    def _resume(self, folder: Folder) -> None:
        """Take the newest checkpoint that a rank can read; every rank calls it, and gets the same error."""
        torn: list[str] = []
        tried: set[int] = set()  # by this rank; a file that cannot be renamed keeps its number
        while True:
            newest, error, damaged = -1, "", folder.torn()
            try:
                folder.make()
                folder.claim()  # by each rank, since each host may have a separate folder
                numbers = set(folder.numbers())
                newest = max(numbers - tried, default=-1)
                damaged += [str(folder.file(number)) for number in numbers & tried]
            except CheckpointError as raised:
                error = str(raised)
            mine = newest, error, damaged, self._former_steps
            found = allgather_object(mine, name="elastic.train.checkpoints")
            for rank, (_, text, *_) in enumerate(found):
                if text:
                    raise self._error_of(rank, text)
            newest = max(number for number, *_ in found)
            former = max(steps for *_, steps in found)
            if former >= max(newest, 0):  # the user may have changed the state since
                self._commits = 0 if self._former_steps == former else self._commits
                return
            if newest < 0:
                break
            root = [number for number, *_ in found].index(newest)
            loaded = None
            if self._rank() == root:
                tried.add(newest)
                loaded = self._load(folder, newest)
            is_torn, error = broadcast_object(loaded, root, name="elastic.train.loaded")
            if error and not is_torn:
                raise self._error_of(root, error)
            if not error:
                self.on_reset()  # it may be that of another number of ranks
                return
            torn.append(error)
        if files := sorted({file for _, _, files, _ in found for file in files}):
            raise self._error_of(
                0,
                f"{'; '.join(torn) or 'all checkpoints are damaged'}; there is none to resume from. Restore "
                f"one of {', '.join(files)}; or, to start from step 0, remove them or pass another folder",
            )

    def _error_of(self, rank: int, text: str) -> CheckpointError:
        """An error that all ranks raise, and that only one prints if it is not caught."""
        error = CheckpointError(text)
        if self._rank() != rank:
            _print_nothing_of(error)
        return error

    def _load(self, folder: Folder, number: int) -> tuple[bool, str]:
        """Load a checkpoint; whether its file is torn, and what is wrong, if anything."""
        try:
            values = folder.read(number)
        except TornError as error:
            folder.put_aside(number)
            _LOG.warning("elastic: %s; looking for an older one", error)
            return True, str(error)
        except CheckpointError as error:
            return False, str(error)
        try:
            self.imported(values)
            self.save()  # a loss before the others have it restores this
        except Exception as error:
            file = str(folder.file(number))
            return False, (
                f"the checkpoint {file!r} does not fit this program: {type(error).__name__}: {error}; it is "
                "that of another model or other data; pass another folder, or run the program that wrote it"
            )
        self._commits = 0
        text = f"resumed from {folder.file(number)}, step {self.steps}"
        _LOG.info("elastic: %s", text)
        if (member := process.find()) is not None:
            member.send_message(text)
        return False, ""


def _print_nothing_of(error: Exception) -> None:
    """End the program without a traceback if it ends with this error. A user's hook stays."""
    former = sys.excepthook
    if former is not sys.__excepthook__ and not getattr(former, "__module__", "").startswith("polyhvd."):
        return

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            former(kind, raised, trace)

    sys.excepthook = hook
