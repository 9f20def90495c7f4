"""What a job whose ranks are all started at once does when they end, here or on other hosts."""

from __future__ import annotations

from abc import ABC, abstractmethod

from unidist.jobs.processes import describe_exit
from unidist.launcher import Job
from unidist_launch.observation.fixed_job import FixedJobEvents
from unidist_launch.output.writer import Output
from unidist_launch.remote.ending import Ending
from unidist_launch.remote.failure import RankExit
from unidist_launch.side_processes.roster import SideRoster, drive_to_end

__all__ = ["FixedRanks"]


class FixedRanks(ABC):
    """The part that such jobs have in common. A subclass sets the attributes.

    Attributes:
        job: the job.
        ending: of the job.
        output: of the ranks.
        events: tells the observers.
        roster: the processes beside the ranks.
    """

    job: Job
    ending: Ending
    output: Output
    events: FixedJobEvents
    roster: SideRoster

    @abstractmethod
    def turn(self) -> None:
        """Wait for the next event and deal with it."""

    def note_exit(self, end: RankExit) -> None:
        """A rank has ended."""
        is_lost = self.ending.note(end)
        self.events.exited(end.rank, end.pid, end.returncode)
        if is_lost:
            self.output.message(f"unidist: rank {end.rank} is lost ({end.reason}); the others go on without it")
            self.events.rank_lost(end.rank, end.reason)
        elif self.job.verbose:
            self.output.message(f"unidist: rank {end.rank} ended: {end.host_lost or describe_exit(end.returncode)}")

    def show(self) -> None:
        """Give observers their turn, show the state of the job, and end it if it has to."""
        self.events.turn()
        self.output.show(running=self.job.num_proc - len(self.ending.exits), state=self.events.summary)
        self.ending.advance(self.output)

    def conclude(self) -> int:
        """Report how the ranks have ended, then see the processes beside them through; returns the exit code."""
        code = self.ending.conclude(self.output)
        self.events.ended(code)
        drive_to_end(
            self.roster,
            turn=self._last_turn,
            finishing=self.events.observation.finishing,
            signals=self.ending.signals,
        )
        return code

    def _last_turn(self) -> None:
        self.turn()
        self.events.turn()
        self.output.show(running=0, state=self.events.summary)
