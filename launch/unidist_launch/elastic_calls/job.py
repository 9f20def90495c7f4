"""An elastic job whose ranks run a function, as its launcher sees it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from unidist.errors import RemoteError
from unidist.jobs.pool import Answers, Record, is_error
from unidist.launcher import Job, JobObserver
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy import build, make_plan
from unidist_launch.elastic_calls.agent import CallAgents
from unidist_launch.elastic_job import ElasticRun, HostSource


@dataclass(frozen=True)
class EndedCall:
    """The outcome of a job.

    Args:
        code: exit code.
        why: ranks were lost, and the job was given up.
        records: how the calls of its ranks ended that were there at the end, or failed.
    """

    code: int
    why: str
    records: list[Record]


def call_command() -> tuple[str, ...]:
    """Return the command of each rank, for `Job`."""
    return (sys.executable, "-m", "unidist_launch.elastic_calls.rank")


def run_call(job: Job, agents: CallAgents, source: HostSource | None = None) -> EndedCall:
    """Run a job, with `call_command` as its command, to its end. From the main thread, as it handles signals.

    Args:
        job: the job; `job.elastic` is set.
        agents: starts the agents on its hosts.
        source: which hosts there are; None: `job.hosts`.

    Raises:
        ConfigurationError: no host can run it; nothing is left running.
    """
    observer = _Reasons()
    assert job.elastic is not None
    line = job.env.get("UNIDIST_STRATEGY")
    if line:  # ranks train in whole replicas of a model that it divides
        strategies = PluginManager().load().strategies
        plan = make_plan(build(line, strategies), job.num_proc, strategies)
        job = replace(job, elastic=replace(job.elastic, mesh=plan.mesh))
    job = replace(job, observers=(*job.observers, observer))
    with ExitStack() as stack:
        code = ElasticRun(job, stack, starter_of=lambda host: agents, source=source).run()
    # Of ranks that have failed on the way, a job that went well needs nothing.
    records = [record for record in agents.records if code or record[1] is None or not is_error(record[1])]
    return EndedCall(code, "; ".join(observer.reasons), records)


def results_of(ended: EndedCall, name: str) -> list[Any]:
    """Return the results of the ranks that were there at the end, in rank order.

    Args:
        ended: of `run_call`.
        name: of the function.

    Raises:
        RemoteError: the job ended with an error; says which rank failed, and why.
    """
    answers = Answers(sorted({rank for rank, _, _ in ended.records}), name)
    answers.add(ended.records)
    if ended.code and not answers.has_failed:
        raise RemoteError(f"{name} ended with exit code {ended.code}: {ended.why}", rank=-1, remote_traceback="")
    if not ended.code and not ended.records:
        raise RemoteError(f"{name} has ended, but no rank has left a result: {ended.why}", rank=-1, remote_traceback="")
    return answers.results()


class _Reasons(JobObserver):
    """Remembers why ranks were lost, and why the job was given up."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    @override
    def happened(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "give_up":
            self.reasons.insert(0, str(fields["reason"]))
        elif event == "exit" and fields["returncode"]:
            self.reasons.append(f"rank {fields['seat']} (pid {fields['pid']}): {fields['reason']}")
        elif event == "host_failed":
            self.reasons.append(f"{fields['host']}: {fields['reason']}")
