"""The gradients of the collectives: what each rank computes, and what NumPy says it should be.

A rank's loss is the sum of its results, each element times a weight that no other has. Ranks are given
by their positions in the process set; some may have joined, before the collective or after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import drivers
import numpy as np
import oracle

__all__ = ["CASES", "Case", "Situation", "check", "expected", "start_again"]

Array = np.ndarray[Any, Any]
_TAILS = ((2,), ())  # of the first tensor, and of the second one of a group
_ROOT = 1  # by position
_PRESCALE, _POSTSCALE = 0.5, 1.25  # with 3 ranks float32 rounds their product with 1 / 3


@dataclass(frozen=True)
class Case:
    """A collective, as it is called."""

    verb: str
    op: str = ""
    grouped: bool = False
    splits: bool = False

    @property
    def reduces(self) -> bool:
        """Whether it has an op, and is called with scales."""
        return bool(self.op)

    def call(self, hvd: Any, position: int, members: Sequence[int], options: dict[str, Any]) -> Any:
        """A function of tensors that returns a list of results."""
        verb = getattr(hvd, "grouped_" * self.grouped + self.verb)
        options = dict(options)
        if self.reduces:
            options |= {"op": getattr(hvd, self.op), "prescale_factor": _PRESCALE}
            options |= {"postscale_factor": _POSTSCALE}
        if self.verb == "broadcast":
            options["root_rank"] = members[_ROOT]
        if self.grouped:
            return lambda *tensors: list(verb(list(tensors), **options))
        if self.splits:
            splits = _splits(position, len(members))
            return lambda tensor: [verb(tensor, splits, **options)[0]]
        return lambda tensor: [verb(tensor, **options)]

    def rows(self, position: int, size: int) -> int:
        """First dimension of a rank's tensors."""
        if self.verb == "allgather":
            return position + 1
        if self.verb == "reducescatter":
            return 2 * size + 1
        if self.verb == "alltoall":
            return sum(_splits(position, size)) + 1 if self.splits else 2 * size
        return 3

    def parts(self, position: int, size: int) -> list[int]:
        """Of an alltoall, the rows that a rank sends to each."""
        return _splits(position, size) if self.splits else [2] * size


def _splits(position: int, size: int) -> list[int]:
    return [position + other for other in range(size)]


CASES = {
    "allreduce sum": Case("allreduce", "Sum"),
    "allreduce average": Case("allreduce", "Average"),
    "grouped allreduce": Case("allreduce", "Average", grouped=True),
    "allgather": Case("allgather"),
    "grouped allgather": Case("allgather", grouped=True),
    "broadcast": Case("broadcast"),
    "reducescatter sum": Case("reducescatter", "Sum"),
    "reducescatter average": Case("reducescatter", "Average"),
    "grouped reducescatter": Case("reducescatter", "Sum", grouped=True),
    "alltoall": Case("alltoall"),
    "alltoall with splits": Case("alltoall", splits=True),
}


@dataclass(frozen=True)
class Situation:
    """How a case is run: ``argument`` is that of the call, by world rank are ``members`` and ``joined``."""

    members: tuple[int, ...]
    argument: bool | None = None
    joined: tuple[int, ...] = ()
    joined_after: tuple[int, ...] = ()  # between the collective and its gradient
    dtype: str = "float32"

    def positions(self, ranks: Sequence[int]) -> list[int]:
        return [self.members.index(rank) for rank in ranks]


def expected(case: Case, situation: Situation, position: int, exact: bool) -> list[Array]:
    """The gradients by one rank's tensors."""
    size = len(situation.members)
    joined = situation.positions(situation.joined)
    here = [p for p in range(size) if p not in joined]
    silent = situation.positions(situation.joined_after)
    tails = _TAILS if case.grouped else _TAILS[:1]
    weights = [
        {q: _weights(case, here, q, size, i) * (q not in silent) for q in here} for i in range(len(tails))
    ]
    return [
        _gradient(case, position, size, of_tensor, tail, exact)
        for of_tensor, tail in zip(weights, tails, strict=True)
    ]


def _weights(case: Case, here: Sequence[int], position: int, size: int, number: int) -> Array:
    """Of the elements of a rank's result: those that are ``here`` make it."""
    if case.verb == "allgather":
        rows = sum(case.rows(q, size) for q in here)
    elif case.verb == "reducescatter":
        rows = _kept(case, position, size)
    elif case.verb == "alltoall":
        rows = sum(case.parts(q, size)[position] for q in here)
    else:
        rows = case.rows(position, size)
    shape = (rows, *_TAILS[number])
    return (position + 1.0) * (np.arange(float(np.prod(shape))).reshape(shape) + 1 + number)


def _kept(case: Case, position: int, size: int) -> int:
    rows = case.rows(position, size)
    return rows // size + (position < rows % size)


def _gradient(
    case: Case, own: int, size: int, weights: dict[int, Array], tail: tuple[int, ...], exact: bool
) -> Array:
    """What the ranks' weights mean for the tensor of one: the exact adjoint, and Horovod's factor."""
    shape = (case.rows(own, size), *tail)
    if case.verb == "allreduce":
        return sum(weights.values()) * _PRESCALE * _POSTSCALE / (size if case.op == "Average" else 1)  # type: ignore[no-any-return]
    if case.verb == "broadcast":
        return sum(weights.values()) * (own == _ROOT) / (1 if exact else size)  # type: ignore[no-any-return]
    if case.verb == "allgather":
        first = sum(case.rows(q, size) for q in weights if q < own)
        rows = sum(weights.values())[first : first + shape[0]]  # type: ignore[index]
        return rows / (1 if exact else size)  # type: ignore[no-any-return]
    if case.verb == "reducescatter":
        parts = [weights.get(q, np.zeros((_kept(case, q, size), *tail))) for q in range(size)]
        factor = _PRESCALE * _POSTSCALE / (size if case.op == "Average" else 1) * (1 if exact else size)
        return np.concatenate(parts) * factor
    blocks = []
    for q, count in enumerate(case.parts(own, size)):
        first = sum(case.parts(r, size)[q] for r in weights if r < own)
        blocks.append(weights[q][first : first + count] if q in weights else np.zeros((count, *tail)))
    sent = np.concatenate(blocks)
    return np.concatenate([sent, np.zeros((shape[0] - len(sent), *tail))])


def check(
    name: str, case_name: str, situation: Situation, exact: bool, change: Callable[[Any], Any] | None = None
) -> str | None:
    """Run on every rank of the world: the gradient is what is expected; what was raised instead, if anything.

    ``change``: of the function that calls the collective.
    """
    driver = drivers.get(name)
    hvd, case, members = driver.hvd, CASES[case_name], situation.members
    options: dict[str, Any] = {"name": f"gradients {case_name}"}
    part = hvd.add_process_set(members) if len(members) < hvd.size() else None
    if part is not None:
        options["process_set"] = part
    if case.verb in ("allgather", "broadcast", "reducescatter"):
        options["exact_gradient"] = situation.argument
    rank, failure = hvd.rank(), None
    if rank in members and rank not in situation.joined:
        position, size = members.index(rank), len(members)
        here = [p for p in range(size) if p not in situation.positions(situation.joined)]
        tails = _TAILS if case.grouped else _TAILS[:1]
        dtype = drivers.BFLOAT16 if situation.dtype == "bfloat16" else np.dtype(situation.dtype)
        arrays = [np.ones((case.rows(position, size), *tail)).astype(dtype) for tail in tails]
        weights = [_weights(case, here, position, size, i).astype(dtype) for i in range(len(tails))]
        function = case.call(hvd, position, members, options)
        if rank in situation.joined_after:
            driver.call(function, *map(driver.from_numpy, arrays))
        else:
            try:
                found = driver.gradients(change(function) if change else function, arrays, weights)
            except Exception as error:
                failure = str(error)
            else:
                wanted = expected(case, situation, position, exact)
                for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
                    oracle.check(f"{case_name}, tensor {i}", one, other.astype(dtype))
    if situation.joined or situation.joined_after:
        hvd.join()
    if part is not None:
        hvd.remove_process_set(part)
    return failure


def start_again(name: str, environment: dict[str, str]) -> None:
    """Begin another world with these settings; an empty one is removed."""
    hvd = drivers.get(name).hvd
    hvd.shutdown()
    for key, value in environment.items():
        os.environ[key] = value
        if not value:
            del os.environ[key]
    hvd.init()


def compiled(function: Any) -> Any:
    """In torch."""
    import torch

    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def contrast(name: str, exact: bool | None) -> float:
    """The gradient that an optimizer would average, of docs/migrating-from-horovod.md's example."""
    driver = drivers.get(name)
    hvd = driver.hvd
    weight, sample = np.ones(1, "float32"), np.full(1, hvd.rank() + 1.0, "float32")

    def similarities(w: Any) -> list[Any]:
        z = w * driver.from_numpy(sample)
        return [z * hvd.allgather(z, name="embeddings", exact_gradient=exact)]

    (gradient,) = driver.gradients(similarities, [weight], [np.ones(hvd.size(), "float32")])
    return float(gradient[0])
