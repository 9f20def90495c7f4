"""The strategy `sample-board`: ranks say hello to a process beside them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from unidist.control import job_values
from unidist.launcher import SideProcess
from unidist.strategy import OutlivesRanks, Plan, RunsSideProcesses, Strategy

WAIT = timedelta(seconds=60)


@dataclass
class Board(Strategy, RunsSideProcesses, OutlivesRanks):
    """Has a process that waits until all ranks have said hello, and answers.

    Args:
        boards: number of such processes.
    """

    name: ClassVar[str] = "sample-board"

    boards: int = 1

    def side_processes(self, plan: Plan) -> Sequence[SideProcess]:
        command = (sys.executable, "-m", "unidist_sample.board", str(plan.world_size))
        return [SideProcess(command, "board", index, is_vital=True) for index in range(self.boards)]

    def tolerates_lost_ranks(self, plan: Plan) -> bool:
        return True


def say_hello(rank: int, boards: int = 1) -> str:
    """Say hello as a rank, wait for the answers of so many processes, and return that of the last."""
    values = job_values()
    values.set(f"hello/{rank}", str(rank).encode())
    answers = values.wait([f"board/{board}" for board in range(boards)], WAIT)
    values.close()
    return answers[-1].decode()


def serve(number: str) -> None:
    """Answer when so many ranks have said hello, and serve until the job has ended."""
    import os
    import signal

    values = job_values()
    said: Any = values.wait([f"hello/{rank}" for rank in range(int(number))], WAIT)
    answer = f"hello {b' '.join(said).decode()}"
    print("answered", flush=True)  # before the answer, with which the job may end
    values.set(f"board/{os.environ['UNIDIST_ROLE_INDEX']}", answer.encode())
    signal.sigwait([signal.SIGTERM])


if __name__ == "__main__":
    serve(sys.argv[1])
