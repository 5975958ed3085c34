"""Prices of the approximations as a Markdown table and an SVG plot."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final
from xml.sax.saxutils import escape

Prices = Sequence[Mapping[str, Any]]  # the fields of ``approximations.Price``

_COLOURS: Final = ("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02", "#a6761d", "#222222")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP, _LEGEND = 300, 220, 56, 30, 60, 160


def markdown(prices: Prices) -> str:
    """A row for every way: error and top-1 agreement by weights and hit length."""
    columns = list(dict.fromkeys((each["weights"], each["hit"]) for each in prices))
    head = [f"{weights}, {hit}" for weights, hit in columns]
    lines = ["| hit of so many tokens | " + " | ".join(head) + " |", "|---" * (len(columns) + 1) + "|"]
    for way, cells in by_way(prices).items():
        lines.append(f"| {way} | " + " | ".join(_cell(cells[column]) for column in columns) + " |")
    return "\n".join(lines)


def _cell(price: Mapping[str, Any]) -> str:
    return f"{price['error']:.2g}, {100 * price['agreement']:.0f} %"


def by_way(prices: Prices) -> dict[str, dict[tuple[str, int], Mapping[str, Any]]]:
    """Prices by way, then by (weights, hit)."""
    found: dict[str, dict[tuple[str, int], Mapping[str, Any]]] = {}
    for each in prices:
        found.setdefault(each["way"], {})[each["weights"], each["hit"]] = each
    return found


def svg(prices: Prices) -> str:
    """A panel for each kind of weights: error over hit length, both logarithmic, a line for every way."""
    kinds = list(dict.fromkeys(each["weights"] for each in prices))
    width = _LEFT + len(kinds) * (_WIDTH + _GAP) + _LEGEND
    height = _TOP + _HEIGHT + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, kind in enumerate(kinds):
        left = _LEFT + number * (_WIDTH + _GAP)
        parts += _panel([each for each in prices if each["weights"] == kind], prices, kind, left)
    for row, way in enumerate(by_way(prices)):
        x, y = width - _LEGEND, _TOP + 14 + 20 * row
        parts.append(f'<path d="M{x} {y - 4}h20" stroke="{_colour(row)}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 26}" y="{y}">{escape(way)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(own: Prices, all_prices: Prices, kind: str, left: int) -> list[str]:
    """Axes and lines; all panels have the same scales."""
    hits = sorted({each["hit"] for each in all_prices})
    errors = [each["error"] for each in all_prices if each["error"] > 0]
    low, high = math.floor(math.log10(min(errors))), math.ceil(math.log10(max(errors)))

    def x(hit: int) -> float:
        return left + _WIDTH * hits.index(hit) / max(1, len(hits) - 1)

    def y(error: float) -> float:
        place = (math.log10(max(error, 10.0**low)) - low) / max(1, high - low)
        return _TOP + _HEIGHT * (1 - place)

    parts = [f'<text x="{left}" y="{_TOP - 12}" font-weight="bold">{escape(kind)} weights</text>']
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M{left} {at:.1f}h{_WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">1e{power}</text>')
    for hit in hits:
        parts.append(f'<text x="{x(hit):.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{hit}</text>')
    parts.append(
        f'<text x="{left + _WIDTH / 2}" y="{_TOP + _HEIGHT + 38}" text-anchor="middle">tokens of the hit</text>'
    )
    for row, cells in enumerate(by_way(own).values()):
        points = " ".join(f"{x(each['hit']):.1f},{y(each['error']):.1f}" for each in cells.values())
        parts.append(f'<polyline points="{points}" fill="none" stroke="{_colour(row)}" stroke-width="2"/>')
    return parts


def _colour(row: int) -> str:
    return _COLOURS[row % len(_COLOURS)]
