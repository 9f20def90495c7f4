"""What each rank of a job printed, from the output of its launcher."""

from __future__ import annotations

import re


def rank_lines(text: str) -> dict[int, list[str]]:
    """Return the lines of each rank, in order.

    The launcher joins equal lines that several ranks print within a tenth of a second, "[0-2] same": a test that
    expects that of them would measure time.
    """
    found: dict[int, list[str]] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"\[([\d,-]+)!?\] (.*)", line)
        if match:
            for rank in ranks_of(match[1]):
                found.setdefault(rank, []).append(match[2])
    return found


def ranks_of(label: str) -> list[int]:
    """Return the ranks that a label names: "0", "0-2,4"."""
    runs = [run.split("-") for run in label.split(",")]
    return [rank for run in runs for rank in range(int(run[0]), int(run[-1]) + 1)]
