"""Run the tests as CI does, or write down what a run has proven.

    python -m tools.ci run --minutes 75 --started SECONDS
    python -m tools.ci record GROUP

`run`: the quick tests, those of JAX with its newest version too, then in each environment those that the change can
affect, then the rest; groups that were not proven for the longest time come first. Exit code 1 if a test failed; what
there was no time for is named.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping

from tools.affected import read_graph
from tools.affected.__main__ import changed_since, files_of
from tools.ci.groups import (
    GROUPS,
    RECORD,
    ROOT,
    Proven,
    group_files,
    history,
    in_turn,
    is_clean,
    proven_now,
    read_record,
    write_record,
)
from tools.ci.runs import Outcome, again, flakes, minutes_since, run


def main() -> int:
    """Parse the command line and do it."""
    parser = argparse.ArgumentParser(prog="python -m tools.ci", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run")
    command.add_argument("--minutes", type=float, default=75, help="begin no test later than so many after the start")
    command.add_argument("--started", type=float, default=time.time(), help="the start, in seconds since 1970")
    command = commands.add_parser("record")
    command.add_argument("group", choices=[group.name for group in GROUPS])
    arguments = parser.parse_args()
    if arguments.command == "record":
        return _record(arguments.group)
    return _run(arguments.started, arguments.minutes)


def _record(group: str) -> int:
    some = [name for name in ("TEST_FLAGS", "TEST_ONLY", "TEST_NOT", "TEST_DEADLINE") if os.environ.get(name)]
    if some or not is_clean():
        why = f"{some[0]} chose some of the tests" if some else "the working tree has changes"
        print(f"{group}: not recorded in {RECORD.name}, since {why}")
    else:
        write_record({**read_record(), group: proven_now(history()[0])})
    return 0


def _run(started: float, minutes: float) -> int:
    deadline = started + minutes * 60
    record, commits = read_record(), history()
    groups = in_turn(GROUPS, record, commits)
    folders = {group.name: _make_variable(group.variable) for group in groups if group.variable}
    affected = {group: group_files(group, folders, _affected(record.get(group.name), commits)) for group in groups}
    steps: list[tuple[str, str, Collection[str] | None]] = [("quick", "test", None)]
    steps += [("quick, newest jax", "test-jax-newest", None)]
    steps += [(f"{group.name}, affected", group.target, affected[group]) for group in groups if affected[group]]
    steps += [(group.name, group.target, None) for group in groups]
    # A failure ends `make test-all` before these.
    steps += [("without torch", "test-without-torch", None)]
    outcomes: dict[str, Outcome] = {}
    for name, target, only in steps:
        passed = set[str]().union(*(outcome.passed for outcome in outcomes.values()))
        if time.time() < deadline:
            outcomes[name] = again(target, run(target, only=only, without=passed, deadline=deadline))
        else:
            outcomes[name] = Outcome(left_out=True)
        print(f"CI: {name}: {outcomes[name]}; {minutes_since(started):.0f} minutes since the start", flush=True)
    return _summary(outcomes, started)


def _affected(proven: Proven | None, commits: Collection[str]) -> Collection[str]:
    """Return the test files that changes since a group was proven can affect; none if that is not known: all run."""
    if proven is None or proven.commit not in commits:
        return []
    changed = changed_since(proven.commit)
    return read_graph(ROOT, {*files_of(), *changed}).affected(changed)


def _summary(outcomes: Mapping[str, Outcome], started: float) -> int:
    print(f"\nCI took {minutes_since(started):.0f} minutes")
    for name, outcome in outcomes.items():
        print(f"  {name}: {outcome}")
    for name, outcome in outcomes.items():
        for test, message in outcome.failed.items():
            print(f"FAILED ({name}) {test}: {message}")
    for flake in flakes():
        print(f"FLAKE, a defect to hunt: {flake}")
    return 0 if all(outcome.is_good for outcome in outcomes.values()) else 1


def _make_variable(name: str) -> Collection[str]:
    done = subprocess.run(["make", "--silent", f"show-{name}"], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.split()


if __name__ == "__main__":
    sys.exit(main())
