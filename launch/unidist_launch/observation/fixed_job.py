"""The events of a job whose ranks do not change, as far as its observers need them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from unidist.jobs.processes import describe_exit
from unidist.launcher import Job
from unidist_launch.observation.event_log import EventLog
from unidist_launch.observation.observation import Observation
from unidist_launch.output.writer import Output


class FixedJobEvents:
    """Tells the observers of a job what happens; a worker's number is its rank, and there is one generation.

    Args:
        job: the job.
        output: of the ranks.
        send_signal: sends a signal to a rank.
        stack: closes the observers.

    Raises:
        ConfigurationError: an observer cannot do what it was asked for.
    """

    def __init__(self, job: Job, output: Output, send_signal: Callable[[int, int], None], stack: ExitStack) -> None:
        self._log = EventLog(None)
        self.observation = self._observation = Observation(job, self._log, output, send_signal, stack)
        """Tells the observers."""
        self._log.publish("job", command=list(job.command), num_proc=job.num_proc)

    def host_joined(self, index: int, name: str, *, address: str, cores: int) -> None:
        """A host is there."""
        self._log.publish("host_joined", host=name, index=index, address=address, cores=cores)

    def host_lost(self, name: str, reason: str) -> None:
        """A host is gone."""
        self._log.publish("host_lost", host=name, reason=reason)

    def started(self, host: int, pids: Mapping[int, int]) -> None:
        """Ranks of a host were started; `pids` are their processes, by rank."""
        for rank, pid in pids.items():
            self._log.publish("started", worker=rank, host=host)
            self._log.publish("process", worker=rank, seat=rank, pid=pid)

    def complete(self, num_ranks: int) -> None:
        """All ranks were started."""
        ranks = list(range(num_ranks))
        self._log.publish("generation", generation=0, world_size=num_ranks, workers=ranks, progress=0)

    def progressed(self, reports: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Ranks have written progress reports; given by rank."""
        for rank, report in reports:
            self._observation.progressed(rank, report)

    def exited(self, rank: int, pid: int, returncode: int) -> None:
        """A rank has ended."""
        self._log.publish(
            "exit", worker=rank, seat=rank, pid=pid, returncode=returncode, reason=describe_exit(returncode)
        )

    def rank_lost(self, rank: int, reason: str) -> None:
        """A rank is gone, and the others go on without it."""
        self._log.publish("rank_lost", worker=rank, rank=rank, reason=reason)

    def ended(self, exit_code: int) -> None:
        """The job is over."""
        self._log.publish("end", exit_code=exit_code)

    def turn(self) -> None:
        """Give the observers their turn. After the ranks were started, which may need a process without threads."""
        self._observation.turn()

    def summary(self) -> str:
        """Return the summary of the job for the status line, or ""."""
        return self._observation.summary()


__all__ = ["FixedJobEvents"]
