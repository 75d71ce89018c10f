"""The actor of an executor: one rank of its job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyhvd.launch.init import leave_after, shutdown

__all__ = ["ExitedError", "PolyhvdWorker"]


class ExitedError(Exception):
    """A function has called ``sys.exit()``, with which Ray would end the actor."""


class PolyhvdWorker:
    """Runs functions as a rank. It keeps the executor's object between them."""

    def __init__(self) -> None:
        self._executable: Any = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of polyhvd's."""
        return function(*arguments)

    def construct(self, made: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> None:
        """Make the executor's object."""
        self._executable = self.run(made)

    def execute(self, function: Callable[[Any], Any]) -> Any:
        """Call a function of the user's with the executor's object."""
        return self.run((function, (self._executable,), {}))

    def run(self, call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> Any:
        """Call a function of the user's; if it fails, leave the world, so that no rank waits for this one."""
        function, args, kwargs = call
        try:
            return function(*args, **kwargs)
        except SystemExit as error:
            failure = ExitedError(f"called sys.exit({error.code!r})")
            leave_after(failure)
            raise failure from error
        except BaseException as error:
            leave_after(error)
            raise

    def leave(self) -> None:
        """Leave the world in good order."""
        shutdown()
