"""The shm engine against the contract of communicators."""

from __future__ import annotations

import pytest

from unidist.testing import CommunicatorConformance

pytestmark = pytest.mark.parallel


class TestShmCommunicator(CommunicatorConformance):
    engine = "shm"
    sizes = (1, 2, 3, 4)
    shares_memory = True
    life_cycles = 40


@pytest.mark.soak
class TestShmCommunicatorOfEight(TestShmCommunicator):
    sizes = (8,)
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
