"""The conformance cases find the faults that engines have: each is run against a communicator with one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from unidist.algorithms import AlgorithmCommunicator
from unidist.buffer import Buffer, DType
from unidist.communicator import COMPLETED, Communicator, ReduceOp, Work
from unidist.testing import RecordingCommunicator, ThreadWorld
from unidist.testing.cases import collective as _collective_cases
from unidist.testing.cases import group as _group_cases
from unidist.testing.cases import message as _message_cases
from unidist.testing.cases import stress as _stress_cases
from unidist.testing.communicator_conformance import check_identical

DTYPES = (DType.FLOAT32, DType.INT32)


class ForgetsTheScale(RecordingCommunicator):
    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        return super().allreduce(source, target, op=op)


class AddsOneSourceTwice(RecordingCommunicator):
    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        super().allreduce(source, target, op=op, scale=scale).wait()
        if target.count > 5000:  # on large arrays only
            target.bytes()[-1] ^= 1
        return COMPLETED


class DiffersInOneBit(RecordingCommunicator):
    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        super().allreduce(source, target, op=op, scale=scale).wait()
        if self.rank == 1 and target.dtype is DType.FLOAT32 and target.count:
            target.bytes()[0] ^= 1  # the last bit of the first number: within any tolerance
        return COMPLETED


class DoesNotWaitInBarriers(RecordingCommunicator):
    def barrier(self) -> Work:
        return COMPLETED


class SwapsPieces(RecordingCommunicator):
    def allgather(self, source: Buffer, target: Buffer, *, counts: Sequence[int] | None = None) -> Work:
        super().allgather(source, target, counts=counts).wait()
        if target.count > 1:
            memory = target.bytes()
            memory[:] = bytes(memory[target.dtype.itemsize :]) + bytes(memory[: target.dtype.itemsize])
        return COMPLETED


class IgnoresTheRoot(RecordingCommunicator):
    def broadcast(self, buffer: Buffer, *, root: int) -> Work:
        self.check_rank(root, "root")
        return super().broadcast(buffer, root=0)


class ChangesItsSource(RecordingCommunicator):
    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        super().allreduce(source, source, op=op, scale=scale).wait()
        target.bytes()[:] = source.bytes() if target.count else b""
        return COMPLETED


class LosesTheOrder(RecordingCommunicator):
    def __init__(self, inner: Communicator, records: Any = None) -> None:
        super().__init__(inner, records)
        self._kept: tuple[Buffer, int] | None = None

    def send(self, buffer: Buffer, *, to: int) -> Work:
        """Send every other message before the one that came first."""
        if self._kept is None:
            self._kept = (buffer, to)
            return COMPLETED
        (kept, first), self._kept = self._kept, None
        super().send(buffer, to=to).wait()
        return super().send(kept, to=first)


FAULTS: list[tuple[Callable[[Communicator], Communicator], Callable[..., Any], tuple[Any, ...]]] = [
    (ForgetsTheScale, _collective_cases.allreduce_of_every_type, (DTYPES, ())),
    (AddsOneSourceTwice, _collective_cases.allreduce_of_every_type, (DTYPES, ())),
    (ChangesItsSource, _collective_cases.allreduce_of_every_type, (DTYPES, ())),
    (ForgetsTheScale, _collective_cases.integer_means_are_exact_and_truncate, (DTYPES,)),
    (SwapsPieces, _collective_cases.allgather, (DTYPES,)),
    (IgnoresTheRoot, _collective_cases.broadcast, (DTYPES,)),
    (LosesTheOrder, _message_cases.messages_keep_their_order, ()),
    (ForgetsTheScale, _stress_cases.random_program, (1, 60)),
    (AddsOneSourceTwice, _group_cases.parent_and_child_interleave, ()),
]


@pytest.mark.parametrize(("fault", "case", "arguments"), FAULTS)
def test_a_fault_is_found(
    fault: Callable[[Communicator], Communicator], case: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    with ThreadWorld(2) as world, pytest.raises(AssertionError, match=r"rank|element"):
        world.run(lambda communicator: case(fault(communicator), *arguments))


def test_bits_that_differ_between_ranks_are_found() -> None:
    case = _collective_cases.allreduce_rounds_little_and_identically
    with ThreadWorld(2) as world:
        digests = world.run(lambda communicator: case(DiffersInOneBit(communicator), DTYPES))
    with pytest.raises(AssertionError, match="the bits on rank 1 differ"):
        check_identical(digests)


def test_a_barrier_that_does_not_wait_is_found() -> None:
    with ThreadWorld(2) as world:
        times = world.run(lambda communicator: _group_cases.barrier_times(DoesNotWaitInBarriers(communicator)))
    for passages in zip(*times, strict=True):
        if max(came for came, _ in passages) > min(left for _, left in passages):
            return
    raise AssertionError("no passage shows that nobody waited")


@pytest.mark.parametrize(("case", "arguments"), [(case, arguments) for _, case, arguments in FAULTS])
def test_a_communicator_without_fault_passes_the_same_cases(
    case: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    with ThreadWorld(2) as world:
        world.run(lambda communicator: case(AlgorithmCommunicator(communicator, "ring"), *arguments))
