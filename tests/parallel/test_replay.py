"""`--verify replay=N`: a batch that is computed twice leaves no trace, and a rank with other bits is named."""

from __future__ import annotations

import sys
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("torch", reason="most of the trainings are in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _replay import keras_script, torch_script

pytestmark = pytest.mark.parallel
LIMIT = timedelta(seconds=120)
STRATEGIES = [
    "data", "accumulate=2", "clip_norm=0.1", "precision=bf16", "zero=1", "zero=2", "zero=3", "zero=3:shared=false",
    "zero=2,accumulate=2", "tensor=2", "pipeline=2", "activations=recompute:blocks=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return tensorflow_pools


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_that_is_computed_twice_leaves_no_trace(rank_pools: PartPools, strategy: str) -> None:
    pool = rank_pools.get(2, engine="shm")
    found = pool.run(torch_script, (strategy, "replay=1"), timeout=LIMIT)
    expected = pool.run(torch_script, (strategy, "first"), timeout=LIMIT)
    assert found == expected
    assert found[0][0] == ""


@pytest.mark.parametrize("broken", ["forward", "backward"])
@pytest.mark.parametrize("strategy", ["data", "zero=3"])
def test_a_broken_machine_is_named(rank_pools: PartPools, strategy: str, broken: str) -> None:
    pool = rank_pools.get(2, engine="shm")
    for text, losses, _ in pool.run(torch_script, (strategy, "replay=1", broken), timeout=LIMIT):
        assert text.startswith("step 4: the same batch")
        what = "the loss and" if broken == "forward" else "the gradient of '1."
        assert f": {what}" in text
        assert "(rank 1 on " in text
        assert len(losses) == 3, "the error comes before the step"


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="the training is in Keras on TensorFlow")
def test_with_keras_on_tensorflow(rank_pools: PartPools) -> None:
    pool = rank_pools.get(2, engine="shm")
    assert pool.run(keras_script, ("replay=2",), timeout=LIMIT) == pool.run(keras_script, ("first",), timeout=LIMIT)
    for text, losses in pool.run(keras_script, ("replay=2", True), timeout=LIMIT):
        assert text.startswith("step 1: the same batch")
        assert "(rank 1 on " in text
        assert losses == []
