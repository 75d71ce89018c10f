"""The last things that polyhvdrun says of a job that has failed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from fork_servers import IMPORTS, ForkServers
from launching import RANK, Launcher

from polyhvd.launch.job.blame import Ending, first_cause, had_failed, others, traceback_lines


def closing(err: str) -> list[str]:
    """From polyhvdrun's own first line on."""
    lines = err.splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("polyhvdrun: ")) :]


def test_first_cause_is_told_in_full_and_the_others_in_a_line_each(
    launcher: Launcher, tmp_path: Path
) -> None:
    # Ranks 0 and 1 fail of rank 2, which waits for them with its own end.
    source = RANK + (
        f"folder = {str(tmp_path)!r}\n"
        "class PeerLostError(RuntimeError): pass\n"
        "def deep(n):\n"
        "  if n: deep(n - 1)\n"
        "  elif rank == 2: raise ValueError('bad weather')\n"
        "  else: raise PeerLostError(f'rank {rank} lost rank 2')\n"
        "if rank == 2:\n"
        "  while len(os.listdir(folder)) < 3: time.sleep(0.001)\n"  # with the script
        "else: open(f'{folder}/{rank}', 'w').close()\n"
        "deep(3)\n"
    )
    status, _, err = launcher.run("-np", "3", source=source)
    assert status == 1
    lines = closing(err)
    assert sorted(lines[:2]) == [
        f"polyhvdrun: rank {rank} on localhost exited with status 1: PeerLostError: rank {rank} lost rank 2"
        for rank in (0, 1)
    ]
    assert lines[2] == "polyhvdrun: rank 2 on localhost exited with status 1"
    assert lines[3] == "[2] Traceback (most recent call last):"
    assert all(line.startswith("[2] ") for line in lines[3:])
    assert lines[-1] == "[2] ValueError: bad weather"


def test_exception_that_led_to_another_is_part_of_the_cause(launcher: Launcher) -> None:
    source = "try: open('/no/such/file')\nexcept OSError as e: raise RuntimeError('no data') from e\n"
    _, _, err = launcher.run("-np", "1", source=source)
    lines = closing(err)
    assert "[0] FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'" in lines
    assert lines[-1] == "[0] RuntimeError: no data"


def test_a_mismatch_prints_one_traceback(launcher: Launcher) -> None:
    source = (
        "import numpy as np, polyhvd.numpy as hvd\n"
        "hvd.init()\n"
        "def step(): hvd.allreduce(np.ones(hvd.rank()), name='x')\n"
        "step()\n"
    )
    status, _, err = launcher.run("-np", "3", source=source)
    assert status == 1
    lines = err.splitlines()
    last = lines.index("polyhvdrun: ranks 1, 2 exited with status 1: the same error")
    printed = [line for line in lines[:last] if not line.startswith("polyhvdrun: ")]
    assert sum("Traceback" in line for line in printed) == 1
    for rank in (1, 2):
        (line,) = (line for line in printed if line.startswith(f"[{rank}] "))
        assert ":3: polyhvd.errors.RankMismatchError: Mismatched allreduce tensor shapes: " in line
        assert line.endswith("(rank 0 prints the traceback; all ranks with POLYHVD_LOG_LEVEL=debug)")
    assert lines[last + 1] == "polyhvdrun: rank 0 on localhost exited with status 1"
    assert lines[last + 2] == "[0] Traceback (most recent call last):"
    assert any("in step" in line for line in lines[last:])


def test_ranks_with_the_cause_s_error_are_one_line() -> None:
    tail = [b"Traceback (most recent call last):", b'  File "x"', b"ValueError: bad row"]
    cause, same, other = (
        Ending(0, "h", 1, tail),
        Ending(2, "h", 1, tail),
        Ending(1, "h", 1, [*tail[:-1], b"OSError: y"]),
    )
    assert others([cause, same, other], cause) == [
        "rank 1 on h exited with status 1: OSError: y",
        "rank 2 exited with status 1: the same error",
    ]


def test_cause_among_ranks_that_have_failed_together_is_one_that_has_printed_why() -> None:
    mute = Ending(0, "h", 1, [b"", b"2026-01-01 00:00:00,000 polyhvd rank 0 WARNING: x"])
    cause = Ending(1, "h", 1, [b"Traceback (most recent call last):", b"  frame", b"ValueError: bad"])
    assert first_cause([mute, cause]) is cause
    assert first_cause([Ending(0, "h", 3), cause]).rank == 0


def test_earlier_traceback_that_was_caught_is_not_part_of_the_cause() -> None:
    tail = [b"Traceback (most recent call last):", b"  caught", b"ValueError: 1", b"going on"]
    last = [b"Traceback (most recent call last):", b"  raised", b"ValueError: 2"]
    assert traceback_lines([*tail, *last]) == last


def test_exceptions_that_python_ignores_at_exit_are_not_the_cause(launcher: Launcher) -> None:
    source = (
        "import atexit\n"
        "class Held:\n"
        "  def __del__(self):\n"
        "    try: {}['gone']\n"
        "    except KeyError as e: raise TypeError('in a destructor') from e\n"
        "held = Held()\n"
        "atexit.register(lambda: 1 / 0)\n"
        "raise RuntimeError('no data')\n"
    )
    _, _, err = launcher.run("-np", "1", source=source)
    assert err.count("[0] ZeroDivisionError") == err.count("[0] TypeError: in a destructor") == 1
    lines = closing(err)
    assert lines[-1] == "[0] RuntimeError: no data"
    assert [line for line in lines if "Traceback" in line] == ["[0] Traceback (most recent call last):"]


IGNORED = [
    b"Exception ignored in: <function Held.__del__ at 0x7f>",
    b"Traceback (most recent call last):",
    b'  File "x.py", line 2, in __del__',
    b"TypeError: in a destructor",
]


def test_a_victim_stays_one_whatever_its_destructors_raise() -> None:
    lost = [b"Traceback (most recent call last):", b"  frame", b"PeerLostError: rank 1"]
    wrong = [b"Traceback (most recent call last):", b"  frame", b"ValueError: bad"]
    victim, cause = Ending(0, "h", 1, [*lost, *IGNORED]), Ending(1, "h", 1, [*wrong, b"", *IGNORED, b"bye"])
    assert first_cause([victim, cause]) is cause
    assert others([victim, cause], cause) == ["rank 0 on h exited with status 1: PeerLostError: rank 1"]
    assert traceback_lines(cause.tail) == [*wrong, b"", b"bye"]


def test_where_there_is_nothing_else_an_ignored_exception_is_told() -> None:
    pipe = [b"Exception ignored in: <_io.TextIOWrapper name='<stdout>'>", b"BrokenPipeError: [Errno 32]"]
    assert traceback_lines(pipe) == pipe
    assert others([Ending(0, "h", 120, pipe), cause := Ending(1, "h", -9)], cause) == [
        "rank 0 on h exited with status 120: BrokenPipeError: [Errno 32]"
    ]
    assert traceback_lines([*pipe, b"fatal: no disk"]) == [b"fatal: no disk"]


def test_long_traceback_is_told_from_its_beginning() -> None:
    lines = [b"Traceback (most recent call last):", *[b"  frame"] * 150, b"ValueError: deep"]
    assert traceback_lines([b"before", *lines]) == lines


def test_lines_about_other_ranks_are_bounded() -> None:
    def failed(error: bytes) -> list[Ending]:
        return [Ending(rank, "h", 1, [b"Traceback (most recent call last):", error]) for rank in range(100)]

    cause, *rest = failed(b"E: x")
    assert others([cause, *rest], cause) == [
        f"ranks {', '.join(map(str, range(1, 17)))} and 83 more exited with status 1: the same error"
    ]
    lines = others(failed(b"E: y"), cause)
    assert lines[:2] == ["rank 0 on h exited with status 1: E: y", "rank 1 on h exited with status 1: E: y"]
    assert len(lines) == 9
    assert lines[-1] == "92 more ranks failed"


def test_all_lines_of_a_multiline_error_are_of_the_cause_alone() -> None:
    tail = [b"Traceback (most recent call last):", b"  frame", b"E: first", b"second"]
    assert others([Ending(0, "h", 1, tail), cause := Ending(1, "h", -9)], cause) == [
        "rank 0 on h exited with status 1: E: first"
    ]


TRACEBACK = [
    b"Traceback (most recent call last):",
    b'  File "train.py", line 9, in <module>',
    b'    hvd.allreduce(x, name="x")',
    b"polyhvd.errors.PeerLostError: allreduce 'x': rank 1 was lost",
]
LOGGED = b"2026-11-26 23:15:57,049 polyhvd rank 0 WARNING: rank 0: the last operations are in /tmp/x.json"
ELASTIC = b"polyhvd rank 0 generation 3 WARNING: rank 0: the last operations are in /tmp/x.json"


def reason_of(tail: list[bytes], suffered: tuple[bytes, ...] = ()) -> str:
    """What is said of a victim beside the cause."""
    victim = Ending(0, "h", 1, tail, suffered=suffered)
    (line,) = others([victim, cause := Ending(1, "h", -9)], cause)
    return line.removeprefix("rank 0 on h exited with status 1").removeprefix(": ")


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize(
    "logged", [LOGGED, LOGGED[24:], ELASTIC, b"WARNING:polyhvd:rank 0: the last operations"]
)
def test_a_line_of_the_log_within_a_traceback_is_not_the_reason(at: int, logged: bytes) -> None:
    assert reason_of([*TRACEBACK[:at], logged, *TRACEBACK[at:]]) == TRACEBACK[-1].decode()


@pytest.mark.parametrize("at", [0, 4, 10, 30])
@pytest.mark.parametrize("line", range(4))
def test_a_line_of_the_log_that_breaks_a_line_of_a_traceback_is_cut_out(line: int, at: int) -> None:
    broken = [TRACEBACK[line][:at] + LOGGED, TRACEBACK[line][at:]]
    tail = [*TRACEBACK[:line], *broken, *TRACEBACK[line + 1 :]]
    assert reason_of(tail) == TRACEBACK[-1].decode()
    assert traceback_lines(tail) == TRACEBACK


def test_without_a_traceback_the_reason_is_what_the_engine_has_reported() -> None:
    suffered = (b"allreduce 'x': rank 1 has failed: ValueError: bad batch (train.py:12)",)
    assert reason_of([b"saving", LOGGED], suffered) == suffered[0].decode()
    assert reason_of([b"saving", LOGGED]) == "saving"


@pytest.mark.parametrize("path", ["train.py", "./train.py", "{folder}/train.py"])
def test_script_that_is_no_program_is_recognised(launcher: Launcher, tmp_path: Path, path: str) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    path = path.format(folder=tmp_path)
    status, _, err = launcher.start("-np", "2", argv=[path], before=["env", "-C", str(tmp_path)]).finish()
    assert status in (126, 127)
    assert f"Was `python {path}` meant?" in err
    assert err.count("meant?") == 1


def test_script_without_a_first_line_is_recognised(launcher: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    script.chmod(0o755)
    assert "Was `python " in launcher.run("-np", "1", argv=[str(script)])[2]


def test_program_that_does_not_exist_is_no_script(launcher: Launcher) -> None:
    assert "meant" not in launcher.run("-np", "1", argv=["no-such-program.py"])[2]


def test_python_with_a_script_runs(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    argv = [sys.executable, str(tmp_path / "train.py")]
    assert launcher.run("-np", "1", argv=argv) == (0, "[0] hello\n", "")


#: The guilty rank takes longer to end than those that lost it.
SLOW = "import atexit, os, time\nif os.environ['POLYHVD_RANK'] == '1': atexit.register(time.sleep, {})\n"
STEPS = (
    "hvd.init()\nfor step in range(3):\n  if hvd.rank() == 1 and step == 2: raise ValueError('bad data')\n"
)
#: A victim's exception is of its framework's class, or of the program's own.
VICTIMS = {
    "mxnet": (
        "import polyhvd.mxnet as hvd, mxnet as mx\n"
        f"{STEPS}"
        "  try: hvd.allreduce(mx.nd.ones(4), name='x').asnumpy()\n"
        "  except Exception as error: raise mx.base.MXNetError(str(error)) from None\n"
    ),
    "tensorflow": (
        "import tensorflow as tf, polyhvd.tensorflow as hvd\n"
        "reduce = tf.function(lambda x: hvd.allreduce(x, name='x'))\n"
        f"{STEPS}"
        "  reduce(tf.ones(4))\n"
    ),
    "torch": (
        "import torch, polyhvd.torch as hvd\n"
        f"{STEPS}"
        "  try: hvd.allreduce(torch.ones(4), name='x')\n"
        "  except Exception as error: raise RuntimeError('the step has failed') from error\n"
    ),
    "numpy": (f"import numpy as np, polyhvd.numpy as hvd\n{STEPS}  hvd.allreduce(np.ones(4), name='x')\n"),
}


@pytest.mark.parametrize("framework", VICTIMS)
def test_rank_that_failed_first_is_blamed_whatever_its_victims_say(
    launcher: Launcher, fork_servers: ForkServers, framework: str
) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    script = launcher.script(SLOW.format(5 if framework == "numpy" else 0.5) + VICTIMS[framework])
    python = fork_servers.python(1, IMPORTS[framework])  # one import is enough for both ranks
    status, _, err = launcher.run("-np", "2", argv=[*python, script])
    assert status == 1
    lines = closing(err)
    assert "polyhvdrun: rank 1 on localhost exited with status 1" in lines
    assert lines[-1] == "[1] ValueError: bad data"


def test_error_of_its_own_after_one_that_was_handled_is_no_victim_s() -> None:
    tail = [b"Traceback (most recent call last):", b"  raised", b"ValueError: 2"]
    suffered = [b"allreduce 'x' needs rank 1, which has shut down"]
    assert Ending(0, "a", 1, tail, suffered=suffered).certainty == 1
    assert Ending(0, "a", 1, [*tail[:2], b"MXNetError: " + suffered[0]], suffered=suffered).certainty == 2


def test_rank_that_was_told_to_end_had_failed_only_if_a_traceback_was_its_last_word() -> None:
    tail = [b"Traceback (most recent call last):", b"  raised", b"ValueError: 2"]
    assert had_failed(Ending(0, "a", 1, tail))
    assert not had_failed(Ending(0, "a", 1, [b"working"]))
    assert not had_failed(Ending(0, "a", 1, [*tail, b"caught", b"epoch 1", b"epoch 2"]))
    assert not had_failed(Ending(0, "a", 1, [*tail[:2], b"PeerLostError: rank 1"]))


def test_the_line_of_an_init_that_failed_stands_for_a_traceback() -> None:
    wrong = b"/job/train.py:3: polyhvd.config.ConfigError: POLYHVD_CYCLE_TIME='fast': must be a number"
    lost = b"/job/train.py:3: polyhvd.errors.PeerLostError: rank 0 waited 5 s"
    cause, victim = Ending(0, "h", 1, [b"working", wrong]), Ending(1, "h", 1, [b"working", lost])
    assert had_failed(cause)
    assert not had_failed(victim)
    assert first_cause([victim, cause]) is cause
    assert traceback_lines(cause.tail) == [wrong]
    assert others([cause, victim], cause) == [f"rank 1 on h exited with status 1: {lost.decode()}"]
