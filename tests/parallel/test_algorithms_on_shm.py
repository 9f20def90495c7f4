"""Our all-reduce algorithms over the messages of a real engine."""

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


class TestNaive(_OverShm):
    sizes = (1, 3)

    @staticmethod
    def wrap(communicator: Communicator) -> Communicator:
        return AlgorithmCommunicator(communicator, "naive")


class TestRing(_OverShm):
    sizes = (2, 3)

    @staticmethod
    def wrap(communicator: Communicator) -> Communicator:
        return AlgorithmCommunicator(communicator, "ring")


class TestTree(_OverShm):
    sizes = (3,)

    @staticmethod
    def wrap(communicator: Communicator) -> Communicator:
        return AlgorithmCommunicator(communicator, "tree")


class TestButterfly(_OverShm):
    sizes = (3, 8)

    @staticmethod
    def wrap(communicator: Communicator) -> Communicator:
        return AlgorithmCommunicator(communicator, "butterfly")
