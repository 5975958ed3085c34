"""HTML pages that load nothing from anywhere: one look for all reports. All text in them is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

_STYLE: Final = (
    ":root{color-scheme:light dark;--ink:#1f2328;--soft:#57606a;--line:#d0d7de;--grid:#eaeef2;--paper:#fff}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--line:#3d444d;--grid:#2a3038;"
    "--paper:#0d1117}}"
    "body{font:14px system-ui,sans-serif;margin:2em auto;max-width:1180px;padding:0 1em;color:var(--ink);"
    "background:var(--paper)}"
    ".wide{overflow-x:auto}"
    "table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid var(--line);padding:3px 8px;"
    "text-align:right}th:first-child,td:first-child{text-align:left}"
    "figure{display:inline-block;width:460px;max-width:100%;margin:8px 8px 8px 0}figcaption{font-weight:600}"
    "svg{width:100%}text{font-size:11px;fill:var(--soft)}"
    ".axis{stroke:var(--soft)}.grid{stroke:var(--grid)}pre{overflow-x:auto}"
)


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page.

    Args:
        parts: Markup; made by ``table``, ``heading`` and the plots, which escape what they are given.
    """
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    """A heading."""
    return f"<h{level}>{escape(text)}</h{level}>"


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table, headings first."""
    head, *body = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f'<div class="wide"><table><tr>{cells}</tr>{lines}</table></div>'


def _cell(text: str) -> str:
    return escape(text).replace(" / ", "&nbsp;/&nbsp;")  # percentiles stay on one line


def details(summary: str, text: str) -> str:
    """Text that is folded away."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
