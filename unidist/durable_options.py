"""What is asked of the durable checkpoints of an elastic state. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from unidist.errors import ConfigurationError

AUTO: Final = "auto"


@dataclass(frozen=True)
class DurableOptions:
    """Where, how often and how many.

    Args:
        folder: a folder of its own for the checkpoints, in a file system that all ranks share.
        interval: between two of them; None: chosen by what they cost, see `CheckpointSchedule`.
        keep: complete ones that stay.

    Raises:
        ConfigurationError: a value is out of range.
    """

    folder: Path
    interval: timedelta | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        if self.interval is not None and self.interval <= timedelta(0):
            raise ConfigurationError(
                f"checkpoint interval of {self.interval.total_seconds():g} seconds: give more than 0, or {AUTO!r}"
            )
        if self.keep < 1:
            raise ConfigurationError(f"{self.keep} checkpoints to keep: give at least 1")

    def variables(self) -> dict[str, str]:
        """Return the variables by which a rank reads them again."""
        interval = AUTO if self.interval is None else f"{self.interval.total_seconds():g}"
        return {
            "UNIDIST_CHECKPOINT_DIR": str(self.folder),
            "UNIDIST_CHECKPOINT_INTERVAL_SEC": interval,
            "UNIDIST_CHECKPOINT_KEEP": str(self.keep),
        }


def interval_of(value: float | str) -> timedelta | None:
    """Return an interval that is given in seconds, or as "auto", which is None.

    Raises:
        ConfigurationError: it is neither.
    """
    if value == AUTO:
        return None
    try:
        return timedelta(seconds=float(value))
    except (ValueError, OverflowError):
        raise ConfigurationError(f"checkpoint interval {value!r}: give a number of seconds, or {AUTO!r}") from None
