"""The exchange of gradients: which are summed, when, in what order, and what a missing one counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import pytest

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, Work
from unidist.errors import UsageError
from unidist.gradients.allreduce import AllReduceExchange
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.interface import NOTICE_BYTES, RoundResult
from unidist.testing import RecordingCommunicator, ThreadWorld
from unidist.timeline import Recorder

R = TypeVar("R")
PARAMETERS = [
    ParameterInfo("first", (3,), DType.FLOAT64),
    ParameterInfo("second", (2, 2), DType.FLOAT64),
    ParameterInfo("third", (1,), DType.FLOAT32),
]
ALIKE = [ParameterInfo(name, (count,), DType.FLOAT64) for name, count in (("a", 3), ("b", 8), ("c", 1))]


class HostFramework:
    """All that the exchange asks of a framework for host memory."""

    def zero(self, buffer: Buffer) -> None:
        buffer.bytes()[:] = bytes(buffer.nbytes)


def exchange_over(
    communicator: Communicator, parameters: Sequence[ParameterInfo] = PARAMETERS, **options: Any
) -> AllReduceExchange:
    framework: Any = HostFramework()
    return AllReduceExchange(parameters, framework=framework, host=communicator, **options)


def write(exchange: AllReduceExchange, index: int, value: float) -> None:
    array(exchange, index)[:] = value


def array(exchange: AllReduceExchange, index: int) -> np.ndarray[Any, np.dtype[Any]]:
    buffer = exchange.buffer(index)
    return np.frombuffer(buffer.bytes(), buffer.dtype.value)


def on_ranks(size: int, main: Callable[[Communicator], R]) -> list[R]:
    with ThreadWorld(size) as world:
        return world.run(main)


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("overlap", [True, False])
def test_every_buffer_holds_the_scaled_sum_whatever_the_order_of_gradients(bucket_bytes: int, overlap: bool) -> None:
    def main(communicator: Communicator) -> RoundResult:
        exchange = exchange_over(communicator, bucket_bytes=bucket_bytes, overlap=overlap)
        exchange.scale = 0.5
        for order in ([2, 1, 0], [0, 1, 2], [1, 0, 2]):
            for index in order if communicator.rank else reversed(order):
                write(exchange, index, 10 * index + communicator.rank)
                exchange.ready(index)
            assert exchange.in_round
            result = exchange.finish()
            assert not exchange.in_round
            for index in range(3):
                assert (array(exchange, index) == 0.5 * sum(10 * index + rank for rank in range(3))).all()
        return result

    assert on_ranks(3, main) == [RoundResult((True, True, True))] * 3


def test_a_gradient_missing_on_some_ranks_counts_as_zeros_and_on_all_stays_missing() -> None:
    def main(communicator: Communicator) -> RoundResult:
        exchange = exchange_over(communicator)
        for index in range(3):
            write(exchange, index, 100.0)  # what an earlier round left
        if communicator.rank == 1:
            write(exchange, 0, 5.0)
            exchange.ready(0)
        result = exchange.finish()
        assert (array(exchange, 0) == 5.0).all()
        return result

    assert on_ranks(2, main) == [RoundResult((True, False, False))] * 2


def test_results_stay_until_the_memory_was_switched_twice() -> None:
    def main(communicator: Communicator) -> None:
        exchange = exchange_over(communicator, bucket_bytes=64)
        assert exchange.has_other_memory
        before = []
        for number in range(1, 6):
            for index in range(3):
                write(exchange, index, number * (index + 1))
                exchange.ready(index)
            exchange.finish()
            results = [array(exchange, index) for index in range(3)]
            for index, result in enumerate(results):
                assert (result == 2 * number * (index + 1)).all()
            for index, result in enumerate(before):
                assert (result == 2 * (number - 1) * (index + 1)).all()
            if number % 2 or communicator.rank:  # ranks may differ in when they switch
                exchange.switch_memory()
                before = results
            else:
                before = []

    on_ranks(2, main)


def test_a_round_without_any_gradient_is_a_round() -> None:
    assert on_ranks(2, lambda communicator: exchange_over(communicator).finish().present) == [(False,) * 3] * 2


def test_the_largest_byte_of_the_notices_reaches_every_rank() -> None:
    def main(communicator: Communicator) -> bytes:
        own = bytes((communicator.rank, 255 * (communicator.rank == 0), 0)).ljust(NOTICE_BYTES, b"x")
        return exchange_over(communicator).finish(notice=own).notice

    assert on_ranks(3, main) == [bytes((2, 255, 0)).ljust(NOTICE_BYTES, b"x")] * 3


def test_held_gradients_wait_for_finish_and_may_be_added_to() -> None:
    def main(communicator: Communicator) -> int:
        recorder = RecordingCommunicator(communicator)
        exchange = exchange_over(recorder, bucket_bytes=1)
        for turn in (1.0, 2.0):
            for index in range(3):
                array(exchange, index)[:] = turn if turn == 1.0 else array(exchange, index) + turn
                exchange.accumulate(index)
        before = recorder.count("allreduce")
        exchange.finish(scale=1.0 / 6)
        np.testing.assert_allclose(array(exchange, 1), 1.0)
        return before

    assert on_ranks(2, main) == [0, 0]


def test_buckets_are_exchanged_while_gradients_are_still_computed_but_the_last_waits() -> None:
    def main(communicator: Communicator) -> list[int]:
        recorder = RecordingCommunicator(communicator)
        exchange = exchange_over(recorder, ALIKE, bucket_bytes=1)  # a bucket each, the last parameter's first
        seen = []
        for index in (2, 1, 0):
            write(exchange, index, 1.0)
            exchange.ready(index)
            seen.append(recorder.count("allreduce"))
        exchange.finish()
        return [*seen, recorder.count("allreduce")]

    assert on_ranks(2, main) == [[1, 2, 2, 4]] * 2


def test_buckets_keep_their_order_when_gradients_do_not() -> None:
    def main(communicator: Communicator) -> list[int]:
        recorder = RecordingCommunicator(communicator)
        exchange = exchange_over(recorder, ALIKE, bucket_bytes=1)
        for index in (0, 1):
            write(exchange, index, 1.0)
            exchange.ready(index)
        waiting = recorder.count("allreduce")
        write(exchange, 2, 1.0)
        exchange.ready(2)
        exchange.finish()
        return [waiting, *(record.nbytes for record in recorder.records)]

    expected = [0, 64, 64, 64, 3 + NOTICE_BYTES]  # whole cache lines, and a byte per parameter with the notice
    assert on_ranks(2, main) == [expected] * 2


def test_a_second_backward_pass_in_a_round_is_refused_with_the_ways_out() -> None:
    def main(communicator: Communicator) -> None:
        exchange = exchange_over(communicator)
        exchange.ready(1)
        with pytest.raises(UsageError, match=r"'second' became ready twice.*accumulate=N"):
            exchange.ready(1)

    on_ranks(1, main)


def test_another_scale_after_the_exchange_began_is_refused() -> None:
    def main(communicator: Communicator) -> None:
        exchange = exchange_over(communicator, ALIKE, bucket_bytes=1)
        exchange.ready(2)
        with pytest.raises(UsageError, match=r"scale 0\.25 differs from 1"):
            exchange.finish(scale=0.25)

    on_ranks(1, main)


def test_close_closes_the_communicator() -> None:
    def main(communicator: Communicator) -> None:
        exchange = exchange_over(communicator)
        exchange.close()
        with pytest.raises(UsageError):
            communicator.send(Buffer.allocate(1, DType.INT8), to=0)

    on_ranks(1, main)


class Clock:
    """Stands for the module `time`: time passes when a test says so."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


class LateCommunicator(RecordingCommunicator):
    """Every operation is complete 3 seconds after it is waited for."""

    clock: Clock

    def allreduce(self, *arguments: Any, **options: Any) -> Work:
        work, clock = super().allreduce(*arguments, **options), self.clock

        class Late(Work):
            def wait(self, timeout: timedelta | None = None) -> None:
                clock.now += 3.0
                work.wait(timeout)

            def done(self) -> bool:
                return False

        return Late()


def test_the_time_in_which_a_round_waits_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, recorder = Clock(), Recorder()
    monkeypatch.setattr("unidist.timeline.time", clock)

    def main(communicator: Communicator) -> None:
        late = LateCommunicator(communicator)
        late.clock = clock
        exchange = exchange_over(late, ALIKE, bucket_bytes=1, recorder=recorder)
        for _ in range(2):
            clock.now += 50.0  # the backward pass
            for index in range(len(ALIKE)):
                exchange.ready(index)
            exchange.finish()
        exchange.close()

    on_ranks(1, main)
    assert recorder.waited_sec == 2 * (len(ALIKE) + 1) * 3.0  # a bucket for each, and who has a gradient


class Limited(RecordingCommunicator):
    """One of an engine that has only so many operations under way, whose peers come when they are let.

    Args:
        inner: does the work.
        limit: see `Capabilities.num_pending`.
        is_late: the peers come at first when `wait` is called.
    """

    def __init__(self, inner: Communicator, limit: int | None, *, is_late: bool) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, num_pending=limit)
        self.under_way = self.most_under_way = 0
        self.is_late = is_late

    def allreduce(self, source: Buffer, target: Buffer, **options: Any) -> Work:
        work = super().allreduce(source, target, **options)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        return Arriving(work, self)


class Arriving(Work):
    """Is done when the peers have come, after it was asked once."""

    def __init__(self, inner: Work, over: Limited) -> None:
        self._inner, self._over, self._asked = inner, over, 0

    def wait(self, timeout: timedelta | None = None) -> None:
        self._inner.wait(timeout)
        self._count()

    def done(self) -> bool:
        if self._over.is_late or not self._asked:
            self._asked += not self._over.is_late
            return False
        self._count()
        return True

    def _count(self) -> None:
        if self._asked != -1:
            self._over.under_way -= 1
        self._asked = -1


@pytest.mark.parametrize("limit", [None, 48])
@pytest.mark.parametrize("is_late", [False, True])
def test_buckets_are_posted_early_as_far_as_the_engine_takes_them(
    limit: int | None, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unidist.gradients.allreduce.PATIENCE_SEC", 0.05 if is_late else 30.0)
    parameters = [ParameterInfo(str(index), (8,), DType.FLOAT64) for index in range(200)]

    def main(communicator: Communicator) -> None:
        limited = Limited(communicator, limit, is_late=is_late)
        exchange = exchange_over(limited, parameters, bucket_bytes=1)
        for index in reversed(range(200)):
            array(exchange, index)[:] = index
            exchange.ready(index)
        assert limited.count("allreduce") == (48 if limit and is_late else 199), "all but the last"
        assert limited.most_under_way == (limit or 199)
        exchange.finish()
        assert all((array(exchange, index) == 2 * index).all() for index in range(200))

    on_ranks(2, main)
