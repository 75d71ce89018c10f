"""A rank whose process dies is known to be dead at once; one whose process lives is never taken for it.

All ranks are fresh interpreters. The subject is what is seen first of a death, and a fork server's proxy of
a rank ends later than the rank.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from pathlib import Path

from launching import Launcher

JOB = str(Path(__file__).with_name("large_job.py"))
MEGABYTES = 300
#: The kernel takes longer to free the memory than others to hear of the death, but on a busy machine all may
#: be late.
ATTEMPTS = 20


def one_loss(folder: Path) -> tuple[list[float], float]:
    """Lose a rank of three: when each survivor has heard of it, and when its files were closed."""
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    closed: list[float] = []

    def read_to_the_end() -> None:
        with (folder / "pipe").open("rb") as pipe:
            pipe.read()
        closed.append(time.monotonic())

    reader = threading.Thread(target=read_to_the_end, daemon=True)  # a job that fails may never open the pipe
    reader.start()
    argv = [sys.executable, JOB, str(folder), str(MEGABYTES)]
    status, out, err = Launcher(folder).run("-np", "3", "--min-np", "2", argv=argv)
    assert status == 0, err
    reader.join(60)
    heard = re.findall(r"heard (\S+) marked (\d+) by (.*)", out)
    assert len(heard) == 2, out
    for _, marked, error in heard:
        assert marked == "1", "the kernel has marked its word, whatever else was seen first"
        assert re.search(
            r"rank 1 \(pid \d+ on \S+\) was lost to rank [02]"
            r"|process 1 on localhost was killed by SIGKILL",  # the launcher's report, if it came first
            error,
        )
    # Its exit may come after the end of the others.
    loss = (
        r"process 1 on localhost was killed by SIGKILL; the (job continues|others have finished without it)"
    )
    assert re.search(loss, err), err
    return [float(at) for at, _, _ in heard], closed[0]


def test_survivors_hear_of_a_death_before_the_memory_is_free(tmp_path: Path) -> None:
    found = []
    for attempt in range(ATTEMPTS):
        heard, closed = one_loss(tmp_path / str(attempt))
        found.append(max(heard) - closed)
        if found[-1] < 0:
            return
    raise AssertionError(f"heard so many seconds after its files were closed: {found}")


def test_rank_that_exits_without_leave_ends_the_job_though_others_have_gone_on(launcher: Launcher) -> None:
    source = (
        "import os, signal\n"
        "import numpy as np\n"
        "import polyhvd.numpy as hvd\n"
        "hvd.init()\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    while state.step < 100000:\n"
        "        if hvd.rank() == 1 and hvd.size() == 3 and state.step == 3:\n"
        "            os.kill(os.getppid(), signal.SIGSTOP)  # the agent, which reports its end\n"
        "            os._exit(7)\n"
        "        if hvd.size() == 2 and state.step == 10: os.kill(os.getppid(), signal.SIGCONT)\n"
        "        hvd.allreduce(np.ones(5), name='x')\n"
        "        state.step += 1\n"
        "        state.commit()\n"
        "train(hvd.elastic.ArrayState(step=0))\n"
        "print('trained')\n"
    )
    began = time.monotonic()
    status, out, err = launcher.run("-np", "3", "--min-np", "1", source=source, fresh=True)
    assert (status, "trained" in out) == (7, False)  # they end at their next commit ...
    assert time.monotonic() < began + 25.0  # ... and not by SIGKILL, which comes after 30 s
    assert "polyhvdrun: process 1 on localhost exited with status 7" in err
    assert "the job continues" not in err


def test_what_a_process_does_without_ending_is_no_death(launcher: Launcher) -> None:
    source = (
        "import os, signal, subprocess, sys, threading\n"
        "import numpy as np\n"
        "import polyhvd.numpy as hvd\n"
        "def fork():\n"
        "    child = os.fork()\n"
        "    if child == 0: os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "def thread():\n"
        "    started = threading.Thread(target=lambda: hvd.allreduce(np.ones(3), name='thread'))\n"
        "    started.start()\n"
        "    started.join()\n"
        "def stop():\n"
        "    code = f'import os; os.kill({os.getpid()}, 19); os.kill({os.getpid()}, 18)'\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
        "hvd.init()\n"
        "for number, happens in enumerate((fork, thread, stop)):\n"
        "    if hvd.rank() == number or happens is thread: happens()\n"
        "    total = hvd.allreduce(np.ones(3), op=hvd.Sum, name='sum')\n"
        "    assert total.tolist() == 3 * [hvd.size()]\n"
        "    assert hvd.counters()['deaths_marked'] == 0\n"
        "print('well', flush=True)\n"
    )
    status, out, err = launcher.run("-np", "3", "--min-np", "3", source=source, fresh=True)
    assert (status, out.count("well")) == (0, 3), err


def test_worlds_after_each_other_leave_no_thread_and_no_death(launcher: Launcher) -> None:
    source = (
        "import os, time\n"
        "import numpy as np\n"
        "import polyhvd.numpy as hvd\n"
        "threads = lambda: len(os.listdir('/proc/self/task'))\n"
        "for number in range(50):\n"
        "    hvd.init()\n"
        "    before = before if number else threads()\n"
        "    hvd.allreduce(np.ones(3), name='sum')\n"
        "    assert hvd.counters()['deaths_marked'] == 0\n"
        "    hvd.shutdown()\n"
        "until = time.monotonic() + 30\n"
        "while threads() > before:\n"  # one that was joined is listed for a moment longer
        "    assert time.monotonic() < until, threads()\n"
        "print('well', flush=True)\n"
    )
    status, out, err = launcher.run("-np", "2", "--min-np", "2", source=source, fresh=True)
    assert (status, out.count("well")) == (0, 2), err


def test_a_new_rank_whose_validation_counts_epochs_from_0_is_a_warning(
    launcher: Launcher, tmp_path: Path
) -> None:
    source = (
        "import os, sys\n"
        "import numpy as np\n"
        "import polyhvd.numpy as hvd\n"
        "from polyhvd.data import ArrayLoader\n"
        "hvd.init()\n"
        "lost = sys.argv[1]\n"
        "validation = ArrayLoader([np.arange(24)], batch_size=2)\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    while state.epoch < 6:\n"
        "        if hvd.rank() == 1 and state.epoch == 2 and not os.path.exists(lost):\n"
        "            open(lost, 'w').close()\n"
        "            os.kill(os.getpid(), 9)\n"
        "        for batch in validation: hvd.allreduce(np.ones(1), name='loss')\n"
        "        state.epoch += 1\n"
        "        state.commit()\n"
        "train(hvd.elastic.ArrayState(epoch=0))\n"
        "print('done')\n"
    )
    (tmp_path / "train.py").write_text(source)
    argv = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "lost")]
    status, out, err = launcher.run("-np", "2", "--min-np", "2", "--spares", "1", argv=argv)
    assert status == 0, err
    assert len(re.findall(r"\] done", out)) == 2
    assert re.search(r"position 'epoch': \d on rank 0; 0 on rank 1; .* some rows are read twice", err), err
