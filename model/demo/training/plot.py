"""``python -m epdserve.model.demo.training.plot FIGURES FILE``: the evaluation as a table and an SVG plot."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from epdserve.model.demo.training.evaluation import interval

_LABEL_WIDTH: Final = 250
_PANEL_WIDTH: Final = 110
_GAP: Final = 16
_ROW: Final = 22
_TOP: Final = 34
_TICKS: Final = (0.0, 0.5, 1.0)

Figures = Mapping[str, Mapping[str, tuple[int, int]]]  # way -> case -> (right, of how many)


def read(lines: Iterable[str]) -> Figures:
    """Figures of JSON lines; later lines of the same way and case win."""
    figures: dict[str, dict[str, tuple[int, int]]] = {}
    for line in lines:
        row = json.loads(line)
        figures.setdefault(row["way"], {})[row["case"]] = (row["right"], row["count"])
    return figures


def cases_of(figures: Figures) -> list[str]:
    """Names of the cases, in the order of their first figure."""
    return list(dict.fromkeys(case for row in figures.values() for case in row))


def markdown(figures: Figures) -> str:
    """A row for every way, share and 95 % interval for every case."""
    cases = cases_of(figures)
    lines = ["| | " + " | ".join(cases) + " |", "|---" * (len(cases) + 1) + "|"]
    for way, row in figures.items():
        cells = [_cell(*row[case]) if case in row else "" for case in cases]
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(right: int, count: int) -> str:
    low, high = interval(right, count)
    return f"{right / count:.2f} ({low:.2f}-{high:.2f})"


def svg(figures: Figures) -> str:
    """A panel for every case, a row for every way: a dot at the share, a line over its interval."""
    cases = cases_of(figures)
    width = _LABEL_WIDTH + len(cases) * (_PANEL_WIDTH + _GAP) + _GAP
    height = _TOP + len(figures) * _ROW + 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, way in enumerate(figures):
        parts.append(
            f'<text x="{_LABEL_WIDTH - 10}" y="{_middle(number) + 4}" text-anchor="end">{escape(way)}</text>'
        )
    for column, case in enumerate(cases):
        parts += _panel(figures, case, _LABEL_WIDTH + column * (_PANEL_WIDTH + _GAP), height)
    return "\n".join([*parts, "</svg>\n"])


def _panel(figures: Figures, case: str, left: int, height: int) -> list[str]:
    bottom = height - 24
    parts = [f'<text x="{left + _PANEL_WIDTH / 2}" y="18" text-anchor="middle">{escape(case)}</text>']
    for tick in _TICKS:
        x = left + tick * _PANEL_WIDTH
        parts.append(f'<line x1="{x}" x2="{x}" y1="{_TOP - 6}" y2="{bottom}" stroke="#ccc"/>')
        parts.append(f'<text x="{x}" y="{bottom + 14}" text-anchor="middle" font-size="10">{tick:g}</text>')
    for number, row in enumerate(figures.values()):
        if case in row:
            right, count = row[case]
            low, high = (left + end * _PANEL_WIDTH for end in interval(right, count))
            y = _middle(number)
            parts.append(
                f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}" stroke="#06c" stroke-width="2"/>'
            )
            parts.append(
                f'<circle cx="{left + right / count * _PANEL_WIDTH:.1f}" cy="{y}" r="4" fill="#06c"/>'
            )
    return parts


def _middle(number: int) -> float:
    return _TOP + (number + 0.5) * _ROW


def main() -> None:
    """Print the table, write the plot."""
    parser = argparse.ArgumentParser(prog="python -m epdserve.model.demo.training.plot", description=__doc__)
    parser.add_argument("figures", type=Path, help="file that the evaluation's --json wrote")
    parser.add_argument("target", type=Path, help="SVG file to write")
    options = parser.parse_args()
    figures = read(options.figures.read_text().splitlines())
    print(markdown(figures))
    options.target.write_text(svg(figures))


if __name__ == "__main__":
    main()
