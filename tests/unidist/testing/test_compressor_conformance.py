"""The suite of compressors: ours pass it, and each fault that a compressor can have is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import pytest

from unidist.buffer import Buffer, DType
from unidist.builtin.half import Float16
from unidist.communicator import COMPLETED, Work
from unidist.gradients import Bucket, BucketCompressor, GradientCompressor
from unidist.testing import CompressorConformance


class TestFloat16(CompressorConformance):
    compressor = "fp16"
    error = 2e-3


class TestBFloat16(CompressorConformance):
    compressor = "bf16"
    error = 2e-2


class TestPowerSGD(CompressorConformance):
    compressor = "powersgd/rank=2/warmup=0"
    error = 1.0
    feedback_rounds = 100


class TestPowerSGDThatBeginsWithoutCompression(CompressorConformance):
    compressor = "powersgd/rank=2/warmup=1"
    error = 1e-6


class TestNoCompression(CompressorConformance):
    compressor = "none"
    compresses = ()


class _Plain(BucketCompressor):
    """Compresses nothing, and does one thing wrong."""

    def __init__(self, bucket: Bucket, fault: str) -> None:
        self.bucket, self.fault, self.rounds = bucket, fault, 0
        self.values = np.frombuffer(bucket.memory.bytes(), str(bucket.memory.dtype))

    def allreduce(self, scale: float) -> Work:
        self.rounds += 1
        memory, communicator = self.bucket.memory, self.bucket.communicator
        if self.fault == "hides what is not finite":
            np.nan_to_num(self.values, copy=False)
        if self.fault == "never recovers" and not np.isfinite(self.values).all():
            self.rounds += 1000
        if self.fault == "uses padding":
            self.values[self.values == 0] = 1
        if self.fault == "forgets the scale":
            scale = 1.0
        if self.fault == "forgets small elements":
            self.values[np.abs(self.values) < 0.7] = 0
        if self.fault == "starts two":
            extra = Buffer.allocate(1, DType.INT32)
            communicator.allreduce(extra, extra).wait()
        work = communicator.allreduce(memory, memory, scale=scale)
        if self.fault == "waits":
            work.wait()
            return COMPLETED
        return _Late(self, work)

    def finish(self, first: bool) -> None:
        if self.fault == "differs by rank" and self.bucket.communicator.rank == 1:
            self.values[3] = np.nextafter(self.values[3], 2)
        if self.fault == "never recovers" and self.rounds > 1000:
            self.values[0] = np.nan
        if self.fault == "unpacks twice" and not first:
            self.values += self.values


class _Late(Work):
    def __init__(self, state: _Plain, inner: Work) -> None:
        self.state, self.inner, self.first = state, inner, True

    def wait(self, timeout: timedelta | None = None) -> None:
        self.inner.wait(timeout)
        if self.first or self.state.fault == "unpacks twice":
            self.state.finish(self.first)
        self.first = False

    def done(self) -> bool:
        return self.inner.done()


@dataclasses.dataclass(frozen=True)
class Faulty(GradientCompressor):
    name: ClassVar[str] = "faulty"

    fault: str = ""

    def attach(self, bucket: Bucket) -> BucketCompressor | None:
        compressed = [*CompressorConformance.compresses, *([DType.INT32] if self.fault == "takes integers" else [])]
        if bucket.memory.dtype not in compressed:
            return None
        return _Plain(bucket, self.fault)


class Suite(CompressorConformance):
    error = 1e-6

    def __init__(self, made: GradientCompressor) -> None:
        self.made = made

    def make(self) -> GradientCompressor:
        return self.made


class SuiteWithFeedback(Suite):
    error = 1.0
    feedback_rounds = 20


FAULTS: list[tuple[str, Callable[[Suite], Any], str]] = [
    ("differs by rank", lambda suite: suite.test_every_rank_gets_the_same_bits(2), "on rank 1 differ"),
    ("forgets the scale", lambda suite: suite.test_the_scale_is_applied_once(2, DType.FLOAT32), "not a quarter"),
    ("forgets small elements", lambda suite: suite.test_the_sum_is_about_right(2, DType.FLOAT64), "relative error"),
    (
        "forgets small elements",
        lambda suite: SuiteWithFeedback(suite.made).test_what_a_round_leaves_out_is_added_to_later_ones(
            2, DType.FLOAT64
        ),
        "is lost",
    ),
    ("waits", lambda suite: suite.test_starting_an_exchange_waits_for_nobody(2, DType.FLOAT32), "before it returns"),
    ("uses padding", lambda suite: suite.test_padding_stays_zero(2), "no gradient has"),
    (
        "hides what is not finite",
        lambda suite: suite.test_what_is_not_finite_stays_so_and_the_next_round_is_good(2, DType.FLOAT32, np.nan),
        "does not show",
    ),
    (
        "never recovers",
        lambda suite: suite.test_what_is_not_finite_stays_so_and_the_next_round_is_good(2, DType.FLOAT32, np.inf),
        "the round after",
    ),
    ("takes integers", lambda suite: suite.test_what_it_does_not_compress_is_left_alone(2), "declares"),
    ("starts two", lambda suite: suite.test_it_says_how_many_collectives_it_starts(2, DType.FLOAT32), "num_operations"),
    (
        "unpacks twice",
        lambda suite: suite.test_its_work_may_be_waited_for_and_its_state_closed_twice(2, DType.FLOAT32),
        "second wait",
    ),
]


@pytest.mark.parametrize(
    ("fault", "case", "message"), FAULTS, ids=[f"{fault}-{i}" for i, (fault, *_) in enumerate(FAULTS)]
)
def test_a_fault_is_found(fault: str, case: Callable[[Suite], Any], message: str) -> None:
    case(Suite(Faulty()))
    with pytest.raises(AssertionError, match=message):
        case(Suite(Faulty(fault)))


def test_rounding_counts_as_feedback_where_it_is_within_the_limit() -> None:
    SuiteWithFeedback(Float16()).test_what_a_round_leaves_out_is_added_to_later_ones(2, DType.FLOAT32)
