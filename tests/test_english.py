"""Habits that make polyhvd's English hard to read, each with what to write instead.

Reads documents, and the comments, docstrings and messages of sources; not the tests.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: Nouns after which a relative pronoun or a verb of people is wrong.
_PART = r"(?:rank|process|launcher|polyhvdrun|worker|host|agent|driver|thread|member|task|actor)(?:e?s)?"
#: Words after which "alone" means "by itself".
_BY_ITSELF = r"(?<!train )(?<!trains )(?<!trained )(?<!runs )(?<!run )(?<!is )(?<!be )"
#: Pattern, in any case, and what to write.
HABITS = {
    r"\b(?:told|tells?|telling)\b(?!(?: \S+){0,4} apart)": "send, report, notify, set",
    r"\b(?:hears?|heard)\b": "receive, notice",
    rf"\bsaid\b|\b{_PART} says?\b": "report, print, state",
    r", say[,.;)]|: say\b": "for example; pass",
    rf"\b{_BY_ITSELF}alone\b(?! \|)": "only",
    r"\balike\b": "the same, equally, both",
    r"\banew\b": "again, new",
    r"\b\w+ of (?:its|their) own\b(?! (?!and|to|that|in|on|at|with|for)\w)": "its own X, a separate X",
    r"\b(?:nobody|somebody|himself|herself)\b": "no rank, a process, the part by its name",
    r"\b(?:newcomers?|signs? of life)\b": "new rank, heartbeat",
    r"\bdeals? (?!with)|\bdealt\b": "assign, split",
    rf"\b{_PART} (?:whom?|wants?)\b": "that, which; request",
    r"(?<!\bthere )\b(?:is|are) no (?!longer|more|such|different|way)[a-z]+": "is not a, are not",
}
_PREPOSITIONS = "Of|As|Where|When|For|With"
#: At the start of docstrings of functions and classes.
OPENING = re.compile(rf"(?:Whether|Those|Who|Whose|What|{_PREPOSITIONS})\b")
#: At the start of docstrings of properties.
OPENING_OF_PROPERTY = re.compile(rf"(?:{_PREPOSITIONS})\b")
REWRITE_OF_OPENING = "Return whether ..., Return the ...; for a class or property: The ..."


class Text(NamedTuple):
    path: Path
    line: int
    text: str
    #: Words with which it may not begin.
    opening: re.Pattern[str] | None = None


def files(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = [ROOT / name for name in listed.split("\0") if name and not name.startswith("tests/")]
    return sorted(path for path in found if path.is_file())


def _blank(match: re.Match[str]) -> str:
    """Replace a match by as many lines."""
    return "``" + "\n" * match[0].count("\n")


def of_markdown(path: Path) -> Iterator[Text]:
    """Yield the lines without code and without addresses."""
    text = re.sub(r"^( *)```.*?^ *```", _blank, path.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>", _blank, text)
    for number, line in enumerate(text.splitlines(), 1):
        yield Text(path, number, line)


def of_python(path: Path) -> Iterator[Text]:
    """Yield comments, docstrings, and string literals with a space: messages and help texts."""
    source = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(path, token.start[0], token.string.lstrip("#: "))
    openings = {}
    for node in ast.walk(tree := ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        if isinstance(node.body[0], ast.Expr):
            openings[node.body[0].value] = OPENING_OF_PROPERTY if is_property else OPENING
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Text(path, node.lineno, re.sub(r"``[^`]*``", "``", node.value), openings.get(node))


def of_cpp(path: Path) -> Iterator[Text]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for match in re.finditer(r'//+(?P<comment>.*)|"(?P<string>(?:\\.|[^"\\])*)"', line):
            yield Text(path, number, re.sub(r"`[^`]*`", "``", match["comment"] or match["string"] or ""))


def habits_in(text: Text) -> Iterator[str]:
    found = [
        (match, rewrite)
        for habit, rewrite in HABITS.items()
        for match in re.finditer(habit, text.text, re.IGNORECASE)
    ]
    if text.opening is not None and (opening := text.opening.match(text.text)):
        found.append((opening, REWRITE_OF_OPENING))
    for match, rewrite in found:
        line = text.line + text.text.count("\n", 0, match.start())
        around = " ".join(text.text[max(0, match.start() - 40) : match.end() + 40].split())
        yield f"{text.path.relative_to(ROOT)}:{line}: {match[0]!r} in {around!r}; write: {rewrite}"


def test_the_habits_are_found() -> None:
    for sentence in (
        "Each rank is told its place.",
        "polyhvdrun says why.",
        "It goes to rank 0 alone.",
        "The process who has it waits.",
        "It runs on a thread of its own.",
        "The disk is full, say.",
        "all decide alike",
        "b is no number",
    ):
        assert list(habits_in(Text(ROOT / "x.md", 1, sentence))), sentence
    for sentence in (
        "The page says so.",
        "A rank must not train alone.",
        "It reads the first byte of its own tensors.",
        "Users who have no GPU can tell them apart.",
        "There is no limit.",
    ):
        assert not list(habits_in(Text(ROOT / "x.md", 1, sentence))), sentence


DOCSTRINGS = '''
class Moments:
    """Of the joined batch."""

    @property
    def failed(self):
        """Whether the job has failed."""

    @cached_property
    def heading(self):
        """Of its section."""

    def rate(self):
        """As in the last step."""

def pending():
    """Whether there are any."""

def waiting():
    """Return whether ranks wait. Where they do, they are listed."""
'''


def test_docstrings_begin_with_a_verb_or_a_noun(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(DOCSTRINGS)
    found = [line for text in of_python(path) for line in habits_in(text._replace(path=ROOT / "module.py"))]
    assert {line.split(":")[1] for line in found} == {"3", "11", "14", "17"}


@pytest.mark.parametrize(
    ("read", "patterns"),
    [
        (of_markdown, ["*.md"]),
        (of_python, ["*.py"]),
        (of_cpp, ["*.cc", "*.h"]),
    ],
    ids=["documents", "python", "cpp"],
)
def test_texts_have_none_of_the_habits(read: Callable[[Path], Iterator[Text]], patterns: list[str]) -> None:
    found = [line for path in files(*patterns) for text in read(path) for line in habits_in(text)]
    assert not found, "reword these (STYLE.md, Prose):\n" + "\n".join(found)


def test_functions_that_return_whether_return_a_bool() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in files("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.returns is not None
        if (ast.get_docstring(node) or "").startswith("Return whether")
        if not {"bool", "Tensor"} & set(re.findall(r"\w+", ast.unparse(node.returns)))
    ]
    assert not found
