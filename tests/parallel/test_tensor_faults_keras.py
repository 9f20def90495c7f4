"""A rank that cannot go on within cut layers of Keras ends the others, who learn which one it was."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest
from part_pools import PartPools
from tensorflow_ranks import ENVIRONMENT

from unidist.jobs.pool.pool import RankPool

pytest.importorskip("tensorflow", reason="the training is in Keras")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _tensor_faults import check_others, train, train_or_die

pytestmark = pytest.mark.parallel
LIMIT = timedelta(seconds=300)


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return tensorflow_pools


@pytest.mark.parametrize("moment", ["forward", pytest.param("backward", marks=pytest.mark.soak)])
def test_an_exception_ends_every_rank(tensorflow_pools: PartPools, moment: str) -> None:
    outcomes = tensorflow_pools.get(2).run(train, ("keras", "shm", "raises", moment), timeout=LIMIT)
    assert "no such word" in outcomes[1][1]
    check_others(outcomes)


@pytest.mark.soak
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_a_killed_rank_ends_every_rank(moment: str) -> None:
    ranks = [(rank,) for rank in range(3)]
    with RankPool(3, env=ENVIRONMENT) as pool:  # of its own: no rank has imported TensorFlow before it forks
        outcomes = pool.run(train_or_die, ("keras", "shm", moment), per_rank_args=ranks, timeout=LIMIT)
    assert outcomes[1] == ("died", "9")
    check_others(outcomes)
