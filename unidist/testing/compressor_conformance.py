"""The conformance suite of gradient compressors: subclass it, name your compressor, run pytest.

    from unidist.testing import CompressorConformance

    class TestMyCompressor(CompressorConformance):
        compressor = "mine/rank=2"

The ranks are threads of one process (`ThreadWorld`), so the suite takes seconds. Attributes tell how exact a compressor
is, and which element types it leaves alone; everything else is the contract of `unidist.gradients.compression`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import pytest
from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, ReduceOp, Work
from unidist.framework import Framework
from unidist.gradients.buckets import BucketLayout, ParameterInfo, plan_buckets
from unidist.gradients.compression import Bucket, BucketCompressor, GradientCompressor, build_compressor
from unidist.runtime.plugin_manager import PluginManager
from unidist.testing.cases._arrays import Array, array_of, decode, encode
from unidist.testing.recording import RecordingCommunicator
from unidist.testing.threads import ThreadWorld

_SHAPES = ((24, 10), (7,), (3, 5, 4), ())


class CompressorConformance:
    """See the module's text. Each attribute may be replaced in a subclass.

    Attributes:
        compressor: as users write it: "NAME" or "NAME/OPTION=VALUE".
        framework: does the arithmetic on buckets.
        sizes: numbers of ranks, at least 2.
        compresses: element types that it compresses; buckets of the others of `dtypes` travel as they are.
        dtypes: element types of buckets to test with.
        error: largest relative error of a round's sum, the norm of the difference over the norm of the exact sum.
        feedback_rounds: rounds after which the mean of the results of equal gradients has a relative error below
            `feedback_error`, because what a round leaves out is added to the next ones; 0: it does not promise that.
        feedback_error: see there.
    """

    compressor: ClassVar[str] = ""
    framework: ClassVar[str] = "torch"
    sizes: ClassVar[Sequence[int]] = (2, 3)
    compresses: ClassVar[Sequence[DType]] = (DType.FLOAT32, DType.FLOAT64)
    dtypes: ClassVar[Sequence[DType]] = (
        DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16, DType.INT32, DType.COMPLEX64,
    )  # fmt: skip
    error: ClassVar[float] = 0.0
    feedback_rounds: ClassVar[int] = 0
    feedback_error: ClassVar[float] = 0.1

    def make(self) -> GradientCompressor:
        """Return the compressor; by default, the registered one that `compressor` describes."""
        return build_compressor(self.compressor, PluginManager().load().compressors)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each test the sizes and types of this class."""
        if "size" in metafunc.fixturenames:
            metafunc.parametrize("size", self.sizes)
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.compresses)

    def test_every_rank_gets_the_same_bits(self, size: int) -> None:
        def case(ranks: _Rank) -> list[bytes]:
            for seed in range(3):
                ranks.fill(seed)
                ranks.exchange(1.0 / size)
            return [bytes(bucket.memory.bytes()) for bucket in ranks.buckets]

        first, *others = self._run(size, case)
        for rank, found in enumerate(others, start=1):
            assert found == first, f"the sums on rank {rank} differ from those on rank 0, after three rounds"

    def test_the_sum_is_about_right(self, size: int, dtype: DType) -> None:
        for found, wanted in self._run(size, lambda ranks: (ranks.round(0, 1.0), ranks.sum_of_all(0)), [dtype]):
            error = _distance(found, wanted)
            assert error <= self.error, f"the sum of {dtype} has a relative error of {error:.2e}, above {self.error:g}"

    def test_the_scale_is_applied_once(self, size: int, dtype: DType) -> None:
        def case(scale: float) -> Array:
            found: Array = self._run(size, lambda ranks: ranks.round(0, scale), [dtype])[0]
            return found

        # A power of two, by which numbers of any type are multiplied without rounding.
        error = _distance(case(0.25), 0.25 * case(1.0))
        assert error <= 1e-6, f"with a scale of 0.25 the sum of {dtype} is not a quarter (relative error {error:.2e})"

    def test_padding_stays_zero(self, size: int) -> None:
        def case(ranks: _Rank) -> float:
            ranks.fill(0)
            ranks.exchange(1.0)
            return max(float(np.abs(ranks.padding(number)).max(initial=0)) for number in range(len(ranks.buckets)))

        for largest in self._run(size, case):
            assert largest == 0.0, f"places of a bucket that no gradient has came out as {largest}"

    @pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
    def test_what_is_not_finite_stays_so_and_the_next_round_is_good(self, size: int, dtype: DType, bad: float) -> None:
        def case(ranks: _Rank) -> tuple[bool, bool]:
            ranks.round(0, 1.0)  # so that there is something to be fed back
            ranks.fill(1)
            if ranks.rank == size - 1:
                ranks.set_element(0, 5, bad)
            ranks.exchange(1.0)
            spoilt = ranks.numbers()
            return bool(np.isfinite(spoilt).all()), bool(np.isfinite(ranks.round(2, 1.0)).all())

        for hidden, recovered in self._run(size, case, [dtype]):
            assert not hidden, f"{bad} on rank {size - 1} does not show in the sum: no loss scaler would find it"
            assert recovered, f"the round after {bad} is not finite any more"

    def test_what_a_round_leaves_out_is_added_to_later_ones(self, size: int, dtype: DType) -> None:
        if not self.feedback_rounds:
            pytest.skip(f"{self.compressor} does not promise it (feedback_rounds)")

        def case(ranks: _Rank) -> float:
            mean = np.mean([ranks.round(0, 1.0 / size) for _ in range(self.feedback_rounds)], axis=0)
            return _distance(mean, ranks.sum_of_all(0) / size)

        for error in self._run(size, case, [dtype]):
            assert error <= self.feedback_error, (
                f"the mean of {self.feedback_rounds} rounds has a relative error of {error:.2e}, above "
                f"{self.feedback_error:g}: what is left out is lost"
            )

    def test_what_it_does_not_compress_is_left_alone(self, size: int) -> None:
        def case(ranks: _Rank) -> list[DType]:
            return sorted(
                bucket.memory.dtype
                for bucket, state in zip(ranks.buckets, ranks.states, strict=True)
                if state is not None
            )

        for found in self._run(size, case):
            assert found == sorted(self.compresses), f"it compresses {found}, and declares {sorted(self.compresses)}"

    def test_starting_an_exchange_waits_for_nobody(self, size: int, dtype: DType) -> None:
        def case(ranks: _Rank) -> bool:
            ranks.round(0, 1.0)  # the first one may be without compression
            ranks.fill(1)
            ranks.recorder.must_not_wait = True
            works = ranks.start(1.0)
            ranks.recorder.must_not_wait = False
            for work in works:
                work.wait()
            return ranks.recorder.has_waited

        assert not any(self._run(size, case, [dtype])), "`allreduce` waits for a collective before it returns"

    def test_it_says_how_many_collectives_it_starts(self, size: int, dtype: DType) -> None:
        def case(ranks: _Rank) -> tuple[int, int]:
            ranks.round(0, 1.0)  # the first one may be without compression
            ranks.fill(1)
            before = ranks.recorder.num_started
            works = ranks.start(1.0)
            started = ranks.recorder.num_started - before
            for work in works:
                work.wait()
            return started, sum(state.num_operations for state in ranks.states if state is not None)

        for started, declared in self._run(size, case, [dtype]):
            assert started <= declared, f"`allreduce` starts {started} collectives; num_operations says {declared}"

    def test_its_work_may_be_waited_for_and_its_state_closed_twice(self, size: int, dtype: DType) -> None:
        def case(ranks: _Rank) -> bool:
            ranks.fill(0)
            works = ranks.start(1.0)
            for work in works:
                work.wait(timedelta(seconds=10))
            once = ranks.numbers()
            for work in works:
                work.wait()
                assert work.done(), "done() of a work that was waited for is False"
            again = ranks.numbers()
            ranks.close()
            return bool(np.array_equal(once, again))

        assert all(self._run(size, case, [dtype])), "a second wait() changes the result"

    def _run(self, size: int, case: Callable[[_Rank], Any], dtypes: Sequence[DType] | None = None) -> list[Any]:
        """Return what `case` returned on each rank.

        Args:
            size: number of ranks.
            case: what a rank does.
            dtypes: of its buckets; default: all of this class.
        """
        framework = PluginManager().load().frameworks.get(self.framework).load()
        layouts, parameters = _layouts(self.dtypes if dtypes is None else dtypes)

        def main(communicator: Communicator) -> Any:
            ranks = _Rank(self.make(), communicator, framework, layouts, parameters)
            try:
                return case(ranks)
            finally:
                ranks.close()

        with ThreadWorld(size) as world:
            return world.run(main)


class _Rank:
    """The buckets of one rank, and their states.

    Attributes:
        rank: of this rank.
        recorder: its communicator.
        buckets: one or more of each type.
        states: of the buckets; None where it is not compressed.
    """

    def __init__(
        self,
        compressor: GradientCompressor,
        communicator: Communicator,
        framework: Framework,
        layouts: Sequence[BucketLayout],
        parameters: Sequence[ParameterInfo],
    ) -> None:
        self.rank, self._size = communicator.rank, communicator.size
        self.recorder = _LateCommunicator(communicator)
        self.buckets = [
            Bucket(
                layout,
                tuple(parameters[slot.parameter] for slot in layout.slots),
                communicator.allocate(layout.count * layout.dtype.itemsize).cast(layout.dtype),
                self.recorder,
                framework,
            )
            for layout in layouts
        ]
        self.states: list[BucketCompressor | None] = [compressor.attach(bucket) for bucket in self.buckets]

    def fill(self, seed: int) -> None:
        """Put this rank's gradients of a round into the buckets; padding is zeros."""
        for number in range(len(self.buckets)):
            self._write(number, self._gradient(number, seed, self.rank))

    def start(self, scale: float) -> list[Work]:
        """Start the exchange of every bucket."""
        return [
            self.recorder.allreduce(bucket.memory, bucket.memory, scale=scale)
            if state is None
            else state.allreduce(scale)
            for bucket, state in zip(self.buckets, self.states, strict=True)
        ]

    def exchange(self, scale: float) -> None:
        """Exchange every bucket."""
        for work in self.start(scale):
            work.wait()

    def round(self, seed: int, scale: float) -> Array:
        """Exchange the gradients of a round; returns the sums."""
        self.fill(seed)
        self.exchange(scale)
        return self.numbers()

    def numbers(self) -> Array:
        """Return what the gradients' places hold now, of all buckets."""
        found = []
        for number, bucket in enumerate(self.buckets):
            values = decode(array_of(bucket.memory), bucket.memory.dtype)
            found += [values[slot.offset : slot.offset + slot.count] for slot in self.buckets[number].layout.slots]
        return np.concatenate(found).copy()

    def padding(self, number: int) -> Array:
        """Return what a bucket holds in no gradient's place."""
        bucket = self.buckets[number]
        is_padding = np.ones(bucket.memory.count, np.bool_)
        for slot in bucket.layout.slots:
            is_padding[slot.offset : slot.offset + slot.count] = False
        found: Array = decode(array_of(bucket.memory), bucket.memory.dtype)[is_padding]
        return found

    def sum_of_all(self, seed: int) -> Array:
        """Return the exact sum of all ranks' gradients of a round, as `numbers` orders them."""
        found = []
        for number, bucket in enumerate(self.buckets):
            dtype = bucket.memory.dtype
            total = sum(
                decode(encode(self._gradient(number, seed, rank), dtype), dtype).astype(np.complex128)
                for rank in range(self._size)
            )
            assert isinstance(total, np.ndarray)
            found += [total[slot.offset : slot.offset + slot.count] for slot in bucket.layout.slots]
        return np.concatenate(found)

    def set_element(self, number: int, index: int, value: float) -> None:
        """Replace one element of a bucket's first gradient."""
        bucket = self.buckets[number]
        place = bucket.layout.slots[0].offset + min(index, bucket.layout.slots[0].count - 1)
        array_of(bucket.memory)[place] = encode(np.array([value]), bucket.memory.dtype)[0]

    def close(self) -> None:
        """Close every state, twice."""
        for state in (*self.states, *self.states):
            if state is not None:
                state.close()

    def _gradient(self, number: int, seed: int, rank: int) -> Array:
        bucket = self.buckets[number]
        rng = np.random.default_rng([seed, rank, number])
        values = np.zeros(bucket.memory.count)
        for slot in bucket.layout.slots:
            drawn = rng.standard_normal(slot.count)
            values[slot.offset : slot.offset + slot.count] = drawn if _is_inexact(bucket.memory) else np.rint(9 * drawn)
        return values

    def _write(self, number: int, values: Array) -> None:
        memory = self.buckets[number].memory
        array_of(memory)[:] = encode(values, memory.dtype)


class _LateCommunicator(RecordingCommunicator):
    """Runs each collective when somebody waits for it: a communicator of threads would run it, and wait, at once.

    Attributes:
        must_not_wait: nobody may wait for a collective now.
        has_waited: somebody did.
        num_started: collectives so far.
    """

    num_started = 0
    must_not_wait = False
    has_waited = False

    @override
    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        return _Late(self, lambda: super(_LateCommunicator, self).allreduce(source, target, op=op, scale=scale))

    @override
    def allgather(self, source: Buffer, target: Buffer, *, counts: Sequence[int] | None = None) -> Work:
        return _Late(self, lambda: super(_LateCommunicator, self).allgather(source, target, counts=counts))

    @override
    def broadcast(self, buffer: Buffer, *, root: int) -> Work:
        return _Late(self, lambda: super(_LateCommunicator, self).broadcast(buffer, root=root))


class _Late(Work):
    def __init__(self, communicator: _LateCommunicator, call: Callable[[], Work]) -> None:
        self._communicator = communicator
        communicator.num_started += 1
        self._call = call
        self._work: Work | None = None

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        self._communicator.has_waited |= self._communicator.must_not_wait
        if self._work is None:
            self._work = self._call()
        self._work.wait(timeout)

    @override
    def done(self) -> bool:
        return self._work is not None and self._work.done()


def _layouts(dtypes: Sequence[DType]) -> tuple[Sequence[BucketLayout], Sequence[ParameterInfo]]:
    """Return the buckets of a few parameters of each type."""
    parameters = [
        ParameterInfo(f"{dtype}.{number}", shape, dtype)
        for number, shape in enumerate(_SHAPES)
        for dtype in dtypes
    ]  # fmt: skip
    return plan_buckets(parameters, bucket_bytes=1 << 20), parameters


def _is_inexact(memory: Buffer) -> bool:
    return memory.dtype.is_floating or memory.dtype.is_complex


def _distance(found: Array, wanted: Array) -> float:
    """Return the norm of the difference over the norm of what is wanted."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
