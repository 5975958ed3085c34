"""What can be compiled is compiled: an optional module whose build fails only makes things slower and skips tests."""

import importlib.util
import tomllib

from support.native import compiler
from support.repository import ROOT

MODULES = [
    module["name"]
    for module in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
]


def test_native_modules_are_there_where_a_compiler_is() -> None:
    assert MODULES
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    assert compiler() is None or not missing
