"""What all tests share: tests that need a program this machine may lack say so, and the summary names them.

``@pytest.mark.needs("promtool")`` leaves a test out where promtool is absent; ``--all`` makes that a failure.
"""

import shutil
from collections import Counter

import pytest

_ABSENT = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="fail if tests are left out for want of a program")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ABSENT] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        programs = {str(name) for mark in item.iter_markers("needs") for name in mark.args}
        for program in sorted(name for name in programs if shutil.which(name) is None):
            config.stash[_ABSENT][program] += 1
            item.add_marker(pytest.mark.skip(reason=f"needs {program}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for program, count in sorted(config.stash[_ABSENT].items()):
        terminalreporter.write_line(f"not run: {count} tests, this machine has no {program}", yellow=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if (
        exitstatus == pytest.ExitCode.OK
        and session.config.getoption("--all")
        and session.config.stash[_ABSENT]
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
