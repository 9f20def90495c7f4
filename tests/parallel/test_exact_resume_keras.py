"""A resumed training of Keras on TensorFlow has the losses of the undisturbed one, bit for bit."""

from __future__ import annotations

import sys
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest
from part_pools import PartPools

sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="the trainings are in Keras on TensorFlow"),
]

STRATEGIES = ["data", "accumulate=3", "clip_norm=0.1", "precision=bf16", "zero=1", "zero=2", "zero=3", "tensor=2",
              "pipeline=2", "activations=recompute:blocks=dense"]  # fmt: skip


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return tensorflow_pools


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_after_a_checkpoint_are_those_of_the_undisturbed_run(
    rank_pools: PartPools, strategy: str, tmp_path: Path
) -> None:
    def on_rank() -> list[list[float]]:
        from _keras_exact_resume import resumed

        return resumed(strategy, tmp_path / "saved", asynchronous=strategy in ("zero=3", "data"))

    for undisturbed, again, found in rank_pools.get(2, engine="shm").run(on_rank, timeout=timedelta(seconds=180)):
        assert len(undisturbed) == 3
        assert again == undisturbed, "two runs differ"
        assert found == undisturbed, "the resumed run differs"
