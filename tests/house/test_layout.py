"""The tree is the agreed one, and pyproject.toml and the requirement files say the same as it."""

import tomllib
from pathlib import Path

import pytest
from support.repository import PACKAGE_ROOTS, ROOT, files

pytestmark = pytest.mark.needs("git")

TOP_LEVEL = {
    *PACKAGE_ROOTS,
    "deploy",
    "helm",
    "proto",
    "tests",
    "pyproject.toml",
    "README.md",
    "LICENSE",
}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(path: Path) -> set[str]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {line for line in lines if line and not line.startswith("-r")}


def test_top_level_is_the_agreed_list() -> None:
    assert {file.parts[0] for file in files() if not file.parts[0].startswith(".")} == TOP_LEVEL


def test_every_folder_with_sources_is_a_package() -> None:
    folders = {file.parent for file in files() if file.suffix == ".py" and file.parts[0] in PACKAGE_ROOTS}
    assert [folder for folder in sorted(folders) if not (ROOT / folder / "__init__.py").is_file()] == []


def test_packages_in_pyproject_are_those_of_the_tree() -> None:
    tree = {
        "epdserve." + ".".join(file.parent.parts)
        for file in files()
        if file.name == "__init__.py" and file.parts[0] in PACKAGE_ROOTS
    }
    assert sorted(project()["tool"]["setuptools"]["packages"]) == sorted(tree)


def test_every_package_root_is_typed() -> None:
    assert [root for root in PACKAGE_ROOTS if not (ROOT / root / "py.typed").is_file()] == []


def test_a_test_lies_in_the_folder_of_what_it_tests() -> None:
    packages = {file.parent for file in files() if file.name == "__init__.py"}
    other_rooms = {"house", "integration", "support", "golden", "deploy"}
    tests = [file for file in files() if file.parts[0] == "tests" and file.name.startswith("test_")]
    # Cases of a specification, numbered as they are there, stand in a folder of their own
    tests = [file for file in tests if file.parent.name != "conformance"]
    astray = [
        str(file)
        for file in tests
        if file.parts[1] not in other_rooms and Path(*file.parts[1:-1]) not in packages
    ]
    assert astray == []


def test_requirement_files_pin_what_pyproject_asks_for() -> None:
    metadata = project()["project"]
    extras = metadata["optional-dependencies"]
    run = {*metadata["dependencies"], *extras["worker"], *extras["up"]}
    pinned = pins(ROOT / "deploy/requirements.txt")
    builder = {pin for pin in pinned if pin.startswith("setuptools==")}
    assert pinned - builder == run
    assert pins(ROOT / "deploy/requirements-dev.txt") == set(extras["dev"])


def test_every_requirement_is_pinned_exactly() -> None:
    files_with_pins = ("deploy/requirements.txt", "deploy/requirements-dev.txt")
    loose = [pin for name in files_with_pins for pin in pins(ROOT / name) if "==" not in pin or "+" in pin]
    assert loose == []
