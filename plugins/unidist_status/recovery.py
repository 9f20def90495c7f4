"""Durations of the phases of a change of the world: detect, re-form, restore, first step. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unidist.control.messages import StepTimeReport


@dataclass
class Recovery:
    """One change of the world.

    Args:
        cause: what was lost, or that ranks come or go.
        began: when the coordinator knew of it.
        detect_sec: from the last sign of life of the lost rank until then: the most that it can have taken to notice;
            None: nothing was lost, or the rank had not been heard of.
        generation: that it led to; None: the ranks have not met yet.
        reform_sec: until the ranks had their places in the new generation.
        restore_sec: until the last rank was called again: connecting, restoring, synchronising.
        first_step_sec: until the last rank had taken its first step.
        missing: workers that have not told of their first step.
        is_loss: a member was lost.
    """

    cause: str
    began: float
    detect_sec: float | None = None
    generation: int | None = None
    reform_sec: float | None = None
    restore_sec: float | None = None
    first_step_sec: float | None = None
    missing: set[int] = field(default_factory=set)
    is_loss: bool = False

    @property
    def is_complete(self) -> bool:
        """Return whether every rank trains again."""
        return self.generation is not None and not self.missing

    def as_fields(self) -> dict[str, Any]:
        """Return it as plain data, seconds rounded to milliseconds."""
        phases = {
            "detect_sec": self.detect_sec,
            "reform_sec": self.reform_sec,
            "restore_sec": self.restore_sec,
            "first_step_sec": self.first_step_sec,
        }
        rounded = {name: None if value is None else round(value, 3) for name, value in phases.items()}
        return {"cause": self.cause, "generation": self.generation, "is_complete": self.is_complete, **rounded}


class RecoveryWatch:
    """Follows the changes of a job; `last` is the present one, or the one before."""

    def __init__(self) -> None:
        self.last: Recovery | None = None
        self.num = 0
        """Changes of the world so far, those under way included."""

    def lost(self, cause: str, now: float, heard: float | None) -> None:
        """A member was lost.

        Args:
            cause: what to say of it.
            now: when.
            heard: when something last came from it.
        """
        self._begin(cause, now)
        assert self.last is not None
        if self.last.is_loss:
            return  # another one, in the same recovery
        # Its peers may have noticed, and have said so, before the coordinator knew which rank it was.
        self.last.is_loss, self.last.cause = True, cause
        self.last.detect_sec = None if heard is None else max(0.0, self.last.began - heard)

    def changes(self, cause: str, now: float) -> None:
        """The members were asked to come back: ranks come or go; or the generation has ended."""
        self._begin(cause, now)

    def formed(self, generation: int, workers: list[int], now: float) -> None:
        """The next generation has begun."""
        if self.last is not None and self.last.generation is None:
            self.last.generation, self.last.missing = generation, set(workers)
            self.last.reform_sec = now - self.last.began

    def reported(self, worker: int, report: StepTimeReport) -> bool:
        """A worker tells how it gets on; returns whether the change is complete now, and was not before."""
        last = self.last
        if last is None or report.generation != last.generation or worker not in last.missing:
            return False
        if report.restore_sec is not None:
            last.restore_sec = max(last.restore_sec or 0.0, report.restore_sec)
        if report.first_step_sec is None:
            return False
        last.first_step_sec = max(last.first_step_sec or 0.0, report.first_step_sec)
        last.missing.discard(worker)
        return not last.missing

    def _begin(self, cause: str, now: float) -> None:
        if self.last is None or self.last.generation is not None:
            self.last = Recovery(cause, now)
            self.num += 1
