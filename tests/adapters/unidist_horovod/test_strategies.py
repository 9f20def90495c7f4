"""Strategies run on the engine `horovod` unchanged, with the numbers of one process."""

from __future__ import annotations

import pytest

from unidist.testing import StrategyConformance

pytestmark = pytest.mark.parallel


class TestDataParallelOverHorovod(StrategyConformance):
    engine = "horovod"
    sizes = (3,)


class TestAccumulatingOverHorovod(StrategyConformance):
    engine = "horovod"
    strategy = "accumulate=4"
    passes = 4
    sizes = (2,)
