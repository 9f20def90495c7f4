"""The engine of one process against the contract of communicators."""

from __future__ import annotations

from unidist.testing import CommunicatorConformance


class TestSingleCommunicator(CommunicatorConformance):
    engine = "single"
    sizes = (1,)
    shares_memory = True
