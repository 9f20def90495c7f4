"""Small all-reduces whose data travels with the message of a cycle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, ReduceOp
from unidist.errors import MismatchError
from unidist.negotiation import NegotiationOptions, Negotiator, OperationKind, Request
from unidist.negotiation._carried import CARRIED_BYTES, MOST_RANKS, CycleBlocks
from unidist.testing.recording import Record, RecordingCommunicator
from unidist.testing.threads import ThreadWorld

SMALL, LARGE = CARRIED_BYTES // 8, CARRIED_BYTES // 8 + 1
"""Numbers of float64 that fit, and one more."""


def carrying(communicator: Communicator) -> Communicator:
    communicator.capabilities = replace(communicator.capabilities, adds_in_rank_order=True)
    return communicator


def run(size: int, main: Callable[[Negotiator, list[Record]], Any]) -> list[Any]:
    """Run `main` on a negotiator per rank, with the list of the collectives that it issues."""

    def with_negotiator(communicator: Communicator) -> Any:
        recording = RecordingCommunicator(carrying(communicator))
        negotiator = Negotiator(recording, NegotiationOptions())
        try:
            result = main(negotiator, recording.records)
            communicator.barrier().wait()  # nobody closes while a peer is in a cycle
            return result
        finally:
            negotiator.close()

    with ThreadWorld(size) as world:
        return world.run(with_negotiator)


def allreduce(negotiator: Negotiator, name: str, data: Any, **options: Any) -> None:
    buffer = Buffer.of(data)
    request = Request(name, OperationKind.ALLREDUCE, buffer, buffer, data.shape, **options)
    if negotiator.rank % 2:  # either way on any rank
        negotiator.run(request)
    else:
        negotiator.submit(request).wait()


@pytest.mark.parametrize(("count", "exchanges"), [(1, 1), (SMALL, 1), (LARGE, 2)])
def test_a_known_sum_takes_one_exchange_if_it_is_small(count: int, exchanges: int) -> None:
    def main(negotiator: Negotiator, calls: list[Record]) -> None:
        for step in range(4):
            data = np.full(count, 10.0 * step + negotiator.rank)
            calls.clear()
            allreduce(negotiator, "x", data, scale=0.5)
            np.testing.assert_array_equal(data, np.full(count, 0.5 * (30.0 * step + 3)))
            assert step == 0 or len(calls) == exchanges, calls

    run(3, main)


@pytest.mark.parametrize("op", list(ReduceOp))
def test_every_reduction(op: ReduceOp) -> None:
    wanted = {ReduceOp.SUM: 5, ReduceOp.PRODUCT: 6, ReduceOp.MIN: 2, ReduceOp.MAX: 3}[op]

    def main(negotiator: Negotiator, calls: list[Record]) -> None:
        for _ in range(3):
            data = np.full(3, 2 + negotiator.rank, np.int32)
            allreduce(negotiator, "x", data, op=op)
            assert data.tolist() == [wanted] * 3

    run(2, main)


def test_sixteen_bits_are_rounded_once() -> None:
    def main(negotiator: Negotiator, calls: list[Record]) -> None:
        for _ in range(3):
            data = np.full(1, [2048.0, 1.0, 1.0][negotiator.rank], np.float16)
            allreduce(negotiator, "x", data)
        assert data.tolist() == [2050.0], "2048 + 1 is 2048 in float16"

    run(3, main)


def test_ranks_that_announce_something_else_too_go_the_long_way() -> None:
    """One rank submits two sums at once, the other one after the other: the cycles' messages differ."""

    def main(negotiator: Negotiator, calls: list[Record]) -> None:
        for step in range(5):
            arrays = [np.full(3, float(step + number)) for number in range(2)]
            requests = [
                Request(f"x{i}", OperationKind.ALLREDUCE, Buffer.of(a), Buffer.of(a), a.shape)
                for i, a in enumerate(arrays)
            ]
            if negotiator.rank:
                for handle in [negotiator.submit(request) for request in requests]:
                    handle.wait()
            else:
                for request in requests:
                    negotiator.run(request)
            assert [array[0] for array in arrays] == [2.0 * step, 2.0 * (step + 1)]

    run(2, main)


def test_another_shape_under_a_known_name_is_an_error_and_later_ones_are_right() -> None:
    def main(negotiator: Negotiator, calls: list[Record]) -> None:
        for step in range(4):
            data = np.full(4 if step == 2 and negotiator.rank else 3, 1.0)
            if step == 2:
                with pytest.raises(MismatchError, match="do not agree on operation 'x'"):
                    allreduce(negotiator, "x", data)
                assert data.tolist() == [1.0] * len(data)
            else:
                allreduce(negotiator, "x", data)
                assert data.tolist() == [2.0] * 3

    run(2, main)


def test_many_ranks_and_engines_that_add_otherwise_have_no_room() -> None:
    with ThreadWorld(MOST_RANKS + 1) as world:
        assert CycleBlocks(carrying(world.communicators[0])).room == 0
    with ThreadWorld(2) as world:
        assert CycleBlocks(world.communicators[0]).room == 0
        assert CycleBlocks(carrying(world.communicators[1])).room == CARRIED_BYTES >= DType.FLOAT64.itemsize
