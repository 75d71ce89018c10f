"""The migration page's table of horovodrun's options says what the parser does."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from launching import ROOT

from polyhvd.launch.cli import horovodrun
from polyhvd.launch.cli import main as cli
from polyhvd.launch.cli.options import make_parser

#: The option strings of horovodrun's parser (horovod/runner/launch.py of horovod 0.28.1), by what follows
#: them: nothing, a number, a word.
ALONE = """
    --version -v --verbose -cb --check-build --disable-cache --tcp --gloo --mpi --jsrun
    --autotune --no-autotune --timeline-mark-cycles --no-timeline-mark-cycles --stall-check --no-stall-check
    --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather
    --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --mpi-threads-disable
    --no-mpi-threads-disable --log-with-timestamp --log-without-timestamp --log-hide-timestamp
    --no-log-hide-timestamp -prefix-timestamp --prefix-output-with-timestamp
"""
WITH_NUMBER = """
    -np --num-proc --start-timeout -p --ssh-port --fusion-threshold-mb --cycle-time-ms --cache-capacity
    --autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples
    --autotune-gaussian-process-noise --stall-check-warning-time-seconds
    --stall-check-shutdown-time-seconds --num-nccl-streams --gloo-timeout-seconds --min-np --min-num-proc
    --max-np --max-num-proc --slots-per-host --elastic-timeout --reset-limit
"""
WITH_WORD = """
    -H --hosts -hostfile --hostfile -i --ssh-identity-file --network-interface --network-interfaces
    --output-filename --config-file --binding-args --mpi-args --autotune-log-file --timeline-filename
    --thread-affinity --host-discovery-script --log-level
"""
OPTIONS: dict[str, list[str]] = {
    **{option: [] for option in ALONE.split()},
    **{option: ["4"] for option in WITH_NUMBER.split()},
    **{option: ["x"] for option in WITH_WORD.split()},
    "--blacklist-cooldown-range": ["1", "2"],
}
#: Names of ours for options of horovodrun; it has --gloo, --mpi and --check-build.
ALIASES = {"--use-gloo", "--use-mpi", "--check", "--log-dir"}
#: An abbreviation of --slots-per-host in Horovod's documentation, which its parser takes.
ABBREVIATIONS = {"--slots"}
#: Words of horovodrun in Horovod's documentation: running, elastic, autotune, timeline, tensor-fusion, mpi,
#: gpus, troubleshooting and docker.
DOCUMENTED = """
    -np 4 -H localhost:4
    -np 16 -H server1:4,server2:4,server3:4,server4:4
    -np 6 -hostfile myhostfile
    --verbose -np 2 -H localhost:4
    --gloo -np 4 -H localhost:4
    --mpi -np 4
    --jsrun -np 4
    -np 16 -H host1:4,host2:4 -p 12345
    -np 16 -H host1:4,host2:4 -i my_key --network-interface eth0,lo
    -np 8 --start-timeout 120
    -np 18 --host-discovery-script discover_hosts.sh
    -np 8 --host-discovery-script discover_hosts.sh --slots 4
    -np 8 --min-np 4 --max-np 12 --host-discovery-script discover_hosts.sh
    -np 8 --blacklist-cooldown-range 10 100 --host-discovery-script discover_hosts.sh
    -np 4 --timeline-filename timeline.json --timeline-mark-cycles
    -np 4 --autotune --autotune-log-file autotune.csv
    -np 4 --autotune --autotune-warmup-samples 3 --autotune-steps-per-sample 10
    -np 4 --autotune-bayes-opt-max-samples 20 --autotune-gaussian-process-noise 0.8
    -np 4 --fusion-threshold-mb 32
    -np 4 --fusion-threshold-mb 0 --cycle-time-ms 3.5
    -np 4 --no-stall-check
    -np 4 --stall-check-warning-time-seconds 120 --stall-check-shutdown-time-seconds 240
    -np 4 --num-nccl-streams 2
    -np 4 --mpi-args="--map-by ppr:2:socket"
    -np 4 --config-file config.yaml
    -np 4 --log-level DEBUG --log-hide-timestamp
    -np 4 --output-filename logs --prefix-output-with-timestamp
"""
#: What horovodrun has, and is no way to start a job.
HELP = {"-h", "--help"}


def page() -> str:
    return (ROOT / "docs" / "migrating-from-horovod.md").read_text()


def table() -> dict[str, str]:
    """Of each option the word that stands in the table."""
    section = page().partition("## polyhvdrun\n")[2].partition("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:3] for line in section.splitlines() if line.startswith("| `-")]
    return {
        option: verdict.strip() for names, verdict in rows for option in re.findall(r"`(-[\w-]+)`", names)
    }


def test_table_of_the_page_is_made_from_the_parser() -> None:
    assert "\n".join(horovodrun.table(make_parser())) in page()


def test_parser_knows_every_option_of_horovodrun_and_says_where_others_come_from() -> None:
    parser = make_parser()
    ours = {option for action in parser._actions for option in action.option_strings}
    assert set(OPTIONS) <= ours
    foreign = {
        option
        for action in parser._actions
        if action.option_strings and action.option_strings[0] in horovodrun.FROM_ELSEWHERE
        for option in action.option_strings
    }
    assert ours - set(OPTIONS) - HELP - ALIASES - ABBREVIATIONS == foreign
    assert not foreign & set(OPTIONS)


def test_remarks_belong_to_options_that_are_there() -> None:
    first = {action.option_strings[0] for action in make_parser()._actions if action.option_strings}
    named = {*horovodrun.REMARKS, *horovodrun.FROM_ELSEWHERE, *horovodrun.WITHOUT_EFFECT}
    assert named <= first


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_parser_does_what_the_table_says(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = table()[option]
    words = [option, *OPTIONS[option], "python", "train.py"]
    if option == "--version":
        with pytest.raises(SystemExit, match="0"):
            make_parser().parse_args(words)
    else:
        parsed = vars(make_parser().parse_args(words))
        assert parsed["command"] == ["python", "train.py"]
        default = vars(make_parser().parse_args(["python", "train.py"]))
        changed = {name for name in parsed if parsed[name] != default[name]}
        assert (changed == {"_without_effect"}) == (verdict == "no effect")
        assert len(changed) == 1


@pytest.mark.parametrize("words", [line.strip() for line in DOCUMENTED.strip().splitlines()])
def test_command_lines_of_horovods_documentation_are_understood(words: str) -> None:
    options = make_parser().parse_args([*shlex.split(words), "python", "train.py"])
    assert options.command == ["python", "train.py"]
    cli._check(options)


def test_opposites_of_settings_reach_the_ranks() -> None:
    words = ["--no-autotune", "--log-without-timestamp", "--thread-affinity", "0,1", "--stall-check"]
    options = make_parser().parse_args([*words, "true"])
    assert cli._settings(options) == {
        "POLYHVD_AUTOTUNE": "0",
        "POLYHVD_LOG_HIDE_TIME": "1",
        "POLYHVD_THREAD_AFFINITY": "0,1",
        "POLYHVD_STALL_CHECK_DISABLE": "0",
    }


def test_sed_of_the_migration_page_changes_imports_and_uses(tmp_path: Path) -> None:
    found = re.search(r"^sed .* train\.py$", page(), re.MULTILINE)
    assert found is not None
    script = tmp_path / "train.py"
    script.write_text(
        "import horovod\n"
        "import os, horovod\n"
        "if True:\n"
        "    import horovod.torch as hvd\n"
        "from horovod import run\n"
        "from horovod.runner import run as go\n"
        "horovod.run(train, np=2)\n"
        "use_horovod = True\n"
        "trainer = Trainer(strategy='horovod')\n"
    )
    subprocess.run(["sh", "-c", found[0]], cwd=tmp_path, check=True)
    assert script.read_text() == (
        "import polyhvd\n"
        "import os, polyhvd\n"
        "if True:\n"
        "    import polyhvd.torch as hvd\n"
        "from polyhvd import run\n"
        "from polyhvd.runner import run as go\n"
        "polyhvd.run(train, np=2)\n"
        "use_horovod = True\n"
        "trainer = Trainer(strategy='horovod')\n"
    )
