"""``polyhvd parity migrate``: trained weights from a file of one framework to a file of another, with proof.

Imports no framework: each side runs in a separate process, ``migrating_side.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyhvd.parity import proving
from polyhvd.parity.folders import NoRoomError, WorkFolder, work_folder
from polyhvd.parity.jobs import end_with_parent, python, seconds
from polyhvd.parity.migrating_side import FRAMEWORKS, SideResult, Task

__all__ = ["main"]

#: Frameworks by the end of a file's name.
_ENDINGS = {ending: name for name, facts in FRAMEWORKS.items() for ending in facts.endings}
_RTOL = 1e-4
_PRINTED_MAX = 2000

Array = np.ndarray[Any, Any]


class _Failed(Exception):
    """A migration that has not come about, in a line."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class _Compared:
    """How far the outputs of two models are apart."""

    largest: float  # difference
    scale: float  # root mean square of the source's outputs
    agrees: bool
    same_classes: float | None  # the share of rows whose largest output is the same


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry weights over and prove that both models make the same of the same inputs.

    Args:
        arguments: of the command; None: those of this process.

    Returns:
        0: done; 1: the outputs differ; 2: the call cannot be carried out; 3: the models do not match; 4: a
        process died. Unless it is 0, no file was written.
    """
    options = _parser().parse_args(arguments)
    try:
        return _migrate(options)
    except _Failed as failed:
        print(f"polyhvd parity migrate: {failed}", file=sys.stderr)
        return failed.status
    except NoRoomError as error:
        print(f"polyhvd parity migrate: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="polyhvd parity migrate",
        description="Convert a file of trained weights to another framework, and check that both models "
        "produce the same outputs from the same inputs.",
        epilog="exit status: 0 done, 1 outputs differ, 2 invalid call, 3 models do not match, 4 a process "
        "died; unless it is 0, TARGET is unchanged",
    )
    files = ", ".join(f"{' or '.join(facts.endings)} of {facts.models}" for facts in FRAMEWORKS.values())
    parser.add_argument("source", metavar="SOURCE", help=f"file of trained weights: {files}")
    parser.add_argument("target", metavar="TARGET", help="file to write, with one of these endings")
    functions = ", ".join(f"{name}_model()" for name in FRAMEWORKS)
    parser.add_argument(
        "--model",
        required=True,
        metavar="FILE.py",
        help=f"has a function for each of the two frameworks that returns the model: {functions}; and "
        "example_inputs(), which returns an array, or a list of them for a model with several inputs",
    )
    parser.add_argument(
        "--inputs",
        metavar="FILE.npy",
        help="inputs for both models, images with channels first; FILE.npz for several arrays",
    )
    parser.add_argument(
        "--rtol",
        type=float,
        default=_RTOL,
        help="relative tolerance of the outputs, of each value and of their root mean square; default: "
        "%(default)g",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=600.0, metavar="SECONDS", help="time limit of each process"
    )
    parser.add_argument("--verbose", action="store_true", help="list the weights")
    return parser


def _migrate(options: argparse.Namespace) -> int:
    source, target = _framework_of(options.source), _framework_of(options.target)
    for path, what in ((options.source, "SOURCE"), (options.model, "--model")):
        if not Path(path).is_file():
            raise _Failed(f"{what} {path}: there is no such file", 2)
    folder = Path(options.target).resolve().parent
    if not folder.is_dir():
        raise _Failed(f"TARGET {options.target}: there is no folder {folder}", 2)
    if Path(options.target).is_dir():
        raise _Failed(f"TARGET {options.target}: is a folder; expected the name of a file", 2)
    inputs = _read(options.inputs) if options.inputs else None
    read = _side(Task(source, options.model, options.source, inputs), options.timeout)
    _check_finite(read, f"the model of {source} with {options.source}")
    ending = next(ending for ending in _ENDINGS if options.target.endswith(ending))
    with _beside(options.target, folder) as made:
        file = f"{made.path}/model{ending}"
        written = _side(Task(target, options.model, file, read.inputs, read), options.timeout)
        compared = _compared(read.run.outputs, written.run.outputs, options.rtol)
        shape = ", ".join("x".join(map(str, each.shape)) for each in read.inputs)
        difference = (
            f"outputs of {source} and {target} on inputs {shape} differ by {compared.largest:.2g} at most, "
            f"where their root mean square is {compared.scale:.2g}"
        )
        if not compared.agrees:
            pairs = {weight.name: weight.source for weight in written.weights if weight.source}
            found = proving.finding(written.run, read.run, pairs)
            if found is not None and found.is_mapping:
                raise _Failed(
                    f"{difference}: more than --rtol {options.rtol:g}: {found.text}; add its weights "
                    f"to layouts in {options.model}; nothing was written",
                    1,
                )
            raise _Failed(
                f"{difference}: more than --rtol {options.rtol:g}. The weights match, so the models compute "
                "something else: compare epsilons, padding, activations and the order of dimensions; nothing "
                "was written",
                1,
            )
        try:
            os.replace(file, options.target)
        except OSError as error:
            raise _Failed(f"TARGET {options.target}: cannot be written: {error.strerror}", 2) from None
    if options.verbose:
        for weight in written.weights:
            print(f"{weight.source} -> {weight.name} {list(weight.shape)}")
    parameters = sum(int(np.prod(weight.shape)) for weight in written.weights)
    print(f"{options.target}: {len(written.weights)} weights, {parameters} numbers of {options.source}")
    print(difference)
    if compared.same_classes is not None:
        print(f"the largest output is the same in {compared.same_classes:.1%} of rows")
    return 0


@contextlib.contextmanager
def _beside(target: str, folder: Path) -> Iterator[WorkFolder]:
    """A folder from which what was written is moved to its place."""
    with contextlib.ExitStack() as held:
        try:
            made = held.enter_context(work_folder(".polyhvd-", folder))
        except NoRoomError:
            raise
        except OSError as error:
            raise _Failed(f"TARGET {target}: cannot be written: {error.strerror}", 2) from None
        yield made


def _framework_of(path: str) -> str:
    for ending, framework in _ENDINGS.items():
        if path.endswith(ending):
            return framework
    raise _Failed(f"{path}: unknown kind of file; expected a name that ends in {', '.join(_ENDINGS)}", 2)


def _read(path: str) -> list[Array]:
    try:
        found = np.load(path, allow_pickle=False)
        arrays = [found] if isinstance(found, np.ndarray) else [found[name] for name in found.files]
    except (EOFError, OSError, ValueError, zipfile.BadZipFile) as error:
        raise _Failed(f"--inputs {path}: {error}", 2) from None
    if not arrays:
        raise _Failed(f"--inputs {path}: has no array; expected what numpy.save() or numpy.savez() writes", 2)
    return [np.ascontiguousarray(each) for each in arrays]


def _side(task: Task, timeout_s: float) -> SideResult:
    """Run one side to its end."""
    with work_folder("polyhvd-migrate-") as work:
        folder = work.path
        (folder / "task").write_bytes(pickle.dumps(task))
        command = [*python("polyhvd.parity.migrating_side"), str(folder)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                preexec_fn=end_with_parent(),
                pass_fds=(work.held_by,),
            )
        except subprocess.TimeoutExpired:
            raise _Failed(
                f"the side of {task.framework} takes more than {timeout_s:g} s (--timeout)", 4
            ) from None
        if not (folder / "result").exists():
            how = (
                f"status {done.returncode}" if done.returncode >= 0 else signal.Signals(-done.returncode).name
            )
            printed = done.stderr.strip()[-_PRINTED_MAX:]
            raise _Failed(f"the process of {task.framework} ended with {how}; it printed:\n{printed}", 4)
        result: SideResult = pickle.loads((folder / "result").read_bytes())
    if result.status:
        raise _Failed(result.error, result.status)
    return result


def _check_finite(result: SideResult, what: str) -> None:
    if not all(np.isfinite(each).all() for each in result.run.outputs):
        raise _Failed(f"{what} returns NaNs or infinities; pass other inputs with --inputs", 1)


def _compared(expected: Sequence[Array], found: Sequence[Array], rtol: float) -> _Compared:
    shapes = [[list(each.shape) for each in outputs] for outputs in (expected, found)]
    if shapes[0] != shapes[1]:
        raise _Failed(
            f"the models' outputs are of shapes {shapes[0]} and {shapes[1]}; nothing was written", 3
        )
    largest, scale, agrees = 0.0, 0.0, True
    for one, other in zip(expected, found, strict=True):
        one, other = one.astype(np.float64), other.astype(np.float64)
        rms = float(np.sqrt(np.mean(one**2))) if one.size else 0.0
        apart = np.abs(one - other)
        agrees = agrees and bool((apart <= rtol * (np.abs(one) + rms)).all())
        largest, scale = float(np.maximum(largest, apart.max(initial=0.0))), max(scale, rms)  # NaNs, too
    first = expected[0]
    classes = None
    if len(expected) == 1 and first.ndim == 2 and first.shape[1] > 1:
        classes = float(np.mean(first.argmax(1) == found[0].argmax(1)))
    return _Compared(largest, scale, agrees, classes)
