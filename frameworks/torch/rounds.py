"""Agreement between ranks on which gradients a step has. Knows no tensors, only states of parameters.

A rank knows which of its parameters took part in a backward, not which of the others' did. So each
backward ends with a round: one small Max over a byte per parameter. A gradient that any rank has is then
reduced by all of them, zeros from those that have none; one that no rank has stays absent everywhere.
A step that is not settled by then (some parameter might still get its gradient) holds rounds
until every rank has reached it, so ranks may differ in what and how often they compute.

All optimizers that a thread uses share its rounds in a process set: whoever waits, for whichever of them,
answers for all, and no order of waiting can deadlock. At the end of a backward the rounds of all process
sets are under way before one is waited for.

Threads do not answer for each other. A rank cannot know whether an optimizer of another thread is about to
have gradients, and threads get ahead of each other differently on each rank. So each has separate boards,
and an optimizer sits on the board of the thread that used it last. A board is named for its first optimizer,
and what else sits on it follows from what its thread has done so far: where a thread does the same on every
rank, its rounds only meet its own ones, in the order of its program. A round changes none but the optimizers
that are ready or at their step on some rank, which this thread uses on all of them. No thread holds a lock
while it waits for ranks. So each thread is by itself the case of one thread, and none waits for another.
"""

from __future__ import annotations

import abc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from polyhvd.errors import HorovodInternalError, RankMismatchError

__all__ = [
    "EXPECTED",
    "FROZEN",
    "GONE_BYTES_MAX",
    "READY",
    "REDUCED",
    "Board",
    "Place",
    "Section",
    "hold_rounds",
]

# States of a parameter. The largest among the ranks is what holds for all of them.
FROZEN = 0  # needs no gradient
EXPECTED = 1  # may still get one before the step
REDUCED = 2  # was reduced in an earlier round of this step
READY = 3  # is being reduced; READY + n: as a sparse tensor of n sparse dimensions

# Whether a section is here, whether it is not at its step, rounds since the last step, 255 minus these, a
# digest that identifies its parameters, one of the hyperparameters of its last step, and whether gradients of
# it stay on their rank.
_HEADER_BYTES = 13
_GONE, _HERE, _AT_STEP = range(3)
_ROUNDS_MAX = 255
#: Sections that are gone on every rank keep their places until these take more than this.
GONE_BYTES_MAX = 8192


def _doubled(digest: int) -> bytes:
    """Two bytes of a digest, and 255 minus each: the largest among ranks add up to 255 if all are equal."""
    first, second = digest.to_bytes(2, "little")
    return bytes((first, second, 255 - first, 255 - second)) if digest else bytes(4)


def _differ(doubled: bytes | bytearray) -> bool:
    """Return whether ranks have sent different digests; those that have sent none do not count."""
    return any(doubled) and (doubled[0] + doubled[2], doubled[1] + doubled[3]) != (255, 255)


def _any_ready(states: bytes | bytearray) -> bool:
    return max(states, default=FROZEN) >= READY


class Section(abc.ABC):
    """One optimizer's part in the rounds. One thread uses it at a time."""

    #: Where it takes part, and its place there.
    board: Board
    place: Place

    def __init__(self) -> None:
        #: Held while it reports, or goes to another board.
        self.moving = threading.Lock()
        #: No rank will start another gradient before the step.
        self.settled = False
        #: Rounds since the last step that it was ready in, on some rank.
        self.rounds = 0
        #: Identifies its parameters, if not 0; the same on every rank.
        self.digest = 0
        #: Of the hyperparameters of its last step, if not 0.
        self.values_digest = 0
        #: Whether gradients of it stay on this rank, and whether some do on any rank, as of the last round.
        self.has_local = self.has_local_anywhere = False
        #: Why it takes part no more; the same on every rank.
        self.retired: str | None = None

    @abc.abstractmethod
    def parameter_names(self) -> list[str]:
        """Names of its parameters, in order."""

    @abc.abstractmethod
    def report(self, *, at_step: bool) -> bytes:
        """Start the gradients that are due, and return the state of each parameter."""

    @abc.abstractmethod
    def start_missing(self, states: bytes) -> None:
        """Start those that are READY on some rank and not yet started here, and what waits for others.

        Args:
            states: of each parameter; the same on every rank.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Wait for all that was started. Raises the first error, after all are done."""

    @abc.abstractmethod
    def compare_values(self) -> None:
        """In a later round, compare hyperparameters, which were not the same on all ranks in this one."""

    @abc.abstractmethod
    def drop(self) -> None:
        """Forget what was started: the round has failed, and others may never start theirs."""


class Place:
    """A section's place in the rounds. It outlives the section, which ranks delete when they like.

    It stays empty when the section goes to another board, until it comes back.
    """

    __slots__ = ("section", "size")

    def __init__(self, section: Section) -> None:
        self.section = weakref.ref(section)
        #: Number of parameters; kept up to date by the section.
        self.size = 0

    def occupant(self) -> Section | None:
        """The section, if it takes part."""
        section = self.section()
        return None if section is None or section.retired or section.place is not self else section


class Board:
    """The rounds of one thread in one process set. No other thread uses it.

    Args:
        agree: begins to replace each byte with the largest among the ranks, and returns a function that waits
            for it and raises RankMismatchError when their numbers differ. Its second argument: whether that
            function is called at once.
        call_roll: begins to ask whether every rank takes part, none has joined, and returns a function that
            waits for the answer; all ranks that do take part call it.
        difference: returns which of the sections' names of parameters only some ranks have; all ranks that
            take part call it.
    """

    def __init__(
        self,
        agree: Callable[[bytearray, bool], Callable[[], None]],
        call_roll: Callable[[], Callable[[], bool]],
        difference: Callable[[Sequence[Sequence[str]]], str],
    ) -> None:
        self.agree = agree
        self.call_roll = call_roll
        self.difference = difference
        self.places: list[Place] = []

    def add(self, section: Section, size: int = 0) -> None:
        """Let a section take part here, and nowhere else; in the same order on every rank. It is held weakly.

        Args:
            size: the number of its parameters.
        """
        place = next((place for place in self.places if place.section() is section), None)
        if place is None:
            place = Place(section)
            self.places.append(place)
        place.size = size
        with section.moving:
            section.board, section.place = self, place

    def hold_round(self, at_step: Section | None) -> None:
        """Reduce what any rank has ready; return when it is done on this one.

        Args:
            at_step: the section that waits in its step, or None at the end of a backward.

        Raises:
            HorovodInternalError: a reduction failed, or the ranks are not in the same step.
        """
        hold_rounds([self], at_step)


def hold_rounds(boards: Sequence[Board], at_step: Section | None = None) -> None:
    """:meth:`Board.hold_round` on several boards, none of which waits for another.

    Process sets may overlap in any way, for example in a ring of ranks: each thing is begun on all boards
    before it is waited for on one.
    """
    rounds: list[_Round] = []
    errors: list[Exception] = []

    def on_each(act: Callable[[Any], Any], among: Sequence[Any]) -> list[Any]:
        done = []
        for item in among:
            try:
                act(item)
                done.append(item)
            except Exception as error:
                errors.append(error)
        return done

    try:
        on_each(lambda board: rounds.append(_Round(board, at_step, single=len(boards) == 1)), boards)
        agreed = on_each(_Round.conclude, rounds)
        for held in agreed:
            errors += held.finish()
        on_each(_Round.clear, on_each(_Round.ask_for_presence, agreed))
    except BaseException:
        for held in rounds:
            held.drop()
        raise
    if errors:
        raise errors[0]


class _Part(NamedTuple):
    """A section's report in a round."""

    place: Place
    section: Section
    begin: int  # in the states
    reported: bytes


class _Round:
    """One round of a board, which begins when this is made."""

    def __init__(self, board: Board, at_step: Section | None, *, single: bool) -> None:
        self._board = board
        self._states = bytearray()
        self._live: list[_Part] = []
        self._errors: list[Exception] = []
        self._present: Callable[[], bool] | None = None
        self._taken = list(board.places)
        for place in self._taken:
            self._ask(place, at_step)
        try:
            self._wait = board.agree(self._states, single)
        except BaseException:
            self.drop()
            raise

    def _ask(self, place: Place, at_step: Section | None) -> None:
        """Add the report of the section of a place."""
        states, section = self._states, place.section()
        if section is not None:
            with section.moving:  # from here on its new thread may use it, if it has gone
                if place.occupant() is not None:
                    is_at_step = section is at_step
                    reported = section.report(at_step=is_at_step)
                    self._live.append(_Part(place, section, len(states), reported))
                    rounds = min(section.rounds, _ROUNDS_MAX)
                    here = _AT_STEP if is_at_step else _HERE
                    states += bytes((here, not is_at_step, rounds, _ROUNDS_MAX - rounds))
                    states += _doubled(section.digest) + _doubled(section.values_digest)
                    states += bytes((section.has_local,)) + reported
                    return
        states += bytes(_HEADER_BYTES + place.size)

    def drop(self) -> None:
        """Let all sections forget what was started."""
        for part in self._live:
            if part.section.place is part.place:
                part.section.drop()

    def conclude(self) -> None:
        """Wait for the other ranks, and start what any of them has ready."""
        try:
            self._wait()
        except RankMismatchError as error:
            self.drop()
            # Every rank is here: all of them reset the board.
            self._board.places.clear()
            text = "the optimizers of the ranks do not have the same number of parameters"
            for part in self._live:
                part.section.retired = f"{text}; make new ones"
            difference = self._board.difference([part.section.parameter_names() for part in self._live])
            raise RankMismatchError(f"{text}: {difference}; {error}") from error
        except BaseException:
            self.drop()
            raise
        for part, union in self._concerned():
            part.section.settled = EXPECTED not in union or not self._states[part.begin + 1]
            part.section.has_local_anywhere = bool(self._states[part.begin + 12])
            try:
                part.section.start_missing(union)
            except Exception as error:
                self._errors.append(error)

    def _concerned(self) -> list[tuple[_Part, bytes]]:
        """Sections that are ready or at their step on some rank, and the states of their parameters.

        The others may be in use by another thread by now.
        """
        found = []
        for part in self._live:
            union = bytes(self._states[part.begin + _HEADER_BYTES :][: len(part.reported)])
            if self._states[part.begin] == _AT_STEP or _any_ready(union):
                found.append((part, union))
        return found

    def finish(self) -> list[Exception]:
        """Wait for what was started, and note what is known to every rank now; what went wrong."""
        errors, states = self._errors, self._states
        for part, union in self._concerned():
            try:
                part.section.finish()
            except Exception as error:
                errors.append(error)
            if _differ(states[part.begin + 8 :][:4]):
                part.section.compare_values()
            if _differ(states[part.begin + 4 :][:4]):
                errors.append(
                    RankMismatchError(
                        "the parameters of an optimizer have other names on other ranks; make optimizers, "
                        "and add groups of parameters, in the same order on every rank, and let threads make "
                        "optimizers one after the other"
                    )
                )
            most, least = states[part.begin + 2], _ROUNDS_MAX - states[part.begin + 3]
            part.section.rounds = most + 1
            if most != least and _any_ready(union):
                errors.append(
                    RankMismatchError(
                        "the ranks are not in the same step: since the last one, some have made "
                        f"{most - least} more backward passes than others; call backward() equally often "
                        "on every rank before step(), or accumulate with backward_passes_per_step"
                    )
                )
        for begin, place in self._places():
            if place.occupant() is None and _any_ready(states[begin + _HEADER_BYTES :][: place.size]):
                errors.append(
                    HorovodInternalError(
                        "an optimizer that other ranks still use was deleted on this rank, or is used by "
                        "another thread here"
                    )
                )
        return errors

    def _places(self) -> list[tuple[int, Place]]:
        """The places, and where in the states each begins."""
        found, begin = [], 0
        for place in self._taken:
            found.append((begin, place))
            begin += _HEADER_BYTES + place.size
        return found

    def ask_for_presence(self) -> None:
        """If many sections are gone, ask whether every rank takes part; one that has joined has no answer."""
        gone = (place for begin, place in self._places() if self._states[begin] == _GONE)
        if sum(_HEADER_BYTES + place.size for place in gone) > GONE_BYTES_MAX:
            self._present = self._board.call_roll()

    def clear(self) -> None:
        """Give up the places of sections that are gone on every rank, if every rank knows."""
        if self._present is not None and self._present():
            gone = {id(place) for begin, place in self._places() if self._states[begin] == _GONE}
            self._board.places = [place for place in self._board.places if id(place) not in gone]
