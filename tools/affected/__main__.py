"""`python -m tools.affected`: the test files that uncommitted changes can affect, one on each line."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.affected import read_graph

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Print the test files, or why one of them is among them, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.affected", description=__doc__)
    parser.add_argument("--since", metavar="COMMIT", default="HEAD", help="what changed since this commit (HEAD)")
    parser.add_argument("--explain", metavar="TEST_FILE", help="say why a change affects this test file")
    chosen = parser.parse_args(arguments)
    try:
        changed = changed_since(chosen.since, root)
    except subprocess.CalledProcessError as exc:
        print(f"git cannot compare with {chosen.since!r}: {exc.stderr.splitlines()[0]}", file=sys.stderr)
        return 2
    try:
        graph = read_graph(root, {*files_of(root), *changed})
    except SyntaxError as exc:
        print(f"{exc.filename}:{exc.lineno}: {exc.msg}", file=sys.stderr)
        return 2
    if chosen.explain:
        lines = graph.explain(changed, chosen.explain)
        print("\n".join(lines) or f"no change affects {chosen.explain}")
    else:
        for test in sorted(graph.affected(changed)):
            print(test)
    return 0


def changed_since(commit: str, root: Path = ROOT) -> set[str]:
    """Return the files that differ from those of a commit, with new files and deleted ones.

    Raises:
        subprocess.CalledProcessError: there is no such commit.
    """
    tracked = _git(root, "diff", "--name-only", "--no-renames", "--relative", "-z", commit, "--")
    return {*tracked, *_git(root, "ls-files", "--others", "--exclude-standard", "-z")}


def files_of(root: Path = ROOT) -> list[str]:
    """Return the files of the working tree that git does not ignore."""
    files = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    return [file for file in files if (root / file).is_file()]


def _git(root: Path, *arguments: str) -> list[str]:
    """Run git, and return the paths that it prints."""
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)
    return [path for path in done.stdout.split("\0") if path]


if __name__ == "__main__":
    sys.exit(main())
