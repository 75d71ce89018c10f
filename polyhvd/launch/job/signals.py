"""Signals to the launcher, as numbers in a pipe that its loop reads."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from polyhvd.launch.job import agent

__all__ = ["passing_signals_to", "stop_like_others"]


@contextlib.contextmanager
def passing_signals_to(alarm: int) -> Iterator[None]:
    """Have the number of each signal written to a descriptor, each time that it comes.

    In another thread than the main one nothing changes: the program around us handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former_alarm = signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
    former = {}
    for number in (*agent.STOP_SIGNALS, *agent.USER_SIGNALS, signal.SIGTSTP):
        handler = signal.getsignal(number)
        # What nohup has the launcher ignore stays ignored; signals for users' own ends may be in use, also by
        # a handler that Python does not know, such as faulthandler's.
        is_free = handler == signal.SIG_DFL and not agent.has_handler(os.getpid(), number)
        if (number in agent.STOP_SIGNALS and handler != signal.SIG_IGN) or is_free:
            former[number] = signal.signal(number, agent.leave_to_the_loop)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(former_alarm)


def stop_like_others() -> None:
    """Stop as other programs do on Ctrl-Z; returns when this process is continued."""
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)
