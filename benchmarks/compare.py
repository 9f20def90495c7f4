"""Two tables of `make bench`, row by row: what became slower or faster, beyond the noise of both. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report import Row

SMALLEST = 0.05
"""Smaller changes are none, however still the machine was."""


@dataclass(frozen=True)
class Change:
    """One row of both tables.

    Args:
        old: of the first table.
        new: of the second.
    """

    old: Row
    new: Row

    @property
    def is_beyond_noise(self) -> bool:
        """Whether no round of one is within the rounds of the other, and the medians are further apart than those."""
        old, new = self.old, self.new
        is_apart = new.low > old.high or new.high < old.low
        noise = max(row.high - row.low for row in (old, new))
        smallest = SMALLEST * min(abs(old.value), abs(new.value))
        return is_apart and abs(new.value - old.value) > max(noise, smallest)

    @property
    def kind(self) -> str:
        """Return "slower", "faster" or "same"."""
        if not self.is_beyond_noise:
            return "same"
        return "faster" if (self.new.value > self.old.value) == self.new.is_higher_better else "slower"

    def line(self) -> str:
        """Return it in words."""
        spreads = " -> ".join(
            f"{row.value:.2f}{row.unit} ({row.low:.2f} to {row.high:.2f})" for row in (self.old, self.new)
        )
        return f"{self.kind:6}  {self.new.what}: {spreads}"


def changes(old: Sequence[Row], new: Sequence[Row]) -> list[Change]:
    """Return the rows that both tables have, those that became slower first."""
    before: Mapping[str, Row] = {row.what: row for row in old}
    found = [Change(before[row.what], row) for row in new if row.what in before]
    return sorted(found, key=lambda change: ("slower", "faster", "same").index(change.kind))


def described(old: Sequence[Row], new: Sequence[Row]) -> list[str]:
    """Return the lines of the comparison: each change beyond noise, how many rows are the same, and who has others."""
    found = changes(old, new)
    lines = [change.line() for change in found if change.kind != "same"]
    lines.append(f"{sum(change.kind == 'same' for change in found)} of {len(found)} rows are the same but for noise")
    if any(len(row.rounds) < 2 for row in (*old, *new)):
        lines.append("a table has rows of one round, whose noise is not known: measure both with --rounds 3")
    for rows, others, which in ((old, new, "first"), (new, old, "second")):
        missing = [row.what for row in rows if row.what not in {other.what for other in others}]
        lines += [f"only in the {which}: {what}" for what in missing]
    return lines
