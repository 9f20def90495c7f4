"""The engine `horovod`, on real Horovod, against the contract of communicators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
from horovod_bindings import ENVIRONMENTS, skip_without

from unidist.buffer import DType
from unidist.communicator import ReduceOp
from unidist.testing import CommunicatorConformance, PoolCache
from unidist.testing.cases.failure import MOMENTS, Moment

pytestmark = pytest.mark.parallel


class TestHorovodCommunicator(CommunicatorConformance):
    engine = "horovod"
    sizes: ClassVar[Sequence[int]] = (1, 3)
    unsupported = frozenset((dtype, ReduceOp.PRODUCT) for dtype in (DType.COMPLEX64, DType.COMPLEX128))
    nan_ops = (ReduceOp.SUM, ReduceOp.PRODUCT)  # the MIN and MAX of Horovod's gloo depend on the order of the ranks
    detects_mismatch = False  # Horovod compares some of what may differ, and does not name ranks
    moments: ClassVar[Sequence[Moment]] = ("large allreduce", "split")  # each takes new processes
    death_bound_sec = 38.0  # Horovod's gloo may wait its own 30 s; the suite's communicators wait 40 s
    life_cycles = 8
    seeds = (1,)
    in_pairs = True  # an operation takes several of Horovod's cycles

    def test_the_death_of_a_rank_is_noticed_by_all_others(self, group_size: int, moment: str) -> None:
        # The victim is a forked child, and Horovod's gloo cannot always be started again in a child of a process in
        # which it has lost a peer: new processes for every death.
        with PoolCache() as own:
            self._rank_pool = own.get
            super().test_the_death_of_a_rank_is_noticed_by_all_others(group_size, moment)


@pytest.mark.soak
class TestHorovodCommunicatorOfOtherSizes(TestHorovodCommunicator):
    sizes = (2, 3, 4)
    moments = MOMENTS
    in_pairs = False


class TestHorovodCommunicatorByTensorFlow(TestHorovodCommunicator):
    """The same over the other binding; as it is slow to import, for fewer numbers of ranks and ways to die."""

    sizes = (3,)
    env = ENVIRONMENTS["tensorflow"]

    @pytest.fixture(autouse=True)
    def _needs_the_binding(self) -> None:
        skip_without("tensorflow")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "moment" in metafunc.fixturenames:
            metafunc.parametrize(("group_size", "moment"), [pytest.param(3, "large allreduce", marks=pytest.mark.soak)])
        else:
            super().pytest_generate_tests(metafunc)
