"""The sample strategy: how it rounds, what it sends, and how its updates compare with plain data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from part_pools import PartPools

from unidist.buffer import Buffer, DType
from unidist.errors import ConfigurationError
from unidist.gradients.allreduce import AllReduceExchange
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.interface import NOTICE_BYTES, GradientExchange
from unidist.gradients.options import ExchangeOptions
from unidist.testing import Record, RecordingCommunicator, StrategyConformance, ThreadCommunicator, ThreadWorld
from unidist.testing.fixtures import RankPoolFactory

PARAMETERS = (ParameterInfo("a", (3,), DType.FLOAT32), ParameterInfo("b", (5,), DType.FLOAT64))


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


class HostMemory:
    """The little of a framework that an exchange of host memory needs."""

    def zero(self, buffer: Buffer) -> None:
        buffer.bytes()[:] = bytes(buffer.nbytes)


def make_exchange(communicator: ThreadCommunicator, records: list[Record] | None = None) -> GradientExchange:
    from unidist_sample.compress import CompressedExchange

    wire = (ParameterInfo("a", (3,), DType.BFLOAT16), PARAMETERS[1])
    recording = RecordingCommunicator(communicator, [] if records is None else records)
    return CompressedExchange(PARAMETERS, AllReduceExchange(wire, framework=HostMemory(), host=recording))  # type: ignore[arg-type]  # that is all it calls


def write(exchange: GradientExchange, index: int, values: Sequence[float]) -> None:
    buffer = exchange.buffer(index)
    np.frombuffer(buffer.bytes(), np.dtype(str(buffer.dtype)))[:] = values


def read(exchange: GradientExchange, index: int) -> list[float]:
    buffer = exchange.buffer(index)
    values: list[float] = np.frombuffer(buffer.bytes(), np.dtype(str(buffer.dtype))).tolist()
    return values


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_that_of_torch(dtype: str) -> None:
    from unidist_sample.compress import narrow, widen

    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    special = np.array([0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0x3F808000, 0x3F818000, 0x7F7FFFFF], np.uint32)
    wide = np.concatenate([bits, special]).view(np.float32)
    narrowed, widened = Buffer.allocate(wide.size, DType(dtype)), np.empty_like(wide)
    narrow(Buffer.of(wide), narrowed)
    widen(narrowed, Buffer.of(widened))
    expected = torch.from_numpy(wide).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(widened, expected)


def test_float32_travels_in_half_the_bytes_and_other_types_as_they_are() -> None:
    def rank(communicator: ThreadCommunicator) -> tuple[list[Record], list[float], list[float]]:
        records: list[Record] = []
        exchange = make_exchange(communicator, records)
        write(exchange, 0, [communicator.rank + 1.0, 2, 3])
        write(exchange, 1, [0.1] * 5)
        for index in (1, 0):
            exchange.ready(index)
        exchange.finish()
        return records, read(exchange, 0), read(exchange, 1)

    with ThreadWorld(2) as world:
        for records, first, second in world.run(rank):
            reduced = {record.dtype: record.nbytes for record in records if record.operation == "allreduce"}
            assert DType.FLOAT32 not in reduced
            assert reduced[DType.BFLOAT16] < 3 * 4 + 64  # 3 elements, padded to a cache line
            assert first == [3, 4, 6]
            assert second == pytest.approx([0.2] * 5, rel=1e-15)


def test_a_held_gradient_is_rounded_once_at_its_final_value() -> None:
    """As in accumulate=2: added to between `accumulate` and `ready`, or between `accumulate` and `finish`."""

    def rank(communicator: ThreadCommunicator) -> list[list[float]]:
        exchange = make_exchange(communicator)
        found = []
        for ends_ready in (True, False):
            write(exchange, 0, [100, 100, 100])
            exchange.accumulate(0)
            write(exchange, 0, [100.25, 100.5, 101])
            if ends_ready:
                exchange.ready(0)
                write(exchange, 0, [-1, -1, -1])  # too late to count
            exchange.finish()
            assert not exchange.in_round
            found.append(read(exchange, 0))
        return found

    with ThreadWorld(2) as world:
        for found in world.run(rank):
            assert found == [[200, 201, 202]] * 2  # bfloat16 has steps of 0.5 at 100 and of 1 at 200


def test_a_gradient_missing_on_one_rank_counts_as_zeros_and_on_all_stays_missing() -> None:
    def rank(communicator: ThreadCommunicator) -> tuple[Any, ...]:
        exchange = make_exchange(communicator)
        write(exchange, 0, [7, 7, 7])
        if communicator.rank == 1:
            write(exchange, 0, [1, 2, 3])
            exchange.ready(0)
        result = exchange.finish(notice=bytes([communicator.rank] * NOTICE_BYTES))
        return result.present, result.notice[0], read(exchange, 0)

    with ThreadWorld(2) as world:
        assert world.run(rank) == [((True, False), 1, [1, 2, 3])] * 2


def test_gradients_outside_of_host_memory_are_refused() -> None:
    from unidist_sample.compress import CompressedData

    parameters = [ParameterInfo("weight", (3,), DType.FLOAT32, "cuda:0")]
    with pytest.raises(ConfigurationError, match=r"'sample-compress' .* 'weight' is in cuda:0 memory"):
        CompressedData().make_exchange(parameters, None, None, ExchangeOptions())  # type: ignore[arg-type]  # it looks at them first


def descend(strategy: str, scale: float) -> list[float]:
    """Return the weights after five steps of plain descent on data whose gradients are multiples of `scale`."""
    import torch

    import unidist.torch as ud

    ud.init()
    try:
        weight = torch.nn.Parameter(torch.zeros(64))
        model = torch.nn.ParameterDict({"weight": weight})
        _, optimizer = ud.distribute(model, torch.optim.SGD([weight], lr=1.0), strategy)
        for step in range(5):
            slope = torch.arange(64.0) % 7 + step + 2 * ud.rank()
            optimizer.zero_grad()
            (weight * slope * scale).sum().backward()
            optimizer.step()
        values: list[float] = weight.detach().tolist()
        return values
    finally:
        ud.shutdown()


@pytest.mark.parallel
def test_gradients_that_16_bits_can_hold_give_the_very_same_updates(rank_pool: RankPoolFactory) -> None:
    pool = rank_pool(2)
    expected = pool.run(descend, ("data", 1.0))
    assert pool.run(descend, ("sample-compress=bfloat16", 1.0)) == expected
    assert pool.run(descend, ("sample-compress=float16", 1.0)) == expected


@pytest.mark.parallel
def test_others_are_rounded_within_the_stated_bound(rank_pool: RankPoolFactory) -> None:
    pool = rank_pool(2)
    exact, rounded = pool.run(descend, ("data", 1 / 3))[0], pool.run(descend, ("sample-compress", 1 / 3))[0]
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=2 * 2**-8)


def test_what_it_does_not_honour_is_refused() -> None:
    from unidist_sample.compress import CompressedData

    options = ExchangeOptions(predivide_factor=2.0)
    with pytest.raises(ConfigurationError, match="given a predivide factor, which strategy 'sample-compress' does not"):
        CompressedData().make_exchange(PARAMETERS, None, None, options)  # type: ignore[arg-type]  # it looks at them first


@pytest.mark.parallel
class TestSampleCompress(StrategyConformance):
    strategy = "sample-compress=float16"
    sizes = (1, 2, 3)
    optimizers = ("adamw",)
    tolerance = narrow_tolerance = 5e-5  # one parameter of the training is float32 and rounded; the others feel it
