"""Compressors by name, and the exchange that uses them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import pytest

from unidist.buffer import Buffer, DType
from unidist.builtin.half import BFloat16, Float16
from unidist.builtin.uncompressed import NoCompression
from unidist.communicator import Communicator, Work
from unidist.errors import ConfigurationError
from unidist.gradients.allreduce import AllReduceExchange
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.compression import Bucket, BucketCompressor, GradientCompressor, build_compressor
from unidist.gradients.options import ExchangeOptions
from unidist.jobs.preflight import check
from unidist.runtime.plugin_manager import PluginManager
from unidist.settings.environment import Settings
from unidist.testing import RecordingCommunicator, ThreadWorld

PARAMETERS = [ParameterInfo(name, (8,), DType.FLOAT64) for name in "abc"]


class HostFramework:
    """All that the exchange asks of a framework for host memory."""

    def zero(self, buffer: Buffer) -> None:
        buffer.bytes()[:] = bytes(buffer.nbytes)

    def multiply(self, buffer: Buffer, factor: float) -> None:
        np.frombuffer(buffer.bytes(), buffer.dtype.value)[:] *= factor


@dataclass(frozen=True)
class Doubling(GradientCompressor):
    """Writes down what happens, and returns twice the sum."""

    name: ClassVar[str] = "doubling"

    num_operations: int = 1
    leave_out: str = ""
    waits: bool = False

    def attach(self, bucket: Bucket) -> BucketCompressor | None:
        if self.leave_out in [item.name for item in bucket.parameters]:
            return None
        return DoublingBucket(bucket, self.num_operations, waits=self.waits)


class Waiting(Work):
    """Goes on in `wait` only."""

    def __init__(self, inner: Work) -> None:
        self._inner = inner

    def wait(self, timeout: timedelta | None = None) -> None:
        self._inner.wait(timeout)

    def done(self) -> bool:
        return False


class DoublingBucket(BucketCompressor):
    def __init__(self, bucket: Bucket, num_operations: int, *, waits: bool = False) -> None:
        self.bucket = bucket
        self.waits = waits
        self.num_operations = num_operations
        self.closed = 0

    def allreduce(self, scale: float) -> Work:
        memory = self.bucket.memory
        work = self.bucket.communicator.allreduce(memory, memory, scale=2 * scale)
        return Waiting(work) if self.waits else work

    def close(self) -> None:
        self.closed += 1


def exchange_over(communicator: Communicator, options: ExchangeOptions, **more: Any) -> AllReduceExchange:
    framework: Any = HostFramework()
    parameters = more.pop("parameters", PARAMETERS)
    return AllReduceExchange(parameters, framework=framework, host=communicator, options=options, **more)


def array(exchange: AllReduceExchange, index: int) -> np.ndarray[Any, np.dtype[Any]]:
    return np.frombuffer(exchange.buffer(index).bytes(), np.float64)


def test_a_bucket_is_exchanged_by_its_compressor_or_as_it_is() -> None:
    def main(communicator: Communicator) -> list[float]:
        options = ExchangeOptions(compressor=Doubling(leave_out="b"))
        exchange = exchange_over(communicator, options, bucket_bytes=1)
        for _ in range(2):
            for index in range(3):
                array(exchange, index)[:] = index + communicator.rank
                exchange.ready(index)
            exchange.finish()
        return [array(exchange, index)[0] for index in range(3)]

    with ThreadWorld(2) as world:
        assert world.run(main) == [[2.0, 3.0, 10.0]] * 2


def test_a_single_rank_compresses_nothing() -> None:
    def main(communicator: Communicator) -> float:
        exchange = exchange_over(communicator, ExchangeOptions(compressor=Doubling()))
        array(exchange, 0)[:] = 3
        exchange.ready(0)
        exchange.finish()
        return float(array(exchange, 0)[0])

    with ThreadWorld(1) as world:
        assert world.run(main) == [3.0]


def test_gradients_are_divided_before_the_sum_and_the_sum_multiplied() -> None:
    def main(communicator: Communicator) -> tuple[list[float], list[float]]:
        seen: list[float] = []

        class Looking(RecordingCommunicator):
            def allreduce(self, source: Buffer, target: Buffer, **options: Any) -> Work:
                if source.dtype is DType.FLOAT64:
                    seen.extend(np.frombuffer(source.bytes(), np.float64)[:1].tolist())
                return super().allreduce(source, target, **options)

        exchange = exchange_over(Looking(communicator), ExchangeOptions(predivide_factor=4.0), bucket_bytes=1)
        exchange.scale = 0.5
        for index in range(3):
            array(exchange, index)[:] = 8.0
            exchange.ready(index)
        exchange.finish()
        return seen, [float(array(exchange, index)[0]) for index in range(3)]

    with ThreadWorld(2) as world:
        assert world.run(main) == [([2.0, 2.0, 2.0], [8.0, 8.0, 8.0])] * 2


@pytest.mark.parametrize(("num_operations", "expected"), [(1, 48), (10, 4), (1000, 0)])
def test_what_goes_on_in_wait_only_takes_the_places_that_the_engine_has(num_operations: int, expected: int) -> None:
    parameters = [ParameterInfo(str(index), (8,), DType.FLOAT64) for index in range(100)]

    def main(communicator: Communicator) -> tuple[int, bool]:
        recorder = RecordingCommunicator(communicator)
        recorder.capabilities = replace(communicator.capabilities, num_pending=48)
        options = ExchangeOptions(compressor=Doubling(num_operations, waits=True))
        exchange = exchange_over(recorder, options, parameters=parameters, bucket_bytes=1)
        for index in reversed(range(100)):
            array(exchange, index)[:] = index
            exchange.ready(index)
        early = recorder.count("allreduce")
        exchange.finish()
        return early, all((array(exchange, index) == 4 * index).all() for index in range(100))

    with ThreadWorld(2) as world:
        assert world.run(main) == [(expected, True)] * 2


def test_closing_the_exchange_closes_the_compression() -> None:
    made: list[DoublingBucket] = []

    @dataclass(frozen=True)
    class Keeping(Doubling):
        def attach(self, bucket: Bucket) -> BucketCompressor | None:
            made.append(DoublingBucket(bucket, 1))
            return made[-1]

    def main(communicator: Communicator) -> None:
        exchange = exchange_over(communicator, ExchangeOptions(compressor=Keeping()))
        exchange.close()
        exchange.close()

    with ThreadWorld(2) as world:
        world.run(main)
    assert [each.closed for each in made] == [1, 1]


def test_the_cores_compressors_by_name() -> None:
    registry = PluginManager().load().compressors
    assert build_compressor("none", registry) == NoCompression()
    assert build_compressor(" fp16 ", registry) == Float16()
    assert build_compressor("bf16", registry) == BFloat16()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp61", "unknown compression 'fp61'. Did you mean 'fp16'"),
        ("fp16/bits", "Syntax: NAME/OPTION=VALUE"),
        ("fp16/bits=4", "unknown option of compression 'fp16'"),
        ("powersgd/rank=two", "is not an integer"),
    ],
)
def test_a_name_or_option_that_does_not_fit_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("(", r"\(")):
        build_compressor(text, PluginManager().load().compressors)


def test_it_is_refused_before_any_process_starts() -> None:
    with pytest.raises(ConfigurationError, match="unknown compression 'fp61'"):
        check(Settings(strategy="data:compression=fp61"), 2, PluginManager().load())
    check(Settings(strategy="data:compression=powersgd/rank=3"), 2, PluginManager().load())
