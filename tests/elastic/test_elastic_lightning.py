"""A job of Lightning that loses ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import Launcher

from polyhvd.testing.stand_ins import is_installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed("lightning"), reason="Lightning is not installed"),
]

SCRIPT = str(Path(__file__).with_name("elastic_lightning.py"))
DEADLINE_S = 120.0  # for liveness only


def test_trainer_goes_on_within_an_epoch_with_the_same_bits(launcher: Launcher, tmp_path: Path) -> None:
    kills = ["0:9", "1:17"]  # at the beginning of an epoch, and in its last step
    options = ("-np", "3", "--min-np", "3", "--spares", "2")
    launcher.start(*options, argv=[*launcher.python("lightning"), SCRIPT, str(tmp_path), *kills])
    status, out, err = launcher.finish(DEADLINE_S)
    assert status == 0, err
    assert all((tmp_path / f"killed {kill}").exists() for kill in kills), out
    ends = re.findall(r"(?:end|undisturbed) (.*)", out)
    assert ends == 6 * ends[:1]
    assert ends[0].endswith("counts [3.0] steps 27 epochs 3 rate 0.01715")
