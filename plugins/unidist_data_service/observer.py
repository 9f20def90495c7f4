"""Starts the data workers of a job, and tells its ranks of those that have ended."""

from __future__ import annotations

import sys
from pathlib import Path

from typing_extensions import override

from unidist.jobs import describe_exit
from unidist.launcher import JobObserver, ObservedJob, SideProcess
from unidist_data_service.keys import COUNT_KEY, KEY_FILE_VARIABLE, lost_key

_ROLE = "data"


class DataWorkersObserver(JobObserver):
    """Runs the data workers of one job, on its hosts. One that fails is not started again; others do its work.

    Args:
        count: number of data workers.
        key_file: file for the key by which others join; None: none.
    """

    starts_processes = True

    def __init__(self, count: int, *, key_file: Path | None) -> None:
        self._count = count
        self._key_file = key_file
        self._workers: dict[int, int] = {}
        self._has_begun = False

    @override
    def start(self, job: ObservedJob) -> None:
        self._job = job

    @override
    def turn(self) -> None:
        """Start the workers."""
        if self._has_begun:
            return
        self._has_begun = True
        self._values = self._job.values()
        self._values.set(COUNT_KEY, str(self._count).encode())
        for index in range(self._count):
            self._workers[self._job.start_process(self._process(index))] = index

    @override
    def process_exited(self, number: int, returncode: int) -> None:
        """Tell ranks that wait for it."""
        index = self._workers.pop(number, None)
        if index is not None:
            self._values.set(lost_key(index), f"it has ended ({describe_exit(returncode)})".encode())

    def _process(self, index: int) -> SideProcess:
        env = {"CUDA_VISIBLE_DEVICES": ""}  # a framework must not take the ranks' memory
        if index == 0 and self._key_file is not None:
            env[KEY_FILE_VARIABLE] = str(self._key_file)
        command = (sys.executable, "-m", "unidist_data_service.worker")
        return SideProcess(command, role=_ROLE, index=index, env=env, label=f"data worker {index}")
