"""The report of ``polyhvd parity`` as a page: what a phone, and who sees little, needs of it."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from polyhvd.parity.report import Check, Report, terminal
from polyhvd.parity.report.charts import chart
from polyhvd.parity.report.page import as_html
from polyhvd.parity.report.style import STYLE
from polyhvd.parity.statuses import STATUSES

#: Of the texts of a chart on a phone, in the chart's own units; a figure is half as wide there.
FONT = 22.0
_CHARACTER = 0.62  # of the font's size: a digit of the widest of the usual fonts

FIRST = {"step": 1, "layer": 0, "kind": "gradient", "detail": "", "advice": "look there", "names": ["w", "v"]}
AGREE = Check("a against b: alone", "frameworks", agree=True, cells=[[0.1], [0.2]])
DIFFER = Check("a against c: alone", "frameworks", agree=False, first=FIRST, text="it", cells=[[0.1], [20.0]])


def report_of(*checks: Check, outcome: str = "") -> Report:
    outcome = outcome or ("agree" if all(check.agree for check in checks) else "differ")
    return Report(
        "mlp", STATUSES[outcome], outcome, "message", ["numpy"], steps=2, ranks=1, checks=list(checks)
    )


@pytest.mark.parametrize(
    ("values", "logarithmic"),
    [
        ([1.0, 2.0, 3.0], False),
        ([7.278e-13, 5.88], False),
        ([-1.234e-5, -3.3e-5], False),
        ([2.302585, 2.302586], False),
        ([12345.6, 1e9], False),
        ([0.0, 0.0], False),
        ([1.5], False),
        ([1e-7, 3e8], True),
        ([0.0, float("inf"), 20.0], True),
        ([1.0] * 123_457, False),
    ],
)
def test_no_text_of_a_chart_is_cut_on_a_phone(values: list[float], logarithmic: bool) -> None:
    assert f"svg text{{font-size:{FONT:g}px}}" in STYLE
    text = chart("c", "t", "s", [("one", "c0", values)], unit="loss", logarithmic=logarithmic)
    (drawing,) = re.findall(r'<svg role="img".*?</svg>', text, re.DOTALL)
    root = ElementTree.fromstring(drawing)
    width, height = (float(number) for number in root.attrib["viewBox"].split()[2:])
    rows: dict[float, list[tuple[float, float]]] = {}
    labels = list(root.iter("text"))
    assert len(labels) >= 4
    for label in labels:
        said = label.text or ""
        x, y, wide = float(label.attrib["x"]), float(label.attrib["y"]), len(said) * FONT * _CHARACTER
        begin = x - {"start": 0.0, "middle": wide / 2, "end": wide}[label.get("text-anchor", "start")]
        assert 0 <= begin <= width - wide, said
        assert 0.8 * FONT <= y <= height - 0.2 * FONT, said
        rows.setdefault(y, []).append((begin, begin + wide))
    for places in rows.values():
        for one, two in pairwise(sorted(places)):
            assert one[1] <= two[0], "labels lie over each other"


def test_charts_name_six_steps_at_most() -> None:
    for steps in (1, 6, 7, 31, 61, 1000):
        text = chart("c", "t", "s", [("a", "c0", [float(step) for step in range(steps)])], unit="loss")
        assert 1 <= text.count('text-anchor="middle">') <= 6, steps


def test_what_differs_by_rounding_is_one_line() -> None:
    text = chart("c", "t", "s", [("a", "c0", [1.0, 0.9]), ("b", "c1", [1.0 + 1e-7, 0.9])], unit="loss")
    assert len(set(re.findall(r'points="(.*?)"', text))) == 1
    alone = chart("c", "t", "s", [("a", "c0", [1.5571234]), ("b", "c1", [1.5571237])], unit="loss")
    assert len(set(re.findall(r'cy="(.*?)"', alone))) == 1


def test_a_column_of_differences_is_there_if_there_are_any() -> None:
    assert "first difference" not in as_html(report_of(AGREE))
    assert 'class="where" data-head="first difference">step 1, layer 0, kind gradient, w / v</td>' in as_html(
        report_of(AGREE, DIFFER)
    )


def test_cells_stand_below_each_other_on_a_phone_so_that_no_column_is_cut() -> None:
    phone = STYLE.partition("@media (max-width:40rem)")[2]
    assert ".checks td{display:block}" in phone
    assert ".where{min-width:0}" in phone
    page = as_html(report_of(AGREE, DIFFER))
    cells = re.findall(r"<td[^>]*>", page.partition('class="checks"')[2].partition("</table>")[0])
    assert len(cells) == 8
    assert all('data-head="' in cell for cell in cells)


def test_no_figure_is_cut_off_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "20")
    terminal._print_rich(report_of(replace(AGREE, loss=3.8e-8, worst={"weights": 8.9e-7})))
    assert "…" not in capsys.readouterr().out


def test_watches_of_two_models_under_one_name_have_a_row_for_each_layer() -> None:
    check = Check("parity.watch", "compare", agree=True, cells=[[0.1, 0.2], [0.3]], times=2)
    page = as_html(replace(report_of(check), frameworks=[], layers={"parity.watch": ["a"]}))
    rows = re.findall(r'<th scope="row">\d+ <span>(.*?)</span></th>(.*?)</tr>', page)
    assert [(name, cells.count("<td")) for name, cells in rows] == [("a", 2), ("layer 1", 2)]


def test_what_was_not_compared_is_no_zero() -> None:
    page = as_html(report_of(AGREE))
    assert "0.0e+00" not in page
    assert 'data-head="losses">-</td>' in page


def test_comparisons_that_part_at_one_place_are_one_thing_to_do() -> None:
    others = [replace(DIFFER, name=f"a against {name}") for name in "de"]
    elsewhere = replace(DIFFER, name="b against c", first={**FIRST, "step": 0})
    text = as_html(report_of(DIFFER, *others, elsewhere))
    (steps,) = re.findall(r"<ol>(.*?)</ol>", text, re.DOTALL)
    items = steps.split("<li>")[1:]
    assert len(items) == 2
    assert "b against c" in items[0]
    assert "There as well: a against d; a against e." in items[1]


@pytest.mark.parametrize("outcome", [name for name in STATUSES if name not in ("differ", "usage")])
def test_each_outcome_says_what_to_do(outcome: str) -> None:
    text = as_html(report_of(AGREE, outcome=outcome))
    (step,) = re.findall(r"What to do next</h2><p>(.*?)</p>", text)
    assert step


def _light(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_what_is_behind_them(scheme: str) -> None:
    """By 4.5 to 1, as WCAG 2.2 asks for (1.4.3)."""
    light, dark = STYLE.split("@media (prefers-color-scheme:dark)")
    colours = dict(re.findall(r"--([\w-]+):(#\w+)", light if scheme == "light" else dark))
    pairs = [
        (front, back) for front in ("text", "weak", "good", "bad", "link") for back in ("ground", "soft")
    ]
    pairs += [("on-h", f"h{level}") for level in range(4)] + [("on-h4", "h4")]
    for front, back in pairs:
        one, two = sorted((_light(colours[front]), _light(colours[back])))
        assert (two + 0.05) / (one + 0.05) >= 4.5, f"{front} on {back}"


def test_a_suspicious_layer_is_on_the_page_of_comparisons_that_agree() -> None:
    assert "Suspicious" not in as_html(report_of(AGREE))
    found = {"text": "layer 7 <stands out>", "advice": "look here"}
    page = as_html(report_of(replace(AGREE, suspicious=found)))
    assert "layer 7 &lt;stands out&gt;<br>look here" in page
