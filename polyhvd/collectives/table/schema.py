"""The fields of a row of the table, and those of a framework's dialect.

Texts are templates: ``{tensor}``, ``{a_tensor}`` and ``{tensors}`` are what the framework calls its tensors,
``{Tensor}`` is their type and ``{Given}`` that of arguments, and ``{ones}`` and ``{array}`` make one from a
shape and from a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Dialect", "Family", "Parameter", "Verb", "Wrapper", "Wrappers"]


@dataclass(frozen=True)
class Parameter:
    """An argument of verbs, or of wrappers.

    Args:
        name: of the argument.
        type: the annotation, a template.
        text: for the documentation, a template: what it means, with shapes, dtypes and units.
        default: the source of its default; None: it has to be given.
        is_passed: False: it is accepted and has no effect.
    """

    name: str
    type: str
    text: str
    default: str | None = None
    is_passed: bool = True


@dataclass(frozen=True)
class Family:
    """The common fields of all forms of one collective.

    Args:
        name: of the collective.
        order: names of the parameters of all forms, in the order of Horovod's signatures for PyTorch.
        details: what it does, for the documentation of every form that returns a result; a template.
        raises: keys of RAISES.
        parameters: those that differ from the ones of that name in PARAMETERS.
    """

    name: str
    order: tuple[str, ...]
    details: str = ""
    raises: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()


@dataclass(frozen=True)
class Verb:
    """A public function.

    Args:
        name: of the function, and of the method of ``Functions`` that it calls.
        family: name of its :class:`Family`.
        summary: the first line of the documentation, a template.
        returns: the annotation of the result, a template.
        result: what the result is, for the documentation; empty: nothing is returned.
        example: the last lines of the example; a template.
        details: added to the text of the family; a template.
        without: parameters of the family that this form does not have.
        texts: of parameters that mean something else here, by name; templates.
        raises: instead of the family's.
        overloads: of a parameter, pairs of its annotation and that of the result which goes with it; the
            first has the default. Templates.
    """

    name: str
    family: str
    summary: str
    returns: str
    result: str
    example: str
    details: str = ""
    without: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    raises: tuple[str, ...] | None = None
    overloads: tuple[str, tuple[tuple[str, str], ...]] | None = None

    @property
    def is_async(self) -> bool:
        """Whether it returns a handle."""
        return self.name.rstrip("_").endswith("_async")


@dataclass(frozen=True)
class Dialect:
    """A framework's names and texts: ``DIALECT`` of its ``dialect.py``.

    Keys of ``order`` and ``notes`` are names of verbs, or of families with an asterisk: ``"allreduce*"``.

    Args:
        title: what the framework is called.
        module: what users import.
        tensor: what a tensor is called: "array" or "tensor".
        type: the annotation of a tensor.
        imports: statements of the generated module, besides those that every such module has.
        example_import: the line with which examples begin.
        ones: makes a tensor of ones from a shape, in examples.
        array: makes a tensor of a list, in examples.
        dtypes: what tensors may have.
        given: the annotation of what is taken for a tensor; empty: tensors, and in some places numbers.
        lacks: verbs of the table that it does not have.
        without: parameters that none of its verbs has.
        async_without: parameters that none of its asynchronous forms has.
        parameters: that the table lacks, or that differ from its.
        order: names of parameters, with spaces between, where Horovod's signatures of this framework differ
            from those for PyTorch. What the table has besides them comes last.
        notes: paragraphs that are added to the documentation; templates. ``"*"`` is for all that return
            results, ``"*_async"`` for all that return handles.
        types: annotations that differ, by ``"verb.parameter"`` or ``"verb.return"``; templates.
        raises: name and text of errors, where these are not the table's, by the name there; templates.
        decorator: of every function.
    """

    title: str
    module: str
    tensor: str
    type: str
    imports: tuple[str, ...]
    example_import: str
    ones: str
    array: str
    dtypes: str
    given: str = ""
    lacks: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    async_without: frozenset[str] = frozenset()
    parameters: tuple[Parameter, ...] = ()
    order: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    raises: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    decorator: str = ""


REFUSED = {"InvalidArgumentError": "an argument cannot be used."}


@dataclass(frozen=True)
class Wrapper:
    """A public function that has an optimizer or a tape reduce its gradients.

    Args:
        name: of the function.
        order: names of its parameters, with spaces between. Those after an asterisk are given by name.
        summary: the first line of the documentation.
        example: the lines of the example.
        details: more paragraphs of the documentation, with empty lines between.
        texts: of parameters that mean something else here, by name.
        raises: when an error is raised, by its name.
        calls: a function that takes the parameters that are not options, the first one by position, and
            ``options``.
    """

    name: str
    order: str
    summary: str
    example: str
    details: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)
    raises: Mapping[str, str] = field(default_factory=REFUSED.copy)
    calls: str = "distribute"


@dataclass(frozen=True)
class Wrappers:
    """The wrappers of a framework: ``WRAPPERS`` of its ``signatures.py``.

    Args:
        title: what the framework is called.
        imports: as of :class:`Dialect`.
        parameters: of all wrappers, by name; those that OPTIONS has become ``options``.
        functions: the wrappers.
        options: the class of ``options``.
        ops: the reductions that they can do, as source; empty: Average, Sum and Adasum.
        decorator: of every function.
    """

    title: str
    imports: tuple[str, ...]
    parameters: Mapping[str, Parameter]
    functions: tuple[Wrapper, ...]
    options: str = "Options"
    ops: str = ""
    decorator: str = ""
