"""Our all-reduce algorithms over the messages of a real engine.

What is not an all-reduce passes through, whatever the algorithm: one of them runs the whole suite.
"""

from __future__ import annotations

import pytest

from unidist.algorithms import AlgorithmCommunicator
from unidist.communicator import Communicator
from unidist.testing import CommunicatorConformance

pytestmark = pytest.mark.parallel


class _OverShm(CommunicatorConformance):
    engine = "shm"
    detects_mismatch = False  # its all-reduce is messages, of which each rank sees its own only
    names_missing_ranks = False  # the rank that a message is missing from may itself be waiting
    names_lost_ranks = False  # a peer that gave up first may be named
    abort_carries_reason = False
    life_cycles = 8
    seeds = (1,)


class _AllreduceAlone(_OverShm):
    for _name in dir(_OverShm):
        if _name.startswith("test_") and not _name.startswith(
            ("test_allreduce", "test_means", "test_nan", "test_works", "test_polling", "test_random", "test_the_death")
        ):
            locals()[_name] = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "moment" in metafunc.fixturenames:
            metafunc.parametrize(("group_size", "moment"), [(self.sizes[-1], "large allreduce")])
        else:
            super().pytest_generate_tests(metafunc)


class TestNaive(_AllreduceAlone):
    sizes = (1, 3)

    @staticmethod
    def wrap(communicator: Communicator) -> Communicator:
        return AlgorithmCommunicator(communicator, "naive")


class TestRing(_OverShm):
    sizes = (3,)

    @staticmethod
    def wrap(communicator: Communicator) -> Communicator:
        return AlgorithmCommunicator(communicator, "ring")


class TestTree(_AllreduceAlone):
    sizes = (3,)

    @staticmethod
    def wrap(communicator: Communicator) -> Communicator:
        return AlgorithmCommunicator(communicator, "tree")


class TestButterfly(_AllreduceAlone):
    sizes = (3, 4)

    @staticmethod
    def wrap(communicator: Communicator) -> Communicator:
        return AlgorithmCommunicator(communicator, "butterfly")


@pytest.mark.soak
class TestRingOfTwo(TestRing):
    sizes = (2,)


@pytest.mark.soak
class TestButterflyOfEight(TestButterfly):
    sizes = (8,)
