"""Shows the progress of a training: a bar on a terminal if a library for bars is installed, else lines."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from polyhvd.runtime import current

__all__ = ["Progress"]

_REDRAW_S = 0.1
#: Waiting for data is mentioned if it takes at least this part of the time.
_MENTIONED = 0.01


class _Bar(Protocol):
    def update(self, done: int, note: str) -> None: ...

    def close(self) -> None: ...


class _RichBar:
    def __init__(self, title: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        note = TextColumn("{task.fields[note]}")
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            note,
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(title, total=total, note="")
        self._progress.start()

    def update(self, done: int, note: str) -> None:
        self._progress.update(self._task, completed=done, note=note)

    def close(self) -> None:
        self._progress.stop()


class _TqdmBar:
    def __init__(self, title: str, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(desc=title, total=total, leave=False)

    def update(self, done: int, note: str) -> None:
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def _bar(title: str, total: int) -> _Bar | None:
    """A bar, if there is a terminal and one of the libraries."""
    if not sys.stderr.isatty():
        return None
    for kind in (_RichBar, _TqdmBar):
        try:
            return kind(title, total)
        except Exception:  # not installed, or too old a version: it is for show
            continue
    return None


class Progress:
    """The display of a training on rank 0. It never fails, and seldom reads what a step has returned.

    Args:
        epochs: how many there are.
        enabled: whether to show anything.
    """

    def __init__(self, epochs: int, *, enabled: bool) -> None:
        self._epochs = epochs
        self._enabled = enabled
        self._shows = False
        self._bar: _Bar | None = None
        self._result: Any = None

    def begin_epoch(self, epoch: int, steps: int) -> None:
        """An epoch begins, or goes on after a change of the world, with so many steps to go."""
        self.close()
        world = current.world()
        self._shows = self._enabled and world.placement.rank == 0
        self._data_s = world.data_wait_s
        self._title = f"epoch {epoch + 1}/{self._epochs}"
        self._done, self._result = 0, None
        self._began = self._drawn = time.monotonic()
        if self._shows:
            self._bar = _bar(self._title, steps)

    def step(self, result: Any) -> None:
        """A step is done."""
        self._done += 1
        self._result = result
        now = time.monotonic()
        if self._bar is not None and now - self._drawn > _REDRAW_S:
            self._drawn = now
            self._bar.update(self._done, " ".join(filter(None, [_note(result), self._data_note(now)])))

    def end_epoch(self, size: int) -> None:
        """The epoch is over."""
        if not self._shows:
            return
        self.close()
        parts = [
            f"{self._done} step{'s' * (self._done != 1)}",
            f"{time.monotonic() - self._began:.1f} s",
            f"{size} rank{'s' * (size > 1)}",
        ]
        parts += filter(None, [self._data_note(time.monotonic()), _note(self._result)])
        print(f"{self._title}: {', '.join(parts)}", file=sys.stderr, flush=True)

    def _data_note(self, now: float) -> str:
        """How much of the epoch's time this rank has waited for data."""
        part = (current.world().data_wait_s - self._data_s) / max(1e-9, now - self._began)
        return f"waiting for data {part:.0%}" if part >= _MENTIONED else ""

    def close(self) -> None:
        """Remove the bar; idempotent."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()


def _note(result: Any) -> str:
    """The result of a step as text."""
    named = result if isinstance(result, dict) else {"loss": result}
    parts = []
    for name, value in named.items():
        try:
            parts.append(f"{name} {float(value):.4g}")
        except (TypeError, ValueError):
            continue
    return " ".join(parts)
