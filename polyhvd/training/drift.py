"""Reports weights that ranks train together and that differ between them, as after a forgotten broadcast.

Learning rates and other hyperparameters travel in the same operation, with their values, and so do checksums
of the optimizer's state of each weight, which a program may have loaded on one rank only. If weights differ,
every rank also sends the names of those that it trains, so that a layer frozen on some ranks is reported.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyhvd import _core
from polyhvd.collectives.adapter import OpKind
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.errors import HorovodInternalError, RankMismatchError
from polyhvd.runtime import current
from polyhvd.runtime.world import World
from polyhvd.training.mapping import WeightMapping

__all__ = [
    "HYPERPARAMETERS",
    "Drift",
    "DriftCheck",
    "Hyperparameters",
    "Weights",
    "compare_now",
    "names_at_some_positions",
    "names_of_some_ranks",
    "report",
    "shapes_of",
]

#: Name and values of each weight, in the order of the optimizer. Values of None: this rank does not train the
#: weight; None in place of the pair: the weight is not compared.
Weights = Iterable[tuple[str, NDArray[Any] | None] | None]

#: Hyperparameters that are compared, as reports name them.
HYPERPARAMETERS = (
    "learning rate",
    "momentum",
    "weight decay",
    "dampening",
    "beta 1",
    "beta 2",
    "alpha",
    "epsilon",
)
#: By position of the first weight that has them: its name, and values by name.
Hyperparameters = Mapping[int, tuple[str, Mapping[str, float]]]

_LOG = logging.getLogger("polyhvd")
_RANKS_SHOWN = 8
#: Two values that differ by less come from rounding, as of a schedule that hosts compute differently.
_RELATIVE_MAX = 1e-6
_VALUES_REMEDY = (
    "set the same value on every rank: a schedule that follows a loss needs the average of all ranks' losses"
)
_TRAINED_REMEDY = (
    "freeze the same weights on every rank, by 'trainable' of Keras, 'requires_grad' of PyTorch or "
    "'grad_req' of MXNet"
)
_STATES_REMEDY = (
    "load the state of the optimizer on every rank, or call hvd.broadcast_optimizer_state() before the "
    "first step"
)
_ORDER_REMEDY = "build the layers, and list their weights, in the same order on every rank"
_MAPPING_REMEDY = "call mapping.broadcast(root_rank=0) before the first step"
#: In place of a fingerprint: this rank does not train the weight.
_FROZEN = -1
#: In place of a position: the row has the number of positions.
_COUNT = int(np.iinfo(np.int64).min)
#: Is added to the position of a weight in the row of its state in the optimizer.
_STATE = 1 << 40
#: In place of the checksum of a state: this rank has none.
_NO_STATE = -1
_NAMES_SHOWN = 3
_LENGTH_MAX = 1 << 32  # of a list of names
_STRUCTURE_WAIT_S = 5.0  # of a step that might otherwise wait without end
_PATIENCE_S = 10.0  # of a rank that leaves, for the other ranks' first step
_lock = threading.Lock()  # of the next two
_reporters: list[threading.Thread] = []
_numbers: weakref.WeakKeyDictionary[World, Counter[str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Drift:
    """How weights differ between ranks.

    Args:
        text: which weights, on which ranks.
        is_reporter: whether this rank is the one of them that logs it.
        remedy: what to do; empty: broadcast weights.
        is_endless: whether some ranks train more weights than others.
    """

    text: str
    is_reporter: bool
    remedy: str = ""
    is_endless: bool = False


class DriftCheck:
    """Compares the weights of one optimizer over its ranks, once in each world.

    It is one allgather of 24 bytes per weight, optimizer state and hyperparameter, at a step that every rank
    of the process set takes. If that is the second step, the first one compares the number and shapes of the
    weights. A step waits for it only with ``POLYHVD_CHECK_DRIFT=error``: otherwise a thread reports a later
    result, and the rank does not leave before. A rank that has called ``join()`` begins no comparison, since
    it may have missed the step of the others.

    Args:
        call: the optimizer, as the report names it.
        process_set: the ranks that share the weights.
        remedy: how to broadcast weights in this framework.
        step: number of the step at which weights are compared.
        mapping: of the weights, where ranks have different frameworks. These round steps differently, so the
            weights are compared in the first one.
        reduces_singly: whether ranks that train different numbers of weights would wait for each other
            without end. They get an error instead.
    """

    def __init__(
        self,
        call: str,
        process_set: ProcessSet,
        remedy: str,
        *,
        step: int = 1,
        mapping: WeightMapping | None = None,
        reduces_singly: bool = False,
    ) -> None:
        self._call = call
        self._process_set = process_set
        self._remedy = remedy if mapping is None else _MAPPING_REMEDY
        self._step = step if mapping is None else 1
        self._mapping = mapping
        self._reduces_singly = reduces_singly
        self._steps_left = self._step
        self._world: weakref.ref[World] | None = None
        self._begun: _Comparison | None = None

    @property
    def is_first(self) -> bool:
        """Whether the step that was counted last is the first of two in this world."""
        is_counted = self._step - self._steps_left == 1 and self._steps_left > 0
        return is_counted and self._mapping is None and _is_compared(current.world(), self._process_set)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to compare in this world."""
        return self._steps_left == 0 and self._world is not None and self._world() is current.find()

    def is_due(self) -> bool:
        """Count a step; return whether the weights are to be compared in it."""
        if self.is_settled:
            return False
        world = current.world()
        if self._world is None or self._world() is not world:
            self._world, self._steps_left = weakref.ref(world), self._step
        self._steps_left -= 1
        if self._mapping is not None and not self._mapping.has_optimizers:
            return False
        return self._steps_left == 0 and _is_compared(world, self._process_set)

    def compare_again(self) -> bool:
        """Let the next :meth:`is_due` be true; return False if no weights were compared in this world yet."""
        world = current.world()
        if self._world is None or self._world() is not world or not _is_compared(world, self._process_set):
            return False
        self._steps_left = 1
        return True

    def begin(
        self,
        name: str,
        weights: Weights,
        values: Hyperparameters | None = None,
        states: Mapping[int, int] | None = None,
    ) -> None:
        """Send fingerprints of the weights.

        Args:
            name: begins the name of the operation, unless there is a mapping.
            weights: of this rank.
            values: hyperparameters of this rank; not with a mapping.
            states: checksums of the optimizer's states, by positions of their weights; not with a mapping.
        """
        name = name if self._mapping is None else self._mapping.prefix
        world = self._process_set.world or current.world()
        with _lock:
            counter = _numbers.setdefault(world, Counter())
            number = counter[name]
            counter[name] += 1
        full_name = f"{name}.drift.{number}"
        number = process_set_id(self._process_set)
        self._begun = _Comparison(
            world, number, full_name, _Rows(world, number, full_name, weights, values or {}, states or {})
        )

    def compare(
        self,
        name: str,
        weights: Callable[[], Weights],
        values: Callable[[], Hyperparameters] = dict,
        states: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        """In the step at which it is due, :meth:`begin` and :meth:`finish`."""
        if self.is_due():
            more = (values(), states()) if self._mapping is None else ()
            self.begin(name, weights(), *more)
            self.finish()
        elif self.is_first:
            self.begin(name, shapes_of(weights()))
            self.finish()

    def finish(self) -> None:
        """After the gradients of the step: report what differs, or start a thread that does when it is known.

        Raises:
            RankMismatchError: the weights differ, with ``POLYHVD_CHECK_DRIFT=error``; on every rank. Or the
                ranks would wait without end.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return
        if begun.raises or begun.is_done(_STRUCTURE_WAIT_S if self._reduces_singly else 0.0):
            self._report(begun, is_in_step=True)
            return
        reporter = threading.Thread(target=self._report, args=(begun,), name="polyhvd drift", daemon=True)
        with _lock:
            reporter.start()
            _reporters[:] = [*filter(threading.Thread.is_alive, _reporters), reporter]

    def _report(self, begun: _Comparison, *, is_in_step: bool = False) -> None:
        found = begun.wait()
        if found is not None:
            text = f"{self._call}: {found.text}"
            if is_in_step and found.is_endless and self._reduces_singly:
                raise RankMismatchError(f"{text}; {found.remedy}")
            report(begun.world, text, found.remedy or self._remedy, is_reporter=found.is_reporter)


class _Comparison:
    """An allgather of fingerprints that has begun."""

    def __init__(self, world: World, number: int, name: str, rows: _Rows) -> None:
        self.world = world
        self.raises = world.settings.check_drift == "error"
        self._ranks = world.engine.process_sets()[number]
        self._rows = rows
        self._handle = world.engine.submit(OpKind.ALLGATHER, name, (rows.array,), None, process_set=number)

    def is_done(self, timeout_s: float) -> bool:
        """Return whether the result is known, which is awaited for so long."""
        until = time.monotonic() + timeout_s
        while not self._handle.done():
            if time.monotonic() >= until:
                return False
            time.sleep(0.001)
        return True

    def wait(self) -> Drift | None:
        """How the weights differ; None if they do not, or if the world has failed."""
        try:
            self._handle.wait()
            return self._rows.drift(self._handle, self._ranks)
        except HorovodInternalError:
            return None


def compare_now(
    name: str,
    sharing: ProcessSet,
    weights: Weights,
    among: ProcessSet,
    values: Hyperparameters | None = None,
) -> Drift | None:
    """Compare weights where every rank of a process set comes in the same order, and wait for the result.

    Args:
        name: of the operation.
        sharing: the ranks that share the weights.
        weights: of this rank.
        among: the ranks that make the call.
        values: hyperparameters of this rank.

    Returns:
        How they differ; None if they do not.

    Raises:
        HorovodInternalError: a rank was lost.
    """
    world, number = among.world or current.world(), process_set_id(among)
    if world.settings.check_drift == "off" or among.size() == 1:
        return None
    rows = _Rows(world, number, name, weights, values or {}, {})
    ranks = range(world.placement.size) if sharing.ranks is None else sharing.ranks
    with world.line(name, number):
        handle = world.engine.submit(
            OpKind.ALLGATHER, name, (rows.array,), None, process_set=number, blocking=True
        )
        handle.wait()
        return rows.drift(handle, ranks)


def report(world: World, text: str, remedy: str, *, is_reporter: bool) -> None:
    """Warn, or raise, depending on ``POLYHVD_CHECK_DRIFT``.

    Args:
        world: whose setting it is.
        text: the finding.
        remedy: what to do.
        is_reporter: whether this rank warns.

    Raises:
        RankMismatchError: with ``error``.
    """
    setting = world.settings.check_drift
    if setting == "error":
        raise RankMismatchError(f"{text}; {remedy}")
    if setting == "warn" and is_reporter:
        _LOG.warning("%s; %s; POLYHVD_CHECK_DRIFT=off turns this check off", text, remedy)


def _await_reports(_: World) -> None:
    """A rank that leaves with a comparison pending would fail the other ranks, which may begin it later."""
    until = time.monotonic() + _PATIENCE_S
    with _lock:
        reporters = list(_reporters)
    for thread in reporters:
        thread.join(max(0.0, until - time.monotonic()))


current.on_leave(_await_reports)


def _is_compared(world: World, process_set: ProcessSet) -> bool:
    if world.settings.check_drift == "off" or world.has_joined:
        return False
    is_known = process_set is global_process_set or process_set.process_set_id is not None
    return is_known and process_set.size() > 1 and process_set.included()


def shapes_of(weights: Weights) -> Weights:
    """The shape of each weight in place of its values."""
    for weight in weights:
        if weight is None or weight[1] is None:
            yield weight
        else:
            yield weight[0], np.array(np.shape(weight[1]), dtype=np.int64)


class _Rows:
    """The rows that a rank sends: rank, position and fingerprint. Ranks that have joined send none.

    Hyperparameters have negative positions, and their value as float64 instead of a fingerprint.
    """

    def __init__(
        self,
        world: World,
        number: int,
        name: str,
        weights: Weights,
        values: Hyperparameters,
        states: Mapping[int, int],
    ) -> None:
        self._world = world
        self._number = number
        self._name = name
        self._rank = rank = world.placement.rank
        self._trained: dict[int, str] = {}  # names by position
        self._excluded: list[int] = []  # positions
        self._values: dict[int, str] = {}
        rows: list[tuple[int, int, int]] = []
        count = 0
        for position, weight in enumerate(weights):
            count += 1
            if weight is None:
                self._excluded.append(position)
                continue
            if weight[1] is None:
                rows.append((rank, position, _FROZEN))
                continue
            self._trained[position] = weight[0]
            data: Any = np.ascontiguousarray(weight[1]).reshape(-1).view(np.uint8)
            rows.append((rank, position, _core.crc32c(data)))
        rows += [(rank, _STATE + at, checksum) for at, checksum in states.items() if at in self._trained]
        if rows:
            rows.append((rank, _COUNT, count))
        for first, (weight_name, by_name) in values.items():
            for order, name_of_value in enumerate(HYPERPARAMETERS):
                if name_of_value in by_name:
                    position = -1 - (first * len(HYPERPARAMETERS) + order)
                    self._values[position] = f"the {name_of_value} of {weight_name!r}"
                    rows.append((rank, position, int(np.float64(by_name[name_of_value]).view(np.int64))))
        self.array = np.array(rows, dtype=np.int64).reshape(-1, 3)

    def drift(self, handle: Any, ranks: Sequence[int]) -> Drift | None:
        """Which of the gathered fingerprints of some ranks differ; None if none do.

        Raises:
            HorovodInternalError: a rank was lost.
        """
        gathered = np.frombuffer(memoryview(handle.buffers()[0]), dtype=np.int64).reshape(-1, 3)
        weights: dict[int, dict[int, int]] = {}
        states: dict[int, dict[int, int]] = {}
        values: dict[int, dict[int, float]] = {}
        for rank, position, fingerprint in gathered.tolist():
            if rank not in ranks:
                continue
            if position < 0 and position != _COUNT:
                value = float(np.int64(fingerprint).view(np.float64))
                values.setdefault(-position, {})[rank] = value
            elif position >= _STATE:
                states.setdefault(position - _STATE, {})[rank] = fingerprint
            else:
                weights.setdefault(position, {})[rank] = fingerprint
        counts = weights.pop(_COUNT, {})
        different = sorted(
            position for position, by_rank in weights.items() if len(set(by_rank.values())) > 1
        )
        trained: dict[int, dict[int, str]] = {}
        if different or len(set(counts.values())) > 1:
            trained = self._names_of_ranks(ranks)
            text, remedy = _training_difference(trained)
            if text:  # the cause of all else
                is_endless = len({frozenset(names) for names in trained.values()}) > 1
                return Drift(text, self._rank == min(counts), remedy, is_endless)
        unequal = [position for position in sorted(values) if _are_unequal(values[position].values())]
        if unequal:  # the cause of other weights
            first = unequal[0]
            name = self._values.get(-first, f"the {HYPERPARAMETERS[(first - 1) % len(HYPERPARAMETERS)]}")
            text = f"{name} differs between ranks: {_by_value(values[first])}"
            return Drift(text, is_reporter=self._rank == min(values[first]), remedy=_VALUES_REMEDY)
        if not different:
            shared = {at: of_state for at, of_state in states.items() if weights[at].keys() == counts.keys()}
            return self._state_difference(shared, sorted(counts))
        first = different[0]
        number = sum(set(by_rank.values()) != {_FROZEN} for by_rank in weights.values())
        text = (
            f"{len(different)} of {number} weights differ between ranks, the first is "
            f"{self._trained.get(first, f'number {first}')!r}: {_sides(weights[first])}"
        )
        root = min(weights[first])
        other = next(rank for rank, each in weights[first].items() if each != weights[first][root])
        its_name = trained.get(other, {}).get(first)
        if its_name != trained.get(root, {}).get(first):
            text += f"; rank {other} calls it {its_name!r}"
        return Drift(text, is_reporter=self._rank == min(weights[first]))

    def _state_difference(
        self, states: Mapping[int, Mapping[int, int]], ranks: Sequence[int]
    ) -> Drift | None:
        """Return for which weights the optimizers' states differ between ranks; None if for none.

        Args:
            states: checksums, by position of a weight that all ranks have, by rank.
            ranks: of the comparison.
        """
        by_position = {
            position: {rank: by_rank.get(rank, _NO_STATE) for rank in ranks}
            for position, by_rank in sorted(states.items())
        }
        different = [at for at, by_rank in by_position.items() if len(set(by_rank.values())) > 1]
        if not different:
            return None
        first = by_position[different[0]]
        without = [rank for rank in ranks if first[rank] == _NO_STATE]
        holders = [rank for rank in ranks if first[rank] != _NO_STATE]
        sides = f"{_ranks(holders)} {_has(holders)} one, {_ranks(without)} {_has(without)} none"
        sides = sides if without else _sides(first)
        name = self._trained.get(different[0], f"number {different[0]}")
        counted = f"{len(different)} weight{'s' if len(different) > 1 else ''}"
        what = f"the optimizer's states of {counted} differ between ranks"
        text = f"{what}, the first is that of {name!r}: {sides}"
        return Drift(text, is_reporter=self._rank == ranks[0], remedy=_STATES_REMEDY)

    def _names_of_ranks(self, ranks: Sequence[int]) -> dict[int, dict[int, str]]:
        """Names of the weights that each rank trains, by position; every rank makes this call, or none."""
        name = f"{self._name}.names"
        by_rank = _gathered_names(self._world, self._number, name, self._trained, self._excluded)
        return {rank: names for rank, names in by_rank.items() if rank in ranks}


def _gathered_names(
    world: World, number: int, name: str, names: Mapping[int, str], excluded: Sequence[int] = ()
) -> dict[int, dict[int, str]]:
    """Gather names from every rank of a process set that has not joined.

    Args:
        world: of the ranks.
        number: of the process set.
        name: of the operation.
        names: of this rank, by position.
        excluded: positions that no rank is to return names of.

    Returns:
        Names by position, by rank in ascending order.

    Raises:
        HorovodInternalError: a rank was lost.
    """
    packed = json.dumps([world.placement.rank, list(names.items()), list(excluded)]).encode() + b"\n"
    sent = np.frombuffer(packed, dtype=np.uint8)
    handle = world.engine.submit(OpKind.ALLGATHER, name, (sent,), None, process_set=number)
    handle.wait()
    received = sorted(json.loads(line) for line in bytes(memoryview(handle.buffers()[0])).splitlines())
    left_out = {position for each in received for position in each[2]}
    return {
        rank: {position: name for position, name in its_names if position not in left_out}
        for rank, its_names, _ in received
    }


def names_of_some_ranks(world: World, number: int, name: str, *lists: Sequence[str]) -> str:
    """Compare lists of names over the ranks of a process set that have not joined; each of them calls this.

    Args:
        world: of the ranks.
        number: of the process set.
        name: of the operation.
        lists: of this rank.

    Returns:
        The names that only some ranks have, as in "'b' is on rank 0 and not on rank 1", of the first list
        that has another length on some ranks, or else of the first one with other names; empty if no list
        differs.

    Raises:
        HorovodInternalError: a rank was lost.
    """
    own = {_LENGTH_MAX * i + at: each for i, names in enumerate(lists) for at, each in enumerate(names)}
    by_rank = _gathered_names(world, number, name, own)
    for property_of in (len, lambda names: Counter(names.values())):
        for i in sorted({position // _LENGTH_MAX for names in by_rank.values() for position in names}):
            of_list = {
                rank: {at: each for at, each in names.items() if at // _LENGTH_MAX == i}
                for rank, names in by_rank.items()
            }
            root, *others = map(property_of, of_list.values())
            if any(other != root for other in others):
                return _holders(of_list, "on")
    return ""


def names_at_some_positions(world: World, number: int, name: str, names: Mapping[int, str]) -> str:
    """Compare which positions have a name; every rank of a process set that has not joined calls this.

    Args:
        world: of the ranks.
        number: of the process set.
        name: of the operation.
        names: of this rank, by position, and an empty one at minus the number of positions that there are.

    Returns:
        The names at positions that only some ranks have, as in "'b' is on rank 0 and not on rank 1"; empty if
        all ranks have the same positions, or other numbers of positions.

    Raises:
        HorovodInternalError: a rank was lost.
    """
    by_rank = _gathered_names(world, number, name, names)
    shared = set.intersection(*map(set, by_rank.values()))
    if not any(position < 0 for position in shared):
        return ""
    different = {
        rank: {position: each for position, each in its_names.items() if position not in shared}
        for rank, its_names in by_rank.items()
    }
    return _holders(different, "on") if any(different.values()) else ""


def _training_difference(by_rank: Mapping[int, Mapping[int, str]]) -> tuple[str, str]:
    """Which ranks train which weights, and what to do; empty texts if all ranks train the same ones.

    Layers without a name are numbered within each process. If ranks train the same number of weights and no
    name is at the same position on both, only these numbers differ, unless the names are the same ones.

    Args:
        by_rank: names of the weights that a rank trains, by position.
    """
    root, *others = by_rank.values()
    in_order = {rank: tuple(name for _, name in sorted(names.items())) for rank, names in by_rank.items()}
    are_same = len({tuple(sorted(names)) for names in in_order.values()}) == 1
    if are_same and len(set(in_order.values())) > 1:
        at = next(i for i, names in enumerate(zip(*in_order.values(), strict=True)) if len(set(names)) > 1)
        holders: dict[str, list[int]] = {}
        for rank, names in in_order.items():
            holders.setdefault(names[at], []).append(rank)
        listed = " and ".join(f"{name!r} on {_ranks(ranks)}" for name, ranks in holders.items())
        return f"the ranks train the same weights in different orders: weight {at} is {listed}", _ORDER_REMEDY
    if all(_are_same_weights(root, other) for other in others):
        return "", ""
    return f"the ranks train different weights: {_holders(by_rank, 'trained on')}", _TRAINED_REMEDY


def _holders(by_rank: Mapping[int, Mapping[int, str]], verb: str) -> str:
    """Which names only some ranks have, as in "'b' is trained on rank 0 and not on rank 1".

    Args:
        by_rank: names by position, by rank.
        verb: that follows "is" or "are".

    Returns:
        The names with their ranks; if all ranks have the same names, the number of names of each rank.
    """
    holders: dict[str, list[int]] = {}
    for rank, names in by_rank.items():
        for name in names.values():
            holders.setdefault(name, []).append(rank)
    by_holders: dict[tuple[int, ...], list[str]] = {}
    for name, ranks in holders.items():
        if len(ranks) < len(by_rank):
            by_holders.setdefault(tuple(ranks), []).append(name)
    if not by_holders:
        numbers: dict[int, list[int]] = {}
        for rank, names in by_rank.items():
            numbers.setdefault(len(names), []).append(rank)
        return ", ".join(f"{number} on {_ranks(ranks)}" for number, ranks in numbers.items())
    parts = []
    for some, listed in list(by_holders.items())[:_RANKS_SHOWN]:
        is_or_are = "is" if len(listed) == 1 else "are"
        absent = [rank for rank in by_rank if rank not in some]
        parts.append(f"{_listed(listed)} {is_or_are} {verb} {_ranks(some)} and not on {_ranks(absent)}")
    return "; ".join(parts)


def _are_same_weights(one: Mapping[int, str], other: Mapping[int, str]) -> bool:
    if one.keys() != other.keys():
        return False
    return sum(name == other[position] for position, name in one.items()) in (0, len(one))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_NAMES_SHOWN]))
    return shown + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")


def _are_unequal(values: Iterable[float]) -> bool:
    known = list(values)
    least, most = min(known), max(known)
    return most - least > _RELATIVE_MAX * max(abs(least), abs(most))


def _by_value(by_rank: Mapping[int, float]) -> str:
    """Values with their ranks, as in "0.1 on rank 0, 0.2 on ranks 1, 2"."""
    ranks: dict[float, list[int]] = {}
    for rank in sorted(by_rank):
        ranks.setdefault(by_rank[rank], []).append(rank)
    shown = [f"{value:.7g} on {_ranks(some)}" for value, some in list(ranks.items())[:_RANKS_SHOWN]]
    more = f", and {len(ranks) - _RANKS_SHOWN} more values" if len(ranks) > _RANKS_SHOWN else ""
    return ", ".join(shown) + more


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    more = f" and {len(ranks) - _RANKS_SHOWN} more" if len(ranks) > _RANKS_SHOWN else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _sides(by_rank: Mapping[int, int]) -> str:
    root = min(by_rank)
    others = [rank for rank, fingerprint in by_rank.items() if fingerprint != by_rank[root]]
    return f"{_ranks(others)} {_has(others)} other values than rank {root}"
