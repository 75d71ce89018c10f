"""What the launcher prints, on a pipe and on a terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from polyhvd.launch.job.output import STDERR, STDOUT, Output


@dataclass
class Sink:
    """The reading ends of an Output's two streams."""

    out: int
    err: int

    def read(self, descriptor: int) -> bytes:
        os.set_blocking(descriptor, False)
        data = b""
        try:
            while part := os.read(descriptor, 65536):
                data += part
        except BlockingIOError:
            pass
        return data

    def printed(self) -> bytes:
        return self.read(self.out)

    def complained(self) -> bytes:
        return self.read(self.err)


@pytest.fixture
def pipes() -> Iterator[tuple[Sink, int, int]]:
    (out, stdout), (err, stderr) = os.pipe(), os.pipe()
    fcntl.fcntl(stdout, fcntl.F_SETPIPE_SZ, 1 << 20)  # printing blocks when it is full
    yield Sink(out, err), stdout, stderr
    for descriptor in (out, err, stdout, stderr):
        os.close(descriptor)


@pytest.fixture
def piped(pipes: tuple[Sink, int, int]) -> tuple[Sink, Output]:
    sink, stdout, stderr = pipes
    return sink, Output(12, stdout=stdout, stderr=stderr)


def test_prefixes_are_aligned(piped: tuple[Sink, Output]) -> None:
    sink, output = piped
    output.write(3, STDOUT, b"three\n")
    output.write(11, STDERR, b"eleven\n")
    assert sink.printed() == b"[ 3] three\n"
    assert sink.complained() == b"[11] eleven\n"


def test_a_line_is_held_until_it_is_complete(piped: tuple[Sink, Output]) -> None:
    sink, output = piped
    output.write(0, STDOUT, b"be")
    output.write(1, STDOUT, b"other\n")
    output.write(0, STDOUT, b"gin\nne")
    assert sink.printed() == b"[ 1] other\n[ 0] begin\n"
    output.finish(0)
    assert sink.printed() == b"[ 0] ne\n"


def test_progress_bar_leaves_its_last_state_in_a_pipe(piped: tuple[Sink, Output]) -> None:
    sink, output = piped
    for percent in range(101):
        output.write(0, STDERR, b"\r%3d%%" % percent)
    assert sink.complained() == b""
    output.write(0, STDERR, b"\n")
    assert sink.complained() == b"[ 0] 100%\n"


def test_progress_bar_takes_no_memory(piped: tuple[Sink, Output]) -> None:
    _, output = piped
    for _ in range(1000):
        output.write(0, STDERR, b"\r" + b"#" * 100)
    assert len(output._ranks[0].partial[STDERR]) <= 202


@pytest.mark.parametrize("cut", range(1, 14))
def test_carriage_returns_are_understood_wherever_a_chunk_ends(piped: tuple[Sink, Output], cut: int) -> None:
    sink, output = piped
    data = b"one\r\n1%\r2%\r\nx\n"
    output.write(0, STDOUT, data[:cut])
    output.write(0, STDOUT, data[cut:])
    assert sink.printed() == b"[ 0] one\n[ 0] 2%\n[ 0] x\n"


def test_endless_line_is_cut(piped: tuple[Sink, Output]) -> None:
    sink, output = piped
    sink_size = 0
    for _ in range(40):
        output.write(0, STDOUT, b"x" * 4096)
        sink_size += len(sink.printed())
    assert sink_size >= 2 * 65536
    assert len(output._ranks[0].partial[STDOUT]) <= 65536


def test_tail_keeps_the_last_lines_of_standard_error(piped: tuple[Sink, Output]) -> None:
    _, output = piped
    for i in range(500):
        output.write(1, STDERR, b"line %d\n" % i)
    output.write(1, STDOUT, b"not this\n")
    output.write(1, STDERR, b"end")
    output.finish(1)
    assert output.tail(1)[-2:] == [b"line 499", b"end"]
    assert len(output.tail(1)) == 200


def test_closed_reader_is_ignored(pipes: tuple[Sink, int, int]) -> None:
    sink, _, stderr = pipes
    reader, stdout = os.pipe()
    os.close(reader)
    output = Output(2, stdout=stdout, stderr=stderr)
    output.write(0, STDOUT, b"nobody reads\n")
    output.write(0, STDERR, b"somebody does\n")
    assert sink.complained() == b"[0] somebody does\n"
    os.close(stdout)


def test_non_blocking_descriptor_loses_nothing(pipes: tuple[Sink, int, int]) -> None:
    sink, stdout, stderr = pipes
    os.set_blocking(stdout, False)
    output = Output(1, stdout=stdout, stderr=stderr)
    child = os.fork()
    if child == 0:
        output.write(0, STDOUT, b"".join(b"%d\n" % i for i in range(100000)))
        os._exit(0)
    os.close(os.dup(stdout))
    received = b""
    os.set_blocking(sink.out, True)
    while received.count(b"\n") < 100000:
        received += os.read(sink.out, 65536)
    assert os.waitpid(child, 0)[1] == 0
    assert received.splitlines()[-1] == b"[0] 99999"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Sink, Output]]:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    master, slave = pty.openpty()
    yield Sink(master, master), Output(2, stdout=slave, stderr=slave)
    os.close(master)
    os.close(slave)


def test_terminal_shows_coloured_prefixes(terminal: tuple[Sink, Output]) -> None:
    sink, output = terminal
    output.write(0, STDOUT, b"a\n")
    output.write(1, STDOUT, b"b\n")
    assert sink.printed() == b"\x1b[36m[0] \x1b[0ma\r\n\x1b[33m[1] \x1b[0mb\r\n"


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    master, slave = pty.openpty()
    Output(1, stdout=slave, stderr=slave).write(0, STDOUT, b"a\n")
    assert Sink(master, master).printed() == b"[0] a\r\n"
    os.close(master)
    os.close(slave)


def test_progress_bar_of_rank_0_moves_on_a_terminal(terminal: tuple[Sink, Output]) -> None:
    sink, output = terminal
    output.write(0, STDERR, b"\r 10%")
    assert sink.printed() == b"\r\x1b[K\x1b[36m[0] \x1b[0m 10%"
    output.write(1, STDOUT, b"news\n")
    shown = sink.printed()
    assert shown == b"\r\x1b[K\x1b[33m[1] \x1b[0mnews\r\n\x1b[36m[0] \x1b[0m 10%", "the bar is drawn again"
    output.write(0, STDERR, b"\r100%\n")
    assert sink.printed().endswith(b"\r\x1b[K\x1b[36m[0] \x1b[0m100%\r\n\x1b[36m[0] \x1b[0m 10%\r\x1b[K")


def test_progress_bars_of_other_ranks_do_not_move(terminal: tuple[Sink, Output]) -> None:
    sink, output = terminal
    output.write(1, STDERR, b"\r 10%")
    assert sink.printed() == b""


def test_unfinished_line_is_cut_to_the_terminal_s_width(terminal: tuple[Sink, Output]) -> None:
    sink, output = terminal
    output.write(0, STDERR, b"\r" + b"#" * 100)
    assert sink.printed().count(b"#") == 40 - 4 - 1


def test_a_text_stream_gets_what_it_can_show_and_a_closed_one_ends_nothing() -> None:
    raw = io.BytesIO()
    narrow, closed = io.TextIOWrapper(raw, encoding="ascii"), io.StringIO()
    output = Output(1, stdout=narrow, stderr=closed)
    closed.close()
    output.write(0, STDERR, b"lost\n")
    output.write(0, STDOUT, "é\n".encode() + b"\xff\nplain\n")
    output.close()
    assert raw.getvalue() == b"[0] \\xe9\n[0] \\ufffd\n[0] plain\n"


def test_ranks_that_are_retired_keep_no_file_open_and_no_line(
    pipes: tuple[Sink, int, int], tmp_path: Path
) -> None:
    _, stdout, stderr = pipes
    output = Output(1, stdout=stdout, stderr=stderr, directory=str(tmp_path))
    before, known = len(os.listdir("/proc/self/fd")), []
    for rank in range(1, 101):
        output.add_rank()
        output.write(rank, STDERR, b"last words\n")
        output.finish(rank)
        assert output.tail(rank) == [b"last words"]
        output.retire(rank)
        known.append(len(os.listdir("/proc/self/fd")))
    assert max(known) - before <= 2 * 17
    assert (known[-1], output.tail(1), output.size) == (known[50], [], 101)
    output.close()


def test_late_words_of_a_retired_rank_s_children_are_printed_and_kept(
    pipes: tuple[Sink, int, int], tmp_path: Path
) -> None:
    sink, stdout, stderr = pipes
    output = Output(1, stdout=stdout, stderr=stderr, directory=str(tmp_path))
    output.write(0, STDOUT, b"early\n")
    output.retire(0)
    for rank in range(1, 101):
        output.add_rank()
        output.retire(rank)
    output.write(0, STDOUT, b"late\n")
    output.close()
    assert sink.printed() == b"[0] early\n[0] late\n"
    assert (tmp_path / "rank.0" / "stdout").read_bytes() == b"early\nlate\n"


def test_rank_whose_files_cannot_be_opened_is_printed_and_this_is_reported_once(
    pipes: tuple[Sink, int, int], tmp_path: Path
) -> None:
    sink, stdout, stderr = pipes
    folder = tmp_path / "out"
    output = Output(1, stdout=stdout, stderr=stderr, directory=str(folder))
    folder.rename(tmp_path / "moved")
    folder.touch()
    for rank in (1, 2):
        output.add_rank()
        output.write(rank, STDOUT, b"late\n")
    output.close()
    assert sink.printed() == b"[1] late\n[2] late\n"
    (complaint,) = sink.complained().splitlines()
    assert complaint.startswith(f"polyhvdrun: cannot write {folder}/rank.1: Not a directory".encode())
    with pytest.raises(NotADirectoryError):
        Output(1, stdout=stdout, stderr=stderr, directory=str(folder / "below"))
