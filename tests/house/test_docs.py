"""Links in the pages of this repository lead somewhere, and packages have a page."""

import re

import pytest
from support.repository import ROOT, files

pytestmark = pytest.mark.needs("git")

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def test_relative_links_resolve() -> None:
    broken = [
        f"{page}: {target}"
        for page in files()
        if page.suffix == ".md"
        for target in LINK.findall((ROOT / page).read_text(encoding="utf-8"))
        if not re.match(r"[a-z]+:|#", target) and not (ROOT / page.parent / target.partition("#")[0]).exists()
    ]
    assert broken == []
