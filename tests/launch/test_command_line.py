"""polyhvdrun's command line: what it does before and after a job, and how it complains."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import RANK, Launcher

from polyhvd.launch.cli import main as cli
from polyhvd.launch.cli.dry_run import hide_secrets
from polyhvd.launch.cli.options import make_parser, parse

FAILING_ONCE = RANK + (
    "count = os.environ['POLYHVD_RESTART_COUNT']\n"
    "print('attempt', count, flush=True)\n"
    "if rank == 1 and count == '0': raise ValueError('bad weather')\n"
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no command to run"),
        ("-np 2", "no command to run"),
        ("-np x true", "argument -np/--num-proc: invalid int value: 'x'"),
        ("-np 0 true", "cannot start 0 ranks"),
        ("-np -1 true", "cannot start -1 ranks"),
        ("-np 3 -H localhost:2 true", "3 ranks were requested, but there are 2 slots"),
        ("-H localhost:2,localhost:2 true", "names localhost twice"),
        ("-H localhost:0 true", "'0' is not a number of slots"),
        ("-H '' true", "lists no host"),
        ("-H a:1 --hostfile x true", "not allowed with argument -H/--hosts"),
        ("--slots-per-host 0 true", "expected a number, 1 or more, found '0'"),
        ("--slots-per-host 2 -np 3 true", "there are 2 slots"),
        ("--mpi --gloo true", "not allowed with argument"),
        ("--autotune --no-autotune true", "not allowed with argument"),
        ("--log-with-timestamp --log-hide-timestamp true", "not allowed with argument"),
        ("--autotune-warmup-sample 3 true", "was --autotune-warmup-samples meant?"),
        ("--cycle-time-ms soon true", "POLYHVD_CYCLE_TIME='soon'"),
        ("--max-restarts -1 true", "expected a number, 0 or more"),
        ("--tee 1 true", "give --output-filename DIR"),
        ("--tee 4 true", "invalid choice: 4"),
        ("--min-np 3 -np 2 true", "expected 1 <= --min-np <= -np <= --max-np"),
        ("--min-np 0 -np 2 true", "expected a number, 1 or more, found '0'"),
        ("--max-np 2 true", "an elastic job needs -np or --min-np"),
        ("-np 2 --spares -1 true", "expected a number, 0 or more, found '-1'"),
        ("-np 2 --min-np 2 -H localhost:1 true", "--min-np 2: the hosts have 1 slots"),
        ("-np 2 --min-np 1 --elastic-timeout nan true", "--elastic-timeout nan: expected seconds"),
        ("-np 2 --blacklist-cooldown-range 5 1 true", "expected 0 <= MIN <= MAX"),
        ("-np 2 --min-np 1 --mpi true", "--mpi: not supported in an elastic job"),
        ("-np 2 --min-np 1 --keep-going true", "--keep-going: not supported in an elastic job"),
        ("-np 2 --min-np 1 true : -np 1 true", "several programs: not supported in an elastic job"),
        ("-np 1 --host-discovery-script /none.sh true", "/none.sh: No such file or directory"),
        ("-H a:1 --host-discovery-script x true", "leave out -H and --hostfile"),
        ("-x 1=2 true", "expected NAME or NAME=VALUE, found '1=2'"),
        ("-x POLYHVD_RANK=2 true", "POLYHVD_RANK is set only by polyhvdrun"),
        ("-x NOT_HERE_AT_ALL true", "give -x NOT_HERE_AT_ALL=VALUE"),
        ("--config-file /none.yaml true", "cannot read --config-file /none.yaml"),
        ("--print-completion cmd", "expected one of"),
        ("-np 1 true :", "program 2 of those that ':' separates is empty"),
        ("-np 1 : true", "program 1 of those that ':' separates is empty"),
        ("-np 1 true : : -np 1 true", "program 2 of those that ':' separates is empty"),
        ("-np 1 true : false", "program 2 (false) has no -np"),
        ("true : -np 1 false", "program 1 (true) has no -np"),
        ("-np 1 true : -np 1 --verbose false", "--verbose is for the whole job"),
        ("-np 1 true : -np 1 --no-autotune false", "--no-autotune is for the whole job"),
        ("-np 1 true : -np 0 false", "program 2 (false): cannot start 0 ranks"),
        ("-np 1 -H localhost:2 true : -np 2 false", "program 2 (false): 2 ranks were requested, but 1 slot"),
        ("--mpi -np 1 true : -np 1 true", "':' is not for --mpi"),
        ("--mpi --max-restarts 1 true", "--max-restarts is not for --mpi"),
    ],
)
def test_bad_input_is_one_clear_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "--print-completion" in words:
        pytest.importorskip("shtab")
    begin = time.monotonic()
    with pytest.raises(SystemExit, match="2"):
        cli.main([word.strip("'") for word in words.split()])
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"polyhvdrun: .*{re.escape(message)}.*\n", err), err
    assert time.monotonic() < begin + 20  # far from the 30 s of --start-timeout


def test_restarts_run_the_whole_job_again_and_say_why(launcher: Launcher) -> None:
    status, out, err = launcher.run("-np", "2", "--max-restarts", "2", source=FAILING_ONCE)
    assert status == 0
    assert sorted(out.splitlines()) == [f"[{rank}] attempt {count}" for rank in (0, 1) for count in (0, 1)]
    assert "polyhvdrun: rank 1 has failed: restart 1 of 2" in err
    assert "restart 2" not in err


def test_last_failure_is_told_without_the_words_of_those_before(launcher: Launcher) -> None:
    source = RANK + "count = os.environ['POLYHVD_RESTART_COUNT']\n"
    source += "if count == '0': raise ValueError('bad weather')\nos._exit(7)"
    status, _, err = launcher.run("-np", "1", "--max-restarts", "1", source=source)
    assert status == 7
    assert "bad weather" not in err.partition("restart 1 of 1")[2]


def test_what_cannot_be_started_is_not_started_again(launcher: Launcher) -> None:
    status, _, err = launcher.run("-np", "1", "--max-restarts", "3", argv=["/no/such/program"])
    assert status == 127
    assert "restart" not in err


def test_a_job_that_was_told_to_end_is_not_started_again(launcher: Launcher) -> None:
    source = RANK + "signal.signal(15, lambda *_: os._exit(3)); print('ready', flush=True); signal.pause()"
    launcher.start("-np", "2", "--max-restarts", "3", source=source).wait_for("ready", 2)
    assert launcher.process is not None
    launcher.process.terminate()
    status, _, err = launcher.finish()
    assert status != 0
    assert "restart" not in err


def test_variables_and_modules_reach_the_ranks(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "showing.py").write_text(
        "import os, sys\nprint(os.environ['ONE'], os.environ['TWO'], sys.argv[1:], flush=True)\n"
    )
    env = {"TWO": "passed on", "PYTHONPATH": str(tmp_path)}
    words = ["-x", "ONE=a=b", "-x", "TWO", "-m", "showing", "-x"]
    assert launcher.run("-np", "1", argv=words, env=env)[:2] == (0, "[0] a=b passed on ['-x']\n")


def test_huge_pages_are_asked_for_by_an_option_alone() -> None:
    plain, asking = (cli._spec(parse(make_parser(), [*words, "true"])) for words in ([], ["--huge-pages"]))
    assert "THP_MEM_ALLOC_ENABLE" not in plain.env
    assert asking.env["THP_MEM_ALLOC_ENABLE"] == "1"


def test_lines_have_their_time_and_tee_chooses_a_stream(launcher: Launcher, tmp_path: Path) -> None:
    source = "import sys\nprint('out')\nprint('err', file=sys.stderr)\n"
    options = ["-np", "1", "--prefix-output-with-timestamp", "--output-filename", str(tmp_path / "logs")]
    status, out, err = launcher.run(*options, "--tee", "2", source=source)
    assert status == 0
    when = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d{4}"
    assert re.fullmatch(rf"{when} \[0\] out\n", out)
    assert re.fullmatch(rf"{when} \[0\] err\n", err)
    assert [path.name for path in (tmp_path / "logs" / "rank.0").iterdir()] == ["stderr"]
    assert (tmp_path / "logs" / "rank.0" / "stderr").read_text() == "err\n"


def test_dry_run_of_an_elastic_job_names_its_limits_and_hosts(launcher: Launcher) -> None:
    options = ("-np", "2", "--min-np", "1", "--max-np", "4", "--spares", "1", "-H", "localhost:3,127.0.0.1:1")
    status, out, err = launcher.run("--dry-run", *options, argv=["python", "train.py"])
    assert status == 0, err
    assert out.splitlines()[:5] == [
        "elastic: 2 ranks at first, 1 to 4 later",
        "1 spare on each host",
        "host localhost (here): 3 slots",
        "host 127.0.0.1 (here): 1 slot",
        "every process: python train.py",
    ]
    assert out.splitlines()[-1] == "nothing was started"


def test_dry_run_says_all_and_starts_nothing(launcher: Launcher, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    words = ["--dry-run", "--cycle-time-ms", "3", "-np", "1", "-H", "localhost:2", "-x", "MY_TOKEN=abc"]
    words += [
        "touch",
        str(touched),
        ":",
        "-np",
        "2",
        "-H",
        "far.invalid:2",
        "--",
        "touch",
        "--password=abc",
        ":",
    ]
    status, out, err = launcher.run(argv=words)
    assert (status, err) == (0, "")
    assert "3 ranks on 2 hosts" in out
    assert "host localhost (here): rank 0\n" in out
    assert "host far.invalid (by ssh): ranks 1-2\n" in out
    assert f"rank 0: touch {touched}\n" in out
    assert "ranks 1-2: touch --password=... :\n" in out
    assert "POLYHVD_CYCLE_TIME=3\n" in out
    assert "MY_TOKEN=..." in out
    assert "abc" not in out
    assert not touched.exists()


def test_secrets_of_a_command_are_hidden_and_nothing_else() -> None:
    words = [
        "python",
        "--api-key",
        "abc",
        "API_KEY=abc",
        "--secret",
        "--epochs=3",
        "--keys",
        "x",
        "author=me",
    ]
    assert hide_secrets(words) == [
        *("python", "--api-key", "...", "API_KEY=...", "--secret", "--epochs=3", "--keys", "x", "author=me")
    ]


def test_a_fixed_number_of_ranks_may_be_given_as_elastic_limits(launcher: Launcher) -> None:
    words = ["--min-np", "2", "--max-np", "2", "--reset-limit", "0", "echo", "x"]
    status, out, err = launcher.run(argv=words)
    assert (status, sorted(out.splitlines()), err) == (0, ["[0] x", "[1] x"], "")


def test_time_to_start_comes_from_the_option_or_horovods_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYHVD_START_TIMEOUT", raising=False)
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "77")
    assert cli._spec(parse(make_parser(), ["true"])).start_timeout_s == 77
    assert cli._spec(parse(make_parser(), ["--start-timeout", "5", "true"])).start_timeout_s == 5


def test_launcher_imports_neither_numpy_nor_what_options_ask_for() -> None:
    program = (
        "import sys, polyhvd.launch.cli.main\n"
        "print([name for name in ('numpy', 'yaml', 'shtab', 'cloudpickle') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_v_alone_is_the_version_as_in_horovodrun(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-v"]) == 0
    assert re.fullmatch(r"polyhvd \d\S*\n", capsys.readouterr().out)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--verbose"])
