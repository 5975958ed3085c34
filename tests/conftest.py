"""What all tests share: which of them need a program this machine may lack, and which must run in one process.

``@pytest.mark.needs("promtool")`` leaves a test out where promtool is absent; ``--all`` makes that a failure. With
``-n``, a file is run by one process, and all tests of the one real server by another.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_TOOLS = Path(__file__).resolve().parents[1] / ".run/tools"  # of deploy/tools.sh
if str(_TOOLS) not in os.environ.get("PATH", ""):
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{_TOOLS}"
_NEEDS = re.compile(r"needs (\S+)")
STACK = "tests/integration/stack/"  # these share one server, whose start takes long


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="fail if tests are left out for want of a program")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        programs = {str(name) for mark in item.iter_markers("needs") for name in mark.args}
        for program in sorted(name for name in programs if shutil.which(name) is None):
            item.add_marker(pytest.mark.skip(reason=f"needs {program}"))
    if "slow" not in str(config.option.markexpr):  # minutes long, by a documented command
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]
    yield
    items.sort(key=lambda item: not item.nodeid.startswith(STACK))  # the longest unit of work starts first


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files as units of work: pytest-xdist's own groups have no effect with this pytest."""
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return STACK if nodeid.startswith(STACK) else nodeid.partition("::")[0]

    return FileScheduling(config, log)


def _absent(config: pytest.Config) -> Counter[str]:
    """Programs that tests were left out for, with their counts; known where results are gathered."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    reasons = [report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple)]
    return Counter(match[1] for reason in reasons if (match := _NEEDS.search(reason)))


def _seconds_by_folder(reporter: pytest.TerminalReporter) -> list[tuple[float, str]]:
    """What each folder of tests took, the longest first; tests that ran side by side count in full."""
    seconds: Counter[str] = Counter()
    for reports in reporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds["/".join(report.nodeid.split("/")[:3]).partition("::")[0]] += report.duration
    folders: Counter[str] = Counter()
    for place, took in seconds.items():
        folders[place.rpartition("/")[0] if place.endswith(".py") else place] += took
    return sorted(((took, folder) for folder, took in folders.items() if took >= 1), reverse=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.verbose <= 0 and len(config.args) == 1:
        for took, folder in _seconds_by_folder(terminalreporter):
            terminalreporter.write_line(f"{took:6.0f} s  {folder}")
    for program, count in sorted(_absent(config).items()):
        terminalreporter.write_line(f"not run: {count} tests, this machine has no {program}", yellow=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and session.config.getoption("--all") and _absent(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
