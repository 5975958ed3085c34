"""Figures as a table and a plot."""

import json
from xml.etree import ElementTree

from epdserve.model.demo.training.evaluation import interval
from epdserve.model.demo.training.plot import markdown, read, svg

ROWS = [
    {"way": "exact", "case": "copy", "right": 9, "count": 10},
    {"way": "both <replays>", "case": "copy", "right": 0, "count": 10},
    {"way": "exact", "case": "tool", "right": 10, "count": 10},
]
FIGURES = read(json.dumps(row) for row in ROWS)


def test_later_figures_win() -> None:
    again = {"way": "exact", "case": "copy", "right": 1, "count": 4}
    assert read(json.dumps(row) for row in [*ROWS, again])["exact"]["copy"] == (1, 4)


def test_the_table_has_a_cell_for_every_figure() -> None:
    low, high = interval(9, 10)
    assert markdown(FIGURES).splitlines() == [
        "| | copy | tool |",
        "|---|---|---|",
        f"| exact | 0.90 ({low:.2f}-{high:.2f}) | 1.00 (0.72-1.00) |",
        "| both <replays> | 0.00 (0.00-0.28) |  |",
    ]


def test_the_plot_has_a_dot_for_every_figure_inside_its_interval() -> None:
    root = ElementTree.fromstring(svg(FIGURES))
    dots = [float(dot.attrib["cx"]) for dot in root.findall(".//{*}circle")]
    lines = [line.attrib for line in root.findall(".//{*}line") if line.attrib["stroke"] == "#06c"]
    assert len(dots) == len(lines) == len(ROWS)
    assert all(float(line["x1"]) <= dot <= float(line["x2"]) for dot, line in zip(dots, lines, strict=True))
