"""The shm engine against the contract of communicators."""

from __future__ import annotations

import pytest

from unidist.testing import CommunicatorConformance

pytestmark = pytest.mark.parallel


class TestShmCommunicator(CommunicatorConformance):
    engine = "shm"


class TestShmCommunicatorWithTinyWindows(CommunicatorConformance):
    """Little staging memory: everything large goes through many windows."""

    engine = "shm"
    sizes = (3,)
    env = {"UNIDIST_SHM_STAGING_BYTES": "1"}  # noqa: RUF012 - as in the base class
    life_cycles = 10
