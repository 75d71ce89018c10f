"""A case: one network, its data and its optimizer, for every framework; and how a file of one is read."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from polyhvd.errors import InvalidArgumentError
from polyhvd.parity import models
from polyhvd.parity.layers import Layer

__all__ = [
    "FRAMEWORKS",
    "LOSSES",
    "OPTIMIZERS",
    "PRECISIONS",
    "SCHEDULES",
    "BadCaseError",
    "Case",
    "Optimizer",
    "error_line",
    "from_file",
]

Array = np.ndarray[Any, Any]
#: Means over the batch: of the cross entropy of scores with classes, of the squared difference.
LOSSES = ("cross_entropy", "squared_error")
OPTIMIZERS = ("sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop", "adagrad")
#: In which layers compute; weights and what optimizers keep are float32.
PRECISIONS = ("float32", "bfloat16", "float16")
SCHEDULES = ("constant", "warmup", "cosine", "halve")
#: Those that train cases.
FRAMEWORKS = {name: facts for name, facts in models.FRAMEWORKS.items() if facts.session}


_PLAIN = (bool, int, float, str)
#: Characters of a value in a message.
_SHOWN_MAX = 80


class BadCaseError(ValueError):
    """A case cannot be used; the message describes the fault."""


def error_line(error: BaseException) -> str:
    """Return an error's class and the first line of its text, for messages."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _kind_of(value: Any) -> str:
    """A description of a value, for messages."""
    if isinstance(value, type):
        return f"the class {value.__name__}, of which an instance is needed"
    return f"{type(value).__name__}: {_shown(value)}" if isinstance(value, _PLAIN) else type(value).__name__


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _is_one_of(value: Any, known: Sequence[str]) -> bool:
    return isinstance(value, str) and value in known


def _is_above_0(value: Any) -> bool:
    return _is_number(value) and 0 < value < math.inf


def _refused(what: str, value: Any, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"Optimizer: {what}={_shown(value)}: expected {expected}")


def _shown(value: Any) -> str:
    """A value in a message, of one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


@dataclass(frozen=True)
class Optimizer:
    """How every framework treats the gradients, in numbers that mean the same to all of them.

    ``polyhvd docs parity`` has the formulas, and what each framework has instead by default.

    Args:
        name: one of :data:`OPTIMIZERS`.
        rate: learning rate.
        momentum: of "momentum" and "nesterov".
        betas: of "adam" and "adamw".
        rho: of "rmsprop".
        epsilon: outside of the root in "adam" and "adamw", inside in "rmsprop" and "adagrad".
        weight_decay: decoupled in "adamw", else added to the gradient.
        clip_norm: gradients of a larger norm, all together, are scaled to it, after they were averaged.
        accumulate: into how many parts of equal size each rank cuts its batch, whose gradients it adds up.
        schedule: one of :data:`SCHEDULES`.
    """

    name: str = "sgd"
    rate: float = 0.05
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    rho: float = 0.9
    epsilon: float = 1e-6
    weight_decay: float = 0.0
    clip_norm: float | None = None
    accumulate: int = 1
    schedule: str = "constant"

    def __post_init__(self) -> None:
        for what, value, known in (
            ("name", self.name, OPTIMIZERS),
            ("schedule", self.schedule, SCHEDULES),
        ):
            if not _is_one_of(value, known):
                raise _refused(what, value, f"one of {', '.join(known)}")
        for what, number in (("rate", self.rate), ("epsilon", self.epsilon), ("clip_norm", self.clip_norm)):
            is_left_out = number is None and what == "clip_norm"
            if not is_left_out and not _is_above_0(number):
                raise _refused(what, number, "a number above 0")
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise _refused("betas", self.betas, "two numbers")
        for what, share in (
            ("momentum", self.momentum),
            ("rho", self.rho),
            *(("betas", beta) for beta in self.betas),
        ):
            if not (_is_number(share) and 0 <= share < 1):
                raise _refused(what, share, "a number from 0 to below 1")
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise _refused("accumulate", self.accumulate, "a whole number, 1 or more")
        if not (_is_number(self.weight_decay) and 0 <= self.weight_decay < math.inf):
            raise _refused("weight_decay", self.weight_decay, "a number, 0 or more")

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate of a step.

        Args:
            step: counted from 0.
            steps: how many there are.
        """
        if self.schedule == "warmup":  # over the first quarter
            return self.rate * min(1.0, (step + 1) / max(1, math.ceil(steps / 4)))
        if self.schedule == "cosine":
            return self.rate * 0.5 * (1.0 + math.cos(math.pi * step / max(1, steps)))
        if self.schedule == "halve":  # after a half
            return self.rate * (0.5 if 2 * step >= steps else 1.0)
        return self.rate

    @property
    def uses_momentum(self) -> float:
        """The momentum, 0 where it has none."""
        return self.momentum if self.name in ("momentum", "nesterov") else 0.0

    @property
    def takes_sparse(self) -> bool:
        """Whether every framework can do it to sparse gradients as they are."""
        plain = self.name == "sgd" and not self.weight_decay and self.clip_norm is None
        return plain and self.accumulate == 1

    @property
    def coupled_decay(self) -> float:
        """The share of each weight that is added to its gradient."""
        return 0.0 if self.name == "adamw" else self.weight_decay

    @property
    def decoupled_decay(self) -> float:
        """The share of each weight that is subtracted from it in a step, times the learning rate."""
        return self.weight_decay if self.name == "adamw" else 0.0


@dataclass(frozen=True)
class Case:
    """The case that ``polyhvd parity`` runs.

    Args:
        name: of the catalogue, or of the file.
        build: given the name of a framework, returns layers of :mod:`polyhvd.parity.layers`, or a model of
            that framework, built; None: the case has none for it.
        batch: given the name of a framework and the number of a step, returns inputs and targets of a whole
            batch, the same for every framework: images as [batch, channels, height, width].
        loss: one of :data:`LOSSES`.
        optimizer: what is done with the gradients.
        same_on_ranks: whether several ranks have to do together what one does with the whole batch. Not with
            batch normalization, whose statistics are each rank's own, unless it is described by layers.
        about: in a few words.
        channels_last: frameworks whose model, built by the case, is given images with channels last.
        precision: one of :data:`PRECISIONS`, in which layers compute.
    """

    name: str
    build: Callable[[str], Any]
    batch: Callable[[str, int], tuple[Array, Array]]
    loss: str = "cross_entropy"
    optimizer: Optimizer = Optimizer()
    same_on_ranks: bool = True
    about: str = ""
    channels_last: Sequence[str] = ("tensorflow",)
    precision: str = "float32"

    @property
    def loss_scale(self) -> float:
        """By what the loss is multiplied, and gradients divided again: those in float16 would be 0 else."""
        return 1024.0 if self.precision == "float16" else 1.0

    def of(self, framework: str) -> list[Layer] | Any | None:
        """The result of ``build``: a list of layers, a model, or None.

        Raises:
            BadCaseError: build raises, or returns something else.
        """
        try:
            made = self.build(framework)
        except (Exception, SystemExit) as error:
            raise BadCaseError(f"{self.name}: build({framework!r}) has raised {error_line(error)}") from error
        if isinstance(made, (list, tuple)):
            wrong = next((item for item in made if not isinstance(item, Layer)), None)
            if wrong is not None or not made:
                raise BadCaseError(
                    f"{self.name}: build({framework!r}) has to return a list of layers of "
                    f"polyhvd.parity.layers, or a model of {FRAMEWORKS[framework].models}; found "
                    f"{'an empty list' if not made else f'a list with {type(wrong).__name__} in it'}"
                )
            return list(made)
        facts = FRAMEWORKS[framework]
        maker = framework if facts.made_by is None else facts.made_by
        if made is not None and models.framework_of(made) != maker:
            model = f", a model of {facts.models}" if maker else ""
            raise BadCaseError(
                f"{self.name}: build({framework!r}) has to return a list of layers of "
                f"polyhvd.parity.layers{model}, or None where there is none; found {_kind_of(made)}"
            )
        return made

    def data(self, framework: str, step: int) -> tuple[Array, Array]:
        """A batch.

        Raises:
            BadCaseError: ``batch`` raises, or returns something else than two arrays of equal length.
        """
        try:
            made = self.batch(framework, step)
        except (Exception, SystemExit) as error:
            raise BadCaseError(
                f"{self.name}: batch({framework!r}, {step}) has raised {error_line(error)}"
            ) from error
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise BadCaseError(
                f"{self.name}: batch({framework!r}, {step}) has to return inputs and targets, two arrays; "
                f"found {type(made).__name__}"
            )
        inputs, targets = (_numbers(item, f"{self.name}: batch({framework!r}, {step})") for item in made)
        if not inputs.ndim or not targets.ndim or len(inputs) != len(targets) or not len(inputs):
            raise BadCaseError(
                f"{self.name}: batch({framework!r}, {step}): inputs and targets need as many rows, "
                f"found shapes {list(inputs.shape)} and {list(targets.shape)}"
            )
        return _plain(inputs), _plain(targets)


def _numbers(value: Any, source: str) -> Array:
    """An array of numbers.

    Raises:
        BadCaseError: it is none.
    """
    try:
        made = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise BadCaseError(
            f"{source}: expected two arrays of numbers, inputs and targets, found a list that makes none: "
            "the model of a case has one input; compare one with several by --scripts"
        ) from error
    if made.dtype.kind not in "fiub":
        raise BadCaseError(f"{source}: expected arrays of numbers, found one of {made.dtype}")
    return made


def _plain(array: Array) -> Array:
    """In types that every framework has by default."""
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)


#: Names that a file may define besides ``build`` and ``batch``.
_OPTIONAL = {"loss", "optimizer", "same_on_ranks", "about", "channels_last", "precision"}


def from_file(path: Path) -> Case:
    """The case that a file describes.

    Args:
        path: of a program of Python with the functions ``build(framework)`` and ``batch(framework, step)``,
            and if need be ``loss``, ``optimizer`` (an :class:`Optimizer`, or a dict of its arguments),
            ``same_on_ranks``, ``about``, ``channels_last`` and ``precision``, which mean what they mean in
            :class:`Case`.

    Raises:
        BadCaseError: there is no such file, it cannot be run, or lacks a function.

    Example::

        case = from_file(Path("mymodel.py"))
    """
    if not path.is_file():
        found = "that is a folder" if path.is_dir() else "there is no such file"
        raise BadCaseError(f"{path}: {found}; give a file, or a name of `polyhvd parity --list`")
    spec = importlib.util.spec_from_file_location(f"polyhvd_case_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise BadCaseError(f"{path}: is not a file of Python; its name has to end in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whose status would be taken for that of the comparison
        raise BadCaseError(f"{path}: cannot be run: {error_line(error)}") from error
    known = vars(module)
    for name, called in (("build", "build(framework)"), ("batch", "batch(framework, step)")):
        if not callable(known.get(name)):
            raise BadCaseError(
                f"{path}: has no function {called}; for an example of a whole case, run: polyhvd docs parity"
            )
    given = {name: known[name] for name in _OPTIONAL if name in known}
    _check_options(path, given)
    if isinstance(given.get("optimizer"), dict):
        try:
            given["optimizer"] = Optimizer(**given["optimizer"])
        except ValueError as error:
            raise BadCaseError(f"{path}: optimizer: {str(error).removeprefix('Optimizer: ')}") from error
    return Case(path.stem, known["build"], known["batch"], **given)


def _check_options(path: Path, given: Mapping[str, Any]) -> None:
    """Check the values that a file defines besides its functions.

    Raises:
        BadCaseError: something cannot.
    """

    def refuse(name: str, expected: str) -> None:
        raise BadCaseError(f"{path}: {name}={_shown(given[name])}: expected {expected}")

    for name, known in (("loss", LOSSES), ("precision", PRECISIONS)):
        if name in given and not _is_one_of(given[name], known):
            refuse(name, f"one of {', '.join(known)}")
    for name, kind, expected in (("same_on_ranks", bool, "True or False"), ("about", str, "a text")):
        if name in given and not isinstance(given[name], kind):
            refuse(name, expected)
    channels = given.get("channels_last", ())
    if not isinstance(channels, (tuple, list)) or not set(map(str, channels)) <= FRAMEWORKS.keys():
        refuse("channels_last", f"a tuple of names of frameworks, of {', '.join(FRAMEWORKS)}")
    optimizer, names = given.get("optimizer", Optimizer()), [item.name for item in fields(Optimizer)]
    if not isinstance(optimizer, (Optimizer, dict)):
        refuse("optimizer", f"an Optimizer or a dict of its arguments ({', '.join(names)})")
    if isinstance(optimizer, dict) and (unknown := [name for name in optimizer if name not in names]):
        raise BadCaseError(
            f"{path}: optimizer: there is no {_shown(unknown[0])}; expected of {', '.join(names)}"
        )
