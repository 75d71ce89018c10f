"""The error that ends a rank's program is the reason that the ranks which need it are given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fork_servers import IMPORTS, ForkServers
from joining import DEADLINE_S, ROOT, TORCHRUN, Job, environment, free_port
from launching import Launcher

from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.server import Server
from polyhvd.testing.stand_ins import is_installed

#: A rank that fails, and others that print the errors that they get.
BEGIN = """
import os, sys
import numpy as np
import polyhvd.numpy as hvd
hvd.init()
def report(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except hvd.HorovodInternalError as error:
        os.write(1, f"{type(error).__name__}: {error}\\n".encode())
def fail():
    raise ValueError("bad row")
hvd.allreduce(np.ones(3), name="x")
"""
REASON = "rank {} has failed: ValueError: bad row (train.py, line 12)"
#: Its second thread waits for an operation that no other rank asks for.
WAITING = {
    "thread": "threading.Thread(target=wait).start()\n",
    "pool": "pool = concurrent.futures.ThreadPoolExecutor(1)\npool.submit(wait)\n",
}
BEGIN_THREADS = BEGIN.replace("import os, sys", "import os, sys, threading") + (
    "import concurrent.futures\ndef wait(): hvd.allreduce(np.ones(3), name=f'of rank {hvd.rank()}')\n"
)


class Ranks:
    """Ranks without a launcher, which would end them with the first one, on hosts that share this machine."""

    def __init__(self, folder: Path, python: list[str]) -> None:
        self._script = folder / "train.py"
        self._python = python

    def run(self, hosts: str, source: str) -> list[tuple[int, str, str]]:
        """Exit status, output and errors of each rank; ``hosts`` has a letter a rank."""
        self._script.write_text(source)
        secret = new_secret()
        server = Server(parse_secret(secret))
        try:
            with Job() as job:
                for rank, host in enumerate(hosts):
                    variables = {
                        "POLYHVD_RANK": str(rank),
                        "POLYHVD_SIZE": str(len(hosts)),
                        "POLYHVD_HOST_ID": host,
                        "POLYHVD_RENDEZVOUS": server.endpoint,
                        "POLYHVD_SECRET": secret,
                        "POLYHVD_FLIGHT_RECORDER": "0",
                    }
                    job.start([*self._python, str(self._script)], environment(**variables))
                return job.finish()
        finally:
            server.close()


@pytest.fixture
def ranks(tmp_path: Path, fork_servers: ForkServers) -> Ranks:
    return Ranks(tmp_path, fork_servers.python(2, IMPORTS["numpy"]))


@pytest.mark.parametrize(
    ("hosts", "leaver"), [("aa", 0), ("aa", 1), ("aaa", 1), ("aabb", 0), ("aabb", 2), ("aabb", 3), ("abc", 2)]
)
def test_a_rank_that_fails_is_the_reason_for_whoever_waits_or_comes_later(
    ranks: Ranks, hosts: str, leaver: int
) -> None:
    source = BEGIN + (
        f"if hvd.rank() == {leaver}: fail()\n"
        "for name in 'x', 'y': report(hvd.allreduce, np.ones(3), name=name)\n"
    )
    ended = ranks.run(hosts, source)
    reason = REASON.format(leaver)
    for rank, (status, out, err) in enumerate(ended):
        lines = [f"PeerDepartedError: allreduce '{name}': {reason}" for name in "xy"]
        assert (status, out.splitlines()) == ((1, []) if rank == leaver else (0, lines)), err


def test_a_rank_that_fails_while_an_operation_is_pending_is_the_reason(ranks: Ranks) -> None:
    source = BEGIN + (
        "if hvd.rank() == 1:\n    handle = hvd.allreduce_async(np.ones(3), name='y')\n    fail()\n"
        "report(hvd.allreduce, np.ones(3), name='x')\n"
    )
    (_, first, err), _, (_, last, _) = ranks.run("aaa", source)
    for out in (first, last):
        assert out.startswith("PeerDepartedError: "), err
        assert out.endswith(f"{REASON.format(1)}\n")


def test_a_rank_that_fails_of_another_one_is_no_reason(ranks: Ranks) -> None:
    """Rank 0 ends by the error of rank 1, and rank 2, which comes later, is given that of rank 1."""
    source = BEGIN + (
        "pid = int(hvd.allgather(np.array([os.getpid()]))[0])\n"
        "if hvd.rank() == 1: fail()\n"
        "if hvd.rank() == 0:\n"
        "    try:\n"
        "        hvd.allreduce(np.ones(3), name='x')\n"
        "    except hvd.HorovodInternalError as error:\n"
        "        raise RuntimeError('the step has failed') from error\n"
        "while os.path.exists(f'/proc/{pid}'): pass\n"
        "report(hvd.allreduce, np.ones(3), name='y')\n"
    )
    _, _, (_, out, err) = ranks.run("aaa", source)
    assert out == f"PeerDepartedError: allreduce 'y': {REASON.format(1)}\n", err


def test_process_sets_without_the_rank_go_on_and_a_rank_that_has_joined_is_given_the_reason(
    ranks: Ranks,
) -> None:
    source = BEGIN.replace("hvd.init()", "pair = hvd.ProcessSet([0, 1])\nhvd.init(process_sets=[pair])") + (
        "if hvd.rank() == 2: fail()\n"
        "if hvd.rank() == 0: report(hvd.join)\n"
        "else: report(hvd.allreduce, np.ones(3), name='x')\n"
        "total = hvd.allreduce(np.ones(3), op=hvd.Sum, process_set=pair, name='pair')\n"
        "os.write(1, f'{total.tolist()}\\n'.encode())\n"
    )
    (_, joined, err), (_, waiting, _), _ = ranks.run("aaa", source)
    reason = REASON.format(2).replace("line 12", "line 13")
    assert joined == f"PeerDepartedError: join 'join.noname.0': {reason}\n[2.0, 2.0, 2.0]\n", err
    assert waiting == f"PeerDepartedError: allreduce 'x': {reason}\n[2.0, 2.0, 2.0]\n", err


def test_a_rank_that_is_interrupted_in_init_is_the_reason(ranks: Ranks) -> None:
    """Rank 1 calls init() once rank 0, which waits for it there, has been interrupted."""
    source = (
        "import os, signal, sys, threading\n"
        "import polyhvd.numpy as hvd\n"
        "def interrupt(thread):\n"
        "    stack = []\n"
        "    while '_exchange' not in stack:\n"
        "        frame, stack = sys._current_frames()[thread], []\n"
        "        while frame: frame, stack = frame.f_back, [*stack, frame.f_code.co_name]\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "if os.environ['POLYHVD_RANK'] == '0':\n"
        "    threading.Thread(target=interrupt, args=[threading.get_ident()]).start()\n"
        "    try:\n"
        "        hvd.init()\n"
        "    except KeyboardInterrupt:\n"
        "        open(__file__ + '.interrupted', 'w')\n"
        "else:\n"
        "    while not os.path.exists(__file__ + '.interrupted'): pass\n"
        "    try:\n"
        "        hvd.init()\n"
        "    except hvd.HorovodInternalError as error:\n"
        "        print(error)\n"
    )
    (first, _, err), (_, out, _) = ranks.run("aa", source)
    assert (first, out) == (0, "rank 0 failed in init(): KeyboardInterrupt\n"), err


@pytest.mark.parametrize("end", ["", "hvd.shutdown()\nfail()\n", "try: fail()\nexcept ValueError: pass\n"])
def test_a_rank_that_ends_in_good_order_has_shut_down(ranks: Ranks, end: str) -> None:
    source = BEGIN + "if hvd.rank() == 0: report(hvd.allreduce, np.ones(3), name='x')\nelse:\n"
    source += "".join(f"    {line}\n" for line in (end or "pass\n").splitlines())
    (_, out, err), _ = ranks.run("aa", source)
    assert out.startswith(
        "PeerDepartedError: allreduce 'x' needs rank 1, which has shut down: it finished after its 1st "
    ), err


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        ("sys.exit(3)", 3, "rank 1 has ended with status 3"),
        ("sys.exit('no data in \\nthis folder')", 1, "rank 1 has ended with: no data in"),
        ("try: sys.exit(3)\nexcept SystemExit: raise", 3, "rank 1 has ended with status 3"),
        ("with open(__file__): sys.exit(True)", 1, "rank 1 has ended with status 1"),
        ("exit(3)", 3, "rank 1 has ended with status 3"),
        ("quit('no data')", 1, "rank 1 has ended with: no data"),
        ("leave(3)", 3, "rank 1 has ended with status 3"),
        ("sys.exit('')", 1, "rank 1 has ended with status 1"),
        ("sys.exit(np.ones(2))", 1, "rank 1 has ended with: [1. 1.]"),
        ("sys.exit(np.int64(0))", 1, "rank 1 has ended with: 0"),
        ("raise SystemExit(3)", 3, "rank 1 has ended with status 3"),
        ("raise SystemExit('no data')", 1, "rank 1 has ended with: no data"),
        ("def main(): return 3\nraise SystemExit(main())", 3, "rank 1 has ended with status 3"),
    ],
)
def test_a_rank_that_exits_with_a_status_or_a_text_is_the_reason(
    ranks: Ranks, end: str, status: int, reason: str
) -> None:
    source = f"from sys import exit as leave\n{BEGIN}if hvd.rank() == 1:\n"
    source += "".join(f"    {line}\n" for line in end.splitlines())
    source += "report(hvd.allreduce, np.ones(3), name='x')\n"
    (_, out, err), (found, _, _), (_, last, _) = ranks.run("aab", source)
    assert (found, out) == (status, f"PeerDepartedError: allreduce 'x': {reason}\n"), err
    assert last == out


@pytest.mark.parametrize(
    "end",
    [
        "sys.exit(0)",
        "sys.exit()",
        "try: sys.exit(3)\nexcept SystemExit: pass",
        "try: sys.exit(3)\nexcept SystemExit: sys.exit(0)",
        "try: sys.exit(3)\nexcept SystemExit: pass\nraise SystemExit(0)",
        "try: raise SystemExit(3)\nexcept SystemExit: raise SystemExit",
        "SystemExit(3)",
        "import atexit\natexit.register(sys.exit, 3)",
        "import atexit\ndef late(): raise SystemExit(3)\natexit.register(late)",
        "thread = threading.Thread(target=sys.exit, args=(3,))\nthread.start()\nthread.join()",
    ],
)
def test_a_rank_that_exits_with_status_0_has_shut_down(ranks: Ranks, end: str) -> None:
    source = BEGIN_THREADS + "if hvd.rank() == 0: report(hvd.allreduce, np.ones(3), name='x')\nelse:\n"
    source += "".join(f"    {line}\n" for line in end.splitlines())
    (_, out, err), (status, _, _) = ranks.run("aa", source)
    assert out.startswith("PeerDepartedError: allreduce 'x' needs rank 1, which has shut down: it "), err
    assert status == 0


def test_an_exit_after_a_failure_of_another_rank_is_no_reason(ranks: Ranks) -> None:
    source = BEGIN + (
        "pid = int(hvd.allgather(np.array([os.getpid()]))[0])\n"
        "if hvd.rank() == 1: fail()\n"
        "if hvd.rank() == 0:\n"
        "    try:\n"
        "        hvd.allreduce(np.ones(3), name='x')\n"
        "    except hvd.HorovodInternalError as error:\n"
        "        sys.exit(4)\n"
        "while os.path.exists(f'/proc/{pid}'): pass\n"
        "report(hvd.allreduce, np.ones(3), name='y')\n"
    )
    _, _, (_, out, err) = ranks.run("aaa", source)
    assert out == f"PeerDepartedError: allreduce 'y': {REASON.format(1)}\n", err


@pytest.mark.parametrize("waiting", WAITING)
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("fail()", REASON.format(1)),
        ("sys.excepthook = lambda *_: None\nfail()", REASON.format(1)),
        ("sys.exit('no data')", "rank 1 has ended with: no data"),
        ("exit('no data')", "rank 1 has ended with: no data"),
        ("raise SystemExit('no data')", "rank 1 has ended with: no data"),
        ("raise KeyboardInterrupt", "rank 1 has shut down while operations were pending"),
    ],
)
def test_a_rank_whose_main_thread_has_failed_leaves_while_another_thread_waits(
    ranks: Ranks, waiting: str, end: str, reason: str
) -> None:
    source = BEGIN_THREADS + (
        "open(f'{__file__}.{hvd.rank()}', 'w').close()\n"  # it is through the first operation
        "if hvd.rank() == 1:\n"
        "    while not all(os.path.exists(f'{__file__}.{rank}') for rank in range(3)): pass\n"
    )
    source += "".join(f"    {line}\n" for line in (WAITING[waiting] + end).splitlines())
    source += "report(hvd.allreduce, np.ones(3), name='x')\n"
    (_, first, err), (status, _, _), (_, last, _) = ranks.run("aab", source)
    for out in (first, last):  # with the operation's name unless it was asked for after that
        assert out.startswith("PeerDepartedError: "), err
        assert out.endswith(f"{reason}\n")
    assert status != 0


def test_the_main_threads_exception_is_the_only_one_that_such_a_rank_prints(launcher: Launcher) -> None:
    source = BEGIN_THREADS + (
        "if hvd.rank() == 1:\n    threading.Thread(target=wait).start()\n    fail()\n"
        "hvd.allreduce(np.ones(3), name='x')\n"
    )
    status, _, err = launcher.run("-np", "2", source=source, env={"POLYHVD_FLIGHT_RECORDER": "0"})
    lines = err.splitlines()
    assert (status, lines[-1]) == (1, "[1] ValueError: bad row")
    assert "ShutdownError" not in err
    assert "polyhvdrun: rank 1 on localhost exited with status 1" in lines


@pytest.mark.parametrize(
    "end", ["pass", "sys.exit(0)", "raise SystemExit(0)", "try: fail()\nexcept ValueError: sys.exit()"]
)
@pytest.mark.parametrize("waiting", WAITING)
def test_threads_go_on_after_the_main_thread_has_ended_well(ranks: Ranks, waiting: str, end: str) -> None:
    source = BEGIN_THREADS + (
        "main = threading.current_thread()\n"
        "def wait():\n"
        "    if threading.current_thread() in (t for t in threading.enumerate() if not t.daemon):\n"
        "        while not threading._SHUTTING_DOWN: pass\n"
        "    total = hvd.allreduce(np.ones(3), op=hvd.Sum, name='y')\n"
        "    os.write(1, f'{total.tolist()}\\n'.encode())\n"
    )
    source += WAITING[waiting] + end + "\n"
    for status, out, err in ranks.run("aa", source):
        assert (status, out) == (0, "[2.0, 2.0, 2.0]\n"), err


@pytest.mark.parametrize("end", ["pass", "hvd.shutdown()", "threading.excepthook = None\nhvd.shutdown()"])
def test_an_exception_of_another_thread_is_named_when_the_rank_leaves(ranks: Ranks, end: str) -> None:
    source = BEGIN_THREADS + "if hvd.rank() == 1:\n"
    source += "    thread = threading.Thread(target=fail, name='loader')\n"
    source += "    thread.start()\n    thread.join()\n    hvd.allreduce(np.ones(3), name='x')\n"
    source += "".join(f"    {line}\n" for line in end.splitlines())
    source += "else:\n    for name in 'x', 'y': report(hvd.allreduce, np.ones(3), name=name)\n"
    (_, out, err), (status, _, printed) = ranks.run("aa", source)
    reason = "rank 1 has shut down; its thread 'loader' had failed: ValueError: bad row (train.py, line 12)"
    assert (status, out) == (0, f"PeerDepartedError: allreduce 'y': {reason}\n"), err
    assert "Exception in thread loader" in printed


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("fail()", "rank 1 has failed: ValueError: bad row (train.py, line 11)"),
        ("sys.exit(3)", "rank 1 has ended with status 3"),
        ("raise SystemExit(3)", "rank 1 has ended with status 3"),
    ],
)
def test_a_rank_in_a_process_of_multiprocessing_that_fails_leaves_while_another_thread_waits(
    ranks: Ranks, method: str, end: str, reason: str
) -> None:
    begin = BEGIN_THREADS.replace("hvd.init()\n", "").replace('hvd.allreduce(np.ones(3), name="x")\n', "")
    source = begin + (
        "import multiprocessing\n"
        "def work():\n"
        "    hvd.init()\n"
        "    open(f'{__file__}.{hvd.rank()}', 'w').close()\n"  # it is in the world
        "    while not all(os.path.exists(f'{__file__}.{rank}') for rank in range(3)): pass\n"
        "    if hvd.rank() == 1:\n"
        "        threading.Thread(target=wait).start()\n"
        f"        {end}\n"
        "    report(hvd.allreduce, np.ones(3), name='x')\n"
        "if __name__ == '__main__':\n"
        f"    process = multiprocessing.get_context('{method}').Process(target=work)\n"
        "    process.start()\n"
        "    process.join()\n"
    )
    (_, first, err), _, (_, last, _) = ranks.run("aab", source)
    for out in (first, last):
        assert out.startswith("PeerDepartedError: "), err
        assert out.endswith(f"{reason}\n")


@pytest.mark.parametrize("earlier", ["", "os.environ['POLYHVD_ALONE'] = '1'\nhvd.init()\nhvd.shutdown()\n"])
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_rank_in_a_process_of_multiprocessing_that_returns_has_shut_down(
    ranks: Ranks, method: str, earlier: str
) -> None:
    begin = BEGIN_THREADS.replace("hvd.init()\n", "").replace('hvd.allreduce(np.ones(3), name="x")\n', "")
    source = begin + (
        "import multiprocessing\n"
        "def last():\n"
        "    threading.main_thread().join()\n"
        "    hvd.allreduce(np.ones(3), name='x')\n"
        "def work():\n"
        "    os.environ.pop('POLYHVD_ALONE', None)\n"
        "    hvd.init()\n"
        "    if hvd.rank() == 1:\n"
        "        threading.Thread(target=last).start()\n"  # the rank leaves after it
        "        return\n"
        "    for name in 'x', 'y': report(hvd.allreduce, np.ones(3), name=name)\n"
        "if __name__ == '__main__':\n"
    )
    source += "".join(f"    {line}\n" for line in earlier.splitlines())
    source += (
        f"    process = multiprocessing.get_context('{method}').Process(target=work)\n"
        "    process.start()\n"
        "    process.join()\n"
    )
    (_, out, err), _ = ranks.run("aa", source)
    assert out.startswith("PeerDepartedError: allreduce 'y' needs rank 1, which has shut down: it "), err


@pytest.mark.skipif(not is_installed("torch"), reason="torchrun comes with PyTorch, which is not installed")
def test_ranks_of_torchrun_are_given_the_reason(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BEGIN + "if hvd.rank() == 1: fail()\nhvd.allreduce(np.ones(3), name='x')\n")
    with Job() as job:
        options = ["--nproc-per-node", "2", "--master-port", str(free_port())]
        job.start([*TORCHRUN, *options, str(script)], environment())
        ((status, _, err),) = job.finish()
    assert status == 1
    assert f"allreduce 'x': {REASON.format(1)}" in err


def test_in_an_elastic_job_the_verdict_stays_and_survivors_log_the_reason_at_most_once(
    launcher: Launcher,
) -> None:
    source = BEGIN + (
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    while state.step < 100:\n"
        "        if hvd.rank() == 1 and state.step == 3: fail()\n"
        "        hvd.allreduce(np.ones(3), name='y')\n"
        "        state.step += 1\n"
        "        state.commit()\n"
        "train(hvd.elastic.ArrayState(step=0))\n"
    )
    status, _, err = launcher.run(
        "-np", "2", "--min-np", "2", source=source, env={"POLYHVD_LOG_LEVEL": "info"}
    )
    assert status == 1
    lines = err.splitlines()
    assert "polyhvdrun: process 1 on localhost exited with status 1" in lines
    assert lines[-1] == "[1] ValueError: bad row"
    assert sum("bad row" in line for line in lines if line.startswith("[0]")) <= 1


# The words themselves

WORDS = (
    "import atexit, sys\n"
    "from polyhvd.launch.uncaught import last_words\n"
    "from polyhvd import errors\n"
    "atexit.register(lambda: print(ascii(last_words())))\n"
)


def words_of(folder: Path, source: str, *options: str, stdin: str = "") -> tuple[str, str]:
    """What a program has to say as it ends, and what it has printed before and on standard error."""
    script = folder / "train.py"
    script.write_text(WORDS + source)
    done = subprocess.run(
        [sys.executable, *options, str(script)],
        env=environment(PYTHONPATH=str(ROOT)),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    *before, words = done.stdout.splitlines()
    return str(eval(words)), "\n".join(before) + done.stderr


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ValueError('bad row')", "ValueError: bad row (train.py, line 5)"),
        ("raise KeyError('x')", "KeyError: 'x' (train.py, line 5)"),
        ("class Mine(Exception): pass\nraise Mine", "Mine (train.py, line 6)"),
        ("import json\njson.loads('{')", "json.decoder.JSONDecodeError: Expecting property name"),
        ("raise errors.InvalidArgumentError('no')", "polyhvd.errors.InvalidArgumentError: no (train.py"),
        ("raise errors.RankMismatchError('no')", "polyhvd.errors.RankMismatchError: no (train.py"),
        (
            "raise ValueError('\\n \\x1b[1;31mbad\\x1b[0m\\x07 row\\nmore')",
            "ValueError: bad\\x07 row (train.py",
        ),
        ("raise ValueError('\\udc80')", "ValueError: \\xdc80 (train.py"),
        (
            "class Mute(Exception):\n    def __str__(self): raise RuntimeError\nraise Mute()",
            "Mute (train.py, line 7)",
        ),
        (
            "try: 1 / 0\nexcept ZeroDivisionError as e: raise ValueError('b') from e",
            "ValueError: b (train.py",
        ),
    ],
)
def test_last_words_are_the_exceptions_class_and_message_and_its_place(
    tmp_path: Path, source: str, words: str
) -> None:
    assert words_of(tmp_path, source)[0].startswith(f"has failed: {words}")


def test_long_last_words_are_cut_and_keep_their_place(tmp_path: Path) -> None:
    words, _ = words_of(tmp_path, "raise ValueError(1000 * '\\u00e9')")
    assert words.endswith("\u00e9 ... (train.py, line 5)")
    assert 360 < len(words.encode()) < 410


@pytest.mark.parametrize(
    "source",
    [
        "",
        "try: 1 / 0\nexcept ZeroDivisionError: pass",
        "raise KeyboardInterrupt",
        "sys.exit('text')",
        "raise errors.PeerLostError('rank 1 was lost')",
        "try: raise errors.PeerLostError('rank 1')\nexcept Exception: raise ValueError('no step')",
        "try: raise errors.PeerLostError('rank 1')\nexcept Exception: raise ValueError('no step') from None",
        "import code\ncode.InteractiveInterpreter().runsource('1 / 0')",
        "import threading\nthreading.Thread(target=lambda: 1 / 0).start()",
    ],
)
def test_there_are_no_last_words_where_no_exception_of_its_own_ends_the_program(
    tmp_path: Path, source: str
) -> None:
    assert words_of(tmp_path, source)[0] == ""


def test_a_session_that_goes_on_after_an_exception_has_no_last_words(tmp_path: Path) -> None:
    words, printed = words_of(tmp_path, "1 / 0\n", "-i", stdin="print('goes on')\n")
    assert (words, "goes on" in printed, "ZeroDivisionError" in printed) == ("", True, True)


def test_a_hook_of_the_programs_own_runs_and_leaves_the_last_words(tmp_path: Path) -> None:
    words, printed = words_of(tmp_path, "sys.excepthook = lambda *found: print('hook', found[1])\n1 / 0\n")
    assert words == "has failed: ZeroDivisionError: division by zero (train.py, line 6)"
    assert printed == "hook division by zero"
