"""Marks the tests of soak.txt, which `make test` leaves out, as `soak`. A plugin of pytest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

STALE_LINES = pytest.StashKey[list[str]]()
"""Lines of soak.txt that match no test, although all tests of their files were collected."""

_FILE = Path(__file__).parents[1] / "soak.txt"


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lines = [line for line in _FILE.read_text().splitlines() if not line.startswith("#")]
    patterns = {line: re.escape(line).replace(r"\*", ".*") for line in lines}
    any_of_them = re.compile("|".join(patterns.values()))
    names = [item.nodeid for item in items]
    for item in items:
        if any_of_them.match(item.nodeid):
            item.add_marker(pytest.mark.soak)
    some_of_a_file = any("::" in argument for argument in config.args) or config.getoption("lf", False)
    files = set() if some_of_a_file else {name.partition("::")[0] for name in names}
    config.stash[STALE_LINES] = [
        line
        for line, pattern in patterns.items()
        if line.partition("::")[0] in files and not any(re.match(pattern, name) for name in names)
    ]
