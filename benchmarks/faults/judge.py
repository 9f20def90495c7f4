"""How a run of a campaign ended."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from benchmarks.faults.job import CampaignJob
from benchmarks.faults.plans import Plan
from benchmarks.faults.training import total

__all__ = ["Outcome", "Verdict", "run"]

LIMIT_SEC = 150.0
"""A job of seconds that takes longer hangs."""

_LEFT_SEC = 20.0


class Verdict(StrEnum):
    """How a run ended; the last four are defects."""

    EXACT = "exact"
    NAMED = "error that names the cause"
    UNNAMED = "error without a cause"
    WRONG = "wrong sum"
    HUNG = "hung"
    LEFT = "left something behind"


@dataclass(frozen=True)
class Outcome:
    """The verdict on a run.

    Args:
        verdict: see there.
        seconds: that the job took.
        num_met: faults that happened before the job had ended.
        text: what says more: the last lines, or what is left.
    """

    verdict: Verdict
    seconds: float
    num_met: int
    text: str = ""

    @property
    def is_defect(self) -> bool:
        """Whether something is to be mended."""
        return self.verdict not in (Verdict.EXACT, Verdict.NAMED)


def run(plan: Plan) -> Outcome:
    """Run a plan in a temporary folder."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return _run(plan, Path(folder))


def _run(plan: Plan, folder: Path) -> Outcome:
    began = time.monotonic()
    deadline = began + LIMIT_SEC
    with CampaignJob(plan.job, plan.engine, folder) as job:
        num_met = 0
        for fault in plan.faults:
            if not job.meet(fault, deadline):
                break
            num_met += 1
        code = job.end(deadline)
        seconds = time.monotonic() - began
        last = "\n".join(job.lines[-30:])
        if code is None:
            return Outcome(Verdict.HUNG, seconds, num_met, last)
        if left := _left(job):
            return Outcome(Verdict.LEFT, seconds, num_met, f"{left}\n{last}")
        if code == 0:
            is_exact = {float(each) for each in job.totals() if _is_number(each)} == {total()}
            verdict = Verdict.EXACT if is_exact and all(map(_is_number, job.totals())) else Verdict.WRONG
            return Outcome(verdict, seconds, num_met, "" if verdict is Verdict.EXACT else f"{job.totals()}\n{last}")
        was_killed = any(fault.target == "launcher" and fault.kind == "kill" for fault in plan.faults)
        reports = [line for line in job.lines if line.startswith("unidist: ")]
        names_it = plan.may_fail and (was_killed or any(_names_a_cause(line) for line in reports))
        return Outcome(Verdict.NAMED if names_it else Verdict.UNNAMED, seconds, num_met, f"exit code {code}\n{last}")


def _names_a_cause(line: str) -> bool:
    return any(words in line for words in ("failed first", "was lost", "ended by", "has ended before"))


def _left(job: CampaignJob) -> str:
    """Return what is left of an ended job after a while; "" if nothing is."""
    deadline = time.monotonic() + _LEFT_SEC
    while (processes := job.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if processes:
        return f"processes {[(each.pid, each.name()) for each in processes]}"
    return f"files {job.files()}" if job.files() else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
