"""The sample engine against the contract of communicators, and against one process."""

from __future__ import annotations

import pytest

from unidist.testing import CommunicatorConformance, StrategyConformance

pytestmark = pytest.mark.parallel


class TestSampleSockets(CommunicatorConformance):
    engine = "sample-sockets"
    sizes = (1, 3)
    detects_mismatch = False
    names_missing_ranks = False  # it knows whom it waits for, who may wait for another
    life_cycles = 10
    seeds = (1,)


class TestTrainingOverSampleSockets(StrategyConformance):
    engine = "sample-sockets"
    sizes = (1, 3)
    optimizers = ("adamw",)
