"""Plots as SVG text: lines with bands, and bars. All text in them is escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_WIDTH, _HEIGHT = 460, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 18, 14, 42
_LEGEND_ROW, _LETTER = 16, 6.2  # heights and widths are guesses: whoever shows it has the font
_COLOURS: Final = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")


@dataclass(frozen=True, slots=True)
class Line:
    """A line with a band around it; ``low`` and ``high`` may be empty."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def lines(title: str, x_name: str, y_name: str, drawn: Sequence[Line], *, log_x: bool = False) -> str:
    """A plot of lines."""
    xs = [x for line in drawn for x in line.xs if not log_x or x > 0]
    ys = [y for line in drawn for y in (*line.ys, *line.high)]
    if not xs or not ys:
        return _frame(title, x_name, y_name, "", [], [])
    place_x = _scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT, log=log_x)
    legend, top = _legend([line.name for line in drawn])
    place_y = _scale(0.0, max(ys), _HEIGHT - _BOTTOM, top)
    parts = [legend]
    for line, colour in zip(drawn, _colours(len(drawn)), strict=True):
        kept = [at for at, x in enumerate(line.xs) if not log_x or x > 0]
        if line.low and line.high:
            there = [(place_x(line.xs[at]), place_y(line.high[at])) for at in kept]
            back = [(place_x(line.xs[at]), place_y(line.low[at])) for at in reversed(kept)]
            parts.append(f'<polygon points="{_points(there + back)}" fill="{colour}" opacity="0.15"/>')
        path = _points([(place_x(line.xs[at]), place_y(line.ys[at])) for at in kept])
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    x_ticks = [(place_x(x), x) for x in _ticks(min(xs), max(xs), log=log_x)]
    return _frame(
        title, x_name, y_name, "".join(parts), x_ticks, [(place_y(y), y) for y in _ticks(0, max(ys))]
    )


def bars(title: str, y_name: str, groups: Mapping[str, Mapping[str, float]]) -> str:
    """Bars side by side: one group for each outer name, one colour for each inner one."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    most = max((value for group in groups.values() for value in group.values()), default=0.0)
    if most <= 0:
        return _frame(title, "", y_name, "", [], [])
    legend, highest = _legend(names)
    place_y = _scale(0.0, most, _HEIGHT - _BOTTOM, highest)
    room = (_WIDTH - _LEFT - _RIGHT) / max(1, len(groups))
    width = 0.8 * room / max(1, len(names))
    parts = [legend]
    for number, (label, group) in enumerate(groups.items()):
        start = _LEFT + room * (number + 0.1)
        for at, (name, colour) in enumerate(zip(names, _colours(len(names)), strict=True)):
            top = place_y(group.get(name, 0.0))
            parts.append(
                f'<rect x="{start + at * width:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{_HEIGHT - _BOTTOM - top:.1f}" fill="{colour}"/>'
            )
        middle = _LEFT + room * (number + 0.5)
        parts.append(_text(middle, _HEIGHT - _BOTTOM + 14, label, anchor="middle"))
    return _frame(title, "", y_name, "".join(parts), [], [(place_y(y), y) for y in _ticks(0, most)])


def _frame(
    title: str,
    x_name: str,
    y_name: str,
    inside: str,
    x_ticks: Sequence[tuple[float, float]],
    y_ticks: Sequence[tuple[float, float]],
) -> str:
    bottom = _HEIGHT - _BOTTOM
    parts = [f'<line x1="{_LEFT}" y1="{bottom}" x2="{_WIDTH - _RIGHT}" y2="{bottom}" class="axis"/>']
    for at, value in y_ticks:
        parts.append(f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_WIDTH - _RIGHT}" y2="{at:.1f}" class="grid"/>')
        parts.append(_text(_LEFT - 5, at + 4, f"{value:g}", anchor="end"))
    for at, value in x_ticks:
        parts.append(_text(at, bottom + 14, f"{value:g}", anchor="middle"))
    parts.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 8, x_name, anchor="middle"))
    turn = f'transform="rotate(-90 12 {_HEIGHT / 2})"'
    parts.append(_text(12, _HEIGHT / 2, y_name, anchor="middle", more=turn))
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}{inside}</svg></figure>'
    )


def _legend(names: Sequence[str]) -> tuple[str, float]:
    """Names side by side above the plot, in as many rows as they need; and where the plot begins below them."""
    x, y, parts = float(_LEFT), float(_TOP), []
    for name, colour in zip(names, _colours(len(names)), strict=True):
        width = 28 + _LETTER * len(name)
        if x > _LEFT and x + width > _WIDTH - _RIGHT:
            x, y = float(_LEFT), y + _LEGEND_ROW
        parts.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 14, y, name))
        x += width
    return "".join(parts), y + _LEGEND_ROW / 2


def _text(x: float, y: float, text: str, *, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _colours(count: int) -> list[str]:
    return [_COLOURS[at % len(_COLOURS)] for at in range(count)]


def _points(pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)


def _scale(
    low: float, high: float, start: float, end: float, *, log: bool = False
) -> Callable[[float], float]:
    """From values to places."""

    def measure(value: float) -> float:
        return math.log10(value) if log else value

    first = measure(low)
    ratio = (end - start) / ((measure(high) - first) or 1.0)
    return lambda value: start + (measure(value) - first) * ratio


def _ticks(low: float, high: float, *, log: bool = False) -> list[float]:
    if log:
        found = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
        return [value for value in found if low * 0.999 <= value <= high * 1.001]
    step = 10 ** math.floor(math.log10((high - low) or 1.0))
    if (high - low) / step < 3:
        step /= 5 if (high - low) / step < 1.5 else 2
    first = math.ceil(low / step)
    return [round(step * number, 10) for number in range(first, int(high / step) + 1)]
