"""`--on-nonfinite`: a bad gradient is named on every rank before it reaches the parameters, in every framework."""

from __future__ import annotations

import sys
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("torch", reason="most of the trainings are in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _nonfinite import keras_script, torch_script

pytestmark = pytest.mark.parallel
LIMIT = timedelta(seconds=120)
ERROR, SKIP = ({"UNIDIST_ON_NONFINITE": value} for value in ("error", "skip"))


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return tensorflow_pools


@pytest.mark.parametrize("strategy", ["data", "zero=1", "zero=2", "zero=3", "data:overlap=false", "clip_norm=1"])
def test_a_bad_gradient_is_an_error_on_every_rank(rank_pools: PartPools, strategy: str) -> None:
    pool = rank_pools.get(2, engine="shm", env=ERROR)
    texts, parameters = zip(*pool.run(torch_script, (strategy, True), timeout=LIMIT), strict=True)
    for text in texts:
        assert text.startswith("update 3: gradients are not finite after these ranks' own backward passes: of '")
        assert text.count("' on rank 1 (nan).") == 1
    (_, before), _ = rank_pools.get(2, engine="shm").run(torch_script, (strategy, False), timeout=LIMIT)
    assert "nan" not in str(parameters)
    assert parameters[0] != before, "the rest of the training is missing"


@pytest.mark.parametrize("strategy", ["data", "zero=2", "zero=3"])
def test_skipped_updates_leave_the_numbers_of_a_training_without_them(rank_pools: PartPools, strategy: str) -> None:
    (text, found), _ = rank_pools.get(2, engine="shm", env=SKIP).run(torch_script, (strategy, True), timeout=LIMIT)
    (_, expected), _ = rank_pools.get(2, engine="shm").run(torch_script, (strategy, False, True), timeout=LIMIT)
    assert text == ""
    assert found == expected


def test_by_default_nobody_looks(rank_pools: PartPools) -> None:
    (text, found), _ = rank_pools.get(2, engine="shm").run(torch_script, ("data", True), timeout=LIMIT)
    assert text == ""
    assert "nan" in str(found)


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="the training is in Keras on TensorFlow")
def test_with_keras_on_tensorflow(rank_pools: PartPools) -> None:
    pool = rank_pools.get(2, engine="shm", env=ERROR)
    for text in pool.run(keras_script, (True,), timeout=LIMIT):
        assert "update 3: gradients are not finite" in text
        assert "on rank 1 (nan)" in text
    assert pool.run(keras_script, (False,), timeout=LIMIT) == ["", ""]


def test_ranks_that_step_alone_cannot_agree(rank_pools: PartPools) -> None:
    def on_rank() -> str:
        from unidist.errors import ConfigurationError

        try:
            torch_script("parameter_server=async", False)
        except ConfigurationError as exc:
            return str(exc)
        return ""

    for text in rank_pools.get(2, engine="shm", env=ERROR).run(on_rank, timeout=LIMIT):
        assert "--on-nonfinite error: the ranks agree on each update" in text
