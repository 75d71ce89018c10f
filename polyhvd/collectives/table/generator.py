"""Makes frameworks/NAME/verbs.py and wrappers.py from the table of this folder and from that of NAME.

``python polyhvd/collectives/table/generator.py`` writes all that have changed, with ``torch`` behind it one.
A framework is whatever folder has a dialect.py, of which verbs.py is made, or a signatures.py, of which
wrappers.py is made. Both are read without importing the framework. The build of the package runs this before
anything is compiled: it needs only the standard library.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]

if __name__ == "__main__":  # without their __init__.py, which needs the compiled core
    for package in ("polyhvd", "polyhvd.collectives"):
        bare = sys.modules[package] = ModuleType(package)
        bare.__path__ = [str(ROOT / package.replace(".", "/"))]

from polyhvd.collectives.table import (  # noqa: E402
    FAMILIES,
    PARAMETERS,
    RAISES,
    VERBS,
    Dialect,
    Parameter,
    Verb,
)
from polyhvd.collectives.table.options import OPTIONS  # noqa: E402
from polyhvd.collectives.table.schema import Wrapper, Wrappers  # noqa: E402

__all__ = ["dialects", "signatures", "write"]

WIDTH = 110
HEADER = '''"""The collectives for {title}, with Horovod's signatures.

Made by ``make verbs`` from polyhvd/collectives/table and from dialect.py: change these instead. What the
functions do is in polyhvd/collectives/functions.py, and in functions.py for what is peculiar to {title}.
"""

from __future__ import annotations
'''
HEADER_OF_WRAPPERS = '''"""Distributed optimizers and tapes of {title}, with Horovod's signatures.

Made by ``make verbs`` from polyhvd/collectives/table and from signatures.py: change these instead.
"""

from __future__ import annotations
'''
#: Modules, names, and the text that shows that a generated module needs them; in the order of imports.
COMMON = (
    ("collections.abc", "Iterable", "Iterable["),
    ("collections.abc", "Sequence", "Sequence["),
    ("typing", "Any", "-> Any:"),
    ("typing", "Any", ": Any"),
    ("typing", "TypeVar", "TypeVar("),
    ("typing", "overload", "@overload"),
    ("polyhvd.collectives.adapter", "Handle", "Handle["),
    ("polyhvd.collectives.adapter", "ReduceOp", "ReduceOp."),
    ("polyhvd.collectives.operation", "Number", "| Number"),
    ("polyhvd.collectives.process_sets", "ProcessSet", ": ProcessSet"),
    ("polyhvd.collectives.process_sets", "global_process_set", "= global_process_set"),
    ("polyhvd.training.compression", "Compressor", ": Compressor"),
    ("polyhvd.training.compression", "KeyedCompressor", "| KeyedCompressor"),
    ("polyhvd.training.options", "Options", "options=Options("),
)


def dialects(frameworks: Path) -> dict[str, Dialect]:
    """Return the dialects of all frameworks in a folder, by the names of their folders."""
    return {name: module.DIALECT for name, module in _modules(frameworks, "*/dialect.py")}


def signatures(frameworks: Path) -> dict[str, Wrappers]:
    """The wrappers of all frameworks in a folder, by the names of their folders, such as tensorflow/keras."""
    patterns = ("*/signatures.py", "*/*/signatures.py")
    return {name: module.WRAPPERS for each in patterns for name, module in _modules(frameworks, each)}


def _modules(frameworks: Path, pattern: str) -> Iterator[tuple[str, Any]]:
    for path in sorted(frameworks.glob(pattern)):
        spec = importlib.util.spec_from_file_location(f"{path.stem}_{path.parent.name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield path.parent.relative_to(frameworks).as_posix(), module


class _Writer:
    """The source of one framework's module."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._verbs = [verb for verb in VERBS.values() if verb.name not in dialect.lacks]
        article = "an" if dialect.tensor[0] in "aeiou" else "a"
        self._words = {
            "tensor": dialect.tensor,
            "tensors": f"{dialect.tensor}s",
            "a_tensor": f"{article} {dialect.tensor}",
            "Tensor": dialect.type,
            "Given": dialect.given or dialect.type,
            "ones": dialect.ones,
            "array": dialect.array,
            "dtypes": dialect.dtypes,
        }

    def source(self) -> str:
        names = [verb.name for verb in self._verbs]
        variables = '\nR = TypeVar("R")\n' if any(v.returns == "R" for v in self._verbs) else ""
        functions = [self._function(verb) for verb in self._verbs]
        header = HEADER.format(title=self._dialect.title)
        return _module(header, self._dialect.imports, names, variables, functions)

    def _text(self, template: str, **more: str) -> str:
        return template.format_map({**self._words, **more})

    def _parameters(self, verb: Verb) -> list[Parameter]:
        """Return the parameters of a verb, in this framework's order."""
        dialect, family = self._dialect, FAMILIES[verb.family]
        own = {row.name: row for row in dialect.parameters}
        gone = {*verb.without, *dialect.without, *(dialect.async_without if verb.is_async else ())}
        allowed = [name for name in family.order if name not in gone]
        order = dialect.order.get(verb.name) or dialect.order.get(f"{family.name}*") or ""
        first = [
            name for name in order.split() if name in allowed or (name in own and name not in PARAMETERS)
        ]
        changed = {row.name: row for row in family.parameters}
        rows = []
        for name in dict.fromkeys((*first, *allowed)):
            row = own.get(name) or changed.get(name) or PARAMETERS[name]
            if name in verb.texts:
                row = replace(row, text=verb.texts[name])
                if "or a number" in row.text and not dialect.given:
                    row = replace(row, type=f"{row.type} | Number")
            kind = dialect.types.get(f"{verb.name}.{name}", row.type)
            rows.append(replace(row, type=self._text(kind), text=self._text(row.text, single=_single(verb))))
        return rows

    def _function(self, verb: Verb) -> str:
        rows = self._parameters(verb)
        returns = self._text(self._dialect.types.get(f"{verb.name}.return", verb.returns))
        lines = []
        if verb.overloads is not None:
            varied, kinds = verb.overloads
            for position, (kind, result) in enumerate(kinds):
                changed = [
                    replace(row, type=self._text(kind), default=None if position else row.default)
                    if row.name == varied
                    else row
                    for row in rows
                ]
                lines += ["@overload", *_signature(verb.name, changed, self._text(result), " ..."), "", ""]
        if self._dialect.decorator:
            lines.append(self._dialect.decorator)
        lines += _signature(verb.name, rows, returns)
        lines += self._documentation(verb, rows)
        return "\n".join((*lines, *self._body(verb, rows), ""))

    def _documentation(self, verb: Verb, rows: list[Parameter]) -> list[str]:
        dialect, family = self._dialect, FAMILIES[verb.family]
        own = dialect.notes.get(verb.name)
        if verb.is_async:
            notes = [own, dialect.notes.get("*_async")]
        else:
            common = dialect.notes.get("*") if {"tensor", "tensors"} & set(family.order) else None
            notes = [own or dialect.notes.get(f"{family.name}*"), common]
        details = "" if verb.is_async else family.details
        if family.name == "handles":
            notes = []
        paragraphs = [" ".join(filter(None, (verb.details, details))), *filter(None, notes)]
        raises = family.raises if verb.raises is None else verb.raises
        errors = [dialect.raises.get(name, (name, RAISES[name])) for name in raises]
        begin = f"{dialect.example_import}\nimport {dialect.module} as hvd\nhvd.init()\n"
        return _documented(
            self._text(verb.summary),
            [self._text(paragraph) for paragraph in filter(None, paragraphs)],
            rows,
            self._text(verb.result),
            [(name, self._text(text)) for name, text in errors],
            begin + self._text(verb.example),
        )

    def _body(self, verb: Verb, rows: list[Parameter]) -> list[str]:
        """A call of the method of that name: by position as far as the table's order goes, then by name."""
        given = [row.name for row in rows if row.is_passed]
        canonical = [name for name in FAMILIES[verb.family].order if name not in verb.without]
        positions = 0
        if verb.name in BY_POSITION:
            while positions < len(canonical) and canonical[positions] in given:
                positions += 1
        else:
            positions = sum(name in ("tensor", "tensors", "root_rank", "splits", "handle") for name in given)
        arguments = canonical[:positions]
        arguments += [f"{name}={name}" for name in given if name not in arguments]
        call = "functions." + verb.name
        line = f"    return {call}({', '.join(arguments)})"
        return [line] if len(line) <= WIDTH else ["    return " + _call(call, arguments)]


#: Of these an argument by name would be felt.
BY_POSITION = frozenset({"allreduce", "allreduce_", "allreduce_async", "allreduce_async_"})


def _single(verb: Verb) -> str:
    return verb.name.removeprefix("grouped_")


def _wrapper(wrappers: Wrappers, wrapper: Wrapper) -> str:
    names = wrapper.order.split()
    rows = [wrappers.parameters[name] for name in names if name != "*"]
    rows = [replace(row, text=wrapper.texts.get(row.name, row.text)) for row in rows]
    own_type = _type_variable(rows[0])
    signature = _signature(wrapper.name, [replace(rows[0], type=own_type), *rows[1:]], own_type)
    if "*" in names:
        signature.insert(names.index("*") + 1, "    *,")
    options = [f"{name}={name}" for name in names if name in OPTIONS]
    options += [f"ops={wrappers.ops}"] if wrappers.ops else []
    first, *others = (row.name for row in rows if row.name not in OPTIONS and row.is_passed)
    arguments = [first, *(f"{name}={name}" for name in others)]
    arguments.append("options=" + _call(wrappers.options, options, 8))
    lines = [wrappers.decorator] if wrappers.decorator else []
    paragraphs = wrapper.details.split("\n\n") if wrapper.details else []
    lines += signature
    lines += _documented(wrapper.summary, paragraphs, rows, "", wrapper.raises.items(), wrapper.example)
    return "\n".join((*lines, "    return " + _call(wrapper.calls, arguments), ""))


def _type_variable(wrapped: Parameter) -> str:
    """The type of a parameter that is also the result's, such as OptimizerT."""
    return f"{wrapped.name.capitalize()}T"


def _type_variables(wrappers: Wrappers) -> str:
    lines = []
    for name in dict.fromkeys(wrapper.order.split()[0] for wrapper in wrappers.functions):
        row = wrappers.parameters[name]
        bound = "" if row.type == "Any" else f", bound={row.type}"
        lines.append(f'{_type_variable(row)} = TypeVar("{_type_variable(row)}"{bound})')
    return "\n" + "\n".join(lines) + "\n"


def _module(
    header: str, own: Iterable[str], names: Iterable[str], variables: str, functions: Iterable[str]
) -> str:
    """A module, with the imports of the framework and those of the common ones that the functions need."""
    text = f"{variables}\n\n" + "\n\n".join(functions)
    imports: dict[str, list[str]] = {}
    for module, name, mark in COMMON:
        if mark in text and name not in imports.get(module, []):
            imports.setdefault(module, []).append(name)
    lines = {module: f"from {module} import {', '.join(found)}" for module, found in imports.items()}
    standard = [line for module, line in lines.items() if not module.startswith("polyhvd")]
    ours = [line for module, line in lines.items() if module.startswith("polyhvd")]
    exports = (f'    "{name}",' for name in sorted(names))
    return "\n".join((header, *standard, "", *own, "", *ours, "", "__all__ = [", *exports, "]", text))


def _documented(
    summary: str,
    paragraphs: Iterable[str],
    rows: list[Parameter],
    result: str,
    raises: Collection[tuple[str, str]],
    example: str,
) -> list[str]:
    """The lines of a docstring."""
    lines = _filled(f'"""{summary}', 4)
    for paragraph in paragraphs:
        lines += ["", *_filled(paragraph, 4)]
    if rows:
        lines += ["", "Args:"]
    for row in rows:
        lines += _filled(f"{row.name}: {row.text}", 8, first=4)
    if result:
        lines += ["", "Returns:", *_filled(result, 8, first=4, later=4)]
    if raises:
        lines += ["", "Raises:"]
    for name, text in raises:
        lines += _filled(f"{name}: {text}", 8, first=4)
    lines += ["", "Example::", "", *(f"    {line}" for line in example.split("\n")), '"""']
    return [f"    {line}".rstrip() for line in lines]


def _call(function: str, arguments: Iterable[str], indent: int = 4) -> str:
    margin = " " * indent
    return "\n".join((f"{function}(", *(f"{margin}    {argument}," for argument in arguments), f"{margin})"))


def _signature(name: str, rows: list[Parameter], returns: str, end: str = "") -> list[str]:
    if not rows:
        return [f"def {name}() -> {returns}:{end}"]
    defaults = (f" = {row.default}" if row.default is not None else "" for row in rows)
    parameters = (
        f"    {row.name}: {row.type}{default}," for row, default in zip(rows, defaults, strict=True)
    )
    return [f"def {name}(", *parameters, f") -> {returns}:{end}"]


def _filled(text: str, indent: int, *, first: int = 0, later: int | None = None) -> list[str]:
    """Lines of a paragraph for a place that is indented by four columns."""
    return textwrap.wrap(
        text,
        WIDTH - 4,
        initial_indent=" " * first,
        subsequent_indent=" " * ((indent if first else 0) if later is None else later),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _sources(frameworks: Path) -> Iterator[tuple[str, Path, str]]:
    """The folder of each file, its path and its text."""
    for name, dialect in dialects(frameworks).items():
        yield name, frameworks / name / "verbs.py", _Writer(dialect).source()
    for name, wrappers in signatures(frameworks).items():
        header = HEADER_OF_WRAPPERS.format(title=wrappers.title)
        names = [wrapper.name for wrapper in wrappers.functions]
        functions = [_wrapper(wrappers, wrapper) for wrapper in wrappers.functions]
        text = _module(header, wrappers.imports, names, _type_variables(wrappers), functions)
        yield name, frameworks / name / "wrappers.py", text


def write(frameworks: Path, names: Collection[str] = ()) -> list[Path]:
    """Write what is missing or has changed; the files that were written.

    Another process may do the same, and none ever reads half a file.

    Args:
        frameworks: the folder of their folders.
        names: of folders; none: all.
    """
    written = []
    for name, path, text in _sources(frameworks):
        if (not names or name in names) and (not path.exists() or path.read_text() != text):
            unfinished = path.with_name(f".{path.stem}.{os.getpid()}")
            unfinished.write_text(text)
            unfinished.replace(path)
            written.append(path)
    return written


def main() -> None:
    """Write those of this checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="folders of frameworks; none: all")
    for path in write(ROOT / "frameworks", parser.parse_args().names):
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
