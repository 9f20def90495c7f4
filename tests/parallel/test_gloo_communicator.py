"""The gloo engine of the torch adapter against the contract of communicators."""

from __future__ import annotations

import pytest

from unidist.buffer import DType
from unidist.communicator import ReduceOp
from unidist.testing import CommunicatorConformance

pytest.importorskip("torch", reason="the engine gloo is PyTorch's")
pytestmark = pytest.mark.parallel


class TestGlooCommunicator(CommunicatorConformance):
    engine = "gloo"
    sizes = (1, 3)
    unsupported = frozenset((dtype, ReduceOp.PRODUCT) for dtype in (DType.COMPLEX64, DType.COMPLEX128))
    nan_ops = (ReduceOp.SUM, ReduceOp.PRODUCT)  # gloo's own MIN and MAX depend on the order of the ranks
    detects_mismatch = False
    detects_message_size = False
    names_missing_ranks = False
    names_lost_ranks = False
    abort_reaches_peers = False  # a wait inside gloo ends with its timeout
    abort_carries_reason = False
    life_cycles = 8
    seeds = (1,)


@pytest.mark.soak
class TestGlooCommunicatorOfOtherSizes(TestGlooCommunicator):
    sizes = (2, 4)
