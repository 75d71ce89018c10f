"""Output that goes nowhere: pipes that nobody reads, streams that are closed, disks that are full."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from launching import DEADLINE_S, RANK, Launcher, assert_gone, pids, wait_until

from polyhvd.launch.job.output import STDERR, STDOUT, Output

#: Prints without end, and once more when it gets a signal.
ENDLESS = RANK + (
    "def save(*_):\n"
    "  print('x' * 100000)\n"
    "  open({folder!r} + f'/saved{{rank}}', 'w').close()\n"
    "  os._exit(0)\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "os.write(1, b'pid %d\\n' % os.getpid())\n"
    "while True: print('x' * 1000, file=sys.{stream})\n"
)


def unread_bytes(process: subprocess.Popen[bytes], stream: str) -> int:
    pipe = getattr(process, stream)
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4), sys.byteorder)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_sigterm_ends_a_job_whose_output_nobody_will_ever_read(
    launcher: Launcher, tmp_path: Path, stream: str
) -> None:
    launcher.start("-np", "2", source=ENDLESS.format(folder=str(tmp_path), stream=stream))
    ranks = pids(launcher.wait_for("pid ", 2))
    process = launcher.process
    assert process is not None
    wait_until(lambda: unread_bytes(process, stream) > 32768, "a pipe about as full as it gets")
    launcher.signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 143
    assert_gone(ranks)
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_job_runs_with_streams_closed(launcher: Launcher, tmp_path: Path, closed: str) -> None:
    source = RANK + (
        "import numpy, polyhvd.numpy as hvd\n"
        "hvd.init()\n"
        "for i in range(2000): print('x' * 100); print('y' * 100, file=sys.stderr)\n"
        "total = hvd.allreduce(numpy.array([rank]), op=hvd.Sum)[0]\n"
        f"open({str(tmp_path)!r} + f'/{{total}}.{{rank}}', 'w').close()\n"
    )
    launcher.start("-np", "2", source=source, before=["sh", "-c", f'exec "$@" {closed}', "sh"])
    assert launcher.finish()[0] == 0
    assert sorted(path.name for path in tmp_path.glob("1.*")) == ["1.0", "1.1"]


def test_full_disk_is_told_once_and_does_not_end_the_job(launcher: Launcher, tmp_path: Path) -> None:
    for rank in range(2):
        folder = tmp_path / "logs" / f"rank.{rank}"
        folder.mkdir(parents=True)
        (folder / "stdout").symlink_to("/dev/full")
    source = RANK + "for i in range(500): print('line', i); print('also', file=sys.stderr)\n"
    status, out, err = launcher.run("-np", "2", "--output-filename", str(tmp_path / "logs"), source=source)
    assert status == 0
    assert len(out.splitlines()) == 1000
    warnings = [line for line in err.splitlines() if "No space left on device" in line]
    assert len(warnings) == 1
    assert "rank." in warnings[0]
    assert "/stdout" in warnings[0]


def test_full_disk_below_standard_output_is_told_once(launcher: Launcher) -> None:
    source = RANK + "for i in range(500): print('line', i)\n"
    launcher.start("-np", "2", source=source, before=["sh", "-c", 'exec "$@" > /dev/full', "sh"])
    status, _, err = launcher.finish()
    assert status == 0
    assert [line for line in err.splitlines() if "No space left on device" in line] == [
        "polyhvdrun: cannot write standard output: No space left on device; the job continues without it"
    ]


def test_number_of_a_closed_stream_is_not_written_to_when_another_file_has_got_it() -> None:
    read, write = os.pipe()
    os.close(write)
    output = Output(1, stdout=write, stderr=write)
    os.close(read)
    other = os.pipe()  # the same numbers
    try:
        assert write in other
        output.write(0, STDOUT, b"stray\n")
        output.write(0, STDERR, b"stray\n")
        os.set_blocking(other[0], False)
        with pytest.raises(BlockingIOError):
            os.read(other[0], 1)
    finally:
        for descriptor in other:
            os.close(descriptor)
