"""Of the seeded defects a few are found here, of each kind one; `make defects` runs all."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))

import defects  # noqa: E402

ALL = {defect.name: defect for defect in defects.defects()}


def table_of_the_document() -> list[list[str]]:
    begin, end = defects.MARKS
    text = defects.DOCUMENT.read_text().partition(begin)[2].partition(end)[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_document_has_the_truth_about_every_defect() -> None:
    listed = [(row[0].split(":")[0].strip("`"), *row[1:4]) for row in table_of_the_document()]
    assert listed == [(name, one.case, one.within, one.place) for name, one in ALL.items()]


def test_there_are_as_many_defects_as_are_asked_for_and_of_every_kind() -> None:
    assert len(ALL) >= 24
    assert set(Counter(defect.kind for defect in ALL.values())) == set(defects.KINDS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("transposed_kernel", marks=pytest.mark.slow),
        pytest.param("nesterov_missing", marks=pytest.mark.slow),
        "shard_shuffled",
    ],
)
def test_a_defect_is_told_with_its_place(name: str) -> None:
    found = defects.run(ALL[name])
    assert found.status == 1, found.message
    assert found.located, f"{found.check}: {found.place}; the truth: {ALL[name].place}"


def test_a_program_without_its_defect_agrees() -> None:
    found = defects.run(ALL["shard_shuffled"], control=True)
    assert found.status == 0, found.message


def finding(
    first: dict[str, object], status: int = 1, check: str = "torch against numpy: 2 ranks"
) -> defects.Finding:
    return defects.Finding(ALL["transposed_kernel"], status, "", check, "frameworks", first)


def test_a_place_is_right_only_if_all_of_it_is() -> None:
    right = {"step": 0, "kind": "activation", "layer": 1}
    assert finding(right).located
    for other in ({"step": 1}, {"kind": "gradient"}, {"layer": 0}):
        assert not finding(right | other).located
    assert not finding(right, check="mxnet against numpy: 2 ranks").located
    assert not finding(right, status=0).located
    assert not finding({}).located


def test_too_few_places_are_not_enough() -> None:
    right, wrong = finding({"step": 0, "kind": "activation", "layer": 1}), finding({})
    assert defects.enough([right] * 22 + [wrong] * 2)
    assert not defects.enough([right] * 21 + [wrong] * 3)
    assert not defects.enough([right] * 23 + [finding({}, status=0)])


def test_a_file_without_a_truth_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text('"""Mine."""\n\nFAULT = True\n')
    with pytest.raises(ValueError, match=re.escape("mine.py: expected a docstring, `DEFECT = {...}`")):
        defects.read(path)
