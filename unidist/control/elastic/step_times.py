"""How a process of an elastic job gets on: what its beats tell to those who watch the job. Pure.

A step lasts from one commit to the next. In it a rank works, and waits for the others: at the reduction of gradients,
at operations by name, at the agreement of the commit. The time without the waiting tells which rank the others wait
for. What a script waits for by itself (`ud.world()...wait()`) nobody sees here: it counts as work, on every rank alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class PaceReport:
    """What a beat tells. Sums begin with the process.

    Args:
        generation: in which the process trains; -1: it has not begun.
        commits: that it took part in.
        progress: commits of the whole job that this process's state has in it.
        updates: of its optimizers; 0 where the script does without.
        timed: commits whose step was measured: all but the first of each generation.
        own_sec: seconds of these steps in which it did not wait for others.
        waited_sec: seconds in which it did.
        restore_sec: from the place in the generation to the call of the training function: connecting, restoring and
            synchronising; None: there was nothing to restore.
        first_step_sec: from that call to the first commit; None: it is under way.
    """

    generation: int = -1
    commits: int = 0
    progress: int = 0
    updates: int = 0
    timed: int = 0
    own_sec: float = 0.0
    waited_sec: float = 0.0
    restore_sec: float | None = None
    first_step_sec: float | None = None


class Pace:
    """Measures one process. The script's thread writes, any thread reads.

    Args:
        clock: seconds, like `time.monotonic`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._report = PaceReport()  # replaced as a whole: a reader sees one moment
        self._updates = 0
        self._at = 0.0
        self._waited = 0.0

    @property
    def report(self) -> PaceReport:
        """What there is to tell now."""
        return replace(self._report, updates=self._updates)

    def as_fields(self) -> dict[str, float | None]:
        """Return the report as plain data, for a message."""
        return asdict(self.report)

    def begin(self, generation: int, *, progress: int, waited_sec: float, restore_sec: float | None = None) -> None:
        """Say that the training function is about to be called.

        Args:
            generation: in which.
            progress: commits that its state has seen.
            waited_sec: seconds that were waited in this generation so far (`Recorder.waited_sec`).
            restore_sec: see `PaceReport`.
        """
        self._at, self._waited = self._clock(), waited_sec
        self._report = replace(
            self._report, generation=generation, progress=progress, restore_sec=restore_sec, first_step_sec=None
        )

    def update(self) -> None:
        """Count an update of an optimizer."""
        self._updates += 1

    def commit(self, *, waited_sec: float) -> float | None:
        """Count a commit that all ranks have agreed on, and the time since the last one.

        Args:
            waited_sec: seconds that were waited in this generation so far, the agreement included.

        Returns:
            The seconds of the generation's first step, when it was that; else None.
        """
        now, report = self._clock(), self._report
        seconds, waited = now - self._at, waited_sec - self._waited
        self._at, self._waited = now, waited_sec
        if report.first_step_sec is None:
            self._report = replace(
                report, commits=report.commits + 1, progress=report.progress + 1, first_step_sec=seconds
            )
            return seconds
        waited = min(max(waited, 0.0), seconds)  # several threads may wait at the same time
        self._report = replace(
            report,
            commits=report.commits + 1,
            progress=report.progress + 1,
            timed=report.timed + 1,
            own_sec=report.own_sec + seconds - waited,
            waited_sec=report.waited_sec + waited,
        )
        return None
