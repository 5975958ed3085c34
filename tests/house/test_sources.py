"""House rules on the text of the sources: length, alphabet, and what must not stand in the tree."""

import re

import pytest
from support.repository import ROOT, python_files, text_files

pytestmark = pytest.mark.needs("git")

MAX_LINES = 400
# The model's own markers hold U+FF5C and U+2581; any other letter outside ASCII is a slip of an editor.
MARKER_LETTERS = {"\uff5c", "\u2581"}
# Written in two pieces, so that this file does not name what it looks for.
BANNED = {
    "open work": re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X"))),
    "a folder of one machine": re.compile(
        "|".join(("/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/tmp/" + "epd/"))
    ),
    "unsafe deserialisation": re.compile("|".join((r"import pick" + "le", r"torch\.lo" + r"ad\("))),
}
URL = re.compile(r"https?://([^\s/:\"'`)\]}>]+)")
# This machine, names that the standards keep for examples, names that stand for one in a format string, and the
# namespace of SVG, which is only a name.
KNOWN_HOSTS = re.compile(
    r"127\.0\.0\.\d+|0\.0\.0\.0|localhost|[{$\[].*|(.+\.)?example(\.\w+)?|router|server|test(server)?|www\.w3\.org"
)


def test_no_source_is_longer_than_the_limit() -> None:
    long = {
        str(file): len(lines) for file in python_files() if len(lines := _text(file).splitlines()) > MAX_LINES
    }
    assert long == {}


def test_sources_are_ascii_but_for_the_markers_of_the_model() -> None:
    strange = {
        str(file): sorted(letters)
        for file in python_files()
        if (letters := {letter for letter in _text(file) if not letter.isascii()} - MARKER_LETTERS)
        and file.parts[0] != "tests"
    }
    assert strange == {}


@pytest.mark.parametrize("what", BANNED)
def test_the_tree_holds_no(what: str) -> None:
    found = [
        f"{file}:{number}"
        for file in text_files()
        for number, line in enumerate(_text(file).splitlines(), 1)
        if BANNED[what].search(line)
    ]
    assert found == []


def test_sources_name_no_host_but_this_machine() -> None:
    found = [
        f"{file}: {host}"
        for file in python_files()
        for host in URL.findall(_text(file))
        if not KNOWN_HOSTS.fullmatch(host)
    ]
    assert found == []


def _text(file: object) -> str:
    return (ROOT / str(file)).read_text(encoding="utf-8")
