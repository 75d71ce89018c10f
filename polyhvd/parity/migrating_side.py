"""One side of a migration, in a separate process: reads weights of a model, or writes and proves them.

``migrating.py`` starts it with the name of a folder, from which it reads its task and to which it writes
its result. Plain arrays of NumPy pass between the sides.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from polyhvd.errors import InvalidArgumentError, UnsupportedError
from polyhvd.parity import loading, models, pairing, proving
from polyhvd.training.mapping import Weight

__all__ = ["FRAMEWORKS", "SideResult", "Task", "main"]

#: Those whose files of weights are known, by their names in migrations.
FRAMEWORKS = {facts.migrates_as: facts for facts in models.FRAMEWORKS.values() if facts.migrates_as}
_MODULES = {facts.migrates_as: f"polyhvd.{name}.parity" for name, facts in models.FRAMEWORKS.items()}

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Task:
    """The task of a side."""

    framework: str
    model_file: str
    file: str  # of weights: to be read by the source, to be written by the target
    inputs: list[Array] | None = None  # None: those of the model file
    source: SideResult | None = None  # the source's result; None: this is the source


@dataclass(frozen=True)
class SideResult:
    """The result of a task."""

    status: int = 0  # 2: the call cannot be carried out, 3: the models do not match
    error: str = ""
    framework: str = ""
    weights: list[Any] = field(default_factory=list)
    inputs: list[Array] = field(default_factory=list)
    run: proving.Ran = field(default_factory=proving.Ran)


class _Refused(Exception):
    """A call that cannot be carried out, in a line."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


def main(words: list[str]) -> None:
    """Run the task in a folder, and write its result there.

    Args:
        words: the path of the folder.
    """
    folder = Path(words[0])
    task: Task = pickle.loads((folder / "task").read_bytes())
    try:
        result = _work(task)
    except _Refused as refused:
        result = SideResult(refused.status, str(refused))
    except ImportError as error:
        result = SideResult(2, f"{task.framework}: {error}")
    (folder / "result").write_bytes(pickle.dumps(result))


def _work(task: Task) -> SideResult:
    adapter = importlib.import_module(_MODULES[task.framework])
    file = _imported(task.model_file)
    make = _made(file, task)
    inputs = _inputs(file, task)
    model = make()
    _run(model, [], inputs, task)  # which gives layers their shapes
    source = task.source
    if source is None:
        _or_refuse(lambda: adapter.load_file(model, task.file))
        weights = _or_refuse(lambda: _weights(adapter, model, file, task))
        run = _run(model, weights, inputs, task)
        given = pairing.given_of(weights)
        return SideResult(framework=task.framework, weights=given, inputs=inputs, run=run)
    sides = (task.framework, source.framework)
    names = getattr(file, "names", None)
    mine = _or_refuse(lambda: _weights(adapter, model, file, task))
    convert = getattr(file, "convert", None)
    given = _or_refuse(lambda: pairing.converted(source.weights, convert))
    pairs = _or_refuse(lambda: pairing.paired(mine, given, names, sides))
    loading.write(pairs)
    adapter.save_file(model, task.file)
    # What is proved is what the file has, in another model.
    again = make()
    _run(again, [], inputs, task)
    _or_refuse(lambda: adapter.load_file(again, task.file))
    found = [loading.Loaded(w.name, other.name, w.layout.common_shape) for w, other in pairs]
    weights = adapter.weights_of(again)  # Gluon counts models in their names
    named = [replace(weight, name=w.name) for weight, w in zip(weights, mine, strict=True)]
    run = _run(again, named, inputs, task)
    return SideResult(framework=task.framework, weights=found, run=run)


def _weights(adapter: Any, model: Any, file: Any, task: Task) -> list[Weight]:
    """Return the weights of a model, with the layouts that the model file has for its framework."""
    layouts = getattr(file, "layouts", {}).get(task.framework, {})
    return models.laid_out(adapter.weights_of(model), layouts, f"layouts[{task.framework!r}]")


def _imported(path: str) -> Any:
    """The model file. What it imports may lie beside it."""
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise _Refused(f"--model {path}: expected a file of Python, whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _Refused(f"--model {path}: {_in_a_line(error)}") from error
    return module


def _made(file: Any, task: Task) -> Callable[[], Any]:
    name = f"{task.framework}_model"
    function = getattr(file, name, None)
    if not callable(function):
        raise _Refused(
            f"--model {task.model_file}: has no function {name}(); expected one that returns the model of "
            f"{task.framework}"
        )

    def make() -> Any:
        try:
            model = function()
        except Exception as error:
            raise _Refused(f"--model {task.model_file}: {name}(): {_in_a_line(error)}") from error
        if model is None:
            raise _Refused(f"--model {task.model_file}: {name}() returns None; expected the model")
        return model

    return make


def _inputs(file: Any, task: Task) -> list[Array]:
    if task.inputs is not None:
        return task.inputs
    function = getattr(file, "example_inputs", None)
    if not callable(function):
        raise _Refused(
            f"--model {task.model_file}: has no function example_inputs(); expected one that returns the "
            "NumPy array for the models, or a list of arrays; write it, or pass --inputs FILE.npy"
        )
    try:
        made = function()
        arrays = [
            np.ascontiguousarray(each) for each in (made if isinstance(made, (list, tuple)) else [made])
        ]
    except Exception as error:
        raise _Refused(f"--model {task.model_file}: example_inputs(): {_in_a_line(error)}") from error
    if not arrays or any(each.dtype.kind not in "fiubV" for each in arrays):
        found = ", ".join(type(each).__name__ for each in made) if isinstance(made, (list, tuple)) else made
        raise _Refused(
            f"--model {task.model_file}: example_inputs(): expected an array of NumPy, or a list of them, "
            f"found {found!r}"
        )
    return arrays


def _run(model: Any, weights: list[Weight], inputs: list[Array], task: Task) -> proving.Ran:
    """The model's outputs, with channels first."""
    try:
        return proving.ran(model, weights, inputs)
    except Exception as error:
        shapes = ", ".join(f"{each.dtype} {'x'.join(map(str, each.shape))}" for each in inputs)
        raise _Refused(
            f"the model of {task.framework} does not take inputs of {shapes}: {_in_a_line(error)}",
            3,
        ) from error


def _or_refuse(function: Callable[[], Any]) -> Any:
    """Call a function, and raise _Refused with one line of text if it fails."""
    try:
        return function()
    except (InvalidArgumentError, OSError, UnsupportedError) as error:
        raise _Refused(str(error).removeprefix("parity.load: "), 3) from error
    except Exception as error:  # files that are not files of weights
        raise _Refused(_in_a_line(error), 2) from error


def _in_a_line(error: Exception) -> str:
    lines = traceback.format_exception_only(error)[-1].strip().splitlines()
    return lines[0] if lines else type(error).__name__
