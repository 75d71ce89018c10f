"""Signals to a job: who gets them, how often, and how much time ranks have for a last checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from launching import RANK, WAITING, Launcher, assert_gone, below, pids, wait_until
from ranks_alive import is_running

from polyhvd.testing.processes import state_of

#: Saves a checkpoint of `seconds` when it gets a signal, and counts the signals.
SAVING = RANK + (
    "handled = []\n"
    "def save(number, _):\n"
    "  handled.append(number)\n"
    "  time.sleep({seconds})\n"
    "  os.write(1, b'saved %d %d\\n' % (rank, len(handled)))\n"
    "  os._exit(0)\n"
    "signal.signal(signal.{name}, save)\n"
    "os.write(1, b'pid %d\\n' % os.getpid())\n"
    "while True: time.sleep(60)\n"
)


def saving(seconds: float, name: str = "SIGTERM") -> str:
    return SAVING.format(seconds=seconds, name=name)


def everyone(launcher: Launcher) -> list[int]:
    """The launcher and all processes below it, parents first."""
    assert launcher.process is not None
    return [launcher.process.pid, *below(launcher.process.pid)]


def send(processes: list[int], number: int) -> None:
    for pid in processes:
        os.kill(pid, number)


@pytest.mark.parametrize("upwards", [False, True], ids=["parents-first", "children-first"])
def test_checkpoint_is_saved_once_when_every_process_gets_sigterm(launcher: Launcher, upwards: bool) -> None:
    launcher.start("-np", "3", source=saving(0.5))
    ranks = pids(launcher.wait_for("pid ", 3))
    processes = everyone(launcher)
    send(processes[::-1] if upwards else processes, signal.SIGTERM)
    status, out, _ = launcher.finish()
    assert status == 143
    assert sorted(line for line in out.splitlines() if "saved" in line) == [
        f"[{r}] saved {r} 1" for r in range(3)
    ]
    assert_gone(ranks)


def test_ranks_without_a_handler_end_at_once_where_all_but_they_get_sigterm(launcher: Launcher) -> None:
    """As ``pkill -f polyhvd`` does it."""
    launcher.start("-np", "2", "--term-grace-s", "600", source=WAITING)
    ranks = pids(launcher.wait_for("pid ", 2))
    send([pid for pid in everyone(launcher) if pid not in ranks], signal.SIGTERM)
    assert launcher.finish(30.0)[0] == 143
    assert_gone(ranks)


@pytest.mark.parametrize("all_get_it", [True, False], ids=["all", "all but ranks"])
def test_ranks_with_a_handler_save_once_whether_they_or_only_the_agents_get_sigterm(
    launcher: Launcher, all_get_it: bool
) -> None:
    source = saving(0.5).replace("handled = []", "import polyhvd.numpy as hvd; hvd.init(); handled = []")
    launcher.start("-np", "2", "--term-grace-s", "600", source=source)
    ranks = pids(launcher.wait_for("pid ", 2))
    send([pid for pid in everyone(launcher) if all_get_it or pid not in ranks], signal.SIGTERM)
    status, out, _ = launcher.finish()
    assert status == 143
    assert sorted(line for line in out.splitlines() if "saved" in line) == [
        f"[{r}] saved {r} 1" for r in range(2)
    ]
    assert_gone(ranks)


def test_a_rank_that_has_handled_many_other_signals_saves_as_well(launcher: Launcher) -> None:
    """As with a timer: more signals than the pipe to the agent holds, and some heartbeats later SIGTERM."""
    many = (
        "import polyhvd.numpy as hvd; hvd.init(); handled = []\n"
        "signal.signal(signal.SIGALRM, lambda *_: None)\n"
        "for _ in range(70000): signal.raise_signal(signal.SIGALRM)\n"
        "time.sleep(2)\n"
    )
    source = saving(0.5).replace("handled = []\n", many)
    assert many in source
    launcher.start("-np", "1", "--term-grace-s", "600", "--heartbeat-timeout-s", "3", source=source)
    (rank,) = pids(launcher.wait_for("pid ", 1))
    send([pid for pid in everyone(launcher) if pid != rank], signal.SIGTERM)
    assert "[0] saved 0 1" in launcher.finish(30.0)[1]


def test_checkpoint_is_saved_although_another_rank_dies_of_the_signal(launcher: Launcher) -> None:
    source = saving(0.5).replace("signal.signal(", "if rank: signal.signal(")
    launcher.start("-np", "2", source=source)
    launcher.wait_for("pid ", 2)
    send(everyone(launcher)[::-1], signal.SIGTERM)
    status, out, _ = launcher.finish()
    assert status == 143
    assert "[1] saved 1 1" in out


def test_checkpoint_may_take_longer_than_three_seconds(launcher: Launcher) -> None:
    launcher.start("-np", "1", source=saving(4))
    launcher.wait_for("pid ", 1)
    launcher.signal(signal.SIGTERM)
    assert "[0] saved 0 1" in launcher.finish()[1]


def test_rank_that_is_stopped_ends_without_waiting_for_the_grace_period(launcher: Launcher) -> None:
    launcher.start("-np", "2", "--term-grace-s", "600", source=WAITING)
    ranks = pids(launcher.wait_for("pid ", 2))
    os.kill(ranks[0], signal.SIGSTOP)
    launcher.signal(signal.SIGTERM)
    assert launcher.finish()[0] == 143
    assert_gone(ranks)


def test_sigterm_to_the_agent_alone_is_passed_on_gently(launcher: Launcher) -> None:
    launcher.start("-np", "2", source=saving(0.5))
    ranks = pids(launcher.wait_for("pid ", 2))
    assert launcher.process is not None
    agent = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGTERM)
    _, out, _ = launcher.finish()
    assert "[0] saved 0 1" in out
    assert "[1] saved 1 1" in out


def test_agent_kills_when_its_own_grace_period_is_over(launcher: Launcher) -> None:
    source = WAITING.replace("os.write", "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write")
    launcher.start("-np", "2", "--term-grace-s", "0.3", source=source)
    ranks = pids(launcher.wait_for("pid ", 2))
    agent = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGTERM)
    assert launcher.finish()[0] == 137
    assert_gone(ranks)


def test_hangup_and_sigterm_together_are_no_impatience(launcher: Launcher) -> None:
    # As a closed session sends them.
    source = saving(0.5).replace("def save", "signal.signal(signal.SIGHUP, lambda *_: None)\ndef save")
    launcher.start("-np", "2", source=source)
    launcher.wait_for("pid ", 2)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
        launcher.signal(number)
    _, out, _ = launcher.finish()
    assert "[0] saved 0 1" in out
    assert "[1] saved 1 1" in out


def test_job_ends_although_a_thread_that_blocks_signals_has_started_it(launcher: Launcher) -> None:
    blocking = (
        "import os, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    before = [sys.executable, "-c", blocking]
    status, out, _ = launcher.start("-np", "2", argv=["sh", "-c", "echo up; exit 3"], before=before).finish()
    assert (status, sorted(out.splitlines())) == (3, ["[0] up", "[1] up"])


def test_second_ctrl_c_kills_although_the_grace_period_is_long(launcher: Launcher) -> None:
    source = RANK + (
        "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'asked\\n'))\n"
        "os.write(1, b'pid %d\\n' % os.getpid())\n"
        "while True: time.sleep(60)\n"
    )
    launcher.start("-np", "2", "--term-grace-s", "600", source=source)
    ranks = pids(launcher.wait_for("pid ", 2))
    launcher.signal(signal.SIGTERM)
    launcher.wait_for("asked", 2)
    launcher.signal(signal.SIGINT)
    assert launcher.finish()[0] == 143
    assert_gone(ranks)


def test_job_below_nohup_outlives_its_terminal(launcher: Launcher, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    source = RANK + (
        "os.write(1, b'pid %d\\n' % os.getpid())\n"
        f"while not os.path.exists({str(flag)!r}): time.sleep(0.01)\n"
        "print('hangup is', signal.getsignal(signal.SIGHUP).name)\n"
    )
    launcher.start("-np", "2", source=source, before=["sh", "-c", 'trap "" HUP; exec "$@"', "sh"])
    launcher.wait_for("pid ", 2)
    send(everyone(launcher), signal.SIGHUP)
    flag.touch()
    status, out, _ = launcher.finish()
    assert status == 0
    assert out.count("hangup is SIG_IGN") == 2


#: Counts SIGUSR1 until SIGUSR2 comes.
COUNTING = RANK + (
    "count = 0\n"
    "def up(*_):\n"
    "  global count; count += 1; os.write(1, b'up %d\\n' % count)\n"
    "signal.signal(signal.SIGUSR1, up)\n"
    "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(f'{count} in all'))\n"
    "os.write(1, b'pid %d\\n' % os.getpid())\n"
    "while True: time.sleep(60)\n"
)


@pytest.mark.parametrize("shell", [False, True], ids=["python", "behind-a-shell"])
def test_user_signals_to_the_launcher_reach_the_ranks_once(launcher: Launcher, shell: bool) -> None:
    argv = [sys.executable, launcher.script(COUNTING)]
    launcher.start("-np", "2", argv=["sh", "-c", '"$@"; exit $?', "sh", *argv] if shell else argv)
    launcher.wait_for("pid ", 2)
    for count in (1, 2):
        launcher.signal(signal.SIGUSR1)
        launcher.wait_for(f"up {count}", 2)
    launcher.signal(signal.SIGUSR2)
    assert "] 2 in all" in launcher.finish()[2]


def test_user_signal_to_every_process_reaches_each_rank_once(launcher: Launcher) -> None:
    launcher.start("-np", "2", source=COUNTING)
    launcher.wait_for("pid ", 2)
    send(everyone(launcher), signal.SIGUSR1)
    launcher.wait_for("up 1", 2)
    launcher.signal(signal.SIGUSR2)  # on the way that another SIGUSR1 would have taken
    assert launcher.finish()[2].count("] 1 in all") > 0
    assert b"up 2" not in launcher.out


def test_user_signal_does_not_kill_ranks_or_children_that_do_not_catch_it(
    launcher: Launcher, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    source = RANK + (
        "if rank == 0: signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'got it\\n'))\n"
        "child = os.fork()\n"
        "if child == 0: signal.signal(signal.SIGUSR1, signal.SIG_DFL)\n"
        "os.write(1, b'pid %d\\n' % os.getpid())\n"
        f"while not os.path.exists({str(flag)!r}): time.sleep(0.01)\n"
        "if child == 0: os._exit(0)\n"
        "sys.exit(os.waitpid(child, 0)[1])\n"
    )
    launcher.start("-np", "2", source=source)
    launcher.wait_for("pid ", 4)
    launcher.signal(signal.SIGUSR1)
    launcher.wait_for("got it", 1)
    flag.touch()
    assert launcher.finish()[0] == 0


def test_sigusr2_to_the_launcher_has_ranks_write_flight_dumps(launcher: Launcher, tmp_path: Path) -> None:
    launcher.start("-np", "2", source="import polyhvd.numpy as hvd\nhvd.init()\n" + WAITING)
    ranks = pids(launcher.wait_for("pid ", 2))
    launcher.signal(signal.SIGUSR2)

    def dumped() -> bool:
        names = [path.name for path in tmp_path.rglob("*.json")]
        return all(any(str(pid) in name for name in names) for pid in ranks)

    wait_until(dumped, "a flight dump of each rank")
    launcher.signal(signal.SIGTERM)
    assert launcher.finish()[0] == 143


def test_a_rank_that_stays_stopped_is_reported_once(launcher: Launcher) -> None:
    """The launcher waits for its end, and no other rank is left to notice."""
    stop = "print('pid', os.getpid(), flush=True)\nif rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
    launcher.start("-np", "2", source=RANK + stop, fresh=True)
    stopped = pids(launcher.wait_for("[1] pid ", 1).partition(b"[1] ")[2])[0]
    launcher.wait_for("[1] polyhvd agent: ", 1, error=True)
    os.kill(stopped, signal.SIGCONT)
    status, _, err = launcher.finish()
    assert status == 0
    assert err.count(f"[1] polyhvd agent: this rank (pid {stopped} on ") == err.count("polyhvd agent") == 1
    assert f"was stopped by a signal, such as SIGSTOP or Ctrl-Z, 5 s ago; `kill -CONT {stopped}`" in err


@pytest.mark.parametrize("first", ["ends", "stops"])
def test_a_rank_that_stays_stopped_is_ended_after_the_limit_of_stalls(launcher: Launcher, first: str) -> None:
    source = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "print('pid', os.getpid(), flush=True)\n"
        "signal.sigwait([signal.SIGUSR1])\n"
    )
    limit = {"POLYHVD_STALL_SHUTDOWN_TIME_SECONDS": "0.5"}
    launcher.start("-np", "2", source=RANK + source, fresh=True, env=limit)
    out = launcher.wait_for("pid ", 2)
    ends, stops = (pids(out.partition(f"[{rank}] ".encode())[2])[0] for rank in range(2))
    if first == "stops":
        send([stops], signal.SIGSTOP)
        wait_until(lambda: state_of(stops) == "T", "rank 1 stops")
    send([ends], signal.SIGUSR1)
    wait_until(lambda: not is_running(ends), "rank 0 ends")
    send([stops], signal.SIGSTOP)
    status, _, err = launcher.finish()
    assert status == 137
    assert "rank 1 on localhost was ended by its agent: it was stopped by a signal for 5.5 s" in err


@pytest.mark.parametrize("is_late", [False, True], ids=["at-once", "together-with-the-end"])
def test_a_host_whose_ranks_are_all_stopped_may_go_on(launcher: Launcher, is_late: bool) -> None:
    """One has ended before, whether its agent has noticed that or not."""
    source = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "print('agent', os.getppid(), 'pid', os.getpid(), flush=True)\n"
        "signal.sigwait([signal.SIGUSR1])\n"
    )
    limit = {"POLYHVD_STALL_SHUTDOWN_TIME_SECONDS": "0.001"}
    launcher.start("-np", "3", source=RANK + source, fresh=True, env=limit)
    out = launcher.wait_for("pid ", 3)
    ended = pids(out.partition(b"[2] ")[2])[0]
    agent = int(out.partition(b"agent ")[2].split()[0])
    if is_late:
        os.kill(agent, signal.SIGSTOP)
    os.kill(ended, signal.SIGUSR1)
    if is_late:
        wait_until(lambda: not is_running(ended), "rank 2 ends")
    else:
        wait_until(lambda: not state_of(ended), "the agent notices that rank 2 has ended")
    ranks = [pid for pid in pids(out) if pid != ended]
    send(ranks, signal.SIGSTOP)
    wait_until(lambda: all(state_of(pid) == "T" for pid in ranks), "the other ranks stop")
    os.kill(agent, signal.SIGCONT)
    launcher.wait_for("polyhvd agent: ", 2, error=True)
    time.sleep(1)  # both would have been ended
    send(ranks, signal.SIGCONT)
    send(ranks, signal.SIGUSR1)
    assert launcher.finish()[0] == 0
