"""Curves as SVG, with text for screen readers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["Curve", "chart"]

_WIDTH, _HEIGHT = 640.0, 260.0
#: Room for texts as large as the style has them on a phone, where the figure is half as wide.
_LEFT, _RIGHT, _TOP, _BOTTOM = 90.0, 34.0, 34.0, 34.0
#: Of the lines of a grid, at most, and of the steps that are named.
_LINES_MAX = 6
_POWERS = [int(f"1{'0' * power}") for power in range(20)]
#: Of an axis of logarithms: what is smaller is drawn there.
_LEAST = 1e-9
#: Of an axis, by the numbers on it: curves that differ only by rounding are drawn as one line.
_SPAN_LEAST = 0.02

Curve = tuple[str, str, Sequence[float]]


def chart(
    identity: str,
    title: str,
    summary: str,
    curves: Sequence[Curve],
    *,
    unit: str,
    logarithmic: bool = False,
    line: tuple[float, str] | None = None,
) -> str:
    """A figure of curves over steps.

    Args:
        identity: of the elements; one for each chart of a page.
        title: in a few words.
        summary: in a sentence, what is to be seen.
        curves: of each its name, its classes for the style, and its values from step 0 on.
        unit: of the values, for the axis.
        logarithmic: whether the axis is.
        line: a level that is drawn, and what it means.
    """
    values = [value for _, _, points in curves for value in points if math.isfinite(value)]
    if line is not None:
        values.append(line[0])
    if not values:
        return ""
    scaled = [_scale(value, logarithmic=logarithmic) for value in values]
    low, high = min(scaled), max(scaled)
    least = 1e-12 if logarithmic else _SPAN_LEAST * max(abs(low), abs(high))
    if high - low <= least:
        middle, half = (low + high) / 2, max(least, 1e-30) / 2 if not logarithmic else 0.5
        low, high = middle - half, middle + half
    if logarithmic:
        low, high = math.floor(low), math.ceil(high)
    steps = max(len(points) for _, _, points in curves)

    def at(step: int, value: float) -> tuple[float, float]:
        finite = value if math.isfinite(value) else max(values)
        part = (_scale(finite, logarithmic=logarithmic) - low) / (high - low)
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step / max(1, steps - 1))
        return x, _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * part

    drawn = [*_axes(low, high, steps, unit, logarithmic=logarithmic)]
    for name, classes, points in curves:
        places = [at(step, value) for step, value in enumerate(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn.append(f'<polyline class="curve {classes}" points="{path}"><title>{escape(name)}</title>')
        drawn.append("</polyline>")
        if len(places) == 1:
            x, y = places[0]
            drawn.append(f'<circle class="dot {classes}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
    if line is not None:
        _, y = at(0, line[0])
        drawn.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(
            f'<text class="over" x="{_WIDTH - _RIGHT}" y="{y - 4:.1f}" text-anchor="end">'
            f"{escape(line[1])}</text>"
        )
    legend = "".join(
        f'<li><svg class="key" viewBox="0 0 28 8" aria-hidden="true"><line class="curve {classes}" x1="0" '
        f'x2="28" y1="4" y2="4"/></svg>{escape(name)}</li>'
        for name, classes, _ in curves
    )
    return (
        f'<figure><figcaption id="{identity}">{escape(title)}</figcaption>'
        f'<svg role="img" aria-labelledby="{identity} {identity}-text" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}">'
        f'<desc id="{identity}-text">{escape(summary)}</desc>{"".join(drawn)}</svg>'
        f'<ul class="legend">{legend}</ul><p>{escape(summary)}</p></figure>'
        + _table(title, {name: points for name, _, points in curves}, steps)
    )


def _scale(value: float, *, logarithmic: bool) -> float:
    return math.log10(max(value, _LEAST)) if logarithmic else value


def _axes(low: float, high: float, steps: int, unit: str, *, logarithmic: bool) -> list[str]:
    drawn = []
    if logarithmic:
        levels = [float(level) for level in range(int(low), int(high) + 1, _stride(high - low))]
        texts = [f"{10.0**level:g}" for level in levels]
    else:
        levels = [low + (high - low) * part for part in (0.0, 0.25, 0.5, 0.75, 1.0)]
        texts = [_short(level, high - low) for level in levels]
    for level, text in zip(levels, texts, strict=True):
        y = _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (level - low) / (high - low)
        drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{_LEFT - 6}" y="{y + 5:.1f}" text-anchor="end">{text}</text>')
    for step in range(0, steps, _stride(steps - 1)):
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step / max(1, steps - 1))
        drawn.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8:.1f}" text-anchor="middle">{step}</text>')
    drawn.append(f'<text x="{_LEFT - 18}" y="{_HEIGHT - 8:.1f}" text-anchor="end">step</text>')
    drawn.append(f'<text x="{_LEFT}" y="{_TOP - 12}">{escape(unit)}</text>')
    return drawn


def _short(level: float, span: float) -> str:
    """A number for an axis, in as many characters as there is room for."""
    text = f"{level if abs(level) > 1e-3 * span else 0.0:.3g}"
    return text if len(text) <= 6 else f"{level:.0e}"


def _stride(length: float) -> int:
    """Return the distance between round numbers from 0 to a length, so that there are not too many."""
    return next(
        stride
        for stride in (digit * unit for unit in _POWERS for digit in (1, 2, 5))
        if length < stride * _LINES_MAX
    )


def _table(title: str, curves: Mapping[str, Sequence[float]], steps: int) -> str:
    heads = "".join(f'<th scope="col">{step}</th>' for step in range(steps))
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{value:.4g}</td>" for value in points)
        + "</tr>"
        for name, points in curves.items()
    )
    return (
        f"<details><summary>The numbers of “{escape(title)}”</summary>"
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(title)}, numbers"><table>'
        f'<thead><tr><th scope="col">step</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
        "</details>"
    )
