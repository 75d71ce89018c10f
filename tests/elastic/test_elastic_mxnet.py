"""A job of MXNet that loses a rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import Launcher

from polyhvd.testing.stand_ins import is_installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed("mxnet"), reason="MXNet is not installed"),
]

SCRIPT = str(Path(__file__).with_name("elastic_gluon.py"))


def test_gluon_network_and_its_trainer_go_on(launcher: Launcher, tmp_path: Path) -> None:
    command = [*launcher.python("mxnet"), SCRIPT, str(tmp_path / "killed")]
    status, out, err = launcher.run("-np", "2", "--min-np", "2", "--spares", "1", argv=command)
    assert status == 0, err
    ends = re.findall(r"end .*", out)
    assert ends == 2 * ends[:1]  # the same weights, moments and counts
    assert ends[0].endswith("[150]")  # no step too many
    losses = [float(text) for text in re.findall(r"losses ([\d.]+)", out)]
    assert min(losses) < losses[0] / 2  # the last may be of the few rows that were left when a process joined
    (lost,) = re.findall(r"process (\d) on localhost was killed by SIGKILL; the job continues", err)
    assert sorted(re.findall(r"\[(\d)\] end", out)) == [m for m in "012" if m != lost], (
        "the survivor has gone on"
    )
