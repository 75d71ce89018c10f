"""The report as one page of HTML that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from polyhvd.parity.report.charts import Curve, chart
from polyhvd.parity.report.findings import Check, Report, counted, in_digits
from polyhvd.parity.report.style import STYLE

__all__ = ["as_html"]

_MODES = {"plain": "without polyhvd", "one": "1 rank"}
#: Heat maps of single checks, at most.
_MAPS_MAX = 12
#: Up to which part of its limit a difference has which class, and what it is called.
_LEVELS = (
    (0.01, "h0", "1 % of the limit or less"),
    (0.1, "h1", "10 % or less"),
    (1.0, "h2", "within the limit"),
    (10.0, "h3", "beyond the limit"),
    (math.inf, "h4", "beyond ten times the limit"),
)
#: What to look at where nothing could be compared.
_ADVICE = {
    "bad-case": "Correct the case as the message says. For an example, run: polyhvd docs parity",
    "not-installed": "Install the framework, or leave it out of --frameworks.",
    "rank-died": "Run the case in only that framework (--frameworks NAME --np 1), and read its output.",
    "models": "Make both models with the same layers in the same order, and freeze the same weights.",
    "nan": "Lower the learning rate (--rate), or check the layer named above for the logarithm of 0 or a "
    "division by 0.",
    "batches": "Return the same rows for every framework in every step.",
    "no-room": "Free space in TMPDIR, or set TMPDIR to a folder with more space.",
    "precision": "Leave the framework out of --frameworks, or choose another case or --precision.",
}


def as_html(report: Report) -> str:
    """The page.

    Args:
        report: of one case, or of scripts.
    """
    title = f"Parity of {report.case}: {'agree' if report.status == 0 else report.outcome}"
    parts = [
        _head(report),
        _next_steps(report),
        _suspicious(report),
        _checks(report),
        _divergence(report),
        _losses(report),
        _heat_maps(report),
        _about(report),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#checks">To the comparisons</a>\n<main>\n'
        + "\n".join(filter(None, parts))
        + "\n</main>\n</body>\n</html>\n"
    )


def _head(report: Report) -> str:
    word = "All agree" if report.status == 0 else "Differ" if report.outcome == "differ" else "Not compared"
    classes = "good" if report.status == 0 else "bad"
    took = f"{counted(report.steps, 'step')}, " if report.steps else ""
    return (
        f"<header><h1>Parity of {escape(report.case)}</h1>"
        f'<p class="verdict {classes}"><strong>{word}.</strong> {_lines(report.message)}</p>'
        f"<p>{escape(', '.join(report.frameworks) or 'scripts')}; {took}{counted(report.ranks, 'rank')}, "
        f"{report.seconds:.1f} s.</p></header>"
    )


def _lines(text: str) -> str:
    first, *others = text.splitlines() or [""]
    details = f"<pre>{escape(chr(10).join(others))}</pre>" if others else ""
    return escape(first) + details


def _next_steps(report: Report) -> str:
    is_case = bool(report.frameworks)
    if report.outcome == "differ":
        items = "".join(f"<li>{_to_do(checks)}</li>" for checks in _by_place(report.differing))
        return _section("next", "What to do next", f"<ol>{items}</ol>")
    if report.status:
        step = _ADVICE[report.outcome]
        if report.outcome == "rank-died" and not is_case:
            step = "Run the program of that rank by itself, and read what it prints."
    else:
        step = "Nothing has to be done." + is_case * (
            " Other optimizers (--optimizer), more steps (--steps) and other numbers of ranks (--np) look at "
            "more."
        )
    return _section("next", "What to do next", f"<p>{escape(step)}</p>")


def _suspicious(report: Report) -> str:
    items = "".join(
        f"<li><strong>{escape(check.name)}</strong>: {escape(check.suspicious['text'])}<br>"
        f"{escape(check.suspicious['advice'])}</li>"
        for check in report.suspected
    )
    return _section("suspicious", "Suspicious layers", f"<ul>{items}</ul>") if items else ""


def _by_place(checks: Sequence[Check]) -> list[list[Check]]:
    """Causes first; those that part at one place together."""
    found: dict[tuple[object, ...], list[Check]] = {}
    for check in sorted(checks, key=_place):
        place = (check.first.get(key) for key in ("step", "layer", "kind", "detail", "advice"))
        found.setdefault((check.question, *place), []).append(check)
    return list(found.values())


def _to_do(checks: Sequence[Check]) -> str:
    first, *others = checks
    parts = [f"<strong>{escape(first.name)}</strong>: {escape(first.text)}"]
    if others:
        parts.append(f"There as well: {escape('; '.join(check.name for check in others))}.")
    return "<br>".join([*parts, escape(str(first.first.get("advice", "")))])


def _place(check: Check) -> tuple[int, int]:
    """Causes first: those within one framework, then by step."""
    return check.question != "distribution", int(check.first.get("step", 0))


def _section(identity: str, title: str, body: str) -> str:
    return f'<section aria-labelledby="{identity}"><h2 id="{identity}">{escape(title)}</h2>{body}</section>'


def _checks(report: Report) -> str:
    if not report.checks:
        return _section("checks", "Comparisons", "<p>None was made.</p>")
    heads = ["comparison", "result", "compared" if report.is_of_scripts else "losses", "worst"]
    heads += ["by its limit"] * report.is_of_scripts + ["first difference"] * bool(report.differing)
    rows = []
    for check in report.checks:
        worst = in_digits(max(check.worst.values(), default=None))
        numbers = [in_digits(check.loss), worst]
        if report.is_of_scripts:
            numbers = [f"{check.times} x", worst, in_digits(check.margin)]
        result = "agree" if check.agree else "differ"
        where = ""
        if not check.agree:
            names = check.first.get("names") or ()
            places = {key: check.first.get(key) for key in ("step", "layer", "kind")}
            where = ", ".join(
                [f"{key} {place}" for key, place in places.items() if place is not None]
                + [" / ".join(dict.fromkeys(map(str, names)))] * bool(names)
            )
        cells = [f'<td data-head="{heads[1]}">{result}</td>']
        cells += [
            f'<td class="number" data-head="{head}">{text}</td>'
            for head, text in zip(heads[2:], numbers, strict=False)
        ]
        if report.differing:
            cells.append(f'<td class="where" data-head="{heads[-1]}">{escape(where)}</td>')
        rows.append(f'<tr class="{result}"><th scope="row">{escape(check.name)}</th>{"".join(cells)}</tr>')
    columns = "".join(f'<th scope="col">{head}</th>' for head in heads)
    table = (
        '<div class="wide" role="region" tabindex="0" aria-label="All comparisons">'
        f'<table class="checks"><thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        "<p>Differences are relative: of losses by the loss, of tensors by their norm. “-”: not compared.</p>"
    )
    return _section("checks", "Comparisons", table)


def _divergence(report: Report) -> str:
    curves: list[Curve] = []
    for question, name, classes in (
        ("distribution", "one framework, distributed against one process", "c0"),
        ("frameworks", "one framework against another", "c1 dashed"),
    ):
        rows = [check.cells for check in report.checks if check.question == question and check.cells]
        if rows:
            steps = min(len(cells) for cells in rows)
            worst = [max(max(cells[step], default=0.0) for cells in rows) for step in range(steps)]
            curves.append((name, classes, worst))
    if not curves:
        return ""
    most = max(value for _, _, values in curves for value in values)
    summary = f"The largest difference of any tensor in each step, by its limit; {most:.2g} at most."
    drawn = chart(
        "divergence",
        "Largest difference by its limit",
        summary,
        curves,
        unit="difference / limit",
        logarithmic=True,
        line=(1.0, "limit"),
    )
    return _section("by-step", "Divergence by step", drawn)


def _losses(report: Report) -> str:
    curves: list[Curve] = []
    for number, (framework, modes) in enumerate(report.losses.items()):
        for mode, losses in modes.items():
            dashes = {"plain": "", "one": " dashed", "all": " dotted"}[mode]
            name = f"{framework}, {_MODES.get(mode, counted(report.ranks, 'rank'))}"
            curves.append((name, f"c{number}{dashes}", losses))
    if not curves:
        return ""
    ends = [losses[-1] for _, _, losses in curves if losses]
    summary = f"{len(curves)} curves; at the end the losses are from {min(ends):.4g} to {max(ends):.4g}."
    drawn = chart(
        "loss-curves", "Loss by step", summary + " Curves that agree hide each other.", curves, unit="loss"
    )
    return _section("losses", "Loss curves", drawn)


def _heat_maps(report: Report) -> str:
    checks = [check for check in report.checks if check.cells and check.cells[0]]
    if not checks:
        return ""
    if report.is_of_scripts:  # each has a different model
        maps = [_map(check.name, check.cells, report.layers.get(check.name, [])) for check in checks]
        return _section("heat", "Layers and steps", "".join([*_legend(), *maps[:_MAPS_MAX]]))
    steps = min(len(check.cells) for check in checks)
    layers = min(len(check.cells[0]) for check in checks)
    worst = [
        [max(check.cells[step][layer] for check in checks) for layer in range(layers)]
        for step in range(steps)
    ]
    names = next(iter(report.layers.values()), [])
    body = [*_legend(), _map("Worst of all comparisons", worst, names)]
    differing = [check for check in checks if not check.agree]
    body += [_map(check.name, check.cells, names) for check in differing[:_MAPS_MAX]]
    return _section("heat", "Layers and steps", "".join(body))


def _legend() -> list[str]:
    keys = "".join(f'<li><span class="cell {name}"></span>{text}</li>' for _, name, text in _LEVELS)
    return [
        "<p>For each layer and step, the largest difference of an activation, gradient or update, in percent "
        "of its limit; “!!” means 10,000 or more.</p>",
        f'<ul class="legend">{keys}</ul>',
    ]


def _map(title: str, cells: list[list[float]], names: list[str]) -> str:
    heads = "".join(f'<th scope="col">{step}</th>' for step in range(len(cells)))
    rows = []
    for layer in range(max(map(len, cells))):
        name = names[layer] if layer < len(names) else f"layer {layer}"
        # Watches of several models may have one name.
        row = "".join(_cell(step[layer]) if layer < len(step) else "<td></td>" for step in cells)
        rows.append(f'<tr><th scope="row">{layer} <span>{escape(name)}</span></th>{row}</tr>')
    return (
        f'<h3>{escape(title)}</h3><div class="wide" role="region" tabindex="0" '
        f'aria-label="Heat map: {escape(title)}"><table class="heat"><thead><tr><th scope="col">layer / step'
        f"</th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(ratio: float) -> str:
    level = next(name for limit, name, _ in _LEVELS if ratio <= limit)
    text = f"{100 * ratio:.0f}" if ratio < 99.95 else "!!" if math.isfinite(ratio) else "∞"
    return f'<td class="{level}">{text}</td>'


def _about(report: Report) -> str:
    items = [("Case", report.case), ("Frameworks", ", ".join(report.frameworks))]
    items += [("Optimizer", ", ".join(f"{k} {v}" for k, v in report.optimizer.items() if v is not None))]
    items += [("Versions", ", ".join(f"{k} {v}" for k, v in report.versions.items()))]
    if report.left_out:
        items.append(("Left out", ", ".join(report.left_out)))
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in items if text)
    return _section("about", "What was run", f"<dl>{facts}</dl>")
