"""Prints how many files and calls of the product an all-reduce by name, a gradient and a step pass.

And how many messages, bytes, copies and allocations a step has. Exits with 1 if one of them has more than its limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.walks.counting import LIMITS, beyond, table, walk_of
from tools.walks.recording import record_walks
from tools.walks.step_counts import LIMITS as STEP_LIMITS
from tools.walks.step_counts import more_than, step_table

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.walks", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the files of each walk, with the calls")
    chosen = parser.parse_args(arguments)
    recorded, counts = record_walks()
    walks = {name: walk_of(calls, ROOT, repeats) for name, (calls, repeats) in recorded.items()}
    print("\n".join([*table(walks), "", "a step", *step_table(counts)]))
    if chosen.list:
        for name, walk in walks.items():
            print("\n".join(["", name, *walk.lines()]))
    problems = [*beyond(walks, LIMITS), *more_than(counts, STEP_LIMITS)]
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
