"""One run of `make TARGET`, what it proved, and a second try for a few tests that failed."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from tools.ci.groups import ROOT

OUT = ROOT / "out" / "ci"
FLAKES = OUT / "flakes.jsonl"
_USUAL_STATUS = (0, 1, 5)
"""Of pytest: all passed, some failed, none was left to run."""
MOST_FAILED = 5
"""If more tests fail, it is not by chance, and none is tried again."""


@dataclass
class Outcome:
    """What a run, or several, came to.

    Attributes:
        passed: names of tests, each after its environment and a colon.
        failed: messages of failures by such names.
        not_begun: number of tests that the time did not suffice for.
        broken: whether pytest or make itself failed.
        left_out: whether there was no time to begin.
    """

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    not_begun: int = 0
    broken: bool = False
    left_out: bool = False

    @property
    def is_good(self) -> bool:
        """Whether nothing failed."""
        return not self.failed and not self.broken

    def __str__(self) -> str:
        """Return a line for people."""
        if self.left_out:
            return "LEFT OUT, there was no time"
        verdict = "green" if self.is_good else "broken" if self.broken else f"{len(self.failed)} failed"
        late = f", {self.not_begun} NOT BEGUN in time" if self.not_begun else ""
        return f"{verdict}, {len(self.passed)} passed{late}"


def run(
    target: str, *, only: Collection[str] | None = None, without: Collection[str] = (), deadline: float = float("inf")
) -> Outcome:
    """Run a target of the Makefile that runs tests.

    Args:
        target: its name.
        only: files and tests to run; default: all.
        without: tests to leave out.
        deadline: seconds since 1970; tests not begun by then are left out.
    """
    OUT.mkdir(parents=True, exist_ok=True)
    report = OUT / "report.jsonl"
    report.unlink(missing_ok=True)
    env = {**os.environ, "TEST_REPORT": str(report), "TEST_DEADLINE": str(deadline)}
    env["TEST_NOT"] = str(_list("not", without))
    if only is not None:
        env["TEST_ONLY"] = str(_list("only", only))
    code = subprocess.run(["make", target], cwd=ROOT, env=env, check=False).returncode
    return read_report(report, code)


def read_report(path: Path, code: int) -> Outcome:
    """Return what the runs that wrote a report came to; `code` is the exit code of what started them."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    outcome = Outcome()
    for line in map(json.loads, lines):
        name = f"{line['environment']}:{{}}".format
        outcome.passed.update(map(name, line["passed"]))
        outcome.failed.update({name(test): message for test, message in line["failed"].items()})
        outcome.not_begun += line["not_begun"]
        outcome.broken |= line["exit_status"] not in _USUAL_STATUS
    outcome.broken |= code != 0 and not outcome.failed
    return outcome


def again(target: str, outcome: Outcome) -> Outcome:
    """Run the tests that failed once more, if they are few; those that pass now are recorded as flakes.

    Returns:
        the outcome of both runs.
    """
    if outcome.broken or not 1 <= len(outcome.failed) <= MOST_FAILED:
        return outcome
    print(f"{len(outcome.failed)} failed; once more:", *outcome.failed, sep="\n  ", flush=True)
    second = run(target, only=outcome.failed)
    still = {test: message for test, message in outcome.failed.items() if test not in second.passed}
    with FLAKES.open("a", encoding="utf-8") as file:
        for test in sorted(outcome.failed.keys() - still.keys()):
            date = datetime.datetime.now(datetime.UTC).date().isoformat()
            file.write(json.dumps({"test": test, "date": date, "message": outcome.failed[test]}) + "\n")
    return Outcome(outcome.passed | second.passed, still, outcome.not_begun, second.broken)


def flakes() -> list[str]:
    """Return the recorded flakes, a line each."""
    lines = FLAKES.read_text(encoding="utf-8").splitlines() if FLAKES.exists() else []
    return [f"{item['test']} ({item['date']}): {item['message']}" for item in map(json.loads, lines)]


def minutes_since(started: float) -> float:
    """Return the minutes since a moment of `time.time()`."""
    return (time.time() - started) / 60


def _list(name: str, lines: Collection[str]) -> Path:
    path = OUT / f"{name}.txt"
    path.write_text("".join(f"{line}\n" for line in sorted(lines)), encoding="utf-8")
    return path
