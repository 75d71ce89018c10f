"""What is a rank's own outlives the rank, at its neighbour."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from launching import Launcher

from polyhvd.elastic.local import decoded, encoded, random_states

JOB = str(Path(__file__).with_name("local_job.py"))


def test_who_takes_the_place_of_a_lost_rank_gets_what_that_had(launcher: Launcher, tmp_path: Path) -> None:
    options = ("-np", "3", "--min-np", "3", "--spares", "1")
    status, out, err = launcher.run(*options, argv=[*launcher.python(), JOB, str(tmp_path / "killed")])
    assert status == 0, err
    ends = re.findall(r"end (\w+) (\d+) (\d+) (?:np\.float64\()?([\d.]+)", out)
    owners = sorted((age, int(owner)) for age, owner, *_ in ends)
    assert owners == [("new", 2000), ("old", 1000), ("old", 3000)]
    for _, owner, steps, drawn in ends:
        # What was on its way when the rank was killed may be lost, and a survivor whose last step it has
        # failed takes the others' commit: then it is that of one commit before.
        assert int(steps) in (9, 10)
        draws = np.random.RandomState(int(owner) // 1000 - 1).random_sample(int(steps))
        assert float(drawn) == draws[-1]


def test_random_states_go_on_where_they_were() -> None:
    parts = random_states()
    data = encoded({name: get() for name, (get, _) in parts.items()}) + b"padding"
    expected = np.random.random(4).tolist()
    for name, value in decoded(data).items():
        parts[name][1](value)
    assert np.random.random(4).tolist() == expected
