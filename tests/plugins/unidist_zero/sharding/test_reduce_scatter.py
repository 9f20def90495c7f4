"""The exchange by reduce-scatter: every rank gets its shard of the sum, whatever became ready when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import pytest
from engine_pools import EnginePool

from unidist.algorithms._reduce import reduce_into, scale_in_place
from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import Communicator, ReduceOp, Work
from unidist.errors import UsageError
from unidist.gradients.buckets import ParameterInfo, plan_buckets
from unidist.gradients.interface import NOTICE_BYTES
from unidist.testing import RecordingCommunicator, ThreadWorld
from unidist.testing.fixtures import RankPoolFactory
from unidist_zero.sharding.all_gather import ShardGather
from unidist_zero.sharding.partition import partition
from unidist_zero.sharding.reduce_scatter import ReduceScatterExchange
from unidist_zero.sharding.shard_groups import make_shard_group

R = TypeVar("R")
COUNTS = (5, 40, 0, 1, 17)
PARAMETERS = [ParameterInfo(f"p{i}", (count,), DType.FLOAT64) for i, count in enumerate(COUNTS)]
STAGES = pytest.mark.parametrize("keeps_buckets", [True, False])


class HostFramework:
    """All that the exchange asks of a framework for host memory."""

    def allocate(self, count: int, dtype: DType, memory: str) -> Buffer:
        assert memory == HOST
        return Buffer.allocate(count, dtype)

    def zero(self, buffer: Buffer) -> None:
        buffer.bytes()[:] = bytes(buffer.nbytes)

    def multiply(self, buffer: Buffer, factor: float) -> None:
        scale_in_place(buffer, factor)

    def add(self, source: Buffer, target: Buffer) -> None:
        reduce_into(target, source, ReduceOp.SUM)


def exchange_over(
    communicator: Communicator,
    *,
    keeps_buckets: bool,
    whole: bool = False,
    bucket_bytes: int = 200,
    shard: int | None = None,
    parameters: Sequence[ParameterInfo] = PARAMETERS,
) -> ReduceScatterExchange:
    shard_group = make_shard_group(communicator, shard or communicator.size)
    layouts = plan_buckets(parameters, bucket_bytes=bucket_bytes)
    framework: Any = HostFramework()
    return ReduceScatterExchange(
        parameters,
        partition(layouts, shard_group.communicator.size, whole=whole),
        framework=framework,
        shard_groups={HOST: shard_group},
        everyone=communicator,
        keeps_buckets=keeps_buckets,
    )


def array(buffer: Buffer) -> np.ndarray[Any, np.dtype[Any]]:
    return np.frombuffer(buffer.bytes(), buffer.dtype.value)


def gradient(rank: int, index: int, turn: int = 0) -> np.ndarray[Any, np.dtype[Any]]:
    return np.random.default_rng((rank, index, turn)).standard_normal(COUNTS[index])


def write(exchange: ReduceScatterExchange, index: int, values: np.ndarray[Any, np.dtype[Any]]) -> None:
    array(exchange.buffer(index))[:] = values
    exchange.ready(index)


def pieces_of(exchange: ReduceScatterExchange) -> list[tuple[int, int, np.ndarray[Any, np.dtype[Any]]]]:
    """Return number, start and values of each piece of a parameter that this rank's shards hold."""
    rank = exchange.shard_groups[HOST].communicator.rank
    found = []
    for piece in exchange.partition.pieces(rank):
        start = piece.offset - exchange.partition.buckets[piece.bucket].begin(rank)
        values = array(exchange.shard(piece.bucket))[start : start + piece.count]
        found.append((piece.parameter, piece.start, values.copy()))
    return found


def check(outcomes: Sequence[Any], expected: Callable[[int], np.ndarray[Any, np.dtype[Any]]], copies: int = 1) -> None:
    """Check that the ranks together have every element of every parameter, each `copies` times."""
    for index, count in enumerate(COUNTS):
        times = np.zeros(count)
        for pieces in outcomes:
            for parameter, start, values in pieces:
                if parameter == index:
                    times[start : start + len(values)] += 1
                    np.testing.assert_allclose(values, expected(index)[start : start + len(values)], atol=1e-14)
        assert (times == copies).all()


def on_ranks(size: int, main: Callable[[Communicator], R]) -> list[R]:
    with ThreadWorld(size) as world:
        return world.run(main)


@STAGES
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("size", "bucket_bytes"), [(1, 200), (2, 1), (3, 200), (4, 1 << 20)])
def test_shards_hold_the_scaled_sum_in_every_round(
    keeps_buckets: bool, whole: bool, size: int, bucket_bytes: int
) -> None:
    def main(communicator: Communicator) -> list[Any]:
        exchange = exchange_over(communicator, keeps_buckets=keeps_buckets, whole=whole, bucket_bytes=bucket_bytes)
        exchange.scale = 0.5
        rounds = []
        for turn in range(3):
            for index in reversed(range(len(COUNTS))):
                write(exchange, index, gradient(communicator.rank, index, turn))
            told = bytes([turn] * NOTICE_BYTES)
            assert exchange.finish(notice=told).notice == told
            rounds.append(pieces_of(exchange))
        return rounds

    outcomes = on_ranks(size, main)
    for turn in range(3):
        summed = [sum(gradient(rank, index, turn) for rank in range(size)) * 0.5 for index in range(len(COUNTS))]
        check([rounds[turn] for rounds in outcomes], lambda index, summed=summed: np.asarray(summed[index]))


@STAGES
def test_buckets_may_be_exchanged_in_another_order(keeps_buckets: bool) -> None:
    order = [3, 0, 4, 2, 1]  # of the parameters, each of which has a bucket

    def main(communicator: Communicator) -> tuple[list[Any], list[int]]:
        exchange = exchange_over(communicator, keeps_buckets=keeps_buckets, bucket_bytes=1)
        bucket_of = {index: number for index, (number, _) in exchange.partition.places().items()}
        exchange.post_in_order([bucket_of[index] for index in order])
        posted = []
        for turn in range(2):
            for index in order:
                write(exchange, index, gradient(communicator.rank, index, turn))
                posted.append(exchange._posted)
            exchange.finish()
        return pieces_of(exchange), posted

    outcomes = on_ranks(2, main)
    assert [posted for _, posted in outcomes] == [[1, 2, 3, 4, 4] * 2] * 2  # the last one in `finish`
    check([found for found, _ in outcomes], lambda index: gradient(0, index, 1) + gradient(1, index, 1))


@STAGES
def test_gradients_that_are_missing_count_as_zeros_and_in_any_order(keeps_buckets: bool) -> None:
    def main(communicator: Communicator) -> tuple[list[Any], tuple[bool, ...]]:
        exchange = exchange_over(communicator, keeps_buckets=keeps_buckets, bucket_bytes=1)
        for turn in range(2):
            given = [0, 4] if communicator.rank == 0 else [0, 1, 3]
            for index in given if turn else reversed(given):
                write(exchange, index, gradient(communicator.rank, index))
            present = exchange.finish().present
        return pieces_of(exchange), present

    outcomes = on_ranks(2, main)
    assert all(present == (True, True, False, True, True) for _, present in outcomes)
    givers = {0: (0, 1), 1: (1,), 2: (), 3: (1,), 4: (0,)}
    check(
        [pieces for pieces, _ in outcomes],
        lambda index: np.asarray(sum((gradient(rank, index) for rank in givers[index]), np.zeros(COUNTS[index]))),
    )


@pytest.mark.parametrize("short", [False, True])
def test_passes_of_a_window_are_added_up_in_the_shards(short: bool) -> None:
    def main(communicator: Communicator) -> list[Any]:
        exchange = exchange_over(communicator, keeps_buckets=False)
        exchange.scale = 0.25
        for window in range(2):
            for turn in range(3):
                for index in range(len(COUNTS)):
                    write(exchange, index, gradient(communicator.rank, index, 10 * window + turn))
                if short or turn < 2:
                    exchange.end_pass()
            result = exchange.finish(scale=0.5) if short else exchange.finish()
            assert all(result.present)
        return pieces_of(exchange)

    factor = 0.5 if short else 0.25
    summed = [
        sum(gradient(rank, index, 10 + turn) for rank in range(2) for turn in range(3)) * factor
        for index in range(len(COUNTS))
    ]
    check(on_ranks(2, main), lambda index: np.asarray(summed[index]))


@STAGES
@pytest.mark.parametrize("early", [False, True])
def test_another_scale_holds_for_the_earlier_passes_too(keeps_buckets: bool, early: bool) -> None:
    def main(communicator: Communicator) -> list[Any]:
        exchange = exchange_over(communicator, keeps_buckets=keeps_buckets)
        for window in range(2):
            exchange.scale = 1.0
            for turn in range(3):
                if early:  # another backward pass has begun, and the one before is exchanged as it was
                    exchange.rescale(1 / (turn + 1))
                if turn:
                    exchange.end_pass()
                if not early:
                    exchange.rescale(1 / (turn + 1))
                for index in range(len(COUNTS)):
                    write(exchange, index, gradient(communicator.rank, index, 10 * window + turn))
            exchange.finish()
        return pieces_of(exchange)

    summed = [
        sum(gradient(rank, index, 10 + turn) for rank in range(2) for turn in range(3)) / 3
        for index in range(len(COUNTS))
    ]
    check(on_ranks(2, main), lambda index: np.asarray(summed[index]))


def test_held_gradients_of_a_window_are_reduced_once() -> None:
    def main(communicator: Communicator) -> list[Any]:
        recording = RecordingCommunicator(communicator)
        exchange = exchange_over(recording, keeps_buckets=True)
        for turn in range(2):
            for index in range(len(COUNTS)):
                array(exchange.buffer(index))[:] = gradient(communicator.rank, index, turn) + (
                    array(exchange.buffer(index)) if turn else 0
                )
                exchange.accumulate(index) if not turn else exchange.ready(index)
        exchange.finish()
        assert recording.count("reducescatter") == len(exchange.partition.buckets)
        return pieces_of(exchange)

    summed = [sum(gradient(rank, i, turn) for rank in range(2) for turn in range(2)) for i in range(len(COUNTS))]
    check(on_ranks(2, main), lambda index: np.asarray(summed[index]))


@STAGES
def test_replicas_of_a_shard_add_up_over_the_groups(keeps_buckets: bool) -> None:
    def main(communicator: Communicator) -> list[Any]:
        exchange = exchange_over(communicator, keeps_buckets=keeps_buckets, shard=2)
        exchange.scale = 0.25
        for index in range(len(COUNTS)):
            write(exchange, index, gradient(communicator.rank, index))
        exchange.finish()
        reduced = exchange.reduced()
        assert reduced.divided_over is not None
        assert reduced.divided_over.size == 2
        return pieces_of(exchange)

    summed = [sum(gradient(rank, index) for rank in range(4)) * 0.25 for index in range(len(COUNTS))]
    check(on_ranks(4, main), lambda index: np.asarray(summed[index]), copies=2)


def test_only_a_few_buckets_have_memory_at_stage_2() -> None:
    parameters = [ParameterInfo(f"p{i}", (64,), DType.FLOAT64) for i in range(10)]

    def main(communicator: Communicator) -> int:
        exchange = exchange_over(communicator, keeps_buckets=False, bucket_bytes=512, parameters=parameters)
        most = 0
        for index in reversed(range(10)):
            array(exchange.buffer(index))[:] = 1
            exchange.ready(index)
            most = max(most, sum(bucket.memory is not None for bucket in exchange._buckets))
        exchange.finish()
        assert all(bucket.memory is None for bucket in exchange._buckets)
        return most

    assert max(on_ranks(2, main)) <= 2


def test_the_bytes_are_those_of_the_formula() -> None:
    def main(communicator: Communicator) -> None:
        recording = RecordingCommunicator(communicator)
        exchange = exchange_over(recording, keeps_buckets=False)
        for index in range(len(COUNTS)):
            write(exchange, index, gradient(communicator.rank, index))
        exchange.finish()
        padded = sum(bucket.count for bucket in exchange.partition.buckets) * 8
        scattered = [record.nbytes for record in recording.records if record.operation == "reducescatter"]
        assert sum(scattered) == padded, "each rank gives every element once"
        recording.records.clear()
        memory = [exchange.allocate(cut.count, cut) for cut in exchange.partition.buckets]
        ShardGather(exchange.partition, memory, exchange.shard_groups).all()
        gathered = [record.nbytes for record in recording.records]
        assert sum(gathered) * communicator.size == padded, "each rank gives its shard"

    on_ranks(3, main)


@pytest.mark.parametrize("whole", [False, True])
def test_gathering_brings_every_shard_to_all(whole: bool) -> None:
    def main(communicator: Communicator) -> None:
        exchange = exchange_over(communicator, keeps_buckets=True, whole=whole)
        memory = [exchange.allocate(cut.count, cut) for cut in exchange.partition.buckets]
        gather = ShardGather(exchange.partition, memory, exchange.shard_groups)
        for number in range(len(memory)):
            array(gather.own(number))[:] = communicator.rank + 1
        gather.all()
        for cut, buffer in zip(exchange.partition.buckets, memory, strict=True):
            expected = np.repeat(np.arange(1, communicator.size + 1), cut.counts)
            np.testing.assert_array_equal(array(buffer), expected)

    on_ranks(3, main)


def test_a_gradient_that_becomes_ready_twice_is_an_error() -> None:
    def main(communicator: Communicator) -> None:
        exchange = exchange_over(communicator, keeps_buckets=True)
        write(exchange, 1, gradient(0, 1))
        with pytest.raises(UsageError, match="'p1' became ready twice"):
            write(exchange, 1, gradient(0, 1))

    on_ranks(1, main)


class Queueing(RecordingCommunicator):
    """One whose waits order a queue: what it is asked for is not done as long as nobody waits for it."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, waits_in_queue=True)

    def reducescatter(self, source: Buffer, target: Buffer, **options: Any) -> Work:
        return Queued(super().reducescatter(source, target, **options))


class Queued(Work):
    """See `Queueing`."""

    def __init__(self, inner: Work) -> None:
        self._inner = inner

    def wait(self, timeout: timedelta | None = None) -> None:
        self._inner.wait(timeout)

    def done(self) -> bool:
        return False


def many_buckets(
    communicator: Communicator, keeps_buckets: bool, *, waits_in_queue: bool = False
) -> tuple[int, int, bool]:
    """Exchange 200 buckets; return how many are posted before `finish`, the most in memory, and if sums are right."""
    recorder = (Queueing if waits_in_queue else RecordingCommunicator)(communicator)
    parameters = [ParameterInfo(f"p{index}", (8,), DType.FLOAT64) for index in range(200)]
    exchange = exchange_over(recorder, keeps_buckets=keeps_buckets, bucket_bytes=1, parameters=parameters)
    most = 0
    for index in reversed(range(200)):
        array(exchange.buffer(index))[:] = index
        exchange.ready(index)
        most = max(most, sum(bucket.pooled is not None for bucket in exchange._buckets))
    early = recorder.count("reducescatter")
    exchange.finish()
    is_right = all((values == communicator.size * index).all() for index, _, values in pieces_of(exchange))
    return early, most, is_right


def many_buckets_over(engine: str, keeps_buckets: bool) -> tuple[int, int, bool]:
    from unidist.runtime import context

    current = context.init()
    try:
        assert current.engine.spec.name == engine
        with patch("unidist_zero.sharding.reduce_scatter.PATIENCE_SEC", 30.0):  # a busy machine
            return many_buckets(current.new_communicator("data"), keeps_buckets)
    finally:
        context.shutdown()


@STAGES
def test_many_buckets_overlap_and_two_of_them_are_in_memory(
    keeps_buckets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unidist_zero.sharding.reduce_scatter.PATIENCE_SEC", 30.0)
    for outcome in on_ranks(2, lambda communicator: many_buckets(communicator, keeps_buckets)):
        assert outcome == (199, 0 if keeps_buckets else 2, True)


def test_memory_is_used_again_at_once_where_a_wait_orders_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidist_zero.sharding.reduce_scatter.PATIENCE_SEC", 0.0)  # nobody asks whether it is done
    for outcome in on_ranks(2, lambda communicator: many_buckets(communicator, False, waits_in_queue=True)):
        assert outcome == (199, 2, True)


@STAGES
@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_many_buckets_overlap_with_every_engine(rank_pool: RankPoolFactory, engine: str, keeps_buckets: bool) -> None:
    for outcome in EnginePool(rank_pool(2), engine).run(many_buckets_over, (engine, keeps_buckets)):
        assert outcome == (199, 0 if keeps_buckets else 2, True)
