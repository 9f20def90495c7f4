"""Random models under random strategies train to the numbers of one process, or are refused for a reason that is known.

`python tests/random_models` runs as many as one likes.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from part_pools import PartPools

sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

import _trained
from _model_programs import Block, Job, Program
from _random_runs import Kind, Outcome, check_many, explore, judge, table

pytestmark = pytest.mark.parallel

LIBRARIES = {"torch": "torch", "keras": "tensorflow"}


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of the sample, which `leak_check` asks too."""
    return torch_pools


def vocabulary(framework: str) -> Any:
    """Return the choices of a framework, or skip the test."""
    pytest.importorskip(LIBRARIES[framework], reason=f"the models are in {framework}")
    return importlib.import_module(f"_{framework}_random").VOCABULARY


def test_a_sample_of_programs(rank_pools: PartPools) -> None:
    results = explore(lambda program: judge(rank_pools, program), vocabulary("torch"), count=12, seed=12, shrinks=False)
    assert not results.defects, table("torch", results)
    assert sum(count for (kind, _), count in results.counts.items() if kind is Kind.SAME) > 4


def test_a_missing_exchange_is_seen(rank_pools: PartPools) -> None:
    vocabulary("torch")
    program = Program("torch", (Block("linear"),), verify=False)
    assert judge(rank_pools, program).kind is Kind.SAME
    with patch.object(_trained, "on_rank", _without_exchange):
        outcome = judge(rank_pools, program)
    assert outcome.kind is Kind.WRONG
    assert "first.weight" in outcome.text


def _without_exchange(program: Program, number: int, folder: str) -> Any:
    from unidist.gradients import allreduce

    class Silent:
        def __init__(self, communicator: Any) -> None:
            self._communicator = communicator

        def allreduce(self, source: Any, target: Any, *, scale: float) -> Any:
            return self._communicator.barrier()

    communicator = allreduce.AllReduceExchange._communicator
    with patch.object(
        allreduce.AllReduceExchange, "_communicator", lambda self, layout: Silent(communicator(self, layout))
    ):
        from _trained import on_rank

        return on_rank(program, number, folder)


def test_a_failing_program_is_shrunk_and_others_are_still_found() -> None:
    def of(program: Program) -> Outcome:
        if "gru" in {block.kind for block in program.blocks}:
            return Outcome(Kind.CRASHED, "gru")
        if "zero" in program.jobs[0].items and program.words:
            return Outcome(Kind.WRONG)
        return Outcome(Kind.SAME)

    results = explore(of, vocabulary("torch"), count=150, seed=1)
    smallest = {defect.outcome.reason: defect.smallest for defect in results.defects}
    assert smallest["gru"].blocks == (Block("gru"),)
    of_zero = smallest[""]
    assert of_zero == Program("torch", of_zero.blocks, (Job("zero=1"),), words=True)
    assert len(of_zero.blocks) == 1
    assert sum(results.counts.values()) == 150


@pytest.mark.soak
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_many_programs(framework: str) -> None:
    check_many(framework, vocabulary(framework))
