"""A thread that does for the engine what needs Python: the engine's own threads never call it."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable

from polyhvd import _core
from polyhvd.runtime.stacks import stacks

__all__ = ["MailboxThread"]

_LOG = logging.getLogger("polyhvd")
_SIGNAL = signal.SIGRTMAX - 3
#: Held by the one mailbox of the process that has the signal: a handler of it writes to one file.
_signal_is_taken = threading.Lock()


class MailboxThread:
    """Serves a mailbox, sleeping outside of the interpreter, until ``close()``."""

    def __init__(self) -> None:
        #: Takes samples of the speed, where they are taken.
        self.on_sample: Callable[[_core.StepSample], None] | None = None
        # For stacks while C code holds the interpreter's lock; not if the program uses the signal.
        self._dumps = -1
        if signal.getsignal(_SIGNAL) == signal.SIG_DFL and _signal_is_taken.acquire(blocking=False):
            with contextlib.suppress(OSError, AttributeError):  # forbidden, or not there
                self._dumps = os.memfd_create("polyhvd-stacks")
            if self._dumps < 0:
                _signal_is_taken.release()
        if self._dumps >= 0:
            faulthandler.register(_SIGNAL, file=self._dumps)
        self.mailbox = _core.Mailbox(0 if self._dumps < 0 else int(_SIGNAL), self._dumps)
        # A daemon, since others are joined before the functions of atexit, and so before shutdown().
        self._thread = threading.Thread(target=self._run, name="polyhvd mailbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread when it has done what is left; the engine has ended."""
        self.mailbox.close()
        self._thread.join()
        if self._dumps >= 0:
            faulthandler.unregister(_SIGNAL)
            os.close(self._dumps)
            self._dumps = -1
            _signal_is_taken.release()

    def _run(self) -> None:
        while self.mailbox.wait():
            while (line := self.mailbox.take_line()) is not None:
                text, is_debug = line
                _LOG.log(logging.DEBUG if is_debug else logging.WARNING, "%s", text)
            if self.mailbox.take_question():
                self.mailbox.answer(_stacks())
            if (sample := self.mailbox.take_sample()) is not None and self.on_sample is not None:
                self._hand_over(sample)

    def _hand_over(self, sample: _core.StepSample) -> None:
        try:
            assert self.on_sample is not None
            self.on_sample(sample)
        except Exception:  # a job does not fail for want of tuning
            _LOG.exception("autotune: stopped by an error")
            self.on_sample = None


def _stacks() -> str:
    try:
        text = stacks(without=[threading.get_ident()])
        return text.encode("utf-8", "backslashreplace").decode()  # of files with names in other encodings
    except Exception as error:  # a stall report is not a reason to fail
        return f"but its stacks cannot be read: {error!r}"


def _forget_in_child() -> None:
    global _signal_is_taken
    _signal_is_taken = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
