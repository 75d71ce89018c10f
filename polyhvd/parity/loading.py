"""Weights from a model of one framework into the same model of another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from polyhvd.collectives.objects import allgather_object, broadcast_object
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.errors import InvalidArgumentError, UnsupportedError
from polyhvd.parity import proving
from polyhvd.parity.comparing import ParityError
from polyhvd.parity.models import framework_of, laid_out, weights_of
from polyhvd.parity.pairing import Convert, Given, Names, converted, given_of, paired
from polyhvd.runtime import current
from polyhvd.training.layouts import Layout
from polyhvd.training.mapping import Weight

__all__ = ["Loaded", "load", "write"]

Array = np.ndarray[Any, Any]
Pairs = Sequence[tuple[Weight, Given]]
T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """A weight that was loaded, and the one that it was loaded from, by their names in the models.

    Args:
        name: in the model that was written to.
        source: in the other; empty: a scale of 1 or an offset of 0, as its normalization has none.
        shape: in common form.
    """

    name: str
    source: str
    shape: tuple[int, ...]


def load(
    model: Any,
    *,
    from_: Any,
    names: Names | None = None,
    convert: Convert | None = None,
    partial: bool = False,
    layouts: Mapping[str, Layout] | None = None,
    from_layouts: Mapping[str, Layout] | None = None,
    check: Any = None,
    process_set: ProcessSet = global_process_set,
) -> list[Loaded]:
    """Overwrite the weights of a model with those of the same one in another framework, or on another rank.

    Weights are paired in the order of the layers, or by name with ``names``. Layouts are mapped as
    :func:`polyhvd.parity.mapping` does, and so are gates and biases of LSTM, GRU and plain recurrent cells.
    All is checked before anything is written. Then both models run on the same inputs, and their outputs are
    compared: on those of ``check``, or on random numbers if a model of Keras has shapes of inputs.
    If a layer is given the same numbers in another order than in the other model, nothing stays written.

    Args:
        model: of PyTorch, Gluon or Keras, built; or a list or dict of parameters, variables or arrays.
        from_: a model likewise; a dict of tensors, as a file of weights is read; or the world rank whose
            model is meant: then every rank calls this with its own model, and that rank's stays as it is.
        names: for a weight of ``from_``, its name in ``model``: a dict, or a function that returns the name,
            or None for a weight that is left out. Those that a dict does not have keep their names.
        convert: a function that is given the weights of ``from_`` as arrays in common form, by name, and
            returns such a dict: split, joined, reordered, added or left out. Its order and its names count.
        partial: True: pair by name, and let weights of ``model`` that nothing in ``from_`` is called keep
            their values, such as those of a new last layer.
        layouts: layouts of weights of ``model``, by name, that are not known by their layers.
        from_layouts: likewise, of ``from_``.
        check: an array that both models take, or a list of them, images with channels first: the models'
            outputs have to agree. None: random inputs, if their shapes are known and both models take them;
            then only a wrong mapping is an error, and other differences are a warning. False: no comparison.
        process_set: the ranks that take part, if ``from_`` is a rank.

    Returns:
        the pairs, in the order of ``model``.

    Raises:
        InvalidArgumentError: weights are missing, left over or of other shapes, or a model does not take the
            inputs of ``check``; nothing was written, on any rank.
        UnsupportedError: a cell has no counterpart in other frameworks, or a layer moves axes so that the
            order of a weight's inputs is not known.
        ParityError: the models' outputs differ; with the layer. The weights are as they were before.

    Example::

        parity.load(torch_model, from_=gluon_net)
        parity.load(model, from_=torch.load("model.pt"), names=lambda name: name.replace("conv1", "stem"))
        parity.load(model, from_=0)  # on every rank, whatever its framework is
    """
    explicit = None if check is None or check is False else proving.given_arrays(check)
    if isinstance(from_, int) and not isinstance(from_, bool):
        pairs = _from_rank(model, from_, names, convert, partial, layouts or {}, check, explicit, process_set)
    else:
        mine = laid_out(weights_of(model), layouts or {}, "layouts")
        theirs = laid_out(weights_of(from_), from_layouts or {}, "from_layouts")
        given = converted(given_of(theirs), convert)
        pairs = paired(mine, given, names, _sides(model, framework_of(from_)), partial=partial)
        if explicit is not None and not (proving.can_run(model) and proving.can_run(from_)):
            raise InvalidArgumentError(
                "parity.load: check: expected two models, whose outputs can be compared, found a "
                f"{type(from_).__name__} to be loaded into a {type(model).__name__}; nothing was loaded"
            )
        before = _copies(pairs)
        write(pairs)
        if check is not False and proving.can_run(model) and proving.can_run(from_):
            tries = [explicit] if explicit else [*proving.candidates(model), *proving.candidates(from_)]
            _undone_unless(pairs, before, lambda: _prove(model, mine, from_, theirs, pairs, tries, explicit))
    return [Loaded(weight.name, other.name, weight.layout.common_shape) for weight, other in pairs]


def _sides(model: Any, source: str | None) -> tuple[str, str]:
    return framework_of(model) or "", source or ""


def _copies(pairs: Pairs) -> list[Array]:
    return [weight.read() for weight, _ in pairs]


def _undone_unless(pairs: Pairs, before: Sequence[Array], function: Callable[[], None]) -> None:
    """Call a function; if it raises, the weights get their values of before."""
    try:
        function()
    except BaseException:
        for (weight, _), array in zip(pairs, before, strict=True):
            weight.write(np.ascontiguousarray(array))
        raise


def _prove(
    model: Any,
    mine: Sequence[Weight],
    from_: Any,
    theirs: Sequence[Weight],
    pairs: Pairs,
    tries: Sequence[list[Array]],
    explicit: list[Array] | None,
) -> None:
    """Compare the outputs of two models of this process."""
    problem: Exception | None = None
    for inputs in tries:
        try:
            runs = proving.ran(model, mine, inputs), proving.ran(from_, theirs, inputs)
        except Exception as error:
            problem = problem or error
            continue
        _judge(proving.finding(*runs, _names(pairs)), explicit is not None)
        return
    if explicit is not None:
        raise InvalidArgumentError(_not_taken(explicit, problem))


def _names(pairs: Pairs) -> dict[str, str]:
    return {weight.name: other.name for weight, other in pairs if other.name}


def _not_taken(inputs: Sequence[Array], problem: object) -> str:
    inputs_text = ", ".join(f"{each.dtype} {list(each.shape)}" for each in inputs)
    return f"parity.load: check: a model does not take inputs of {inputs_text}: {problem}; nothing was loaded"


def _judge(found: proving.Finding | None, is_explicit: bool) -> None:
    """Raise what was found, or warn of it if no check was requested and the mapping is right."""
    if found is None:
        return
    if is_explicit or found.is_mapping:
        hint = "; pass layouts= or from_layouts= with the layouts of its weights" if found.is_mapping else ""
        raise ParityError(f"parity.load: {found.text}{hint}; nothing was loaded")
    warnings.warn(f"parity.load: the weights were loaded, but {found.text}", stacklevel=6)


def _from_rank(
    model: Any,
    root: int,
    names: Names | None,
    convert: Convert | None,
    partial: bool,
    layouts: Mapping[str, Layout],
    check: Any,
    explicit: list[Array] | None,
    process_set: ProcessSet,
) -> Pairs:
    """Load what a rank has, on every rank; what one refuses, all do."""

    def gather(value: T) -> list[T]:
        return allgather_object(value, name="parity.load.check", process_set=process_set)

    is_root = current.world().placement.rank == root
    mine = _on_all(lambda: laid_out(weights_of(model), layouts, "layouts"), gather, process_set)
    own = given_of(mine) if is_root else None
    given = broadcast_object(own, root, name="parity.load", process_set=process_set)
    sides = _sides(model, f"rank {root}")
    pairs = _on_all(
        lambda: (
            paired(mine, given, None, sides)
            if is_root
            else paired(mine, converted(given, convert), names, sides, partial=partial)
        ),
        gather,
        process_set,
    )
    before = [] if is_root else _copies(pairs)
    written = [] if is_root else pairs
    write(written)
    can = check is not False and proving.can_run(model)
    offers = gather((can, explicit, proving.candidates(model) if can and explicit is None else []))
    chosen = next((arrays for _, arrays, _ in offers if arrays is not None), None)
    if not all(able for able, _, _ in offers):
        if chosen is None:
            return pairs
        error = "parity.load: check: a rank has no model that can be run, or check=False; nothing was loaded"
        _undone_unless(written, before, lambda: _refuse(error))
    tries = [chosen] if chosen is not None else [inputs for _, _, offered in offers for inputs in offered]

    def prove() -> None:
        problems: list[str] = []
        for inputs in tries:
            own, problem = None, ""
            try:
                own = proving.ran(model, mine, inputs)
            except Exception as error:
                problem = str(error) or type(error).__name__
            problems = [each for each in gather(problem) if each]
            if problems:
                continue
            other = broadcast_object(
                own if is_root else None, root, name="parity.load", process_set=process_set
            )
            found = None if is_root or own is None else proving.finding(own, other, _names(pairs))
            every = [each for each in gather(found) if each is not None]
            worst = next((each for each in every if each.is_mapping), next(iter(every), None))
            _judge(worst, chosen is not None)
            return
        if chosen is not None:
            _refuse(_not_taken(chosen, problems[0]))

    _undone_unless(written, before, prove)
    return pairs


def _refuse(message: str) -> None:
    raise InvalidArgumentError(message)


def _on_all(function: Callable[[], T], gather: Callable[[Any], list[Any]], process_set: ProcessSet) -> T:
    """The result of a function; an error on one rank is raised on all."""
    refused: InvalidArgumentError | UnsupportedError | None = None
    try:
        made = function()
    except (InvalidArgumentError, UnsupportedError) as error:
        refused = error
    every = gather(None if refused is None else (type(refused), str(refused)))
    if refused is not None:
        raise refused
    for rank, each in zip(process_set.ranks or range(len(every)), every, strict=True):
        if each is not None:
            cls, text = each
            raise cls(f"on rank {rank}: {text}")
    return made


def write(pairs: Sequence[tuple[Weight, Given]]) -> None:
    """Overwrite the weights of a model.

    Args:
        pairs: as :func:`paired` returns them.
    """
    for weight, other in pairs:
        lying = weight.layout.array_from_common(other.array)
        weight.write(np.array(lying, dtype=_dtype(weight.dtype), order="C"))


def _dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes  # takes a while, and is seldom needed

    return np.dtype(ml_dtypes.bfloat16)
