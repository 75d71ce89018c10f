"""Marks the lines of the product that run, for ``make coverage``.

A mark is a byte in a file that all processes share by mmap, so the marks of a rank that is killed remain.
``tools/coverage.py`` lays the file out. In a process with TEST_LINES in its environment, modules of the
product have a statement before each of theirs that sets its mark. Nothing traces; other code does not change.
Programs that polyhvd sends to other interpreters, the agents', have no marks.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import marshal
import mmap
import os
import sys
from types import CodeType, ModuleType

MARKS = "__line_marks__"  # the name of the bytes, among the builtins


def statements(tree: ast.AST) -> dict[int, list[list[ast.stmt]]]:
    """The lines of statements that can run, each with the lists that contain one of that line."""
    found: dict[int, list[list[ast.stmt]]] = {}
    for node in ast.walk(tree):
        if _is_type_checking(node):
            for child in ast.walk(node):
                child.unmarked = True  # type: ignore[attr-defined]
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if not isinstance(block, list) or hasattr(node, "unmarked"):
                continue
            for statement in block:
                if not _is_constant(statement) and not _is_future(statement):
                    lists = found.setdefault(statement.lineno, [])
                    if not any(known is block for known in lists):
                        lists.append(block)
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _is_constant(statement: ast.stmt) -> bool:
    """A docstring, or the dots of a method without a body."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def marked(source: bytes, path: str, offset: int) -> CodeType:
    """The code of a module that marks its lines from this offset on."""
    tree = ast.parse(source, path)
    blocks = {id(block): block for lists in statements(tree).values() for block in lists}
    for block in blocks.values():
        with_marks: list[ast.stmt] = []
        for statement in block:
            if not _is_constant(statement) and not _is_future(statement):
                with_marks.append(_mark(offset + statement.lineno, statement))
            with_marks.append(statement)
        block[:] = with_marks
    code: CodeType = compile(tree, path, "exec", dont_inherit=True)
    return code


def _mark(index: int, statement: ast.stmt) -> ast.stmt:
    mark = ast.parse(f"{MARKS}[{index}] = 1").body[0]
    for node in ast.walk(mark):
        ast.copy_location(node, statement)
    return mark


def install(folder: str) -> None:
    """Mark lines of the modules that the layout in this folder contains."""
    try:
        with open(os.path.join(folder, "layout")) as layout:
            rows = [line.rstrip("\n").split("\t") for line in layout]
        marks = _mapped(os.path.join(folder, "marks"))
    except OSError:  # the run has ended, or this process may not read it
        return
    offsets = {path: int(offset) for path, offset in rows}
    setattr(builtins, MARKS, marks)
    loader = importlib.machinery.SourceFileLoader
    execute = loader.exec_module

    def exec_module(self: importlib.machinery.SourceFileLoader, module: ModuleType) -> None:
        offset = offsets.get(str(self.path))
        if offset is None:
            execute(self, module)
        else:
            exec(_cached(folder, str(self.path), offset), module.__dict__)

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _mapped(path: str) -> mmap.mmap:
    """The marks. mmap keeps a descriptor, which must not be that of a standard stream that is closed."""
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] <= 2:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)
    finally:
        for descriptor in taken:
            os.close(descriptor)


def _cached(folder: str, path: str, offset: int) -> CodeType:
    cached = os.path.join(folder, f"{offset}.{sys.implementation.cache_tag}")
    try:
        with open(cached, "rb") as file:
            code: CodeType = marshal.load(file)
            return code
    except (OSError, EOFError, ValueError):
        pass
    with open(path, "rb") as file:
        code = marked(file.read(), path, offset)
    try:
        with open(f"{cached}.{os.getpid()}", "wb") as file:
            marshal.dump(code, file)
        os.replace(file.name, cached)
    except OSError:  # a full disk, another user: it is only slower
        pass
    return code
