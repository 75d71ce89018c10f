"""Jobs that lose processes and gain others, with real kills: they go on from the newest commit."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest
from launching import Launcher, assert_gone

from polyhvd.launch.elastic.driven import RESUME_STATUS

JOB = str(Path(__file__).with_name("elastic_job.py"))
STEPS = 30
#: Every step adds its number, whatever the size of the world.
WEIGHT = float(sum(range(1, STEPS + 1)))


def run(launcher: Launcher, *options: str, kills: tuple[str, ...] = ()) -> tuple[int, list[str], str]:
    """The status, the ends that ranks have printed, and the launcher's output."""
    folder = launcher._folder
    status, out, err = launcher.run(*options, argv=[*launcher.python(), JOB, str(folder), *kills])
    for kill in kills:
        assert (folder / f"killed {kill}").exists(), f"nobody was at {kill}:\n{out}\n{err}"
    said = "\n".join(line for line in err.splitlines() if line.startswith("polyhvdrun:"))
    return status, re.findall(r"end .*", out), said


def end(size: int) -> str:
    return f"end {STEPS} [{WEIGHT}] 1 size {size}"


@pytest.mark.parametrize(
    ("kills", "lost"),
    [
        (("step:1:7",), 1),
        (("step:0:7",), 1),
        (("commit:2:7",), 1),
        (("step:0:0",), 1),
        (("step:1:7", "step:2:7"), 2),
        (("step:0:7", "step:1:7"), 2),
        (("step:1:7", "meet:0:2:hello"), 2),
        (("step:1:7", "meet:1:2:done"), 2),
        (("step:1:7", "sync:0:2"), 2),
        (("step:1:7", "sync:1:2"), 2),
        (("step:1:7", "init"), 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_job_goes_on_from_the_newest_commit(launcher: Launcher, kills: tuple[str, ...], lost: int) -> None:
    status, ends, said = run(launcher, "-np", "3", "--min-np", "1", kills=kills)
    assert (status, ends) == (0, len(ends) * ends[:1]), said
    assert re.fullmatch(rf"end {STEPS} \[{WEIGHT}\] 1 size [1-3]", ends[0])
    assert f"the job has continued after the loss of {lost} process" in said


def test_kills_in_the_recovery_from_a_recovery_do_not_end_the_job(launcher: Launcher) -> None:
    kills = ("step:1:7", "sync:1:2", "sync:1:3")
    status, ends, said = run(launcher, "-np", "4", "--min-np", "1", kills=kills)
    assert (status, ends) == (0, len(ends) * ends[:1]), said
    assert "the job has continued after the loss of 3 processes" in said


def test_spare_takes_the_place_at_once(launcher: Launcher) -> None:
    status, ends, said = run(launcher, "-np", "2", "--min-np", "2", "--spares", "1", kills=("step:1:7",))
    assert (status, ends) == (0, 2 * [end(2)]), said
    assert "generation 2: 2 ranks" in said
    assert "generation 3" not in said


def test_last_rank_that_waits_for_others_without_a_collective_is_joined(launcher: Launcher) -> None:
    source = (
        "import os, signal, time\n"
        "import polyhvd.numpy as hvd\n"
        "hvd.init()\n"
        "state = hvd.elastic.ArrayState(step=0)\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    if os.environ['POLYHVD_MEMBER'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    if state.step == 0:\n"
        "        hvd.barrier()\n"
        "    state.step += 1\n"
        "    while hvd.size() == 1:\n"
        "        state.commit()\n"
        "        time.sleep(0.001)\n"
        "    print('end', hvd.size(), flush=True)\n"
        "train(state)\n"
    )
    status, out, err = launcher.run("-np", "2", "--min-np", "1", source=source)
    assert status == 0, err
    assert re.findall(r"end \d", out) == ["end 2", "end 2"]


@pytest.mark.parametrize("kill", ["meet:0:2:hello", "meet:1:2:done"])
def test_new_process_outlives_another_that_dies_while_they_meet(launcher: Launcher, kill: str) -> None:
    kills = ("step:1:7", kill)
    options = ("-np", "3", "--min-np", "2", "--spares", "1")
    status, ends, said = run(launcher, *options, kills=kills)
    assert (status, set(ends) <= {end(2), end(3)}) == (0, True), said
    assert "the job has continued after the loss of 2 processes" in said


@pytest.mark.parametrize("kill", ["meet:2:3:hello", "meet:2:3:done", "sync:2:3"])
def test_newcomer_that_dies_while_it_joins_undoes_nothing(launcher: Launcher, kill: str) -> None:
    os.environ["STEPS"], os.environ["STEP_S"] = "30", "0.05"
    try:
        status, ends, said = run(launcher, "-np", "3", "--min-np", "2", kills=("step:1:2", kill))
    finally:
        del os.environ["STEPS"], os.environ["STEP_S"]
    assert (status, len(ends) * ends[:1]) == (0, ends), said
    assert ends[0].startswith(f"end {STEPS} [{WEIGHT}] 1 ")


SLOTS_REST = ("-np", "3", "--min-np", "2", "--blacklist-cooldown-range", "600", "600")


def test_world_shrinks_to_min_np(launcher: Launcher) -> None:
    status, ends, said = run(launcher, *SLOTS_REST, kills=("step:1:7",))
    assert (status, ends) == (0, 2 * [end(2)]), said


def test_too_few_end_the_job_with_a_status_that_says_resume_me(launcher: Launcher) -> None:
    kills = ("step:1:9", "step:0:9")
    status, ends, said = run(launcher, *SLOTS_REST, "--elastic-timeout", "1", kills=kills)
    assert (status, ends) == (RESUME_STATUS, [])
    assert "1 process is left, fewer than --min-np 2, and no more have appeared within 1 s" in said
    assert f"status {RESUME_STATUS}: run the job again, to resume from its checkpoint" in said


def test_reset_limit_ends_the_job_with_the_status_of_the_cause(launcher: Launcher) -> None:
    status, ends, said = run(launcher, "-np", "2", "--min-np", "1", "--reset-limit", "0", kills=("step:1:7",))
    assert (status, ends) == (137, [])
    assert "the world has changed 1 times, and --reset-limit is 0" in said
    assert said.endswith("process 1 on localhost was killed by SIGKILL")


def test_world_changes_in_the_outermost_of_nested_functions_alone(launcher: Launcher) -> None:
    source = (
        "import os, signal\n"
        "import numpy as np\n"
        "import polyhvd.numpy as hvd\n"
        "from polyhvd.runtime import current\n"
        "def is_first_rank_1():  # whichever process that is: the spare may have come before it\n"
        "    return hvd.rank() == 1 and current.world().placement.generation == 1\n"
        "hvd.init()\n"
        "outer = hvd.elastic.ArrayState(total=np.zeros(3), step=0)\n"
        "inner = hvd.elastic.ArrayState(seen=np.zeros(3), i=0)\n"
        "@hvd.elastic.run\n"
        "def evaluate(inner):\n"
        "    while inner.i < 4:\n"
        "        inner.seen += hvd.allreduce(np.ones(3), name='inner')\n"
        "        inner.i += 1\n"
        "        if is_first_rank_1() and (outer.step, inner.i) == (2, 2):\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        inner.commit()\n"
        "    return float(inner.seen[0])\n"
        "@hvd.elastic.run\n"
        "def train(outer):\n"
        "    while outer.step < 4:\n"
        "        outer.total += hvd.allreduce(np.ones(3), name='outer')\n"
        "        outer.step += 1\n"
        "        inner.i, inner.seen[:] = 0, 0\n"
        "        outer.total += evaluate(inner)\n"
        "        outer.commit()\n"
        "train(outer)\n"
        "os.write(1, b'end %d %g size %d\\n' % (outer.step, outer.total[0], hvd.size()))\n"
    )
    # The newcomer is ready at once, and is in the world whose others have been within both functions.
    launcher.start("-np", "3", "--min-np", "3", "--spares", "1", source=source)
    status, out, err = launcher.finish()
    assert (status, out.count("end 4 20 size 3")) == (0, 3), f"{out}\n{err}"


@pytest.mark.parametrize("way", ["run", "train", "train with checkpoints"])
def test_newcomer_does_not_do_again_what_others_have_done(launcher: Launcher, way: str) -> None:
    folder = str(launcher._folder / "checkpoints") if way == "train with checkpoints" else None
    source = (
        "import os, signal, sys\n"
        "import numpy as np\n"
        "import polyhvd.numpy as hvd\n"
        "from polyhvd.data import ArrayLoader\n"
        "from polyhvd.runtime import current\n"
        "def is_first_rank_1():  # whichever process that is: the spare may have come before it\n"
        "    return hvd.rank() == 1 and current.world().placement.generation == 1\n"
        "hvd.init()\n"
        "state = hvd.elastic.ArrayState(total=np.zeros(1), steps=0)\n"
        "phase = 0\n"
        "def step(batch):\n"
        "    state.total += hvd.allreduce(np.ones(1), name='step')\n"
        "    state.steps += 1\n"
        "    if is_first_rank_1() and phase == 2 and state.steps == 13:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "@hvd.elastic.run\n"
        "def run(state, until):\n"
        "    while state.steps < until:\n"
        "        step(None)\n"
        "        state.commit()\n"
        "for phase in 1, 2:\n"
        f"    if {way!r} == 'run':\n"
        "        run(state, 10 * phase)\n"
        "    else:\n"
        "        loader = ArrayLoader([np.arange(60)], batch_size=6)\n"
        f"        options = dict(checkpoint={folder!r}, progress=False)\n"
        "        hvd.elastic.train(step, state, loader, epochs=3, **options)\n"
        "os.write(1, b'end %d %g size %d\\n' % (state.steps, state.total[0], hvd.size()))\n"
    )
    # The spare takes the place at once.
    launcher.start("-np", "3", "--min-np", "3", "--spares", "1", source=source)
    status, out, err = launcher.finish()
    assert "call 1 is skipped" in err
    assert status == 0, err
    steps = 20 if way == "run" else 24  # an epoch of 60 rows is 3 steps of 18 and one of 6
    assert out.count(f"end {steps} {steps} size 3") == 3, f"{out}\n{err}"


def test_error_of_the_program_s_own_is_not_retried(launcher: Launcher) -> None:
    source = (
        "import polyhvd.numpy as hvd\n"
        "hvd.init()\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    state.commit()\n"
        "    if hvd.rank() == 1: raise KeyError('mine')\n"
        "    hvd.barrier()\n"
        "train(hvd.elastic.ArrayState(step=0))\n"
    )
    status, _, err = launcher.run("-np", "3", "--min-np", "1", source=source)
    assert status == 1
    assert "polyhvdrun: process 1 on localhost exited with status 1" in err
    assert err.rstrip().endswith("KeyError: 'mine'")
    assert "the job continues" not in err


def test_ranks_that_disagree_are_not_retried(launcher: Launcher) -> None:
    source = (
        "import numpy as np\n"
        "import polyhvd.numpy as hvd\n"
        "hvd.init()\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    hvd.allreduce(np.ones(1 + hvd.rank()), name='x')\n"
        "train(hvd.elastic.ArrayState(step=0))\n"
    )
    status, _, err = launcher.run("-np", "2", "--min-np", "1", source=source)
    assert status == 1
    assert "RankMismatchError" in err


def test_failure_that_recurs_ends_the_job_with_its_first_cause(launcher: Launcher) -> None:
    source = (
        "import os\n"
        "import polyhvd.numpy as hvd\n"
        "hvd.init()\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    if hvd.rank() == hvd.size() - 1: os.kill(os.getpid(), 11)\n"
        "    hvd.barrier()\n"
        "train(hvd.elastic.ArrayState(step=0))\n"
    )
    status, _, err = launcher.run("-np", "4", "--min-np", "1", source=source)
    assert status == 139
    assert "2 worlds in a row have failed before a commit" in err
    assert "polyhvdrun: process 3 on localhost was killed by SIGSEGV" in err.splitlines()[-1]


def test_failure_without_a_loss_that_recurs_ends_the_job_with_its_text(launcher: Launcher) -> None:
    source = (
        "import polyhvd.numpy as hvd\n"
        "hvd.init()\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    hvd.barrier()\n"
        "    raise hvd.PeerLostError('of my own')\n"
        "train(hvd.elastic.ArrayState(step=0))\n"
    )
    status, _, err = launcher.run("-np", "2", "--min-np", "1", source=source)
    assert status == 1
    text = "2 worlds in a row have failed before a commit; process 0 reports: of my own"
    assert f"polyhvdrun: {text}" in err.splitlines()


def test_job_that_is_not_elastic_says_so_and_fails(launcher: Launcher) -> None:
    source = (
        "import os, signal\n"
        "import polyhvd.numpy as hvd\n"
        "hvd.init()\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"  # after 0.5 s, which is too early on a busy machine
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    if hvd.rank() == 1: os._exit(9)\n"
        "    hvd.barrier()\n"
        "train(hvd.elastic.ArrayState(step=0))\n"
    )
    status, _, err = launcher.run("-np", "2", source=source)
    assert status == 9
    assert "this job is not elastic" in err
    assert "polyhvdrun --min-np" in err


WAITING = (
    "import os, time\n"
    "import polyhvd.numpy as hvd\n"
    "os.write(1, b'pid %d\\n' % os.getpid())\n"
    "hvd.init()\n"
    "@hvd.elastic.run\n"
    "def train(state):\n"
    "    os.write(1, b'training\\n')\n"
    "    while True:\n"
    "        hvd.barrier(); time.sleep(0.01); state.commit()\n"
    "train(hvd.elastic.ArrayState(step=0))\n"
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signal_to_the_launcher_ends_everything(launcher: Launcher, number: int) -> None:
    # In fresh interpreters, which are the launcher's to end.
    launcher.start("-np", "2", "--min-np", "1", "--spares", "1", source=WAITING, fresh=True)
    launcher.wait_for("training", 2)
    pids = [int(text) for text in re.findall(rb"pid (\d+)", launcher.wait_for("pid", 3))]
    launcher.signal(number)
    status, _, _ = launcher.finish()
    assert status == (-9 if number == signal.SIGKILL else 128 + number)
    assert_gone(pids)


@pytest.mark.parametrize("way", ["script", "file", "python"])
def test_job_grows_when_discovery_finds_a_host(launcher: Launcher, tmp_path: Path, way: str) -> None:
    script, hosts = tmp_path / "hosts é.sh", tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    script.write_text(f"#!/bin/sh\ncat '{hosts}'\n")
    script.chmod(0o755)
    (tmp_path / "cluster.py").write_text(
        "from polyhvd.launch.elastic.discovery import HostDiscovery\n"
        "class Cluster(HostDiscovery):\n"
        "    def find_available_hosts_and_slots(self):\n"
        f"        lines = [line for line in open({str(hosts)!r}) if ':' in line]\n"
        "        return {name: int(slots) for name, slots in (line.split(':') for line in lines)}\n"
    )
    found = {
        "script": ("--host-discovery-script", str(script)),
        "file": ("--hostfile", str(hosts)),
        "python": ("--host-discovery-script", "cluster:Cluster"),
    }[way]
    # As of a program with many files: select() takes no descriptor above 1023.
    open_many = (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "while os.open('/dev/null', os.O_RDONLY) < 1024: pass\n"
    )
    may_open_many = way == "file" and resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 2048
    source = (
        "import os, resource\n"
        "import time\n"
        f"{open_many * may_open_many}"
        "import polyhvd.numpy as hvd\n"
        "hvd.init()\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    os.write(1, b'from %d size %d\\n' % (state.step, hvd.size()))\n"
        "    while not (hvd.size() == 2 and state.grown):\n"
        "        hvd.barrier(); state.step += 1; time.sleep(0.01)\n"
        "        state.grown = state.grown or hvd.size() == 3\n"
        "        state.commit()\n"
        "state = hvd.elastic.ArrayState(step=0, grown=False)\n"
        "train(state)\n"
        "os.write(1, b'end %d\\n' % hvd.size())\n"
    )
    launcher.start(
        "-np", "2", "--min-np", "2", "--max-np", "3", *found, source=source, env={"PYTHONPATH": str(tmp_path)}
    )
    launcher.wait_for("size 2", 2)
    hosts.write_text("localhost:2\n127.0.0.1:5\n")
    launcher.wait_for("size 3", 3)
    hosts.write_text("# gone\nlocalhost:2\n")
    status, out, err = launcher.finish()
    assert (status, out.count("end 2")) == (0, 2), err
    first = [int(text) for text in re.findall(r"from (\d+) size 3", out)]
    assert first[0] > 0
    assert first == 3 * first[:1]  # nothing was undone, and the new rank has begun where the others were
    assert "was killed" not in err
    assert "no more messages from polyhvdrun" not in err


SHRINKS = """
import os
import time
import numpy as np
import polyhvd.numpy as hvd
from polyhvd.data import ArrayLoader
hvd.init()
weights = np.zeros(1)
state = hvd.elastic.ArrayState(weights=weights)
def step(batch):
    hvd.allreduce(np.ones(1), name="step")
    state.weights += 1
    if hvd.rank() == 0:
        os.write(1, b"step %d\\n" % state.weights[0])
    time.sleep(0.02)
hvd.elastic.on_leave(lambda leave: 1 / 0)  # nothing else is lost by that
hvd.elastic.on_leave(lambda leave: os.write(1, b"asked to leave\\n"))
hvd.elastic.train(step, state, ArrayLoader([np.zeros(4000)], batch_size=1), epochs=1, checkpoint=FOLDER)
"""


def test_ranks_are_asked_to_leave_where_the_hosts_have_too_few_slots(
    launcher: Launcher, tmp_path: Path
) -> None:
    hosts, folder = tmp_path / "hosts", tmp_path / "run"
    hosts.write_text("localhost:2\n")
    options = ("-np", "2", "--min-np", "2", "--hostfile", str(hosts), "--elastic-timeout", "1")
    launcher.start(*options, source=SHRINKS.replace("FOLDER", repr(str(folder))))
    launcher.wait_for("step 20", 1)
    hosts.write_text("localhost:1\n")
    status, out, err = launcher.finish()
    assert status == RESUME_STATUS, err
    assert (out.count("asked to leave"), err.count("ZeroDivisionError")) == (2, 2)
    assert "the hosts have 1 slot, fewer than --min-np 2: the job waits 1 s for more" in err
    assert "the hosts have 1 slot, fewer than --min-np 2, and no more have appeared within 1 s" in err
    last = int(re.findall(r"step (\d+)\n", out)[-1])
    assert [path.name for path in folder.glob("c*")] == [f"checkpoint-{last:012d}.npz"]


TRAINS = """
import os
import signal
import sys
import time
import numpy as np
import polyhvd.numpy as hvd
from polyhvd.data import ArrayLoader
hvd.init()
number = int(os.environ["POLYHVD_MEMBER"])
state = hvd.elastic.ArrayState(weights=np.zeros(1))
def step(batch):
    hvd.allreduce(np.ones(1), name="step")
    state.weights += 1
    os.write(1, b"step %d\\n" % state.weights[0])
    if WAY == "exit" and number == 1 and state.weights[0] == 5:
        sys.exit(0)
    if WAY == "raise" and number == 1 and state.weights[0] == 5:
        raise ValueError("not a number")
    if WAY == "lose all" and number < 3:
        pids = hvd.allgather(np.array([os.getpid()]), name="pids")
        if state.weights[0] == 5:  # one kills all: another could go back a step if it came later
            while number:
                time.sleep(1.0)
            for pid in reversed(pids):
                os.kill(pid, signal.SIGKILL)
hvd.elastic.train(step, state, ArrayLoader([np.zeros(20)], batch_size=1), epochs=1)
if WAY == "lose all":  # the next training has lost nothing
    other = hvd.elastic.ArrayState(w=np.zeros(1))
    hvd.elastic.train(lambda batch: None, other, ArrayLoader([np.zeros(2)], batch_size=1), epochs=1)
os.write(1, b"trained %d\\n" % number)
if WAY == "kill" and number == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if WAY in ("kill", "stop"):
    time.sleep(6.0)
os.write(1, b"end %d\\n" % number)
"""


def test_rank_that_is_killed_after_its_training_fails_the_job_once(launcher: Launcher) -> None:
    source = TRAINS.replace("WAY", "'kill'").replace("sleep(6.0)", "sleep(1.0)")
    status, out, err = launcher.run("-np", "3", "--min-np", "1", "-H", "localhost:3", source=source)
    assert (status, out.count("trained"), out.count("end")) == (137, 3, 2), err
    assert err.count("process 1 on localhost was killed by SIGKILL") == 1
    assert "the job continues" not in err
    assert "generation" not in err


@pytest.mark.parametrize("policy", ["fail", "restart"])
def test_loss_of_all_that_had_the_state_is_said_and_ends_the_job_unless_told_otherwise(
    launcher: Launcher, policy: str
) -> None:
    options = ("-np", "3", "--min-np", "3", "-H", "localhost:3", "--on-state-lost", policy)
    status, out, err = launcher.run(*options, source=TRAINS.replace("WAY", "'lose all'"))
    lost = "all processes that had the trained state were lost, and there is no checkpoint"
    if policy == "fail":
        assert (status, out.count("end")) == (RESUME_STATUS, 0), err
        assert set(re.findall(rf"rank (\d) generation 2 ERROR: elastic: {lost}", err)) == {"0"}
        assert "--on-state-lost restart to start from step 0" in err
    else:
        assert (status, out.count("end"), out.count("step 1\n"), err.count(lost)) == (0, 3, 6, 1), err


@pytest.mark.parametrize("policy", ["end", "replace"])
def test_rank_that_raises_ends_the_job_unless_it_is_to_be_replaced(launcher: Launcher, policy: str) -> None:
    options = ("-np", "3", "--min-np", "2", "-H", "localhost:3", "--on-exception", policy)
    status, out, err = launcher.run(*options, source=TRAINS.replace("WAY", "'raise'"))
    assert "ValueError: not a number" in err
    if policy == "end":
        assert (status, out.count("trained"), "the job continues" in err) == (1, 0, False), err
    else:
        assert (status, "trained 0" in out, "trained 2" in out) == (0, True, True), err
        assert "the job continues" in err


def test_rank_that_ends_well_in_mid_training_is_named(launcher: Launcher) -> None:
    options = ("-np", "3", "--min-np", "1", "-H", "localhost:3")
    status, out, err = launcher.run(*options, source=TRAINS.replace("WAY", "'exit'"))
    assert (status, out.count("end")) == (0, 2), err
    said = "process 1 on localhost exited with status 0 before its training was over; the others continue"
    assert said in err


def test_program_with_more_elastic_functions_than_the_pipe_has_room_for_ends_well(launcher: Launcher) -> None:
    source = (
        "import fcntl\n"
        "import polyhvd.numpy as hvd\n"
        "from polyhvd.config import Settings\n"
        "fcntl.fcntl(Settings().report_descriptor, fcntl.F_SETPIPE_SZ, 4096)\n"
        "hvd.init()\n"
        "state = hvd.elastic.ArrayState(calls=0)\n"
        "@hvd.elastic.run\n"
        "def call(state): state.calls += 1\n"
        "for _ in range(1_500): call(state)\n"
        "print('end', state.calls)\n"
    )
    status, out, err = launcher.run("-np", "1", "--min-np", "1", source=source)
    assert (status, out, err) == (0, "[0] end 1500\n", "")


@pytest.mark.parametrize("hosts", ["localhost:2", "localhost:1,127.0.0.1:1"])
def test_ranks_that_finish_while_the_launcher_is_stopped_are_finished(launcher: Launcher, hosts: str) -> None:
    source = TRAINS.replace("WAY", "'stop'")
    launcher.start("-np", "2", "--min-np", "1", "--spares", "1", "-H", hosts, source=source)
    launcher.wait_for("trained", 2)
    launcher.signal(signal.SIGSTOP)
    time.sleep(8.0)  # longer than the heartbeat timeout, after which agents end their ranks
    launcher.signal(signal.SIGCONT)
    status, out, err = launcher.finish()
    assert (status, out.count("trained"), out.count("end")) == (0, 2, 2), err
    assert "generation" not in err


def test_program_that_never_calls_init_runs_once_on_each_rank(launcher: Launcher) -> None:
    command = ["sh", "-c", "echo start"]
    status, out, err = launcher.run("-np", "2", "--min-np", "2", "-H", "localhost:4", argv=command)
    assert (status, out.count("start")) == (0, 2), err


def test_process_that_joins_is_given_no_rank_of_another(launcher: Launcher) -> None:
    names = ("RANK", "SIZE", "CROSS_RANK", "LOCAL_RANK", "LOCAL_SIZE")
    source = (
        "import os, signal\n"
        "member = int(os.environ['POLYHVD_MEMBER'])\n"
        f"printed = [os.environ.get('HOROVOD_' + name) for name in {names}]\n"
        "os.write(1, b'%d is %r\\n' % (member, printed))\n"
        "import polyhvd.numpy as hvd\n"
        "hvd.init()\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    while state.step < 3 or hvd.size() < 2:\n"
        "        hvd.barrier(); state.step += 1; state.commit()\n"
        "        if member == 1 and state.step == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "train(hvd.elastic.ArrayState(step=0))\n"
    )
    status, out, err = launcher.run("-np", "2", "--min-np", "1", "-H", "localhost:2", source=source)
    assert status == 0, err
    printed = dict(re.findall(r"(\d) is (.*)", out))
    assert printed["0"] == "['0', '2', '0', '0', '2']"
    assert printed["2"] == "[None, None, None, '1', '2']"


def test_an_agent_that_is_killed_under_a_stopped_guard_costs_only_its_own_host(
    launcher: Launcher, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    source = (
        "import os, time\nimport numpy as np\nimport polyhvd.numpy as hvd\n"
        "hvd.init()\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    print('agent', os.environ['POLYHVD_MEMBER'], os.getppid(), 'of', hvd.size(), flush=True)\n"
        f"    while not hvd.allreduce(np.array([float(os.path.exists({str(done)!r}))]), name='done')[0]:\n"
        "        time.sleep(0.02)\n"
        "        state.commit()\n"
        "train(hvd.elastic.ArrayState(step=0))\n"
    )
    options = ["-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1", "--heartbeat-timeout-s", "3"]
    launcher.start(*options, source=source, fresh=True)
    out = launcher.wait_for(" of 2", 2)
    agent = int(re.findall(rb"agent 0 (\d+) of 2", out)[0])
    guard = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(guard, signal.SIGSTOP)
    os.kill(agent, signal.SIGKILL)
    launcher.wait_for(" of 2", 4)
    done.touch()
    status, _, err = launcher.finish()
    assert status == 0, err
    assert "process 0 on localhost was lost: the agent ended with status -9; the job continues" in err


def test_job_goes_on_where_the_launcher_has_no_descriptors_left_for_a_host(
    launcher: Launcher, tmp_path: Path
) -> None:
    hosts, done = tmp_path / "hosts", tmp_path / "done"
    hosts.write_text("localhost slots=1\n")
    source = (
        "import os, time\nimport polyhvd.numpy as hvd\nhvd.init()\nprint('up', flush=True)\n"
        f"while not os.path.exists({str(done)!r}): time.sleep(0.05)\n"
    )
    options = ["-np", "1", "--min-np", "1", "--max-np", "2", "--hostfile", str(hosts)]
    launcher.start(*options, source=source)
    launcher.wait_for("up", 1)
    assert launcher.process is not None
    pid = launcher.process.pid
    most = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 2
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
    hosts.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    expected = (
        "on 127.0.0.1 was not started: polyhvdrun cannot start an agent for it: Too many open files; the job"
    )
    launcher.wait_for(expected, 1, error=True)
    done.touch()
    status, _, err = launcher.finish()
    assert status == 0, err


def test_job_goes_on_with_hosts_that_come_in_any_order_or_cannot_be(
    launcher: Launcher, tmp_path: Path
) -> None:
    hosts, done = tmp_path / "hosts", tmp_path / "done"

    def are(*lines: str) -> None:
        new = hosts.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(hosts)

    source = (
        "import os, time\nimport numpy as np\nimport polyhvd.numpy as hvd\n"
        "hvd.init()\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    os.write(1, b'size %d\\n' % hvd.size())\n"
        f"    while not hvd.allreduce(np.array([float(os.path.exists({str(done)!r}))]), name='done')[0]:\n"
        "        time.sleep(0.02)\n"
        "        state.commit()\n"
        "train(hvd.elastic.ArrayState(step=0))\n"
    )
    are("localhost slots=1")
    options = ["-np", "1", "--min-np", "1", "--max-np", "2", "--hostfile", str(hosts)]
    launcher.start(*options, source=source)
    launcher.wait_for("size 1", 1)
    are("localhost slots=2", "127.0.0.9 slots=1")  # the latter is not needed yet
    launcher.wait_for("size 2", 2)
    are("localhost slots=1", "127.0.0.1 slots=1")
    launcher.wait_for("size 2", 4)
    are("localhost slots=1", "127.0.0.9 slots=1")
    launcher.wait_for("127.0.0.9 cannot take part for now: ", 1, error=True)
    are("localhost slots=1", "a..b slots=1")
    launcher.wait_for("a..b cannot take part for now: ", 1, error=True)
    done.touch()
    status, _, err = launcher.finish()
    assert status == 0, err


def test_job_that_was_restarted_grows_when_its_file_of_hosts_does(launcher: Launcher, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=1\n")
    source = (
        "import os, time\nimport polyhvd.numpy as hvd\n"
        "hvd.init()\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    if os.environ['POLYHVD_RESTART_COUNT'] == '0': raise ValueError('of the first start')\n"
        "    os.write(1, b'size %d\\n' % hvd.size())\n"
        "    while hvd.size() == 1:\n"
        "        time.sleep(0.02)\n"
        "        state.commit()\n"
        "    hvd.barrier()\n"
        "train(hvd.elastic.ArrayState(step=0))\n"
    )
    options = ["-np", "1", "--min-np", "1", "--max-np", "2", "--max-restarts", "1", "--hostfile", str(hosts)]
    launcher.start(*options, source=source)
    launcher.wait_for("size 1", 1)
    hosts.write_text("localhost slots=2\n")
    status, out, err = launcher.finish(60.0)
    assert (status, out.count("size 2")) == (0, 2), err


def test_job_outlives_the_directory_in_which_it_was_started(launcher: Launcher, tmp_path: Path) -> None:
    folder, done = tmp_path / "folder", tmp_path / "done"
    folder.mkdir()
    source = (
        "import os, time\nimport numpy as np\nimport polyhvd.numpy as hvd\n"
        "hvd.init()\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    os.write(1, b'pid %d of %d\\n' % (os.getpid(), hvd.size()))\n"
        f"    while not hvd.allreduce(np.array([float(os.path.exists({str(done)!r}))]), name='done')[0]:\n"
        "        time.sleep(0.02)\n"
        "        state.commit()\n"
        "train(hvd.elastic.ArrayState(step=0))\n"
    )
    before = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder)]
    launcher.start("-np", "2", "--min-np", "1", source=source, before=before, fresh=True)
    pid = int(re.findall(rb"pid (\d+) of 2", launcher.wait_for(" of 2", 2))[0])
    folder.rmdir()
    os.kill(pid, signal.SIGKILL)
    launcher.wait_for(f"cannot enter {folder}: ", 1, error=True)
    done.touch()
    status, _, err = launcher.finish()
    assert status == 0, err


def test_discovery_that_fails_is_told_once_and_hosts_stay(launcher: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:2\n")
    script.chmod(0o755)
    started = time.monotonic()
    launcher.start("-np", "2", "--host-discovery-script", str(script), source=WAITING)
    launcher.wait_for("training", 2)
    script.write_text("#!/bin/sh\necho no list >&2\nexit 3\n")
    deadline = started + 60
    while b"discovery" not in launcher.err and time.monotonic() < deadline:
        launcher.wait_for("training", 2)
        launcher._read(launcher.process, time.monotonic() + 1)
    launcher.signal(signal.SIGTERM)
    _, _, err = launcher.finish()
    said = f"discovery of hosts: {script} has ended with status 3: no list; the hosts stay as they are"
    assert err.count(said) == 1


@pytest.mark.parametrize("options", [("--max-np", "4", "-H", "localhost:4"), ("--spares", "1"), ()])
def test_processes_know_ranks_before_init_only_where_each_will_have_its_own(
    launcher: Launcher, options: tuple[str, ...]
) -> None:
    source = (
        "import os\nvariables = [os.environ.get(f'{name}_RANK') for name in ('HOROVOD', 'POLYHVD')]\n"
        "import polyhvd.numpy as hvd\nhvd.init()\n"
        "print('known', *set(variables), 'is', hvd.rank(), flush=True)\n"
        "hvd.barrier()\n"
    )
    status, out, err = launcher.run("-np", "2", "--min-np", "2", *options, source=source)
    assert status == 0, err
    found = {tuple(line.split()[-3::2]) for line in out.splitlines() if "known" in line}
    assert found == ({("None", "0"), ("None", "1")} if options else {("0", "0"), ("1", "1")})
