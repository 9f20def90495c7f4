"""Unusual variables and learning rates in Keras on TensorFlow: as in one process, or an error of Keras or unidist."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("tensorflow", reason="the trainings are in Keras on TensorFlow")

from odd_variables_keras import differing, outcomes
from part_pools import PartPools

pytestmark = pytest.mark.parallel

LONG = timedelta(minutes=8)  # graphs are traced for each case
REFUSED = {"layer thawed": "unknown variables"}
"""Text of the error by case: in one process Keras says so."""


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return tensorflow_pools


@pytest.mark.parametrize("strategy", ["data", "zero=1"])
def test_training_is_as_in_one_process_or_refused(rank_pools: PartPools, strategy: str) -> None:
    for found in rank_pools.get(2, engine="shm").run(outcomes, (strategy,), timeout=LONG):
        assert differing(found, REFUSED) == {}
