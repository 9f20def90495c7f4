"""Data parallelism, plain and accumulating, gives the numbers of one process in JAX, however a step is run."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from part_pools import PartPools

from unidist.testing import StrategyConformance

pytest.importorskip("jax", reason="the training is in JAX")
pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(jax_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return jax_pools


class JaxConformance(StrategyConformance):
    framework = "jax"
    modes = ("jit", "step")
    sizes = (2,)


class TestJaxDataParallel(JaxConformance):
    modes = ("jit", "eager", "step")


@pytest.mark.soak
class TestJaxDataParallelOnOtherNumbersOfRanks(JaxConformance):
    modes = ("step",)
    sizes = (1, 3)


class TestJaxDataParallelOverTcp(JaxConformance):
    engine = "tcp"
    modes = ("step",)


@pytest.mark.skipif(find_spec("torch") is None, reason="gloo is PyTorch's")
class TestJaxDataParallelOverGloo(JaxConformance):
    engine = "gloo"
    modes = ("step",)
    optimizers = ("sgd",)


class TestJaxAccumulatingTheMean(JaxConformance):
    strategy = "accumulate=4"
    passes = 4
    optimizers = ("adamw",)


class TestJaxAccumulatingTheSum(JaxConformance):
    strategy = "accumulate=4:reduction=sum"
    passes = 4
    loss_factor = 4.0  # the sum over four passes is four times their mean
    optimizers = ("sgd",)  # Adam's updates are the same
