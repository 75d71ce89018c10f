"""Prints what the ranks write: whole lines, each with its rank, never two mixed into one.

Works on bytes, since a rank may write anything. A progress bar of rank 0 moves on a terminal and
leaves its last state elsewhere. A closed pipe (``| head``) ends the printing, not the job. A full disk
does not end the job either; it is reported on standard error.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO, cast

__all__ = ["STDERR", "STDOUT", "Output", "await_reader"]

STDOUT, STDERR = 1, 2
_LINE_BYTES_MAX = 1 << 16
_TAIL_LINES = 200
#: So many ranks that have ended are remembered: what they wrote last, and their files. Children of theirs may
#: write on, and a job of months that loses one now and then is to need no more than one of hours.
_ENDED_MAX = 16
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RED = 31
_ERASE_LINE = b"\r\x1b[K"


@dataclass
class _Rank:
    prefix: str
    colour: int
    partial: dict[int, bytearray] = field(default_factory=lambda: {STDOUT: bytearray(), STDERR: bytearray()})
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    files: dict[int, BinaryIO] = field(default_factory=dict)


class Output:
    """The launcher's two output streams. Not thread-safe."""

    def __init__(
        self,
        size: int,
        *,
        tag: bool = True,
        timestamps: bool = False,
        directory: str | None = None,
        copied: Sequence[int] = (STDOUT, STDERR),
        stdout: int | TextIO = 1,
        stderr: int | TextIO = 2,
        colour: bool | None = None,
    ) -> None:
        """Print to two descriptors or text streams, and to files as well.

        Args:
            size: number of ranks.
            tag: whether lines begin with their ranks.
            timestamps: whether they begin with the time at which they came.
            directory: ``directory``/rank.N/ gets what each rank writes; None: nothing is copied.
            copied: which streams are copied there.
            stdout: what standard output is printed to, and ``stderr`` standard error.
            stderr: see ``stdout``.
            colour: whether to colour; None: find out.
        """
        given = {STDOUT: stdout, STDERR: stderr}
        self._texts = {stream: file for stream, file in given.items() if not isinstance(file, int)}
        self._streams = {stream: file for stream, file in given.items() if isinstance(file, int)}
        # Not asked again: another file may have got the number of a closed one.
        self._closed = {stream for stream, descriptor in self._streams.items() if not _is_open(descriptor)}
        self._terminal = {s: s in self._streams and os.isatty(self._streams[s]) for s in given}
        self._timestamps = timestamps
        plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        self._coloured = {
            s: colour if colour is not None else t and not plain for s, t in self._terminal.items()
        }
        self._tag = tag
        self._width = len(str(size - 1))
        self._size = 0
        self._ranks: dict[int, _Rank] = {}  # those that run, and the last that have ended
        self._ended: deque[int] = deque()
        self._folder = None if directory is None else Path(directory)
        self._copied = copied
        self._live: tuple[int, bytes] | None = None  # the unfinished line that a terminal shows
        self._copying = True  # until a file could not be written
        self._begun = False  # afterwards, a file that cannot be opened is reported
        #: Called with a descriptor that takes nothing for now; False: give its stream up.
        self.await_reader: Callable[[int], bool] = await_reader
        for _ in range(size):
            self.add_rank()
        self._begun = True

    @property
    def size(self) -> int:
        """How many ranks it expects."""
        return self._size

    def add_rank(self) -> None:
        """Expect one rank more, with the next number."""
        self._size += 1
        self._add(self._size - 1, "wb")

    def _add(self, rank: int, mode: str) -> _Rank:
        prefix = f"[{rank:>{self._width}}] " if self._tag else ""
        self._ranks[rank] = state = _Rank(prefix, _COLOURS[rank % len(_COLOURS)])
        if self._folder is not None and self._copying:
            try:
                self._open_files(state, self._folder / f"rank.{rank:0{self._width}}", mode)
            except OSError as error:
                if not self._begun:
                    raise
                self._stop_copying(str(error.filename), error)
        return state

    def _of(self, rank: int) -> _Rank:
        """The record of a rank; an empty one for a rank that was forgotten and still writes."""
        if rank not in self._ranks:
            self._add(rank, "ab")
            self._end(rank)
        return self._ranks[rank]

    def _end(self, rank: int) -> None:
        self._ended.append(rank)
        if len(self._ended) > _ENDED_MAX:
            for file in self._ranks.pop(self._ended.popleft()).files.values():
                file.close()

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Take what a rank has written; prints the lines that are complete."""
        state = self._of(rank)
        if stream in state.files and self._copying:
            self._copy(state.files[stream], data)
        buffer = state.partial[stream]
        buffer += data
        *lines, rest = buffer.split(b"\n")
        while len(rest) > _LINE_BYTES_MAX and b"\r" not in rest:
            lines.append(rest[:_LINE_BYTES_MAX])
            rest = rest[_LINE_BYTES_MAX:]
        state.partial[stream] = _last_state(rest)
        self._print(rank, stream, [bytes(line) for line in lines])

    def finish(self, rank: int) -> None:
        """The rank has ended: print what has no end of line, too."""
        state = self._of(rank)
        for stream, rest in state.partial.items():
            if rest:
                state.partial[stream] = bytearray()
                self._print(rank, stream, [bytes(rest)])

    def retire(self, rank: int) -> None:
        """The rank has ended, and another number will be in its place: remember it for a while."""
        if rank in self._ranks and rank not in self._ended:
            self._end(rank)

    def tail(self, rank: int) -> list[bytes]:
        """The last lines that the rank wrote to its standard error."""
        return list(self._of(rank).tail)

    def forget(self) -> None:
        """The job starts again: what ranks have written until now explains nothing that follows."""
        for state in self._ranks.values():
            state.tail.clear()

    def report(self, text: str, *, alarm: bool = False) -> None:
        """Print a message of the launcher itself to standard error."""
        line = f"polyhvdrun: {text}"
        if alarm:
            line = self._paint(STDERR, line, _RED)
        self._emit(STDERR, line.encode("utf-8", "surrogateescape") + b"\n")

    def quote(self, rank: int, lines: list[bytes]) -> None:
        """Print lines of a rank on standard error once more."""
        self._emit(STDERR, b"".join(self._line(rank, STDERR, line) for line in lines))

    def close(self) -> None:
        """Close the files, and leave a terminal with a clean line."""
        self._hide_live()
        self._live = None
        for state in self._ranks.values():
            for file in state.files.values():
                file.close()

    def _copy(self, file: BinaryIO, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[file.write(view) :]
        except OSError as error:
            self._stop_copying(file.name, error)

    def _stop_copying(self, name: str, error: OSError) -> None:
        self._copying = False
        self.report(f"cannot write {name}: {error.strerror}; the job continues, its output is only printed")

    def _open_files(self, state: _Rank, folder: Path, mode: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for stream in self._copied:
            name = "stdout" if stream == STDOUT else "stderr"
            file = open(folder / name, mode, buffering=0)  # noqa: SIM115 - see close
            state.files[stream] = cast(BinaryIO, file)

    def _print(self, rank: int, stream: int, lines: list[bytes]) -> None:
        shown = [_shown(line) for line in lines]
        if stream == STDERR:
            self._of(rank).tail.extend(shown)
        if shown:
            self._emit(stream, b"".join(self._line(rank, stream, line) for line in shown))
        if rank == 0 and self._terminal[stream]:
            self._show_live(stream)

    def _line(self, rank: int, stream: int, text: bytes) -> bytes:
        state = self._of(rank)
        prefix = self._paint(stream, state.prefix, state.colour) if state.prefix else ""
        if self._timestamps:
            prefix = f"{_now()} {prefix}"
        return prefix.encode() + text + b"\n"

    def _paint(self, stream: int, text: str, colour: int) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._coloured[stream] else text

    # The line that is not finished

    def _show_live(self, stream: int) -> None:
        text = _shown(bytes(self._of(0).partial[stream]))
        if not text:
            if self._live is not None and self._live[0] == stream:
                self._hide_live()
                self._live = None
            return
        if b"\x1b" not in text:
            import shutil  # late, as few jobs need it

            columns = shutil.get_terminal_size().columns - len(self._of(0).prefix) - 1
            text = text.decode("utf-8", "replace")[: max(columns, 8)].encode()
        self._live = (stream, self._line(0, stream, text).removesuffix(b"\n"))
        self._write(stream, _ERASE_LINE + self._live[1])

    def _hide_live(self) -> None:
        if self._live is not None:
            self._write(self._live[0], _ERASE_LINE)

    def _emit(self, stream: int, data: bytes) -> None:
        if self._live is None or not self._terminal[stream]:
            self._write(stream, data)
            return
        self._hide_live()
        self._write(stream, data)
        self._write(*self._live)

    def _write(self, stream: int, data: bytes) -> None:
        if stream in self._texts:
            self._write_text(stream, data.decode("utf-8", "replace"))
            return
        view = memoryview(data)
        descriptor = self._streams[stream]
        while view and stream not in self._closed:
            try:
                # A pipe that is ready takes this much without blocking, see pipe(7).
                if _ready(descriptor, 0):
                    view = view[os.write(descriptor, view[: select.PIPE_BUF]) :]
                elif not self.await_reader(descriptor):
                    self._closed.add(stream)
            except BlockingIOError:
                pass
            except OSError as error:
                self._closed.add(stream)
                if stream == STDOUT and error.errno != errno.EPIPE:  # else there is no reader any more
                    self.report(
                        f"cannot write standard output: {error.strerror}; the job continues without it"
                    )

    def _write_text(self, stream: int, text: str) -> None:
        if stream in self._closed:
            return
        file = self._texts[stream]
        try:
            try:
                file.write(text)
            except UnicodeEncodeError as error:
                file.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            file.flush()
        except (OSError, ValueError):  # ValueError: it was closed
            self._closed.add(stream)


def _now() -> str:
    """The time as of ISO 8601, with milliseconds and the difference to UTC."""
    moment = time.time()
    milliseconds = int(moment * 1000) % 1000
    return time.strftime(f"%Y-%m-%dT%H:%M:%S.{milliseconds:03d}%z", time.localtime(moment))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _ready(descriptor: int, timeout_ms: int | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(timeout_ms))


def await_reader(descriptor: int) -> bool:
    """Wait until a descriptor can be written, however long that takes."""
    return _ready(descriptor, None)


def _shown(line: bytes) -> bytes:
    """The text that a terminal would show for a line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _last_state(rest: bytearray) -> bytearray:
    """An unfinished line without the states of a progress bar that were overwritten."""
    text = rest.rstrip(b"\r")
    return rest[text.rfind(b"\r") + 1 :]
