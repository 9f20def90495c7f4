"""The groups of tests, what was last proven of each, and the order in which a run proves them."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "proven.json"


@dataclass(frozen=True)
class Group:
    """Tests that run in one environment.

    Attributes:
        name: in the record.
        target: of the Makefile.
        python: of the environment.
        variable: of the Makefile, with the files and folders of these tests; "": all that no other group has.
    """

    name: str
    target: str
    python: str
    variable: str = ""


GROUPS = (
    Group("all", "test-all", ".venv/bin/python"),
    Group("jax", "test-jax", ".venv-jax/bin/python", "JAX_TESTS"),
    Group("integrations", "test-integrations", ".venv-integrations/bin/python", "INTEGRATION_TESTS"),
)


@dataclass(frozen=True)
class Proven:
    """The last run of a group in which everything passed.

    Attributes:
        commit: of the tree that it ran on.
        date: of the run, as 2026-11-28.
    """

    commit: str
    date: str


def read_record(path: Path = RECORD) -> dict[str, Proven]:
    """Return what was last proven of each group."""
    if not path.exists():
        return {}
    return {name: Proven(**entry) for name, entry in json.loads(path.read_text(encoding="utf-8")).items()}


def write_record(record: Mapping[str, Proven], path: Path = RECORD) -> None:
    """Write the record, a line for each group."""
    lines = [f"{json.dumps(name)}: {json.dumps(asdict(proven))}" for name, proven in sorted(record.items())]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def proven_now(commit: str) -> Proven:
    """Return the entry of a run that ends now."""
    return Proven(commit, datetime.datetime.now(datetime.UTC).date().isoformat())


def in_turn(groups: Sequence[Group], record: Mapping[str, Proven], commits: Sequence[str]) -> list[Group]:
    """Order groups by how long ago each was proven.

    A group that a run had no time for is not in its record, and so comes first in the next run.

    Args:
        groups: all groups.
        record: what was last proven of each.
        commits: the history, the newest commit first. What is not in it was proven before all of it.
    """
    ages = {commit: age for age, commit in enumerate(commits)}

    def age(group: Group) -> int:
        return ages.get(record[group.name].commit, len(commits)) if group.name in record else len(commits) + 1

    return sorted(groups, key=age, reverse=True)  # which keeps the order of those that are equal


def group_files(group: Group, folders: Mapping[str, Collection[str]], tests: Collection[str]) -> list[str]:
    """Return those of the files `tests` that belong to a group.

    Args:
        group: the group.
        folders: files and folders of each group that names its own.
        tests: paths of test files, relative to the root.
    """

    def belongs(test: str, places: Collection[str]) -> bool:
        return any(test == place or test.startswith(f"{place}/") for place in places)

    if group.name in folders:
        return sorted(test for test in tests if belongs(test, folders[group.name]))
    elsewhere = [place for places in folders.values() for place in places]
    return sorted(test for test in tests if not belongs(test, elsewhere))


def history(root: Path = ROOT) -> list[str]:
    """Return the hashes of all commits, the newest first; of a shallow clone, those that are there."""
    return _git(root, "rev-list", "HEAD").split()


def is_clean(root: Path = ROOT) -> bool:
    """Whether the working tree is that of the last commit, but for the files that runs of tests write."""
    written = {"tests/durations.json", "tests/proven.json"}
    changed = {line[3:] for line in _git(root, "status", "--porcelain").splitlines()}
    return changed <= written


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout
