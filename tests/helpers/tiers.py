"""Which tests run: the quick ones (`--quick`), all, or those of `make soak`; a plugin of pytest.

What was measured decides, see durations.py: `--quick` runs what is quick, and the tests of end_to_end.toml, whatever
they take. What takes more than SOAK_SEC is marked `soak`. `--write-durations` writes what a run has measured.
"""

from __future__ import annotations

import functools
import re
import time
import tomllib
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from durations import Durations, without_group

SOAK_SEC = 50
"""What takes longer is left to `make soak`."""

_TESTS = Path(__file__).parents[1]
DURATIONS = _TESTS / "durations.json"
END_TO_END = _TESTS / "end_to_end.toml"

COLLECTED = pytest.StashKey[list[str]]()
"""All tests of the files that were asked for, whichever of them run."""

_COMPONENTS = {
    r"Horovod.* is not installed|unidist build horovod": "Horovod (make .venv/.horovod)",
    r"openssh-server": "ssh hosts (apt-get install openssh-server openssh-client iproute2)",
    r"slurm-wlm": "Slurm (apt-get install slurm-wlm munge)",
    r"no Chromium": "Chromium (apt-get install chromium)",
    r"needs Java": "Java (apt-get install openjdk-17-jre-headless)",
    r"make test-integrations|extra `notebook`": "other libraries (make test-integrations)",
    r"no CUDA device": "a GPU (make test-gpu)",
}
"""What tests may be skipped for the lack of, by what their reasons say, and how to get it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--quick", action="store_true", help="run what is quick, and one end-to-end test of everything")
    group.addoption(
        "--one-of-each",
        type=int,
        metavar="NUMBER",
        help="of each test that is marked `soak`, run a single case: the one of this number, counted around",
    )
    group.addoption("--write-durations", action="store_true", help=f"write {DURATIONS.name} by what this run measures")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("write_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(config), "durations-recorder")


@functools.cache
def end_to_end() -> dict[str, dict[str, str]]:
    """Return the table of end-to-end tests: of each subject, its names and the test of each."""
    return tomllib.loads(END_TO_END.read_text(encoding="utf-8"))


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks, and pytest-xdist adds groups to names
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = {test for tests in end_to_end().values() for test in tests.values()}
    config.stash[COLLECTED] = [item.nodeid for item in items]
    durations = Durations.read(DURATIONS).seconds(config.stash[COLLECTED])
    slow = []
    for item in items:
        seconds = durations[item.nodeid]
        if seconds is not None and seconds > SOAK_SEC:
            item.add_marker(pytest.mark.soak)
        if seconds != 0 and item.nodeid not in chosen:
            slow.append(item)
    left_out = set(slow) if config.getoption("quick") else set()
    if (number := config.getoption("one_of_each")) is not None:
        soak = {item.nodeid: item for item in items if item.get_closest_marker("soak")}
        left_out.update(soak[name] for name in soak.keys() - one_of_each(soak, number))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def one_of_each(tests: Iterable[str], number: int) -> set[str]:
    """Return one case of each test, another one for the next number."""
    cases = defaultdict[str, list[str]](list)
    for test in tests:
        cases[test.partition("[")[0]].append(test)
    return {each[number % len(each)] for each in cases.values()}


# What tests take. A fixture that several tests share costs each of them its part, whoever is the first; so do results
# that the tests of a class share.


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    started = time.perf_counter()
    result = yield
    if fixturedef.scope != "function":
        shared = request.session.stash.setdefault(_SHARED, {})
        key = f"{fixturedef.baseid}::{fixturedef.argname}"
        inner = sum(shared.values())
        shared[key] = shared.get(key, 0.0) + max(0.0, time.perf_counter() - started - inner)
    return result


_SHARED = pytest.StashKey[dict[str, float]]()
"""Seconds that fixtures of the present test took which are not its own."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "setup":
        report.shared_seconds = item.session.stash.get(_SHARED, {})  # type: ignore[attr-defined]  # xdist passes it on
        item.session.stash[_SHARED] = {}
        report.shared_fixtures = sorted(_shared_fixtures(item))  # type: ignore[attr-defined]
        report.shares_results = getattr(getattr(item, "cls", None), "shares_results", False)  # type: ignore[attr-defined]
    return report


def _shared_fixtures(item: pytest.Item) -> Iterator[str]:
    info = getattr(item, "_fixtureinfo", None)
    for name, definitions in (info.name2fixturedefs if info else {}).items():
        if definitions and definitions[-1].scope != "function":
            yield f"{definitions[-1].baseid}::{name}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the names of tests to the process that writes the file, which collects none itself under pytest-xdist."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["collected"] = session.config.stash.get(COLLECTED, [])


class _Recorder:
    """Adds up what tests take, and writes it at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._own: dict[str, float] = defaultdict(float)
        self._passed = set[str]()
        self._shared: dict[str, float] = defaultdict(float)
        self._users: dict[str, list[str]] = defaultdict(list)
        self._classes: dict[str, list[str]] = defaultdict(list)
        self._collected = set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = without_group(report.nodeid)
        own = report.duration
        for key, seconds in getattr(report, "shared_seconds", {}).items():
            self._shared[key] += seconds
            own -= seconds
        for key in getattr(report, "shared_fixtures", ()):
            self._users[key].append(name)
        self._own[name] += max(own, 0.0)
        if getattr(report, "shares_results", False):
            self._classes[name.rpartition("::")[0]].append(name)
        if report.when == "call" and report.passed:
            self._passed.add(name)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._collected.update(getattr(node, "workeroutput", {}).get("collected", ()))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if any("::" in argument for argument in self._config.args):
            return
        for names in self._classes.values():
            mean = sum(self._own[name] for name in names) / len(names)
            self._own.update(dict.fromkeys(names, mean))
        measured = {name: self._own[name] for name in self._passed}
        for key, seconds in self._shared.items():
            for name in self._users[key]:
                if name in measured:
                    measured[name] += seconds / len(self._users[key])
        before = Durations.read(DURATIONS)
        after = before.updated(measured, self._collected | set(session.config.stash.get(COLLECTED, ())))
        root = DURATIONS.parents[1]
        after.without({file for file in after.files if not (root / file).exists()}).write(DURATIONS)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say in one line what a quick run has left out for the lack of something."""
    if not config.getoption("quick"):
        return
    reasons = {str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())}
    lacking = [text for pattern, text in _COMPONENTS.items() if any(re.search(pattern, reason) for reason in reasons)]
    if lacking:
        terminalreporter.write_line(f"left out for the lack of: {'; '.join(lacking)}")
    terminalreporter.write_line("left out because it is slow: make test-all")
