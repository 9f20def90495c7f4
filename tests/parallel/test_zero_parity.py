"""ZeRO gives the numbers of one process: every stage, with whatever optimizer, over every engine."""

from __future__ import annotations

import pytest

from unidist.testing import StrategyConformance

pytest.importorskip("torch", reason="the training is in PyTorch")
pytestmark = pytest.mark.parallel


class TestStage1(StrategyConformance):
    strategy = "zero=1"


class TestStage2(StrategyConformance):
    strategy = "zero=2"
