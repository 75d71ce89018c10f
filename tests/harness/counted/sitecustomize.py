"""Counts the Python processes that tests start, and the frameworks that these import.

``tests/harness/meter.py`` puts this folder on PYTHONPATH and names a file in TEST_COSTS. Each process appends
letters to it: "p" when it starts, "f" when it is forked, and one of FRAMEWORKS for each import.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

#: Letters of the frameworks that take long to import.
FRAMEWORKS = {"tensorflow": "t", "mxnet": "m", "torch": "o", "jax": "j", "numpy": "n"}


def _count(letter: str) -> None:
    path = os.environ.get("TEST_COSTS")
    if path:
        try:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError:  # the tests have ended, or this process may not write there
            return
        os.write(file, letter.encode())
        os.close(file)


class _Counted:
    """A finder that counts when one of the frameworks is executed, not when it is only looked for."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in FRAMEWORKS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module

            def execute_counted(module: ModuleType) -> None:
                _count(FRAMEWORKS[name])
                execute(module)

            spec.loader.exec_module = execute_counted  # type: ignore[method-assign]
        return spec


if "TEST_COSTS" in os.environ:
    sys.meta_path.insert(0, _Counted)  # type: ignore[arg-type]
    os.register_at_fork(after_in_child=lambda: _count("f"))
    _count("p")
if "TEST_LINES" in os.environ:
    import line_marks

    line_marks.install(os.environ["TEST_LINES"])
