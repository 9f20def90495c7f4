"""Messages of a communicator that another thread closes between a check and the call."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from unidist.buffer import Buffer, DType
from unidist.engines.shm import ShmEngine
from unidist.errors import UsageError
from unidist.rendezvous import SingleRendezvous
from unidist.topology import Topology


@pytest.fixture
def alone() -> Any:
    return ShmEngine().connect(Topology(), SingleRendezvous(), timeout=timedelta(seconds=10))


def test_a_message_that_was_received_just_before_closing_is_an_error_if_it_was_not_looked_at(alone: Any) -> None:
    sent, target = Buffer.of(bytearray(b"text")), Buffer.allocate(4, DType.UINT8)
    work = alone.recv(target, source=0)
    alone.send(sent, to=0).wait()
    mailbox = alone._mailbox
    assert alone.group.wait_received(0, work.number, 1_000_000_000) == 0
    alone.close()
    with pytest.raises(UsageError, match="closed"):  # it may not have fitted
        mailbox.note_received(work)


def test_a_message_after_closing_is_a_usage_error(alone: Any) -> None:
    mailbox = alone._mailbox
    alone.close()
    for buffer in (Buffer.allocate(0, DType.UINT8), Buffer.allocate(9000, DType.UINT8)):
        with pytest.raises(UsageError, match="closed"):
            mailbox.send(alone, buffer, 0)
        with pytest.raises(UsageError, match="closed"):
            mailbox.receive(alone, buffer, 0)
