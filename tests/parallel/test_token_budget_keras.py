"""Batches of a budget of tokens in Keras on TensorFlow have, on several ranks, the numbers of one process."""

from __future__ import annotations

import numpy as np
import pytest
from part_pools import PartPools
from token_budget_cases import COUNT, largest_difference, together

pytest.importorskip("tensorflow", reason="the training is in Keras")

from token_budget_keras import alone, fitted, fitted_alone, trained

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return tensorflow_pools


@pytest.mark.parametrize(("line", "ranks"), [("data", 2), ("data", 3), ("zero=3", 2)])
def test_the_losses_of_one_process(tensorflow_pools: PartPools, line: str, ranks: int) -> None:
    outcomes = tensorflow_pools.get(ranks).run(trained, (line,))
    steps = together([seen for _, seen in outcomes])
    assert set(range(COUNT)) == {index for step in steps for index in step}
    assert len({len(step) for step in steps}) > 1
    (expected,) = tensorflow_pools.get(1).run(alone, (steps,))
    for losses, _ in outcomes:
        assert largest_difference(losses, expected) < 1e-12
    plain, _ = tensorflow_pools.get(ranks).run(trained, (line,), {"weighted": False})[0]
    assert largest_difference(plain, expected) > 1e-6


def test_fit_has_the_weights_of_one_process(tensorflow_pools: PartPools) -> None:
    outcomes = tensorflow_pools.get(2).run(fitted)
    steps = together([seen for _, seen in outcomes])
    (expected,) = tensorflow_pools.get(1).run(fitted_alone, (steps,))
    for weights, _ in outcomes:
        for one, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
