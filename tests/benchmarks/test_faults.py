"""The campaign of faults: its plans, and some of its runs."""

from __future__ import annotations

import pytest

from benchmarks.faults.judge import Verdict, run
from benchmarks.faults.plans import JOBS, Fault, Plan, random_plan, smallest

NUM_SAMPLED = 12
NUM_IN_SOAK = 200


def test_a_seed_gives_the_same_plan_again_and_all_kinds_of_jobs_come() -> None:
    made = [random_plan(seed) for seed in range(100)]
    assert made == [random_plan(seed) for seed in range(100)]
    assert {plan.job for plan in made} == JOBS.keys()
    assert {plan.job for plan in (random_plan(seed, jobs=("plain", "spare")) for seed in range(50))} == {
        "plain",
        "spare",
    }


def test_a_plan_shrinks_to_the_faults_that_matter() -> None:
    faults = tuple(Fault(kind, "rank", 3) for kind in ("stop", "kill", "pause", "raise"))
    plan = Plan("elastic", "shm", faults)
    found = smallest(plan, lambda each: {"kill", "raise"} <= {fault.kind for fault in each.faults})
    assert found == Plan("elastic", "shm", (faults[1], faults[3]))
    assert smallest(plan, lambda each: False) == plan


@pytest.mark.parallel
def test_a_wrong_sum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.faults import judge

    monkeypatch.setattr(judge, "total", lambda: 1.0)
    assert run(Plan("elastic", "shm", (Fault("kill", "rank", 5),))).verdict is Verdict.WRONG


@pytest.mark.parallel
@pytest.mark.parametrize("seed", range(NUM_SAMPLED))
def test_a_sample_of_runs(seed: int) -> None:
    plan = random_plan(seed, jobs=("plain", "elastic", "durable", "spare", "resumable"))
    outcome = run(plan)
    assert not outcome.is_defect, f"{outcome.verdict}\n{plan}\n{outcome.text}"


@pytest.mark.soak
@pytest.mark.parallel
@pytest.mark.parametrize("seed", range(1000, 1000 + NUM_IN_SOAK))
def test_many_runs(seed: int) -> None:
    plan = random_plan(seed)
    outcome = run(plan)
    assert not outcome.is_defect, f"{outcome.verdict}\n{plan}\n{outcome.text}"
