"""The engine tcp against the contract of communicators, on loopback."""

from __future__ import annotations

import pytest

from unidist.testing import CommunicatorConformance

pytestmark = pytest.mark.parallel


class _Tcp(CommunicatorConformance):
    engine = "tcp"
    detects_mismatch = False  # a MismatchError on every rank, but the communicator does not go on


class TestTcpCommunicator(_Tcp):
    sizes = (1, 2, 3)
    life_cycles = 40


@pytest.mark.soak
class TestTcpCommunicatorOfOtherSizes(_Tcp):
    sizes = (4, 8)


class TestTcpCommunicatorWithManyConnections(_Tcp):
    """Segments of what is long come over several connections, in any order."""

    sizes = (3,)
    env = {"UNIDIST_TCP_CONNECTIONS": "4"}  # noqa: RUF012 - as in the base class
    moments = ("large allreduce",)
    life_cycles = 10


class TestTcpCommunicatorWithOneConnection(_Tcp):
    sizes = (2,)
    env = {"UNIDIST_TCP_CONNECTIONS": "1"}  # noqa: RUF012 - as in the base class
    moments = ("large allreduce",)
    life_cycles = 10


class TestTcpCommunicatorWithTls(_Tcp):
    """Sizes of records and of messages have nothing to do with each other."""

    sizes = (2,)
    env = {"UNIDIST_TLS": "1"}  # noqa: RUF012 - as in the base class
    moments = ("large allreduce",)
    life_cycles = 10
    in_pairs = True


@pytest.mark.soak
class TestTcpCommunicatorOfOtherSizesWithTls(_Tcp):
    sizes = (2, 3, 4)
    env = {"UNIDIST_TLS": "1", "UNIDIST_TCP_CONNECTIONS": "4"}  # noqa: RUF012 - as in the base class
