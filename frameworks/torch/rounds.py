"""Agreement between ranks on which gradients a step has. Knows no tensors, only states of parameters.

A rank knows which of its parameters took part in a backward, not which of the others' did. So each
backward ends with a round: one small Max over a byte per parameter. A gradient that any rank has is then
reduced by all of them, zeros from those that have none; one that nobody has stays absent everywhere.
A step that is not settled by then (some parameter might still get its gradient) holds rounds
until every rank has reached it, so ranks may differ in what and how often they compute.

All optimizers of a process set share its rounds: whoever waits, for whichever optimizer, answers for
all, and no order of waiting can deadlock.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable

from polyhvd.errors import HorovodInternalError, RankMismatchError

__all__ = ["EXPECTED", "FROZEN", "READY", "REDUCED", "Board", "Seat", "Section"]

# States of a parameter. The largest among the ranks is what holds for all of them.
FROZEN = 0  # needs no gradient
EXPECTED = 1  # may still get one before the step
REDUCED = 2  # was reduced in an earlier round of this step
READY = 3  # is being reduced; READY + n: as a sparse tensor of n sparse dimensions

_HEADER_BYTES = 4  # alive, not at its step, rounds since the last step, 255 minus these
_ROUNDS_MAX = 255


def _any_ready(states: bytes | bytearray) -> bool:
    return max(states, default=FROZEN) >= READY


class Section(abc.ABC):
    """One optimizer's part in the rounds."""

    def __init__(self) -> None:
        #: No rank will start another gradient before the step.
        self.settled = False
        #: Rounds since the last step.
        self.rounds = 0
        #: Why it takes part no more; the same on every rank.
        self.retired: str | None = None

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
    def drop(self) -> None:
        """Forget what was started: the round has failed, and others may never start theirs."""


class Seat:
    """A section's place in the rounds. It outlives the section, which ranks delete when they like."""

    __slots__ = ("section", "size")

    def __init__(self, section: Section) -> None:
        self.section = weakref.ref(section)
        #: Number of parameters; kept up to date by the section.
        self.size = 0

    def occupant(self) -> Section | None:
        """The section, if it takes part."""
        section = self.section()
        return None if section is None or section.retired else section


class Board:
    """The rounds of one process set. Not thread-safe.

    Args:
        agree: replaces each byte with the largest among the ranks; raises RankMismatchError when their
            numbers differ.
    """

    def __init__(self, agree: Callable[[bytearray], None]) -> None:
        self._agree = agree
        self._seats: list[Seat] = []

    def add(self, section: Section) -> Seat:
        """Let a section take part; in the same order on every rank. It is held weakly."""
        self._seats.append(Seat(section))
        return self._seats[-1]

    def forget_the_gone(self) -> None:
        """Give up the seats of sections that take part no more, as every rank does at this point."""
        self._seats = [seat for seat in self._seats if seat.occupant() is not None]

    def hold_round(self, at_step: Section | None) -> None:
        """Reduce what any rank has ready; return when it is done on this one.

        Args:
            at_step: the section that waits in its step, or None at the end of a backward.

        Raises:
            HorovodInternalError: a reduction failed, or the ranks are not in the same step.
        """
        board = bytearray()
        live: list[tuple[Section, int, bytes]] = []
        for seat in self._seats:
            section = seat.occupant()
            if section is None:
                board += bytes(_HEADER_BYTES + seat.size)
                continue
            states = section.report(at_step=section is at_step)
            rounds = min(section.rounds, _ROUNDS_MAX)
            live.append((section, len(board), states))
            board += bytes((1, section is not at_step, rounds, _ROUNDS_MAX - rounds))
            board += states
        try:
            self._agree(board)
        except BaseException as error:
            for section, _, _ in live:
                section.drop()
            if not isinstance(error, RankMismatchError):
                raise
            # Every rank is here: all begin anew.
            self._seats.clear()
            text = "the optimizers of the ranks do not have the same number of parameters"
            for section, _, _ in live:
                section.retired = f"{text}; make them anew"
            raise RankMismatchError(f"{text}: {error}") from error
        self._conclude(board, live)

    def _conclude(self, board: bytearray, live: list[tuple[Section, int, bytes]]) -> None:
        """Start what others have ready, wait for all, and note what is known to every rank now."""
        errors: list[Exception] = []
        for section, begin, states in live:
            union = bytes(board[begin + _HEADER_BYTES :][: len(states)])
            section.settled = EXPECTED not in union or not board[begin + 1]
            try:
                section.start_missing(union)
            except Exception as error:
                errors.append(error)
        for section, begin, states in live:
            try:
                section.finish()
            except Exception as error:
                errors.append(error)
            most, least = board[begin + 2], _ROUNDS_MAX - board[begin + 3]
            section.rounds = most + 1
            if most != least and _any_ready(board[begin + _HEADER_BYTES :][: len(states)]):
                errors.append(
                    RankMismatchError(
                        "the ranks are not in the same step: since the last one, some have made "
                        f"{most - least} more backward passes than others; call backward() equally often "
                        "on every rank before step(), or accumulate with backward_passes_per_step"
                    )
                )
        errors += self._clear(board)
        if errors:
            raise errors[0]

    def _clear(self, board: bytearray) -> list[Exception]:
        """Drop the sections that are gone on every rank."""
        errors: list[Exception] = []
        kept: list[Seat] = []
        begin = 0
        for seat in self._seats:
            end = begin + _HEADER_BYTES + seat.size
            if seat.occupant() is None and _any_ready(board[begin + _HEADER_BYTES : end]):
                errors.append(
                    HorovodInternalError("an optimizer that other ranks still use was deleted on this rank")
                )
            if board[begin]:
                kept.append(seat)
            begin = end
        self._seats = kept
        return errors
