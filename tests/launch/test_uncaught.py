"""An error of init() that ends a program is one line; who catches it, or looks at it, has all of it."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from joining import DEADLINE_S, ROOT, SECRET, environment, free_port

TRAIN = "import polyhvd.numpy as hvd\n\nhvd.init()\nprint('trained as one of', hvd.size())\n"
WRONG = {"POLYHVD_CYCLE_TIME": "fast"}
LINE = "train.py:3: polyhvd.config.ConfigError: POLYHVD_CYCLE_TIME='fast': must be a finite number"
#: Seconds of the processor, which do not depend on what else the machine does.
CPU_S_MAX = 2.0
SRUN = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "n1", "MASTER_PORT": "2222"}
TORCHRUN = {**BY_HAND, "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "job"}

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def started(
        program: str = TRAIN, *words: str, text: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "train.py"
        path.write_text(program)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, *words, str(path)],
            env=environment(PYTHONPATH=str(ROOT), **variables),
            input=text,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert used < CPU_S_MAX
        return done

    return started


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (WRONG, "ConfigError: POLYHVD_CYCLE_TIME='fast': must be a finite number"),
        ({**SRUN, **BY_HAND}, "ConfigError: init(): variables contradict each other"),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[1-"}, "ConfigError: SLURM_STEP_NODELIST: 'n[1-' is cut off"),
        ({**SRUN, "SLURM_PROCID": "7"}, "ConfigError: init(): rank 7 is not below the size 2"),
        (
            {**BY_HAND, "WORLD_SIZE": "99999999999"},
            "job has 99999999999 ranks (RANK=0, WORLD_SIZE=99999999999",
        ),
        ({**BY_HAND, "POLYHVD_SECRET": "5e"}, "ConfigError: POLYHVD_SECRET: the job's secret must have"),
        ({**BY_HAND, "POLYHVD_SECRET_FILE": "/no/file"}, "POLYHVD_SECRET_FILE=/no/file: No such file"),
        ({"TF_CONFIG": '{"cluster": {'}, "ConfigError: TF_CONFIG is not a description of a cluster"),
        ({"SM_HOSTS": '["a", "a"]', "SM_CURRENT_HOST": "a"}, "SM_HOSTS must name each host once"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "HOROVOD_CONTROLLER": "gloo"}, "MPI"),
        ({"HOROVOD_TIMELINE": "/no/folder/of/it"}, "FileNotFoundError: [Errno 2] No such file or directory"),
    ],
)
def test_what_the_environment_says_wrongly_is_a_line_with_the_caller_s_place(
    run: Run, variables: dict[str, str], said: str
) -> None:
    done = run(**variables)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "train.py:3: " in line
    assert said in line


def test_a_resource_config_that_is_not_json_is_a_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "input/config/resourceconfig.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"hosts": ["algo-1", ')
    done = run(SAGEMAKER_BASE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert f"train.py:3: polyhvd.config.ConfigError: init(): {path}: is not JSON: " in done.stderr


def test_a_missing_secret_is_a_line_and_the_lines_to_add(run: Run) -> None:
    done = run(**TORCHRUN)
    assert (done.returncode, done.stdout) == (1, "")
    first, *recipe = done.stderr.splitlines()
    assert "train.py:3: polyhvd.config.ConfigError: init(): the ranks that torchrun has started" in first
    assert [line.strip() for line in recipe if line.startswith("    ")] == [
        "(umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > ~/polyhvd.secret)",
        "export POLYHVD_SECRET_FILE=~/polyhvd.secret",
    ]


def test_a_rank_that_does_not_come_is_a_line(run: Run) -> None:
    alone = {**BY_HAND, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run(POLYHVD_SECRET=SECRET, POLYHVD_START_TIMEOUT="2", **alone)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "train.py:3: polyhvd.errors.PeerLostError: rank 0 waited 2 s for ranks" in done.stderr


def test_the_place_is_that_of_the_call(run: Run) -> None:
    program = "def begin():\n    import polyhvd.numpy as hvd\n    hvd.init(\n    )\n\nbegin()\n"
    assert LINE in run(program, **WRONG).stderr


def test_the_error_is_an_ordinary_one_for_who_catches_it(run: Run) -> None:
    program = (
        "import traceback, polyhvd.numpy as hvd\n"
        "try:\n    hvd.init()\nexcept ValueError:\n    print(traceback.format_exc().count('File'))\n"
        "import os\nos.environ['POLYHVD_CYCLE_TIME'] = '1'\nhvd.init()\nraise KeyError('mine')\n"
    )
    done = run(program, **WRONG)
    assert int(done.stdout) > 2
    assert done.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert done.stderr.splitlines()[-1] == "KeyError: 'mine'"


def test_an_error_that_it_has_led_to_is_printed_with_both(run: Run) -> None:
    program = TRAIN.replace(
        "hvd.init()", "try: hvd.init()\nexcept ValueError as e: raise OSError('mine') from e"
    )
    error = run(program, **WRONG).stderr
    assert error.count("Traceback (most recent call last):") == 2
    assert error.splitlines()[-1] == "OSError: mine"


@pytest.mark.parametrize(
    ("words", "variables"),
    [(["-X", "dev"], {}), (["-i"], {}), ([], {"POLYHVD_LOG_LEVEL": "debug"})],
    ids=["dev", "interactive", "debug"],
)
def test_the_traceback_is_there_for_who_looks_for_it(
    run: Run, words: list[str], variables: dict[str, str]
) -> None:
    done = run(TRAIN, *words, **{**SRUN, **BY_HAND}, **variables)
    assert "Traceback (most recent call last):" in done.stderr
    assert "init.py" in done.stderr


def test_a_hook_of_somebody_else_is_left_alone(run: Run) -> None:
    program = "import sys\nsys.excepthook = lambda *found: print(found[1].args, found[2].tb_next is None)\n"
    done = run(program + TRAIN, **WRONG)
    assert (done.stdout.count("must be a finite number"), done.stdout.count("False")) == (1, 1)
    assert done.stderr == ""


def test_a_debugger_after_the_end_has_all_frames(run: Run) -> None:
    done = run(TRAIN, "-m", "pdb", "-c", "continue", text="where\nquit\n", **WRONG)
    assert "config.py" in done.stdout


MISMATCH = """
import numpy as np
import polyhvd.numpy as hvd

hvd.init()
hvd.allreduce(np.ones(4), op="median", name="gradient")
"""


def test_the_traceback_of_an_error_of_polyhvd_ends_at_the_call(run: Run) -> None:
    done = run(MISMATCH)
    assert done.returncode == 1
    assert [line.split(", in")[0] for line in done.stderr.splitlines() if "File" in line] == [
        f'  File "{done.args[-1]}", line 6'
    ]
    assert "polyhvd.errors.InvalidArgumentError: " in done.stderr
    assert "polyhvd/collectives" in run(MISMATCH, POLYHVD_LOG_LEVEL="debug").stderr


def test_the_cause_of_another_class_stays_in_the_traceback(run: Run) -> None:
    done = run(f"{TRAIN}hvd.shutdown()\ntry: 1 / 0\nexcept ZeroDivisionError: hvd.rank()\n")
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert "During handling of the above exception" in done.stderr
    assert "polyhvd/__init__.py" not in done.stderr


def test_a_cause_of_the_same_class_that_the_program_has_raised_stays(run: Run) -> None:
    done = run(
        f"{TRAIN}hvd.shutdown()\n"
        "try: hvd.rank()\n"
        "except hvd.NotInitializedError as error: raise hvd.NotInitializedError('mine') from error\n"
    )
    assert "use hvd.init()" in done.stderr
    assert "NotInitializedError: mine" in done.stderr


def test_the_traceback_of_an_error_of_data_ends_at_the_call(run: Run) -> None:
    done = run(f"{TRAIN}from polyhvd.data import ParquetLoader\nParquetLoader('absent', batch_size=1)\n")
    _, _, last = done.stderr.rpartition("Traceback")  # after the cause, a FileNotFoundError of pyarrow's call
    assert "polyhvd.errors.DataError: absent does not exist" in last
    assert "polyhvd/data" not in last
