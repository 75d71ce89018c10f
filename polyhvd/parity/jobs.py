"""The jobs that ``polyhvd parity`` starts: one for each framework, side by side, by polyhvdrun."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from polyhvd.parity.folders import WorkFolder

__all__ = ["Job", "end_with_parent", "launcher", "python", "run_all", "seconds"]

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1
#: The launcher kills ranks that do not end; this is for the launcher itself.
_GRACE_S = 45.0
#: For its end after SIGKILL, for which it may have to wait for a file system that does not answer.
_KILLED_S = 5.0


def seconds(text: str) -> float:
    """The value of ``--timeout``, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def end_with_parent() -> Callable[[], None]:
    """A function that a child of this process calls first, to get SIGTERM when this process ends."""
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask


class Job:
    """A command whose output goes to a file.

    Args:
        name: for people.
        words: the command.
        folder: for its output; the command holds it.
    """

    def __init__(self, name: str, words: Sequence[str], folder: WorkFolder) -> None:
        self.name = name
        self.is_late = False
        self.log = folder.path / f"{name}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                list(words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent(),  # this process has one thread
                pass_fds=(folder.held_by,),
                start_new_session=True,  # Ctrl-C reaches this process, which ends the others
            )

    @property
    def status(self) -> int | None:
        """How it has ended; None: it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Have it end; :meth:`wait` for it."""
        if self.status is None:
            self._process.terminate()

    def wait(self) -> None:
        """Wait until it has ended; kill it if it does not, and leave it behind if it outlives that."""
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILLED_S)

    def tail(self, lines: int = 12) -> list[str]:
        """The last lines of its output."""
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace").splitlines()[-lines:]
        return []

    def printed(self) -> list[str]:
        """All lines of the programs, without those of the launcher."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()
            return [line for line in lines if not line.startswith("polyhvdrun: ")]
        return []

    def launcher_lines(self) -> list[str]:
        """The lines that the launcher has printed, without their prefix."""
        mark = "polyhvdrun: "
        return [line.removeprefix(mark) for line in self.tail(1000) if line.startswith(mark)]


def run_all(
    jobs: Sequence[Job],
    timeout_s: float,
    on_poll: Callable[[], None],
    excuses: Callable[[Job], bool] = lambda job: False,
) -> Job | None:
    """Wait for jobs; when one fails, or the time is over, the others end as well.

    Args:
        jobs: that run.
        timeout_s: for all of them.
        on_poll: is called at each poll while they run.
        excuses: whether the failure of a job is none.

    Returns:
        the first job that has failed, or was late; None: there is none.

    Raises:
        KeyboardInterrupt: Ctrl-C; all have ended.
    """
    deadline = time.monotonic() + timeout_s
    failed = None

    def failure() -> Job | None:
        return next((job for job in jobs if job.status not in (None, 0) and not excuses(job)), None)

    try:
        while failed is None and any(job.status is None for job in jobs):
            on_poll()
            time.sleep(_POLL_S)
            failed = failure()
            if failed is None and time.monotonic() >= deadline:
                failed = next((job for job in jobs if job.status is None), None)
                if failed is not None:
                    failed.is_late = True
    finally:
        for job in jobs:
            job.stop()
        for job in jobs:
            job.wait()
    on_poll()
    return failed or failure()


def python(module: str) -> list[str]:
    """Return a command line of Python that runs ``main(words)`` of a module of polyhvd.

    ``-m`` would import polyhvd from the current folder if there is one: in a clone, its sources without the
    compiled core. Other modules are found there, as with ``-m``.

    Args:
        module: its name.
    """
    code = (
        "import sys; path = sys.path[:]; sys.path[:] = filter(None, path); "
        f"from {module} import main; sys.path[:] = path; sys.exit(main(sys.argv[1:]))"
    )
    return [sys.executable, "-c", code]


def launcher(ranks: int, timeout_s: float) -> list[str]:
    """The beginning of polyhvdrun's command line.

    Args:
        ranks: of the first program.
        timeout_s: for ranks to start; they import frameworks and rank 0 trains by itself before they connect.
    """
    words = [*python("polyhvd.launch.cli.main"), "-np", str(ranks), "--no-tag"]
    return [*words, "--start-timeout", f"{timeout_s:g}"]
