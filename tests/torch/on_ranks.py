"""Names functions of a module that imports torch, in a process that does not."""

from __future__ import annotations

from typing import Any


class Functions:
    """``Functions("module").name`` can be given to ``Pool.run``."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        def stand_in() -> None: ...

        stand_in.__module__ = self._module
        stand_in.__qualname__ = name
        return stand_in
