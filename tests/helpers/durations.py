"""How long each test takes: tests/durations.json, which decides what `make test` runs.

The file has one line for each file of tests: for each step of seconds the tests that take no longer. A test is three
characters, which stand for its name; those of a function stand for all its cases, so that a function of which a case is
new was never measured. Seconds are those of a machine as fast as the one that wrote the file first, and small changes
leave a line as it is.
"""

from __future__ import annotations

import base64
import hashlib
import json
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

QUICK_SEC = 0.25
"""The longest time of a test that counts as quick, which the file does not tell any closer."""

_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_MARK = 3

Marks = Mapping[str, int]
"""The tests of one file: rounded seconds by marks of functions, and of single cases that differ from their function."""


class Durations:
    """The durations of all tests. Names of tests are node ids of pytest: "file::Class::function[case]".

    Args:
        files: the tests of each file.
    """

    def __init__(self, files: Mapping[str, Marks] | None = None) -> None:
        self._files = dict(files or {})

    @classmethod
    def read(cls, path: Path) -> Durations:
        """Read the file; without one, nothing was ever measured."""
        folders = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return cls(
            {
                f"{folder}/{name}": {mark: int(step) for step, marks in line.items() for mark in _split(marks)}
                for folder, lines in folders.items()
                for name, line in lines.items()
            }
        )

    def write(self, path: Path) -> None:
        """Write the file."""
        folders: dict[str, list[str]] = defaultdict(list)
        for file in sorted(self._files):
            folder, _, name = file.rpartition("/")
            steps: dict[int, str] = dict.fromkeys(sorted(set(self._files[file].values())), "")
            for mark, step in sorted(self._files[file].items()):
                steps[step] += mark
            folders[folder].append(f"{json.dumps(name)}: {json.dumps(steps)}")
        parts = [f"{json.dumps(folder)}: {{\n" + ",\n".join(lines) + "\n}" for folder, lines in folders.items()]
        path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")

    @property
    def files(self) -> frozenset[str]:
        """The files of tests that have durations."""
        return frozenset(self._files)

    def has_quick(self, file: str) -> bool:
        """Whether a file has quick tests."""
        return 0 in self._files.get(file, {}).values()

    def seconds(self, tests: Iterable[str]) -> dict[str, int | None]:
        """Return the rounded seconds of each test, 0 if it is quick, and None if it was never measured.

        Args:
            tests: all tests of each file that has one among them.
        """
        found = dict[str, int | None]()
        for file, names in _by_file(tests).items():
            marks = self._files.get(file, {})
            for cases in _by_function(names):
                usual = marks.get(mark(cases))
                found.update({f"{file}::{name}": marks.get(mark([name]), usual) for name in cases})
        return found

    def updated(self, measured: Mapping[str, float], collected: Collection[str]) -> Durations:
        """Return these durations with those of a run.

        Args:
            measured: seconds of the tests that ran.
            collected: the tests of that run, whether they ran or were left out. Of a file with tests among them, what
                is not among them is forgotten.
        """
        seconds = self.seconds(collected)
        speed = _relative_speed(seconds, measured)
        seconds.update({test: rounded(found / speed, seconds.get(test)) for test, found in measured.items()})
        files = dict(self._files)
        for file, names in _by_file(collected).items():
            files[file] = _summary({name: seconds[f"{file}::{name}"] for name in names})
        return Durations({file: marks for file, marks in files.items() if marks})

    def without(self, missing: Collection[str]) -> Durations:
        """Return these durations without the files named."""
        return Durations({file: marks for file, marks in self._files.items() if file not in missing})


def without_group(nodeid: str) -> str:
    """Return the name of a test without the group that pytest-xdist puts at its end."""
    name, at, group = nodeid.rpartition("@")
    return name if at and "]" not in group else nodeid


def mark(names: Iterable[str]) -> str:
    """Return three characters that stand for the names of a function's cases, or of one of them."""
    digest = hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=3).digest()
    return base64.urlsafe_b64encode(digest).decode()[:_MARK]


def rounded(seconds: float, before: int | None = None) -> int:
    """Round up to the next step, 0 if it is quick; what is near the step `before` stays there."""
    if before == 0:
        stays = seconds <= 1.5 * QUICK_SEC
    else:
        stays = before is not None and 0.35 * before <= seconds <= 1.4 * before and seconds > QUICK_SEC / 1.5
    if before is not None and stays:
        return before
    return 0 if seconds <= QUICK_SEC else next((step for step in _STEPS if seconds <= step), _STEPS[-1])


def _relative_speed(before: Mapping[str, int | None], measured: Mapping[str, float]) -> float:
    """Return how many times as long tests took as they did before, by the median; 1 if few are known."""
    ratios = [measured[test] / seconds for test, seconds in before.items() if seconds and test in measured]
    # Steps are rounded up: on the same machine a test takes 0.7 of its step.
    return statistics.median(ratios) / 0.7 if len(ratios) >= 30 else 1.0


def _summary(seconds: Mapping[str, int | None]) -> Marks:
    """Return the marks of functions, and of the cases that differ from most of their function's.

    Args:
        seconds: of all tests of a file, those that are not known included.
    """
    marks = dict[str, int]()
    for cases in _by_function(seconds):
        known = {name: value for name in cases if (value := seconds[name]) is not None}
        if known:
            usual = statistics.mode(sorted(known.values()))
            marks |= {mark([name]): value for name, value in known.items() if value != usual}
            marks[mark(cases)] = usual
    return marks


def _by_file(tests: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        file, _, name = test.partition("::")
        found[file].append(name)
    return found


def _by_function(names: Iterable[str]) -> Collection[list[str]]:
    """Return the cases of each function."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[name.partition("[")[0]].append(name)
    return found.values()


def _split(marks: str) -> list[str]:
    return [marks[start : start + _MARK] for start in range(0, len(marks), _MARK)]
