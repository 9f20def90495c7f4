"""The lists run on a real communicator: every message is the expected one, whether ranks wait at messages or not."""

from __future__ import annotations

import struct
from datetime import timedelta

import pytest

from tests.plugins.unidist_pipeline.sizes import all_schedules
from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, Work
from unidist.testing import ThreadWorld
from unidist_pipeline.schedules.facts import delivered_by
from unidist_pipeline.schedules.model import COMPUTE, RECEIVES, SENDS, Schedule

_TIMEOUT = timedelta(seconds=20)
_MESSAGE = struct.Struct("20sqq")


def run(communicator: Communicator, schedule: Schedule, *, wait_at_messages: bool) -> list[tuple[str, int, int]]:
    """Do what an executor does; a message holds what it is. Returns what was received before it was needed."""
    arrived: list[tuple[str, int, int]] = []
    receiving: dict[tuple[str, int, int], tuple[Work, Buffer]] = {}
    sending: list[tuple[Work, Buffer]] = []

    def take(expected: tuple[str, int, int]) -> None:
        work, buffer = receiving.pop(expected)
        work.wait(_TIMEOUT)
        word, stage, microbatch = _MESSAGE.unpack(buffer.bytes())
        assert (word.rstrip(b"\0").decode(), stage, microbatch) == expected
        arrived.append(expected)

    for action in schedule.ranks[communicator.rank]:
        if action.kind in SENDS or action.kind in RECEIVES:
            assert action.peer is not None
            buffer = Buffer.allocate(_MESSAGE.size, DType.UINT8)
            fact = delivered_by(action)
            if action.kind in SENDS:
                buffer.bytes()[:] = _MESSAGE.pack(fact[0].encode(), *fact[1:])
                sending.append((communicator.send(buffer, to=action.peer), buffer))
                if wait_at_messages:
                    sending[-1][0].wait(_TIMEOUT)
            else:
                receiving[fact] = communicator.recv(buffer, source=action.peer), buffer
                if wait_at_messages:
                    take(fact)
        elif action.kind in COMPUTE:
            word = "activation at" if action.kind.value == "F" else "gradient at"
            if action.kind.value != "W" and (word, action.stage, action.microbatch) in receiving:
                take((word, action.stage, action.microbatch or 0))
    for work, _ in sending:
        work.wait(_TIMEOUT)
    assert not receiving
    return arrived


@pytest.mark.parametrize("wait_at_messages", [False, True])
def test_every_schedule_runs_on_a_communicator(wait_at_messages: bool) -> None:
    def main(communicator: Communicator) -> int:
        return sum(
            len(run(communicator, schedule, wait_at_messages=wait_at_messages))
            for schedule in all_schedules(ranks=(3,), microbatches=(1, 4, 7))
        )

    with ThreadWorld(3) as world:
        found = world.run(main)
    schedules = list(all_schedules(ranks=(3,), microbatches=(1, 4, 7)))
    assert found == [sum(a.kind in RECEIVES for each in schedules for a in each.ranks[rank]) for rank in range(3)]
