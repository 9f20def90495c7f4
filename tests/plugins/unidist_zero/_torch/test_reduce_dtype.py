"""16-bit gradients are added up in the type that `precision=...:reduce=` asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unidist.algorithms._reduce import reduce_into
from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import Communicator, ReduceOp
from unidist.gradients.buckets import ParameterInfo, plan_buckets
from unidist.gradients.precision import Precision
from unidist.testing import RecordingCommunicator, ThreadWorld
from unidist_zero.sharding.partition import partition
from unidist_zero.sharding.reduce_scatter import ReduceScatterExchange
from unidist_zero.sharding.shard_groups import make_shard_group

PARAMETERS = [ParameterInfo(f"p{i}", (count,), DType.FLOAT16) for i, count in enumerate((6, 40, 17))]
WIDE = Precision(DType.FLOAT16, parameters=DType.FLOAT16, reduce=DType.FLOAT32)


class HostFramework:
    """All that the exchange asks of a framework for host memory."""

    def allocate(self, count: int, dtype: DType, memory: str) -> Buffer:
        assert memory == HOST
        return Buffer.allocate(count, dtype)

    def zero(self, buffer: Buffer) -> None:
        buffer.bytes()[:] = bytes(buffer.nbytes)

    def convert(self, source: Buffer, target: Buffer) -> None:
        array(target)[:] = array(source)

    def add(self, source: Buffer, target: Buffer) -> None:
        reduce_into(target, source, ReduceOp.SUM)


def array(buffer: Buffer) -> np.ndarray[Any, np.dtype[Any]]:
    return np.frombuffer(buffer.bytes(), buffer.dtype.value)


def summed(precision: Precision | None, *, keeps_buckets: bool, passes: int = 1) -> tuple[set[float], set[Any]]:
    """Add up 2048 of rank 0 and 1 of each other rank; return what the shards hold and the types that travelled."""

    def main(world: Communicator) -> tuple[set[float], list[Any]]:
        records: list[Any] = []
        framework: Any = HostFramework()
        exchange = ReduceScatterExchange(
            PARAMETERS,
            partition(plan_buckets(PARAMETERS, bucket_bytes=60), world.size, whole=False),
            framework=framework,
            shard_groups={HOST: make_shard_group(RecordingCommunicator(world, records), world.size)},
            everyone=world,
            keeps_buckets=keeps_buckets,
            precision=precision,
        )
        for turn in range(passes):
            for index in (2, 1, 0):
                array(exchange.buffer(index))[:] = 1 if world.rank else 2048
                exchange.ready(index)
            if turn < passes - 1:
                exchange.end_pass()
        exchange.finish()
        values = {float(value) for buffer in exchange.reduced().memory for value in array(buffer)}
        return values, [record.dtype for record in records if record.operation == "reducescatter"]

    with ThreadWorld(4) as world:
        found = world.run(main)
    return {value for values, _ in found for value in values} - {0.0}, {each for _, types in found for each in types}


@pytest.mark.parametrize("keeps_buckets", [True, False])
def test_the_sum_is_rounded_once_where_a_wider_type_is_asked_for(keeps_buckets: bool) -> None:
    # 2051, rounded once to the even neighbour; in float16 each 1 by itself would be lost.
    assert summed(WIDE, keeps_buckets=keeps_buckets) == ({2052.0}, {DType.FLOAT32})
    assert summed(None, keeps_buckets=keeps_buckets)[1] == {DType.FLOAT16}


def test_the_passes_of_a_window_are_added_up_after_that() -> None:
    assert summed(WIDE, keeps_buckets=False, passes=2)[0] == {4104.0}
