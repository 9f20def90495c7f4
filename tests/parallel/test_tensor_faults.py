"""A rank that cannot go on within cut layers ends the others, who learn which one it was; nobody waits for ever."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _tensor_faults import check_others, train, train_or_die

pytestmark = pytest.mark.parallel
LIMIT = timedelta(seconds=300)


@pytest.mark.parametrize(
    ("engine", "moment"),
    [
        ("shm", "forward"),
        ("shm", "backward"),
        ("gloo", "forward"),
        pytest.param("gloo", "backward", marks=pytest.mark.soak),
    ],
)
def test_an_exception_ends_every_rank(rank_pool: RankPoolFactory, engine: str, moment: str) -> None:
    outcomes = rank_pool(3).run(train, ("torch", engine, "raises", moment), timeout=LIMIT)
    assert outcomes[1] == ("ValueError", "no such word")
    check_others(outcomes, named=engine == "shm")  # gloo's collectives do not say whose connection broke


@pytest.mark.parametrize("moment", ["forward", pytest.param("backward", marks=pytest.mark.soak)])
def test_a_killed_rank_ends_every_rank(rank_pool: RankPoolFactory, moment: str) -> None:
    ranks = [(rank,) for rank in range(3)]
    outcomes = rank_pool(3).run(train_or_die, ("torch", "shm", moment), per_rank_args=ranks, timeout=LIMIT)
    assert outcomes[1] == ("died", "9")
    check_others(outcomes)
