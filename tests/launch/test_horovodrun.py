"""The migration page's table of horovodrun's options says what the parser does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from launching import ROOT

from polyhvd.launch import cli, horovodrun

#: Of horovodrun 0.28 (horovod/runner/launch.py): those that nothing follows, a number, and a word.
ALONE = """
    --version -v --verbose -cb --check-build --disable-cache --tcp --gloo --use-gloo --mpi --use-mpi --jsrun
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


def table() -> dict[str, str]:
    """Of each option the word that stands in the table."""
    page = (ROOT / "docs" / "migrating-from-horovod.md").read_text()
    section = page.partition("## polyhvdrun\n")[2].partition("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:3] for line in section.splitlines() if line.startswith("| `-")]
    return {
        option: verdict.strip() for names, verdict in rows for option in re.findall(r"`(-[\w-]+)`", names)
    }


def test_table_has_every_option_of_horovodrun_and_no_other() -> None:
    assert set(table()) == set(OPTIONS)
    assert set(table().values()) == {"works", "accepted without effect", "not yet"}


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_parser_does_what_the_table_says(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = table()[option]
    words = [option, *OPTIONS[option], "python", "train.py"]
    if verdict == "not yet":
        with pytest.raises(SystemExit):
            cli._parser().parse_args(words)
        assert f"{option} of horovodrun is not here" in capsys.readouterr().err
    elif option == "--version":
        with pytest.raises(SystemExit, match="0"):
            cli._parser().parse_args(words)
    else:
        parsed = vars(cli._parser().parse_args(words))
        assert parsed["command"] == ["python", "train.py"]
        default = vars(cli._parser().parse_args(["python", "train.py"]))
        changed = {name for name in parsed if parsed[name] != default[name]}
        assert changed == ({"_without_effect"} if verdict == "accepted without effect" else changed)
        assert len(changed) == 1
        assert (option in horovodrun.WITHOUT_EFFECT) == (verdict == "accepted without effect")


def test_opposites_of_settings_reach_the_ranks() -> None:
    words = ["--no-autotune", "--log-without-timestamp", "--thread-affinity", "0,1", "--stall-check"]
    options = cli._parser().parse_args([*words, "true"])
    assert cli._settings(options) == {
        "POLYHVD_AUTOTUNE": "0",
        "POLYHVD_LOG_HIDE_TIME": "1",
        "POLYHVD_THREAD_AFFINITY": "0,1",
        "POLYHVD_STALL_CHECK_DISABLE": "0",
    }


def test_sed_of_the_migration_page_changes_imports_and_uses(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "migrating-from-horovod.md").read_text()
    found = re.search(r"^sed .* train\.py$", page, re.MULTILINE)
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
