"""The documents say what the code does, as far as a program can tell."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import polyhvd
from polyhvd import cli

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "examples" / "README.md"])
#: A path in backticks, or the target of a link within the repository.
PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)+/?)`|\]\(((?!https?:)[\w./-]+)\)")
#: "`OpQueue::submit` (`polyhvd/csrc/engine/op_queue.cc`)": a name, and the file that it stands in.
PLACE = re.compile(r"`([\w.:]+)`\s+\(`([\w./-]+\.\w+)`\)")


def found(pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    for document in DOCUMENTS:
        for match in pattern.finditer(document.read_text()):
            yield document, match


def test_configuration_is_the_table_of_config() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "polyhvd.config"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert (ROOT / "docs" / "configuration.md").read_text() == printed


def test_page_of_commands_has_their_options() -> None:
    printed = subprocess.run(
        [sys.executable, "tools/commands.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert (ROOT / "docs" / "commands.md").read_text() == printed


def test_files_that_documents_name_exist() -> None:
    missing = []
    for document, match in found(PATH):
        path = ROOT / match[1] if match[1] else document.parent / match[2]
        if not path.exists():
            missing.append(f"{document.name}: {match[0]}")
    assert not missing


def test_functions_that_documents_name_stand_in_the_file_beside_them() -> None:
    missing = []
    for document, match in found(PLACE):
        path = ROOT / match[2]
        name = re.split(r"::|\.", match[1])[-1]
        if not path.is_file() or not re.search(rf"\b{name}\b", path.read_text()):
            missing.append(f"{document.name}: {match[1]} in {match[2]}")
    assert not missing
    assert len(list(found(PLACE))) > 20


#: A block of Python on a page, and its indentation.
PROGRAM = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
#: A line of tests/surface/*.txt: a module, or one of its names.
RECORDED = re.compile(r"^(?:\[(?P<module>[\w.]+)\]|(?:class )?(?P<name>\w+).*)$", re.MULTILINE)


@functools.cache
def recorded() -> dict[str, set[str]]:
    """Return the public names of each module in tests/surface/."""
    names: dict[str, set[str]] = {}
    for path in (ROOT / "tests" / "surface").glob("*.txt"):
        module = ""
        for match in RECORDED.finditer(path.read_text()):
            module = match["module"] or module
            names.setdefault(module, set()).update(filter(None, [match["name"]]))
    return names


@functools.cache
def names_of(module: str) -> set[str] | None:
    """Return the recorded names of a module, or else those of ``__all__`` in its source, if it has one."""
    if module in recorded():
        return recorded()[module]
    places = [ROOT / folder / Path(*module.split(".")[1:]) for folder in ("polyhvd", "frameworks")]
    for path in [*(place / "__init__.py" for place in places), *(Path(f"{place}.py") for place in places)]:
        for node in ast.parse(path.read_text()).body if path.is_file() else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return set(ast.literal_eval(node.value))
    return None


def is_public(path: str) -> bool:
    """Return whether a name such as ``polyhvd.torch.allreduce`` is public, but do not check methods."""
    parent, _, name = path.rpartition(".")
    if not parent:
        return path == "polyhvd"
    names = names_of(parent)
    if names is None:
        return is_public(parent)
    has_submodules = parent == "polyhvd" or parent not in recorded()
    return name in names or (has_submodules and names_of(path) is not None)


def imports(program: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the variables that imports of polyhvd set, and the paths of their values."""
    for node in ast.walk(program):
        if isinstance(node, ast.Import):
            for item in node.names:
                yield item.asname or item.name, item.name
        elif isinstance(node, ast.ImportFrom):
            for item in node.names:
                yield item.asname or item.name, f"{node.module}.{item.name}"


def unknown_names(program: ast.Module) -> list[str]:
    """Return the names of polyhvd in a program that are not public.

    A part of a program may use ``hvd`` without importing it: a framework must have its names.
    """
    imported = [(name, path) for name, path in imports(program) if path.split(".")[0] == "polyhvd"]
    unknown = [path for _, path in imported if names_of(path) is None and not is_public(path)]
    values = {"polyhvd": ["polyhvd"]}
    for name, path in imported:
        values.setdefault(name, []).append(path)
    values.setdefault("hvd", [f"polyhvd.{path.stem}" for path in (ROOT / "tests" / "surface").glob("*.txt")])
    for node in ast.walk(program):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"\w+(?:\.\w+)+", used := ast.unparse(node)):
            name, _, member = used.partition(".")
            if name in values and not any(is_public(f"{value}.{member}") for value in values[name]):
                unknown.append(used)
    return unknown


def test_programs_of_documents_compile_and_use_public_names() -> None:
    wrong = []
    count = 0
    for document, match in found(PROGRAM):
        text = "".join(line.removeprefix(match[1]) for line in match[2].splitlines(keepends=True))
        count += 1
        try:
            compile(text, document.name, "exec", dont_inherit=True)
        except SyntaxError as error:
            wrong.append(f"{document.name}: {error}:\n{text}")
        else:
            wrong += [f"{document.name}: {name}" for name in unknown_names(ast.parse(text))]
    assert not wrong
    assert count > 80


@pytest.mark.parametrize(
    ("program", "unknown"),
    [
        ("import polyhvd.torch as hvd\nhvd.alreduce(x)", ["hvd.alreduce"]),
        ("import polyhvd.torch as hvd\nhvd.elastic.GluonState()", ["hvd.elastic.GluonState"]),
        ("import polyhvd.numpy as hvd\nhvd.DistributedOptimizer(x)", ["hvd.DistributedOptimizer"]),
        ("import polyhvd.torch as hvd\nhvd.Compression.fp16.compress(x)\nhvd.elastic.TorchState()", []),
        ("from polyhvd.ray import RayExecuter, RayExecutor", ["polyhvd.ray.RayExecuter"]),
        ("import polyhvd.spark.torchs", ["polyhvd.spark.torchs"]),
        ("polyhvd.spark.run_elastc(train)", ["polyhvd.spark.run_elastc"]),
        ("hvd.brodcast_parameters(model)\nhvd.DistributedTrainer(model)", ["hvd.brodcast_parameters"]),
        ("from polyhvd.spark.torch import TorchEstimator\nTorchEstimator(x).fit(y)", []),
    ],
)
def test_names_that_are_not_public_are_found(program: str, unknown: list[str]) -> None:
    assert unknown_names(ast.parse(program)) == unknown


def test_every_atomic_of_the_core_and_the_backends_has_its_reason() -> None:
    page = (ROOT / "docs" / "internals" / "memory-order.md").read_text()
    declared = re.compile(r"(?:std::atomic<.*>|\bCounter\*?|^ *Word) (\w+)(?:\{| = nullptr;|;)", re.MULTILINE)
    missing = []
    count = 0
    for folder in ("polyhvd/csrc", "backends"):
        for source in sorted([*(ROOT / folder).rglob("*.h"), *(ROOT / folder).rglob("*.cc")]):
            if "atomic" not in (text := source.read_text()):
                continue
            for name in declared.findall(text):
                count += 1
                if f"`{name}`" not in page:
                    missing.append(f"{source.relative_to(ROOT)}: {name}")
    assert not missing, "add a row with the order and its reason"
    assert count > 60


#: A page in a text that users read: "see: polyhvd docs elastic".
TOPIC = re.compile(r"polyhvd docs ([a-z][\w-]*)")


def texts(path: Path) -> Iterator[str]:
    """Yield the string literals of a module: messages, and docstrings, which ``help()`` prints."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_and_docstrings_name_pages_by_the_command_that_prints_them() -> None:
    missing = []
    topics = {path.stem for pattern in ("*.md", "guides/*.md") for path in (ROOT / "docs").glob(pattern)}
    sources = [path for folder in ("polyhvd", "frameworks") for path in (ROOT / folder).rglob("*.py")]
    for path in sources:
        for text in texts(path):
            if re.search(r"(?<!> )docs/[\w/-]+\.md", text):
                missing.append(f"{path.name}: a user has no file of this name: {text}")
            for topic in TOPIC.findall(text):
                if topic not in topics:
                    missing.append(f"{path.name}: no page: {text}")
    assert not missing


def test_every_page_is_printed_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docs"]) == 0
    topics = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("guides/*.md")]
    assert sorted([*topics, "index"]) == sorted(path.stem for path in pages)
    assert cli.main(["docs", "checkpoint"]) == 0
    assert capsys.readouterr().out.startswith("# Checkpoint and resume\n")
    assert cli.main(["docs", "elastic"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == (ROOT / "docs" / "elastic.md").read_text().rstrip("\n")
    assert cli.main(["docs", "elastc"]) == 1
    assert capsys.readouterr().err == "polyhvd: docs: no topic 'elastc'; did you mean elastic?\n"


def test_every_example_is_in_the_list_of_examples_with_its_command() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"({path.name})" in listed
    for command in re.findall(r"`((?:polyhvdrun|python) [^`]*)`", listed):
        programs = [ROOT / name for name in re.findall(r"\S+\.py", command)]
        described = [ast.get_docstring(ast.parse(path.read_text())) or "" for path in programs]
        assert any(command in text for text in described), f"no example describes {command}"


def test_the_citation_has_the_version() -> None:
    assert f"\nversion: {polyhvd.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_changelog_of_a_first_version_has_one_line_for_each_feature() -> None:
    after = (ROOT / "CHANGELOG.md").read_text().partition("\n## [Unreleased]\n")[2]
    first, _, section = re.split(r"^## ", after, maxsplit=1, flags=re.MULTILINE)[0].strip().partition("\n")
    if not re.fullmatch(r"This will be .*, the first version\.", first):
        return  # a later version also lists what it changes and fixes
    lines = [line for line in section.splitlines() if line]
    assert [line for line in lines if line.startswith("### ")] == ["### Added"]
    assert [line for line in lines if not re.match("### |#### |- ", line)] == []
    assert [line for line in lines if len(line) > 120] == []


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "polyhvd", "--version"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed == f"polyhvd {polyhvd.__version__}\n"


MOVED = """
import horovod
import horovod.torch as hvd
import os, horovod.keras
    from horovod.torch import DistributedOptimizer
from horovod import run
import horovod.tensorflow.keras as hvd
horovod.run(main, np=2)
step(horovod.torch.rank())
torch = importlib.import_module("horovod.torch")
"""
KEPT = """
import horovod_helpers
from mine.horovod import train
strategy = "horovod"
rate = args.horovod.rate
use_horovod.start()
see = "https://horovod.readthedocs.io"
"""


def test_command_of_the_migration_page_changes_horovods_names_alone(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "migrating-from-horovod.md").read_text()
    (command,) = re.findall(r"^sed .*$", page, re.MULTILINE)
    (tmp_path / "train.py").write_text(MOVED + KEPT)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "train.py").read_text() == MOVED.replace("horovod", "polyhvd") + KEPT
