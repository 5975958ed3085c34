"""Writes the table of all metrics into deploy/README.md: ``python deploy/metrics_reference.py [--check]``.

The table is read off the sources: every place that makes a metric names it, says what it counts and lists its labels.
Names that are put together from a prefix and a list are followed into that list.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
README: Final = ROOT / "deploy" / "README.md"
BEGIN, END = "<!-- begin metrics: deploy/metrics_reference.py -->", "<!-- end metrics -->"
KINDS: Final = {
    "Counter": "counter",
    "CounterMetricFamily": "counter",
    "_counter": "counter",
    "Gauge": "gauge",
    "GaugeMetricFamily": "gauge",
    "_gauge": "gauge",
    "Histogram": "histogram",
    "counter": "counter",  # a partial of the class
    "gauge": "gauge",
    "histogram": "histogram",
}
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, order=True, slots=True)
class MetricRow:
    """One metric.

    Attributes:
        name: As Prometheus stores it; counters end in ``_total``.
        where: Package that makes it.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    where: str


def rows() -> list[MetricRow]:
    """All metrics of the sources, by name."""
    found: dict[str, MetricRow] = {}
    for package in ("kvstore", "services"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for row in _rows_of(file):
                if row.name not in found or (row.text and not found[row.name].text):
                    found[row.name] = row
    return sorted(found.values())


def _rows_of(file: Path) -> Iterator[MetricRow]:
    source = file.read_text(encoding="utf-8")
    if "epdserve_" not in source:
        return
    tree = ast.parse(source)
    helpers = _prefixes(tree)
    folder = file.parent.relative_to(ROOT)
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in KINDS:
            continue
        kind, prefix = KINDS[call.func.id], helpers.get(call.func.id, "")
        if not call.args:
            continue
        first = call.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            name = prefix + first.value
            if name.startswith("epdserve_"):
                yield _row(name, kind, _labels(call), _text(call), folder)
        elif isinstance(first, ast.Name) and call.func.id == "Gauge":
            for node in ast.walk(tree):
                pair = _pair([*node.elts, first]) if isinstance(node, ast.Tuple) else None
                if pair is not None and pair[0].startswith("epdserve_"):
                    yield _row(pair[0], kind, (), pair[1], folder)
        elif (
            isinstance(first, ast.JoinedStr)
            and call.func.id not in helpers
            and not _inside_helper(tree, call)
        ):
            start = first.values[0]
            assert isinstance(start, ast.Constant)
            for name, text in _listed(tree, file):
                yield _row(f"{start.value}{name}", kind, (), text, folder)


def _row(name: str, kind: str, labels: tuple[str, ...], text: str, folder: Path) -> MetricRow:
    if kind == "counter" and not name.endswith("_total"):
        name += "_total"
    return MetricRow(name, kind, labels, text.rstrip("."), folder.as_posix())


def _prefixes(tree: ast.Module) -> dict[str, str]:
    """Local helpers that put a prefix before the name they are given."""
    found = {}
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name in KINDS:
            joined = next((node for node in ast.walk(function) if isinstance(node, ast.JoinedStr)), None)
            start = joined.values[0] if joined is not None else None
            found[function.name] = str(start.value) if isinstance(start, ast.Constant) else ""
    return found


def _inside_helper(tree: ast.Module, call: ast.Call) -> bool:
    return any(
        call in ast.walk(function)
        for function in tree.body
        if isinstance(function, ast.FunctionDef) and function.name in KINDS
    )


def _listed(tree: ast.Module, file: Path) -> Iterator[tuple[str, str]]:
    """Names and meanings that a loop goes through: tuples here, or a dictionary of such tuples in the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple) and (pair := _pair(node.elts)) is not None:
            yield pair
    for other in sorted(file.parent.glob("*.py")):
        for node in ast.walk(ast.parse(other.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if key is not None and isinstance(value, ast.Tuple):
                        pair = _pair([key, *value.elts])
                        if pair is not None and len(value.elts) == 2:
                            yield pair


def _pair(nodes: list[ast.expr]) -> tuple[str, str] | None:
    if len(nodes) < 3:
        return None
    name, text = nodes[0], nodes[1]
    if isinstance(name, ast.Constant) and isinstance(text, ast.Constant):
        words = (str(name.value), str(text.value))
        return words if _NAME.fullmatch(words[0]) and " " in words[1] else None
    return None


def _text(call: ast.Call) -> str:
    found = call.args[1] if len(call.args) > 1 else None
    return str(found.value) if isinstance(found, ast.Constant) else ""


def _labels(call: ast.Call) -> tuple[str, ...]:
    lists = [node for node in call.args[2:3] if isinstance(node, ast.List | ast.Tuple)]
    lists += [
        keyword.value
        for keyword in call.keywords
        if keyword.arg in ("labels", "labelnames") and isinstance(keyword.value, ast.List | ast.Tuple)
    ]
    return tuple(str(item.value) for each in lists for item in each.elts if isinstance(item, ast.Constant))


def table() -> str:
    """As Markdown."""
    lines = ["| metric | type | labels | what | made in |", "|---|---|---|---|---|"]
    lines += [f"| `{r.name}` | {r.kind} | {', '.join(r.labels)} | {r.text} | `{r.where}` |" for r in rows()]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Write it, or compare it."""
    page = README.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    wanted = f"{head}{BEGIN}\n{table()}\n{END}{tail}"
    if "--check" in arguments:
        print("fresh" if page == wanted else "deploy/README.md: run deploy/metrics_reference.py")
        return int(page != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
