"""A resumed training of Keras on JAX has the losses of the undisturbed one, bit for bit.

In JAX alone, random numbers are arguments of the script.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("jax", reason="the trainings are in JAX")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(jax_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return jax_pools


@pytest.mark.parametrize("strategy", ["data", "zero=1", "zero=2", "accumulate=3"])
def test_losses_after_a_checkpoint_are_those_of_the_undisturbed_run(
    rank_pools: PartPools, strategy: str, tmp_path: Path
) -> None:
    def on_rank() -> list[list[float]]:
        from _keras_exact_resume import resumed

        return resumed(strategy, tmp_path / "saved", asynchronous=strategy == "data")

    for undisturbed, again, found in rank_pools.get(2, engine="shm").run(on_rank, timeout=timedelta(seconds=180)):
        assert len(undisturbed) == 3
        assert again == undisturbed, "two runs differ"
        assert found == undisturbed, "the resumed run differs"
