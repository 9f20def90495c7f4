"""What CI tells a run of tests by its environment, and what it reads of it afterwards; a plugin of pytest.

- TEST_ONLY and TEST_NOT name files of lines: tests to run, and to leave out. A line is a file of tests or the name of
  a test, and may begin with the name of the environment that it is about: ".venv-jax:tests/...".
- TEST_DEADLINE is a moment in seconds since 1970: what has not begun by then is skipped.
- TEST_REPORT is a file to which a line is added at the end: what passed, what failed and why, what did not begin.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from durations import without_group

ENVIRONMENT = Path(sys.prefix).name
_NOT_BEGUN = "not begun by TEST_DEADLINE"
# Popped: a test that runs pytest in a process of its own is not what CI asks about.
_variables = {
    name: os.environ.pop(name, "") if name == "TEST_REPORT" else os.environ.get(name, "")
    for name in ("TEST_ONLY", "TEST_NOT", "TEST_REPORT")
}


def _lines(variable: str) -> frozenset[str] | None:
    """Return the tests and files that a variable's file names for this environment; None where it is not set."""
    if not (path := _variables[variable]):
        return None
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return frozenset(line.removeprefix(f"{ENVIRONMENT}:") for line in lines)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only, without = _lines("TEST_ONLY"), _lines("TEST_NOT") or frozenset()

    def is_named(item: pytest.Item, names: frozenset[str]) -> bool:
        return item.nodeid in names or item.nodeid.partition("::")[0] in names

    left_out = [item for item in items if is_named(item, without) or (only is not None and not is_named(item, only))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_runtest_setup() -> None:
    if time.time() > float(os.environ.get("TEST_DEADLINE", "inf")):
        pytest.skip(_NOT_BEGUN)


def pytest_configure(config: pytest.Config) -> None:
    if _variables["TEST_REPORT"] and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Report(Path(_variables["TEST_REPORT"])), "run-report")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A list of tests that leaves none in this environment is no error."""
    is_chosen = bool(_variables["TEST_ONLY"] or _variables["TEST_NOT"])
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and is_chosen:
        session.exitstatus = pytest.ExitCode.OK


class _Report:
    """Collects outcomes in the process that knows all of them.

    Args:
        path: the file to which the line is added.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._passed = set[str]()
        self._failed: dict[str, str] = {}
        self._not_begun = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = without_group(report.nodeid)
        if report.failed:
            self._failed[name] = _message(report)
        elif report.when == "call" and report.passed:
            self._passed.add(name)
        elif report.skipped and _NOT_BEGUN in str(report.longrepr):
            self._not_begun += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = _message(report)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        line = {
            "environment": ENVIRONMENT,
            "passed": sorted(self._passed - self._failed.keys()),
            "failed": self._failed,
            "not_begun": self._not_begun,
            "exit_status": int(exitstatus),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _message(report: Any) -> str:
    """Return the line of a failure that says most."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return next((line for line in text.splitlines() if line.strip()), "")[:300]
