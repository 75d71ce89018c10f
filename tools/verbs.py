"""Makes frameworks/NAME/verbs.py from the table in polyhvd/collectives/table and frameworks/NAME/dialect.py.

``python tools/verbs.py`` writes all of them, ``python tools/verbs.py torch`` one. A framework is whatever
folder has a dialect.py, which is read without importing the framework.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from polyhvd.collectives.table import (  # noqa: E402
    FAMILIES,
    PARAMETERS,
    RAISES,
    VERBS,
    Dialect,
    Parameter,
    Verb,
)

__all__ = ["dialects", "source"]

WIDTH = 110
HEADER = '''"""The collectives for {title}, with Horovod's signatures.

Made by ``make verbs`` from polyhvd/collectives/table and from dialect.py: change these instead. What the
functions do is in polyhvd/collectives/functions.py, and in functions.py for what is peculiar to {title}.
"""

from __future__ import annotations
'''


def dialects() -> dict[str, Dialect]:
    """Those of all frameworks, by the name of the folder."""
    found = {}
    for path in sorted((ROOT / "frameworks").glob("*/dialect.py")):
        spec = importlib.util.spec_from_file_location(f"dialect_{path.parent.name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found[path.parent.name] = module.DIALECT
    return found


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
        functions = "\n\n".join(self._function(verb) for verb in self._verbs)
        header = HEADER.format(title=self._dialect.title)
        names = "".join(f'    "{name}",\n' for name in sorted(verb.name for verb in self._verbs))
        variables = '\nR = TypeVar("R")\n' if any(v.returns == "R" for v in self._verbs) else ""
        return f"{header}\n{self._imports(functions)}\n__all__ = [\n{names}]\n{variables}\n\n{functions}"

    def _imports(self, functions: str) -> str:
        """The framework's own, and those of the common ones that the functions need."""
        standard = []
        abc = [name for name in ("Iterable", "Sequence") if f"{name}[" in functions]
        if abc:
            standard.append(f"from collections.abc import {', '.join(abc)}")
        typing = [name for name in ("TypeVar", "overload") if name != "overload" or "@overload" in functions]
        standard.append(f"from typing import {', '.join(typing)}")
        ours = ["from polyhvd.collectives.adapter import Handle" + ", ReduceOp" * ("ReduceOp." in functions)]
        if "| Number" in functions:
            ours.append("from polyhvd.collectives.operation import Number")
        ours.append("from polyhvd.collectives.process_sets import ProcessSet, global_process_set")
        if "Compressor" in functions:
            ours.append("from polyhvd.training.compression import Compressor, KeyedCompressor")
        return "\n".join((*standard, "", *self._dialect.imports, "", *ours, ""))

    def _text(self, template: str, **more: str) -> str:
        return template.format_map({**self._words, **more})

    def _parameters(self, verb: Verb) -> list[Parameter]:
        """Those of a verb, in this framework's order."""
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
        lines += [f"    {line}".rstrip() for line in self._documentation(verb, rows)]
        return "\n".join((*lines, *self._body(verb, rows), ""))

    def _documentation(self, verb: Verb, rows: list[Parameter]) -> Iterator[str]:
        dialect, family = self._dialect, FAMILIES[verb.family]
        yield from _filled(f'"""{self._text(verb.summary)}', 4)
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
        for paragraph in filter(None, paragraphs):
            yield ""
            yield from _filled(self._text(paragraph), 4)
        if rows:
            yield from ("", "Args:")
            for row in rows:
                yield from _filled(f"{row.name}: {row.text}", 8, first=4)
        if verb.result:
            yield from ("", "Returns:")
            yield from _filled(self._text(verb.result), 8, first=4, later=4)
        raises = family.raises if verb.raises is None else verb.raises
        if raises:
            yield from ("", "Raises:")
            for name in raises:
                shown, text = dialect.raises.get(name, (name, RAISES[name]))
                yield from _filled(f"{shown}: {self._text(text)}", 8, first=4)
        yield from ("", "Example::", "")
        yield f"    {dialect.example_import}"
        yield f"    import {dialect.module} as hvd"
        yield "    hvd.init()"
        yield from (f"    {line}" for line in self._text(verb.example).split("\n"))
        yield '"""'

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
        if len(line) <= WIDTH:
            return [line]
        return [f"    return {call}(", *(f"        {argument}," for argument in arguments), "    )"]


#: Of these an argument by name would be felt.
BY_POSITION = frozenset({"allreduce", "allreduce_", "allreduce_async", "allreduce_async_"})


def _single(verb: Verb) -> str:
    return verb.name.removeprefix("grouped_")


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


def source(dialect: Dialect) -> str:
    """The text of a framework's verbs.py."""
    return _Writer(dialect).source()


def main() -> None:
    """Write what has changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="folders of frameworks; none: all that have a dialect.py")
    names = parser.parse_args().names
    for name, dialect in dialects().items():
        path = ROOT / "frameworks" / name / "verbs.py"
        text = source(dialect)
        if (not names or name in names) and (not path.exists() or path.read_text() != text):
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
