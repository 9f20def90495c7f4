"""The exchange that exchanges nothing: each rank gets its own gradients, scaled."""

from __future__ import annotations

from typing import Any

import numpy as np

from unidist.buffer import Buffer, DType
from unidist.gradients import NOTICE_BYTES, LocalExchange, ParameterInfo


class _HostMemory:
    def allocate(self, count: int, dtype: DType, memory: str) -> Buffer:
        return Buffer.allocate(count, dtype)

    def zero(self, buffer: Buffer) -> None:
        buffer.bytes()[:] = bytes(buffer.nbytes)

    def multiply(self, buffer: Buffer, factor: float) -> None:
        np.frombuffer(buffer.bytes(), str(buffer.dtype))[:] *= factor


def _exchange() -> LocalExchange:
    framework: Any = _HostMemory()
    infos = [
        ParameterInfo("a", (2,), DType.FLOAT64),
        ParameterInfo("b", (3,), DType.FLOAT64),
        ParameterInfo("c", (1,), DType.FLOAT32, copies=2),
    ]
    return LocalExchange(infos, framework, 4)


def _values(exchange: LocalExchange, index: int) -> np.ndarray[Any, Any]:
    buffer = exchange.buffer(index)
    return np.frombuffer(buffer.bytes(), str(buffer.dtype))


def test_the_mean_over_the_ranks_is_taken_out_and_that_over_the_passes_stays() -> None:
    exchange = _exchange()
    exchange.scale = 1 / (4 * 2)
    _values(exchange, 0)[:] = [3, 5]
    exchange.accumulate(0)
    assert exchange.in_round
    _values(exchange, 0)[:] += 1
    exchange.ready(0)
    result = exchange.finish(notice=bytes([7] * NOTICE_BYTES))
    assert (result.present, result.notice) == ((True, False, False), bytes([7] * NOTICE_BYTES))
    assert _values(exchange, 0).tolist() == [2, 3]
    assert not exchange.in_round


def test_a_gradient_that_is_missing_is_zeros_in_the_memory_that_rules_see() -> None:
    exchange = _exchange()
    _values(exchange, 1)[:] = 9
    exchange.ready(1)
    exchange.finish(scale=0.25)
    _values(exchange, 0)[:] = 1
    exchange.ready(0)
    exchange.finish(scale=0.25)
    reduced = exchange.reduced()
    assert sorted(sum(np.frombuffer(each.bytes(), str(each.dtype))) for each in reduced.memory) == [0, 2]
    assert sorted(reduced.num_copies) == [1, 2]
    exchange.close()
