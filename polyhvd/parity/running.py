"""One rank of ``polyhvd parity``: trains a case in one framework, and records a trace of each tensor.

The program of a rank, for :mod:`polyhvd.parity.command`: ``main([ORDER, FRAMEWORK])``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from polyhvd.config import Launched
from polyhvd.parity.case import BadCaseError, Case, error_line
from polyhvd.parity.recording import Recorder
from polyhvd.parity.runs import FRAMEWORKS, Order, Run, Step
from polyhvd.parity.session import Session, begin

__all__ = ["main", "run_mode", "session_of", "train"]

_STATUS = 3


def train(
    session: Session,
    run: Run,
    steps: int,
    part: tuple[int, int],
    on_step: Callable[[], None],
    seed: int = 0,
) -> None:
    """Train, and write down what happens.

    Args:
        session: of a model; nothing was done with it yet.
        run: what is written to.
        steps: how many.
        part: of each batch: which of how many.
        on_step: is called after each step.
        seed: of the weights.

    Raises:
        BadCaseError: the case cannot be used.
    """
    case = session.case
    with _case_errors(case, run, "its weights or its optimizer"):
        weights = session.weights()
        run.weights = [(w.name, w.role, *w.form[1:]) for w in weights]
        begin(weights, seed)
        session.prepare()
    joined = part[1] if session.synchronized else 1
    recorder = Recorder(weights, session.batch_norm_of, part=part, joined=joined)
    for place, layer in enumerate(recorder.layers):
        if (listener := recorder.input_listener(place)) is not None:
            session.on_input(layer.layer, listener)
    if recorder.layers:
        session.on_output(recorder.record_output)
    run.layers = [weight.name for weight in recorder.layers]
    number, of = part
    for step in range(steps):
        inputs, targets = case.data(run.framework, step)
        pieces = of * case.optimizer.accumulate
        if len(inputs) % pieces:
            raise BadCaseError(
                f"{case.name}: a batch of {len(inputs)} rows cannot be cut into {pieces} equal parts, for "
                f"{of} ranks that accumulate {case.optimizer.accumulate} each; choose another --np"
            )
        rows = len(inputs) // of
        recorder.begin()
        losses = []
        size = rows // case.optimizer.accumulate
        for piece in range(case.optimizer.accumulate):
            # What the ranks normalize together is the same for any number of them.
            begin_at = (piece * of + number) * size
            mine = [np.ascontiguousarray(item[begin_at : begin_at + size]) for item in (inputs, targets)]
            recorder.data(*mine)
            try:
                loss = session.compute(
                    *mine,
                    is_first=piece == 0,
                    is_last=piece == case.optimizer.accumulate - 1,
                )
            except Exception as error:
                if run.mode != "plain":  # it may be about another rank
                    raise
                raise BadCaseError(
                    f"{case.name}: in step {step} {run.framework} cannot compute the model and its loss of "
                    f"inputs {list(mine[0].shape)} and targets {list(mine[1].shape)}: "
                    f"{error_line(error)}"
                ) from error
            losses.append(loss)
        recorder.gradients("gradient", session.local_gradient_of)
        session.reduce()
        recorder.gradients("average", session.gradient_of)
        session.update(case.optimizer.rate_at(step, steps))
        recorder.update(session.rate(), session.states_of)
        run.steps.append(Step(float(np.mean(losses)), rows, recorder.take()))
        on_step()


@contextlib.contextmanager
def _case_errors(case: Case, run: Run, what: str) -> Iterator[None]:
    """Raise a failure within this block, in a run of one process, as a fault of the case.

    Raises:
        BadCaseError: it has failed.
    """
    try:
        yield
    except Exception as error:
        is_reported = isinstance(error, BadCaseError) or (isinstance(error, LookupError) and not error.args)
        if is_reported or run.mode != "plain":  # it may be about another rank
            raise
        raise BadCaseError(
            f"{case.name}: {run.framework} cannot make the model that build({run.framework!r}) has returned, "
            f"{what}: {error_line(error)}"
        ) from error


def session_of(framework: str, case: Case, process_set: Any, *, synchronized: bool) -> Session:
    """A session of a framework, which is imported; see :class:`Session` for the arguments.

    Raises:
        LookupError: the case has no model for it.
        BadCaseError: the case cannot be used.
    """
    module = importlib.import_module(f"polyhvd.{framework}.cases")
    made: Session = getattr(module, FRAMEWORKS[framework].session)(
        case, process_set, synchronized=synchronized
    )
    return made


def run_mode(
    order: Order, framework: str, mode: str, process_set: Any, part: tuple[int, int], rank: int = 0
) -> Run:
    """One run of what was ordered, on this rank.

    Args:
        order: what was asked for.
        framework: of this process.
        mode: one of :data:`MODES`.
        process_set: the ranks that train together; None: only this process, without polyhvd.
        part: of each batch: which of how many.
        rank: of this process; the first one reports progress.
    """
    folder = Path(order.folder)

    def report_progress() -> None:
        if rank == 0 and order.folder:
            with (folder / f"{framework}.progress").open("ab") as file:
                file.write(b".")

    made = Run(framework, mode)
    try:
        case = order.load()
        with _case_errors(case, made, "its layers"):
            session = session_of(framework, case, process_set, synchronized=mode == "all")
        train(session, made, order.steps, part, report_progress, order.seed)
    except BadCaseError as error:
        made.problem = f"bad case: {error}"
    except LookupError as error:
        if error.args:
            raise
        made.problem = "none"  # the case has no model for this framework
    return made


def _modes(order: Order, framework: str, rank: int) -> None:
    folder = Path(order.folder)

    def run(mode: str, process_set: Any, part: tuple[int, int]) -> None:
        made = run_mode(order, framework, mode, process_set, part, rank)
        if made.problem == "none":
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
