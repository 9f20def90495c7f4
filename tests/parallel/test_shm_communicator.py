"""The shm engine against the contract of communicators."""

from __future__ import annotations

import pytest

from unidist.testing import CommunicatorConformance

pytestmark = pytest.mark.parallel


class TestShmCommunicator(CommunicatorConformance):
    engine = "shm"
    sizes = (1, 2, 4)  # three, with what is not a power of 2, below: through windows of one byte, and as soak
    shares_memory = True
    life_cycles = 40


@pytest.mark.soak
class TestShmCommunicatorOfOtherSizes(TestShmCommunicator):
    sizes = (3, 8)
    life_cycles = 100


@pytest.mark.soak
class TestShmCommunicatorNotices(TestShmCommunicator):
    """On a machine with nothing else to do, a death and an abort are noticed within a second."""

    sizes = (3,)
    death_bound_sec = 1.0
    abort_bound_sec = 1.0


class TestShmCommunicatorWithTinyWindows(CommunicatorConformance):
    """Little staging memory: everything large goes through many windows."""

    engine = "shm"
    sizes = (3,)
    moments = ("large allreduce",)
    env = {"UNIDIST_SHM_STAGING_BYTES": "1"}  # noqa: RUF012 - as in the base class
    life_cycles = 10
