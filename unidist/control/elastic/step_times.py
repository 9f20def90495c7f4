"""Step times of a process of an elastic job, which its heartbeats report to the launcher and the status page. Pure.

A step lasts from one commit to the next. In it a rank computes, and waits for the others: in the reduction of
gradients, in named operations, in the agreement of the commit. The time without waiting shows which rank the others
wait for. Waiting in the script itself (`ud.world()...wait()`) is not seen and counts as computing, on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from unidist.control.messages import StepTimeReport


class StepTimer:
    """Measures the steps of one process. The script's thread writes, any thread reads.

    Args:
        clock: seconds, like `time.monotonic`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._report = StepTimeReport()  # replaced as a whole, so that a reader sees consistent values
        self._updates = 0
        self._at = 0.0
        self._waited = 0.0

    @property
    def report(self) -> StepTimeReport:
        """The present report."""
        return replace(self._report, updates=self._updates)

    def begin(self, generation: int, *, progress: int, waited_sec: float, restore_sec: float | None = None) -> None:
        """Note that the training function is about to be called.

        Args:
            generation: of the world.
            progress: commits that the state includes.
            waited_sec: seconds waited in this generation so far (`Recorder.waited_sec`).
            restore_sec: see `StepTimeReport`.
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
            waited_sec: seconds waited in this generation so far, including the agreement.

        Returns:
            The seconds of the step if it was the generation's first; else None.
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


__all__ = ["StepTimer"]
