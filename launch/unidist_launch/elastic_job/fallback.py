"""The job that takes over from one with too few ranks for its model: another strategy, from the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

from unidist.launcher import Job


class JobRun(Protocol):
    """A run of a job, `ElasticRun`."""

    @property
    def fallback(self) -> Job | None:
        """The job that is to go on instead."""

    def run(self) -> int:
        """See the job through; returns the exit code."""


def run_elastic(job: Job, start: Callable[[Job, ExitStack], JobRun]) -> int:
    """Run a job, and after it the one that goes on instead, if it has come to that; returns the exit code.

    Args:
        job: the job; `job.elastic` is set.
        start: makes the run of a job; the stack takes what has to be given back.
    """
    while True:
        with ExitStack() as stack:
            run = start(job, stack)
            code = run.run()
        if run.fallback is None:
            return code
        job = run.fallback


def fallback_of(job: Job, num_processes: int, hosts: Collection[str]) -> Job | None:
    """Return the job that goes on with what there is; None: it was not asked for, or does not fit.

    Args:
        job: with too few ranks.
        num_processes: of it that are left.
        hosts: names of those that are left.
    """
    assert job.elastic is not None
    limits, fallback = job.elastic, job.elastic.fallback
    if fallback is None:
        return None
    num_proc = max((num for num in fallback.meshes if num <= num_processes), default=0)
    if not num_proc:
        return None
    return replace(
        job,
        num_proc=num_proc,
        env={**job.env, "UNIDIST_STRATEGY": fallback.strategy},
        hosts=tuple(host for host in job.hosts if host.name in hosts),
        elastic=replace(
            limits,
            min_num=min(limits.min_num, num_proc),
            slots_per_host=limits.slots_per_host or (None if job.hosts else job.num_proc),
            mesh=fallback.meshes[num_proc],
            fallback=None,
        ),
    )
