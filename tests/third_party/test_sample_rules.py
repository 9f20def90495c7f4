"""Rules on single elements and on parameters: the numbers of one process, however the gradients are divided."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from part_pools import PartPools

from unidist.testing import StrategyConformance

pytestmark = pytest.mark.parallel

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plugins.md"


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


@pytest.mark.parametrize("name", ["noise", "lars"])
def test_they_are_the_examples_of_the_page(name: str) -> None:
    from unidist_sample import lars, noise

    module = {"noise": noise, "lars": lars}[name]
    code = inspect.getsource(module).partition("\n@dataclass")[2]
    assert code in PAGE.read_text(encoding="utf-8")


class Noise(StrategyConformance):
    reference = "noise=0.1"
    sizes = (2, 3)
    optimizers = ("adamw",)


class TestNoise(Noise):
    strategy = "noise=0.1"


class TestNoiseZero1(Noise):
    strategy = "noise=0.1,zero=1"


class TestNoiseZero2(Noise):
    strategy = "noise=0.1,zero=2"


class TestNoiseZero3(Noise):
    strategy = "noise=0.1,zero=3"
    sizes = (2,)


class Lars(StrategyConformance):
    reference = "lars=0.1"
    sizes = (2, 3)
    optimizers = ("sgd",)


class TestLars(Lars):
    strategy = "lars=0.1"


class TestLarsZero1(Lars):
    strategy = "lars=0.1,zero=1"


class TestLarsZero2(Lars):
    strategy = "lars=0.1,zero=2"
