"""A rule on single elements, in JAX: the numbers of one process, however gradients are divided."""

from __future__ import annotations

import pytest
from part_pools import PartPools

from unidist.testing import StrategyConformance

pytest.importorskip("jax", reason="the training is in JAX")
pytest.importorskip("unidist_sample", reason="the rule is one of the sample plugin")
pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(jax_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return jax_pools


class TestNoise(StrategyConformance):
    framework = "jax"
    strategy = reference = "noise=0.1"
    modes = ("step",)
    sizes = (2,)
    optimizers = ("adamw",)
    # In JAX each parameter has a gradient, so a rule acts on those that the loss does not depend on, too.
    test_what_is_frozen_or_unused_stays = None  # type: ignore[assignment]


class TestNoiseZero1(TestNoise):
    strategy = "noise=0.1,zero=1"


class TestNoiseZero2(TestNoise):
    strategy = "noise=0.1,zero=2"


class TestNoiseZero3(TestNoise):
    strategy = "noise=0.1,zero=3"
