"""What one rank of ``polyhvd parity`` does: train a case in one framework, and keep a trace of all it sees.

A program: ``python -m polyhvd.parity.running ORDER FRAMEWORK``, for :mod:`polyhvd.parity.command`.
"""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from polyhvd.config import Launched
from polyhvd.parity.case import BadCaseError, Case
from polyhvd.parity.comparing import array_of
from polyhvd.parity.runs import FRAMEWORKS, Order, Run, Step
from polyhvd.parity.session import Session, begin
from polyhvd.parity.traces import Key, Trace, common_input, trace_of
from polyhvd.training.mapping import Weight

__all__ = ["main", "session_of", "train"]

Array = np.ndarray[Any, Any]
_STATUS = 3


class _Recorder:
    """Writes down the traces of a session."""

    def __init__(self, session: Session, part: tuple[int, int]) -> None:
        self.traces: dict[Key, Trace] = {}
        self._session = session
        self._part = part  # of the batch: which of how many
        self.weights = session.weights()
        self.layers: list[Weight] = []
        for weight in self.weights:
            if weight.layer is not None and all(weight.layer is not known.layer for known in self.layers):
                self.layers.append(weight)
        self._parts: dict[Key, list[tuple[int, str, Array]]] = {}
        self._before: list[Array] = []
        for number, weight in enumerate(self.layers):
            if weight.role not in ("input kernel", "state kernel"):
                session.on_input(weight.layer, self._hears(number, weight))
        if self.layers:
            session.on_output(self._hears_output)

    def _hears(self, number: int, weight: Weight) -> Callable[[Any], None]:
        made_by = self.layers[max(number - 1, 0)]

        def tell(tensor: Any) -> None:
            array = common_input(array_of(tensor)[1], weight)
            key = ("activation" if number else "input", number)
            self._parts.setdefault(key, []).append((max(number - 1, 0), made_by.name, array))

        return tell

    def _hears_output(self, tensor: Any) -> None:
        number = len(self.layers)
        array = array_of(tensor[0] if isinstance(tensor, (list, tuple)) else tensor)[1]
        if self.layers[-1].channels_last and array.ndim > 3:
            array = np.moveaxis(array, -1, 1)
        key = ("activation", number)
        self._parts.setdefault(key, []).append((number - 1, self.layers[-1].name, array))

    def gradients(self) -> None:
        """Of all weights, after they were averaged; and what the weights are before the step."""
        for (kind, place), parts in self._parts.items():
            layer, name, first = parts[0]
            array = first if len(parts) == 1 else np.concatenate([part for _, _, part in parts])
            if array.dtype.kind in "iub":  # frameworks have whole numbers of other kinds
                array = array.astype(np.float32)
            self._note(trace_of(kind, place, layer, name, array, self._part))
        self._parts.clear()
        self._before = [weight.read() for weight in self.weights]
        for place, weight in enumerate(self.weights):
            tensor = self._session.gradient_of(weight) if weight.trainable else None
            if tensor is None:
                continue
            array = array_of(tensor)[1]
            if array.ndim > len(weight.layout.shape):  # both biases of a cell of Keras
                array = array[0 if weight.role == "input bias" else 1]
            if weight.role == "state bias" and not weight.is_whole and tensor.shape == weight.layout.shape:
                continue  # of the one bias that Keras has, which is the other one's already
            self._note_weight("gradient", place, weight, array)

    def updates(self) -> None:
        """What the optimizer has made of the weights, and batches of the means of batch normalization."""
        for place, weight in enumerate(self.weights):
            if weight.trainable or weight.role == "mean":
                self._note_weight("update", place, weight, weight.read() - self._before[place])

    def _note_weight(self, kind: str, place: int, weight: Weight, array: Array) -> None:
        layer = next((i for i, known in enumerate(self.layers) if known.layer is weight.layer), 0)
        self._note(trace_of(kind, place, layer, weight.name, weight.layout.array_to_common(array)))

    def _note(self, trace: Trace) -> None:
        self.traces[trace.key] = trace

    def take(self) -> dict[Key, Trace]:
        """The traces of the step, which ends."""
        taken, self.traces = self.traces, {}
        return taken


def train(
    session: Session,
    run: Run,
    steps: int,
    part: tuple[int, int],
    tell: Callable[[], None],
    seed: int = 0,
) -> None:
    """Train, and write down what happens.

    Args:
        session: of a model; nothing was done with it yet.
        run: what is written to.
        steps: how many.
        part: of each batch: which of how many.
        tell: is called after each step.
        seed: of the weights.

    Raises:
        BadCaseError: the case cannot be used.
    """
    case = session.case
    weights = session.weights()
    run.weights = [(w.name, w.role, *w.form[1:]) for w in weights]
    begin(weights, seed)
    session.prepare()
    recorder = _Recorder(session, part)
    run.layers = [weight.name for weight in recorder.layers]
    number, of = part
    for step in range(steps):
        inputs, targets = case.data(run.framework, step)
        pieces = of * case.optimizer.accumulate
        if len(inputs) % pieces:
            raise BadCaseError(
                f"{case.name}: a batch of {len(inputs)} rows cannot be cut into {pieces} equal parts, for "
                f"{of} ranks that accumulate {case.optimizer.accumulate} each; take another --np"
            )
        rows = len(inputs) // of
        inputs, targets = (item[number * rows : (number + 1) * rows] for item in (inputs, targets))
        losses = []
        size = rows // case.optimizer.accumulate
        for piece in range(case.optimizer.accumulate):
            cut = slice(piece * size, (piece + 1) * size)
            losses.append(
                session.compute(
                    np.ascontiguousarray(inputs[cut]),
                    np.ascontiguousarray(targets[cut]),
                    is_first=piece == 0,
                    is_last=piece == case.optimizer.accumulate - 1,
                )
            )
        session.reduce()
        recorder.gradients()
        session.update(case.optimizer.rate_at(step, steps))
        recorder.updates()
        run.steps.append(Step(float(np.mean(losses)), rows, recorder.take()))
        tell()


def session_of(framework: str, case: Case, process_set: Any, *, synchronized: bool) -> Session:
    """A session of a framework, which is imported; see :class:`Session` for the arguments.

    Raises:
        LookupError: the case has no model for it.
        BadCaseError: the case cannot be used.
    """
    module, name = FRAMEWORKS[framework]
    made: Session = getattr(importlib.import_module(module), name)(
        case, process_set, synchronized=synchronized
    )
    return made


def _modes(order: Order, framework: str, rank: int) -> None:
    case = order.load()
    folder = Path(order.folder)

    def tell() -> None:
        if rank == 0:
            with (folder / f"{framework}.progress").open("ab") as file:
                file.write(b".")

    def run(mode: str, process_set: Any, part: tuple[int, int]) -> None:
        made = Run(framework, mode)
        try:
            session = session_of(framework, case, process_set, synchronized=mode == "all")
            train(session, made, order.steps, part, tell, order.seed)
        except BadCaseError as error:
            made.problem = f"bad case: {error}"
        except LookupError as error:
            if error.args:
                raise
            made.problem = "none"  # the case has no model for this framework
            (folder / f"{framework}.left-out").touch()
        path = folder / f"{framework}.{mode}.{rank}"
        new = path.with_name(f"{path.name}.new")
        new.write_bytes(pickle.dumps(made))
        new.rename(path)
        if made.problem:
            raise SystemExit(_STATUS)  # which ends the other ranks

    if rank == 0:
        run("plain", None, (0, 1))
    hvd = importlib.import_module(f"polyhvd.{framework}")
    first = hvd.ProcessSet([0]) if order.ranks > 1 else hvd.global_process_set
    hvd.init(process_sets=[first] if order.ranks > 1 else [])
    if rank == 0:
        run("one", first, (0, 1))
    if order.ranks > 1:
        run("all", hvd.global_process_set, (rank, order.ranks))
    hvd.shutdown()


def main(words: list[str]) -> None:
    """Run one rank.

    Args:
        words: the path of the order, and the name of the framework.
    """
    order = Order(**json.loads(Path(words[0]).read_text()))
    rank = Launched.from_environment().rank or 0
    np.seterr(all="ignore")  # what becomes of it is reported
    _modes(order, words[1], rank)


if __name__ == "__main__":
    main(sys.argv[1:])
