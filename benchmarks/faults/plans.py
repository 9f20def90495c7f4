"""Which job meets which faults, and when: plain data, made from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

__all__ = ["Fault", "Plan", "random_plan", "smallest"]

JOBS = {
    "plain": "three ranks that cannot be replaced",
    "elastic": "three ranks, of which one suffices",
    "durable": "as elastic, with checkpoints",
    "spare": "as elastic, with a process that stands by",
    "resumable": "as elastic; a launcher that is killed is started again",
    "servers": "two ranks, and two parameter servers with replicas",
    "data": "two ranks, and two data workers",
}
"""What each kind of job is."""

_TARGETS = {
    "plain": ("rank", "rank 0"),
    "elastic": ("rank", "rank 0", "agent"),
    "durable": ("rank", "rank 0", "agent", "every rank", "folder"),
    "spare": ("rank", "rank 0", "spare"),
    "resumable": ("rank", "rank 0", "agent", "launcher"),
    "servers": ("server",),
    "data": ("data worker",),
}
_KINDS = {
    "rank": ("kill", "stop", "pause", "slow", "term", "raise", "hold lock", "no memory"),
    "rank 0": ("kill", "stop", "pause", "raise", "hold lock"),
    "every rank": ("kill",),
    "spare": ("kill", "stop", "pause"),
    "agent": ("kill", "stop", "pause"),
    "launcher": ("kill", "pause"),
    "server": ("kill", "stop", "pause"),
    "data worker": ("kill", "stop", "pause"),
    "folder": ("remove", "fill"),
}
_ENGINES = ("shm", "tcp", "gloo")
_MOST_FAULTS = {"servers": 1, "data": 1, "plain": 1}  # what is left of two has no replica


@dataclass(frozen=True)
class Fault:
    """What happens to a process of a job.

    Args:
        kind: kill, stop (for good), pause, slow (stopped again and again for a while), freeze (all processes of the job
            pause), term (SIGTERM), raise, hold lock (Python's, for good), no memory; of a folder: remove, fill.
        target: rank, rank 0, every rank, spare, agent, launcher, server, data worker, folder, job.
        step: so many steps after the fault before it, or after the start of the job; 0: at once, as soon as there is
            such a process, which is before the first step, or while others still deal with the fault before.
        seconds: of a pause.
        chosen: says which one of several processes.
    """

    kind: str
    target: str
    step: int
    seconds: float = 0.0
    chosen: int = 0


@dataclass(frozen=True)
class Plan:
    """A job and its faults, in their order.

    Args:
        job: a name of `JOBS`.
        engine: of its ranks.
        faults: at least one.
    """

    job: str
    engine: str
    faults: tuple[Fault, ...]

    @property
    def may_fail(self) -> bool:
        """Whether an error that names the cause is as good as the sum."""
        if self.job == "plain":
            return True
        if self.job == "servers" and self.faults[0].step == 0:
            return True  # nobody had connected to it
        return any(fault.target == "launcher" and self.job != "resumable" for fault in self.faults)


def random_plan(seed: int, *, jobs: tuple[str, ...] = tuple(JOBS)) -> Plan:
    """Return the plan of a seed, of one of these jobs."""
    rng = random.Random(seed)
    job = rng.choice(jobs)
    faults = []
    for _ in range(rng.randint(1, _MOST_FAULTS.get(job, 3))):
        freezes = rng.random() < 0.1
        target = "job" if freezes else rng.choice(_TARGETS[job])
        kind = "freeze" if freezes else rng.choice(_KINDS[target])
        step = rng.choice((0, rng.randint(1, 40), rng.randint(1, 40)))
        faults.append(Fault(kind, target, step, round(rng.uniform(0.5, 6.0), 1), rng.randrange(12)))
    return Plan(job, rng.choice(_ENGINES), tuple(faults))


def smallest(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """Return a plan that still fails, without the faults that it fails without."""
    found = True
    while found:
        found = False
        for shorter in _shorter(plan):
            if fails(shorter):
                plan, found = shorter, True
                break
    return plan


def _shorter(plan: Plan) -> Iterator[Plan]:
    for index in range(len(plan.faults)):
        rest = plan.faults[:index] + plan.faults[index + 1 :]
        if rest:
            yield replace(plan, faults=rest)
