"""A job of PyTorch that loses a rank, and states apart from jobs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from launching import Launcher

from polyhvd.testing.stand_ins import is_installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed("torch"), reason="PyTorch is not installed"),
]

SCRIPT = str(Path(__file__).with_name("horovod_torch.py"))


@pytest.mark.parametrize("words", [[], ["late"]], ids=["any moment", "end of an epoch"])
def test_script_of_horovod_s_documentation_goes_on(
    launcher: Launcher, tmp_path: Path, words: list[str]
) -> None:
    command = [*launcher.python("torch"), SCRIPT, str(tmp_path / "killed"), *words]
    status, out, err = launcher.run("-np", "2", "--min-np", "1", argv=command)
    assert status == 0, err
    ends = re.findall(r"end .*", out)
    assert ends
    assert ends == len(ends) * ends[:1]  # the same weights and moments
    losses = [float(text) for text in re.findall(r"epoch \d size \d loss ([\d.]+)", out)]
    assert min(losses) < losses[0] / 2  # the last may be of the few rows that were left when a process joined
    assert "process 1 on localhost was killed by SIGKILL; the job continues" in err
    assert f"[0] {ends[0]}" in out, "the survivor has gone on"
    if words:
        assert out.count("epoch 1 size 2 is over") == 2, "nothing is left of the epoch on any rank"


def test_spare_imports_what_an_optimizer_needs_while_it_waits(launcher: Launcher, tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("spare_job.py"))
    limits = ("-np", "2", "--min-np", "2", "--spares", "1")
    # In fresh interpreters: those of the fork servers have imported it already.
    status, out, err = launcher.run(*limits, argv=[sys.executable, script, str(tmp_path)])
    assert status == 0, err
    assert sorted(re.findall(r"end .*", out)) == ["end 20 of 2", "end 20 of 2, a spare: imported True"]
