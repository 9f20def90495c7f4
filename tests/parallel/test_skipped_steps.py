"""A step that one rank leaves out is an error on all ranks in that update, and says where each of them is."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the scripts are in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _skipped_steps import ends, uneven

pytestmark = pytest.mark.parallel
LIMIT = timedelta(seconds=60)


@pytest.mark.parametrize("strategy", ["data", "zero=2", "data:overlap=false"])
def test_a_step_that_is_left_out_after_zero_grad(rank_pool: RankPoolFactory, strategy: str) -> None:
    for kind, text in rank_pool(2).run(ends, (strategy, "zero_grad"), timeout=LIMIT):
        assert kind == "MismatchError", text
        assert "rank 0: update 4, batch 4 (1 drawn since the last exchange), 1 zero_grad() since then" in text
        assert "rank 1: update 4, batch 5 (2 drawn since the last exchange), 2 zero_grad() since then" in text
        assert text.count("at _skipped_steps.py:") == 2


def test_a_batch_that_is_left_out(rank_pool: RankPoolFactory) -> None:
    for kind, text in rank_pool(2).run(ends, ("data", "batch"), timeout=LIMIT):
        assert kind == "MismatchError", text
        assert "rank 1: update 4, batch 5 (2 drawn since the last exchange)" in text


def test_nothing_left_out_is_no_error(rank_pool: RankPoolFactory) -> None:
    assert rank_pool(2).run(ends, ("data", "nothing"), timeout=LIMIT) == [("", "")] * 2


@pytest.mark.parametrize("engine", ["shm", "tcp", "gloo"])
def test_a_rank_that_has_ended_with_fewer_batches_is_said_to_have_ended(
    rank_pool: RankPoolFactory, engine: str
) -> None:
    from unidist.settings.environment import set_variables

    def on_rank() -> tuple[str, str]:
        with set_variables({"UNIDIST_ENGINE": engine}):
            return uneven("data")

    (kind, text), last = rank_pool(2).run(on_rank, timeout=LIMIT)
    assert last == ("", "")
    assert kind in ("PeerLostError", "DeadlockError")
    assert text.count("rank 1 has ended after 4 updates") == 1
    assert "ud.join()" in text


@pytest.mark.parametrize("kind", [ValueError, StopIteration])
def test_a_rank_that_has_ended_with_an_exception_is_said_to(rank_pool: RankPoolFactory, kind: type[Exception]) -> None:
    (_, text), last = rank_pool(2).run(uneven, ("data", kind), timeout=LIMIT)
    assert last == (kind.__name__, "no more")
    assert text.count(f"rank 1 has ended after 4 updates with {kind.__name__}: no more.") == 1
    assert ("ud.join()" in text) == (kind is StopIteration)
