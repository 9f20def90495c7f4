"""The launcher: starts the processes of a job on one kind of machine or cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from unidist.engine import Availability


@dataclass(frozen=True)
class Job:
    """What to start.

    Args:
        command: program and arguments, the same on every rank.
        num_proc: number of ranks.
        env: variables set on every rank, on top of the launcher's own environment.
        output_dir: folder for one file per rank and stream; None writes none.
        grace_period: time between a forwarded SIGTERM and SIGKILL.
        verbose: more lines about what the launcher does.
        quiet: ranks' output only from rank 0 (errors of all).
        timestamps: each line of the ranks is shown with the time.
    """

    command: tuple[str, ...]
    num_proc: int
    env: Mapping[str, str] = field(default_factory=dict)
    output_dir: Path | None = None
    grace_period: timedelta = timedelta(seconds=10)
    verbose: bool = False
    quiet: bool = False
    timestamps: bool = False


class Launcher(ABC):
    """Starts a job, watches it, and reports how it ended."""

    @abstractmethod
    def availability(self) -> Availability:
        """Say whether this launcher can be used on this machine."""

    @abstractmethod
    def run(self, job: Job) -> int:
        """Start every rank of `job`, wait for the end, and return the exit code.

        The code is 0 if all ranks ended with 0; else that of the rank that failed first: its own exit
        code, or 128 + n when signal n killed it. Every process it started is gone when it returns, and
        also when the launcher itself is killed.

        Raises:
            ConfigurationError: the job cannot be started; nothing is left running.
        """
